"""`diloco dashboard`: a page that shows runs, live or afterwards."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from diloco.cli.display.live import PipeSafeConsole
from diloco.dashboard.process import LOOPBACK, check_installed, link, listen, new_token, serve
from diloco.errors import ConfigError

DEFAULT_PORT = 8420


def dashboard(
    folder: Path = Path("runs"),
    /,
    *,
    port: Annotated[int | None, Parameter(name="--port")] = None,
    host: Annotated[str, Parameter(name="--host")] = LOOPBACK,
) -> None:
    """Show runs in the browser, while they train or afterwards.

    Parameters
    ----------
    folder:
        A run folder, or a folder of runs.
    port:
        Where to serve the page (default: 8420, or any free port if that is taken; 0: any free one).
    host:
        The address to listen at. Elsewhere than on loopback, the printed link has a token, and only it opens the page.
    """
    check_installed()
    from diloco.dashboard.runs import RunFolder

    RunFolder(folder)
    try:
        listener = listen(DEFAULT_PORT if port is None else port, host)
    except ConfigError:
        if port is not None:
            raise
        listener = listen(0, host)
    token = new_token(host)
    console = PipeSafeConsole()
    console.print(Text(f"dashboard: {link(listener, host, token)}"), soft_wrap=True)
    console.print(Text("It only reads. Ctrl-C ends it.", style="dim"))
    serve(folder, listener, token)
