"""Access to a dashboard, and what its page may do.

On loopback only this machine reaches the server, and only names of loopback are answered, so that no page of another
site can read it through a name that it controls. Elsewhere the first visit brings the token of the link; a cookie
keeps it. The content-security policy allows this server's own files and nothing else.
"""

import hmac
from collections.abc import Mapping
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "diloco_dashboard"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Access:
    """ASGI middleware around the whole server, which refuses requests. `token` None: loopback, where none is needed."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in HEADERS.items())]
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This page only reads: use GET.", 405)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if self._token is None:
            host = headers.get("host", "")
            name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
            if name.strip("[]") not in LOOPBACK:
                return PlainTextResponse("This dashboard answers to 127.0.0.1 and localhost only.", 421)
            return None
        query = parse_qs(scope["query_string"].decode("latin-1"))
        query_token = query.pop("token", [None])[0]
        if query_token is not None and self._is_token(query_token):
            return self._redirect_with_cookie(scope["path"], query)
        if any(self._is_token(token) for token in (_cookie(headers), _bearer(headers)) if token is not None):
            return None
        return PlainTextResponse("Open the whole link that `diloco dashboard` printed: it has a token.", 403)

    def _is_token(self, token: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(token.encode(), self._token.encode())

    def _redirect_with_cookie(self, path: str, query: Mapping[str, list[str]]) -> Response:
        """Redirect to the same page without the token in the address, which others may see; a cookie keeps it.

        SameSite=lax: a link with the token that is clicked on another site, in a mail or a chat, opens the page. The
        cookie comes with such a navigation and with nothing else that another site starts, and the server only reads.
        """
        assert self._token is not None
        remaining_query = urlencode(query, doseq=True)
        target = "/" + path.lstrip("/")  # never //elsewhere
        response = RedirectResponse(f"{target}?{remaining_query}" if remaining_query else target, 303)
        response.set_cookie(COOKIE, self._token, httponly=True, samesite="lax")
        return response


def _cookie(headers: Mapping[str, str]) -> str | None:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return None
    return None if morsel is None else morsel.value


def _bearer(headers: Mapping[str, str]) -> str | None:
    kind, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None
