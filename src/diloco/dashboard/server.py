"""The dashboard's web server: the page, its files, JSON of everything, and a stream that tells what has changed."""

import asyncio
import json
import math
import re
import time
from collections.abc import AsyncIterator
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from diloco.dashboard.access import Access
from diloco.dashboard.metrics import CONTENT_TYPE, exposition
from diloco.dashboard.runs import Run, RunFolder
from diloco.dashboard.series import MOST_POINTS

_PAGE = Path(str(files("diloco.dashboard") / "page"))
_POLL_SECONDS = 0.5
_HEARTBEAT_SECONDS = 15.0
_LIST_SECONDS = 2.0
_MOST_STREAMS = 64
_MOST_FOLLOWED = 16
_CACHED = {"cache-control": "public, max-age=86400"}
_FRESH = {"cache-control": "no-store"}


def build_app(runs: RunFolder, token: str | None) -> Starlette:
    server = _Server(runs)
    routes = [
        Route("/", server.page),
        Route("/plotly.js", server.plotly),
        Route("/page/{file}", server.file),
        Route("/api/runs", server.list_runs),
        Route("/api/stream", server.stream),
        Route("/metrics", server.metrics),
        Route("/api/run/{run:path}/state", server.state),
        Route("/api/run/{run:path}/series", server.series),
        Route("/api/run/{run:path}/rounds", server.rounds),
        Route("/api/run/{run:path}/config", server.config),
    ]
    middleware = [Middleware(Access, token=token), Middleware(GZipMiddleware, minimum_size=2000, compresslevel=5)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _refuse})


class _Server:
    def __init__(self, runs: RunFolder) -> None:
        self._runs = runs
        self._files = {path.name: path for path in _PAGE.iterdir() if path.is_file()}
        self._streams = 0

    async def page(self, request: Request) -> Response:
        del request
        return HTMLResponse(await asyncio.to_thread(page_text), headers=_FRESH)

    async def plotly(self, request: Request) -> Response:
        del request
        return FileResponse(plotly_file(), media_type="text/javascript", headers=_CACHED)

    async def file(self, request: Request) -> Response:
        path = self._files.get(request.path_params["file"])
        if path is None:
            raise HTTPException(404, "there is no such file")
        return FileResponse(path, headers=_FRESH)

    async def list_runs(self, request: Request) -> Response:
        del request

        def brief() -> list[dict[str, Any]]:
            """Newest first; what has no summary is read from its log, a few seconds' worth of logs at each call."""
            ends = time.monotonic() + _LIST_SECONDS
            return [run.brief(read=time.monotonic() < ends) for run in self._runs.find().values()]

        return _json({"root": self._runs.root.resolve().name, "runs": await asyncio.to_thread(brief)})

    async def state(self, request: Request) -> Response:
        run = self._run(request)
        until = _number(request, "until")
        return _json(await asyncio.to_thread(run.state, until))

    async def series(self, request: Request) -> Response:
        run = self._run(request)
        until = _number(request, "until")
        points = _count(request, "points", 600, MOST_POINTS)
        listed = request.query_params.get("workers")
        workers = (
            None
            if listed is None
            else {int(number) for number in listed.split(",") if number.isascii() and number.isdigit()}
        )
        return _json(await asyncio.to_thread(run.series, until, points, workers))

    async def rounds(self, request: Request) -> Response:
        run = self._run(request)
        until = _number(request, "until")
        before = _number(request, "before")
        count = _count(request, "count", 12, 1000)
        return _json(await asyncio.to_thread(run.rounds, until, count, None if before is None else int(before)))

    async def config(self, request: Request) -> Response:
        return _json(await asyncio.to_thread(self._run(request).config))

    async def metrics(self, request: Request) -> Response:
        """Write the numbers of all runs for Prometheus, or of those named (`?run=NAME`)."""
        names = request.query_params.getlist("run")

        def text() -> str:
            runs = self._runs.find()
            if unknown := [name for name in names if name not in runs]:
                raise HTTPException(404, f"there is no run {unknown[0]!r}")
            return exposition([runs[name].state() for name in dict.fromkeys(names or runs)])

        return Response(await asyncio.to_thread(text), headers=_FRESH | {"content-type": CONTENT_TYPE})

    async def stream(self, request: Request) -> Response:
        """Send the version of each followed run whenever it has changed, as server-sent events."""
        followed = [
            run for name in request.query_params.getlist("run")[:_MOST_FOLLOWED] if (run := self._runs.run(name))
        ]
        if self._streams >= _MOST_STREAMS:
            raise HTTPException(503, f"{_MOST_STREAMS} pages follow this dashboard already")
        return StreamingResponse(self._changes(followed), media_type="text/event-stream", headers=_FRESH)

    async def _changes(self, runs: list[Run]) -> AsyncIterator[str]:
        self._streams += 1
        sent_versions: dict[str, int] = {}
        last_sent = time.monotonic()
        try:
            yield "retry: 2000\n\n"
            while True:
                for run in runs:
                    version = await asyncio.to_thread(run.refresh)
                    if sent_versions.get(run.name) != version:
                        sent_versions[run.name] = version
                        last_sent = time.monotonic()
                        yield f"event: change\ndata: {json.dumps({'run': run.name, 'version': version})}\n\n"
                if time.monotonic() - last_sent > _HEARTBEAT_SECONDS:
                    last_sent = time.monotonic()
                    yield ": still here\n\n"
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._streams -= 1

    def _run(self, request: Request) -> Run:
        run = self._runs.run(request.path_params["run"])
        if run is None:
            raise HTTPException(404, "there is no such run")
        return run


def plotly_file() -> Path:
    """Find plotly's JavaScript inside its Python package: the page works without internet."""
    return Path(str(files("plotly") / "package_data" / "plotly.min.js"))


@lru_cache(maxsize=1)
def page_text() -> str:
    """Read index.html, with an element for each inline style that plotly would add (for maps, which the page has not).

    plotly adds a style only if no element has its id; the content-security policy would refuse it with an error.
    """
    ids = re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly_file().read_text(encoding="utf-8"))
    placeholders = "".join(f'<meta id="{style_id}">\n' for style_id in sorted(set(ids)))
    text = (_PAGE / "index.html").read_text(encoding="utf-8")
    return text.replace("</head>", f"{placeholders}</head>", 1)


def _json(content: object) -> Response:
    return JSONResponse(_finite(content), headers=_FRESH)


def _finite(content: Any) -> Any:
    """Replace nan and inf, which JSON does not know, by None."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content


def _number(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise HTTPException(400, f"{name} must be a number")
    return value


def _count(request: Request, name: str, default: int, most: int) -> int:
    value = _number(request, name)
    return default if value is None else max(1, min(most, int(value)))


async def _refuse(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, HTTPException)
    return PlainTextResponse(error.detail, error.status_code)
