"""A run as its user sees it: the live display, notes, how others can join, the sinks, the page in the browser, and the
report at the end."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

from diloco.cli.display.joining_hint import joining_hint
from diloco.cli.display.live import Display
from diloco.cli.display.report import print_report
from diloco.cli.display.sizes import sizes_printer
from diloco.dashboard.process import LOOPBACK, DashboardProcess, check_installed, link, listen
from diloco.history.run_history import LiveHistory
from diloco.sinks.process import SinkProcesses
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import EndedRun, Observer, Poll


class RunDisplay(Observer):
    """The terminal and the sinks of one run; use it as a context."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self._console = console
        self._config = config
        self._display = Display(console, config)
        self._listener: socket.socket | None = None

    def __enter__(self) -> "RunDisplay":
        if self._config.dashboard is not None:  # a port that is taken is an error before anything is prepared
            check_installed()
            self._listener = listen(self._config.dashboard)
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()
        if self._listener is not None:
            self._listener.close()

    def show_preparation(self, stage: str, done: int, total: int | None) -> None:
        self._display.show_preparation(stage, done, total)

    def note(self, text: str) -> None:
        self._console.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    @contextmanager
    def follow(self, folder: Path, *, resumed: bool) -> Iterator[Poll]:
        with ExitStack() as beside:
            sinks = beside.enter_context(SinkProcesses(self._config.sink_names, folder, self.note))
            live = LiveHistory(folder, elastic=self._config.engine == "swarm")
            live.refresh()
            polls: list[Callable[[], object]] = [
                live.refresh,
                sizes_printer(self._console, live),
                self._display.follow(live, resumed=resumed),
                sinks.poll,
            ]
            if self._listener is not None:
                self._console.print(Text(f"dashboard: {link(self._listener, LOOPBACK, None)}"), soft_wrap=True)
                polls.append(beside.enter_context(DashboardProcess(self._listener, folder, self.note)).poll)
            if self._config.engine == "swarm":
                polls.append(joining_hint(self._console, self._config, live))

            def poll() -> None:
                for each in polls:
                    each()

            try:
                yield poll
            finally:
                self._display.close()

    def with_stop_message(self, stop: Callable[[], None]) -> Callable[[], None]:
        return self._display.with_stop_message(stop)


def print_end(console: Console, ended: EndedRun) -> None:
    """The report; raises the run's error if it has one."""
    if ended.summary["inner_steps"]:
        print_report(console, ended.folder, ended.summary)
    else:
        status = ended.summary["status"]
        console.print(Text(f"diloco · {status} before the first step · run folder: {ended.folder}"), soft_wrap=True)
    if ended.error is not None:
        raise ended.error
