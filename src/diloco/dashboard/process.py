"""Starts the dashboard's server: as a command of its own, or as a process beside a run, which ends with the run.

The process beside a run gets a socket that already listens: a port that is taken is an error before training starts.
It ends when its standard input does, because the run closed it or died.
"""

import contextlib
import errno
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from diloco.errors import ConfigError, install_hint

_GRACE_SECONDS = 5.0
_PACKAGES = ("starlette", "uvicorn", "plotly", "msgspec")
LOOPBACK = "127.0.0.1"


def check_installed() -> None:
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the dashboard needs {', '.join(missing)}: {install_hint('dashboard')}")


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(port: int, host: str = LOOPBACK) -> socket.socket:
    """Open a listening socket, at any free port for port 0; ConfigError if that is not possible."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"dashboard port {port}: it must be from 1 to 65535 (0: any free one)")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"the dashboard's host {host} is no address of this machine ({error})") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"the dashboard's port {port} is in use by another program: choose another one (0: any free one)"
            ) from error
        raise ConfigError(f"the dashboard cannot listen at {host}, port {port} ({error})") from error
    return listener


def new_token(host: str) -> str | None:
    """Make a random token; None on loopback, where other machines cannot connect."""
    return None if is_loopback(host) else secrets.token_urlsafe(24)


def link(listener: socket.socket, host: str, token: str | None) -> str:
    """Return the link to open in a browser. A host that means all addresses becomes this machine's name."""
    port = listener.getsockname()[1]
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name
    return f"http://{name}:{port}/" + (f"?token={token}" if token else "")


def serve(folder: Path, listener: socket.socket, token: str | None, until: Callable[[], None] | None = None) -> None:
    """Serve until Ctrl-C or SIGTERM, or until `until`, called in a thread, returns."""
    import uvicorn

    from diloco.dashboard.runs import RunFolder
    from diloco.dashboard.server import build_app

    app = build_app(RunFolder(folder), token)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    if until is not None:

        def end() -> None:
            until()
            server.should_exit = True

        threading.Thread(target=end, name="dashboard-end", daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


class DashboardProcess:
    """The server beside one run, as a context. Its failures are reported, never raised: the training goes on."""

    def __init__(self, listener: socket.socket, run: Path, report: Callable[[str], None]) -> None:
        self._listener = listener
        self._run = run
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._has_reported = False

    def __enter__(self) -> "DashboardProcess":
        log = self._run / "logs" / "dashboard.log"
        log.parent.mkdir(exist_ok=True)
        number = self._listener.fileno()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "diloco.dashboard.process", str(self._run), str(number)],
                    stdin=subprocess.PIPE, stdout=output, stderr=output, pass_fds=[number], start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            self._report_once(f"could not be started ({error})")
        self._listener.close()
        return self

    def poll(self) -> None:
        """Report once that the server has died; cheap enough to call several times a second."""
        if self._process is not None and self._process.poll() is not None:
            self._report_once("has ended")

    def _report_once(self, failure: str) -> None:
        if not self._has_reported:
            self._has_reported = True
            self._report(f"the dashboard {failure} (see {self._run / 'logs' / 'dashboard.log'}); the training goes on")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GRACE_SECONDS)


def main(run: Path, listener_number: int) -> None:
    os.nice(10)  # the training comes first
    serve(run, socket.socket(fileno=listener_number), None, until=lambda: _wait_for_end(sys.stdin.fileno()))


def _wait_for_end(file: int) -> None:
    while os.read(file, 1024):
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
