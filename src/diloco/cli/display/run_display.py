"""A run as its user sees it: the live display, notes, how others can join, the sinks, the page in the browser, and the
report at the end."""

import math
import shlex
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.text import Text

from diloco.cli.display.live import Display
from diloco.cli.display.report import print_report
from diloco.cli.display.sizes import sizes_printer
from diloco.dashboard.process import LOOPBACK, DashboardProcess, check_installed, link, listen
from diloco.history.run_history import LiveHistory
from diloco.own_command import command
from diloco.sinks.process import SinkProcesses
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import EndedRun, Observer, Poll

_PATIENT_SECONDS = 20.0
_SEARCHING = (
    "not in the swarm yet: finding its members and getting a number from the leader takes two minutes at most "
    "(logs/worker-0-swarm.log in the run folder says more)"
)


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
            live = LiveHistory(folder, elastic=self._config.elastic)
            live.refresh()
            polls: list[Callable[[], object]] = [
                live.refresh,
                sizes_printer(self._console, live),
                self._display.follow(live, resumed=resumed),
            ]
            if self._config.sink_names:
                polls.append(beside.enter_context(SinkProcesses(self._config.sink_names, folder, self.note)).poll)
            if self._listener is not None:
                self._console.print(Text(f"dashboard: {link(self._listener, LOOPBACK, None)}"), soft_wrap=True)
                polls.append(beside.enter_context(DashboardProcess(self._listener, folder, self.note)).poll)
            if self._config.elastic:
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
    """Print the report; raise the run's error if it has one."""
    if ended.summary["inner_steps"]:
        print_report(console, ended.folder, ended.summary)
    else:
        status = ended.summary["status"]
        console.print(Text(f"diloco · {status} before the first step · run folder: {ended.folder}"), soft_wrap=True)
    if ended.error is not None:
        raise ended.error


def joining_hint(console: Console, config: RunConfig, live: LiveHistory) -> Callable[[], None]:
    """Return a function to call several times a second. Once a worker of this machine is in the swarm it prints, one
    time, how others can join; after _PATIENT_SECONDS without one, what the worker waits for. What `live` has by now is
    of earlier starts."""
    begins = live.history.clock.last or 0.0
    printed = False
    patient_until = time.monotonic() + _PATIENT_SECONDS

    def poll() -> None:
        nonlocal printed, patient_until
        if printed:
            return
        if time.monotonic() > patient_until:
            patient_until = math.inf
            console.print(Text(_SEARCHING), soft_wrap=True)
        entered = live.history.swarm
        if entered is not None and entered.time > begins:
            printed = True
            _print_hint(console, config, live.folder, entered.founded, entered.going_on)

    return poll


def _print_hint(console: Console, config: RunConfig, folder: Path, founded: bool, going_on: bool) -> None:
    """Print the first invitations, as the worker that starts the swarm; the others say how it goes on."""
    invite = command("invite", shlex.quote(str(folder)))
    if not founded:
        console.print(Text("joined the swarm: continuing from its state"), soft_wrap=True)
    elif going_on:
        alone = "no other member of the swarm answers: continuing from this machine's newest checkpoint"
        console.print(Text(alone), soft_wrap=True)
    else:
        console.print(Text("the swarm starts here"), soft_wrap=True)
    if config.bucket is not None:
        joining = command("join", shlex.quote(config.bucket))
        console.print(Text(f"others with access to the bucket join with `{joining}`"), soft_wrap=True)
        return
    from diloco.swarm.trust.run_owner import may_invite, new_invitations

    swarm = folder / SWARM_FOLDER
    if not may_invite(swarm):
        console.print(Text("to invite others: on the machine where the run began"), soft_wrap=True)
        return
    seats = config.swarm.seats
    if founded and not going_on and seats:
        made = new_invitations(swarm, config.swarm.invitation_days, time.time(), seats)
        until = f"{datetime.fromtimestamp(made[0].expires, UTC):%Y-%m-%d}"
        each = "one more worker" if seats == 1 else f"{seats} more workers, one line each"
        console.print(
            Text(f"for {each}, until {until}: run `{command('join', '-')}` on its machine, or in another terminal, and "
                 "paste"),
            soft_wrap=True,
        )  # fmt: skip
        for invitation in made:
            console.print(Text(f"  {invitation.text()}", style="bold green"), soft_wrap=True, highlight=False)
        console.print(Text(f"for others (each invitation is for one worker): {invite}"), soft_wrap=True)
    else:
        console.print(Text(f"to invite others: {invite}"), soft_wrap=True)
