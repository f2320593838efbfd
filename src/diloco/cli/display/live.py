"""The live display of a run, from its events: tables in a terminal, plain lines without one."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from diloco.cli.display.numbers import duration, megabytes
from diloco.history.events import ROUND_STATISTICS, WorkerStartedEvent
from diloco.history.figures import MemberFigures, RunFigures, WorkerFigures
from diloco.history.notes import RunNote, printable
from diloco.history.rounds import RoundHistory
from diloco.history.run_history import LiveHistory, RunHistory
from diloco.history.workers import DOING
from diloco.models.pretrained import short_name
from diloco.training.config.run import RunConfig, turns

_REFRESH_SECONDS = 0.25
_PLAIN_SECONDS = 10.0
_TOLD_SECONDS = 3
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_NOTES = 4
_BAR = 24
"""Columns of the progress bar: the line fits 80 columns."""
_STOPPING = "stopping after a last round; press Ctrl-C again to stop now"
_LEAVING = "leaving the swarm, which continues; press Ctrl-C again to stop now"
_LEAVING_ALONE = "stopping, with a checkpoint; press Ctrl-C again to stop now"


class PipeSafeConsole(Console):
    """A console whose output may be closed (`| head`, a closed terminal); the run continues without it."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python can flush at exit


class RunView(RunFigures):
    """The figures of a run now, and what the display tells besides."""

    def __init__(self, config: RunConfig, history: RunHistory) -> None:
        super().__init__(history, elastic=config.elastic)
        self.config = config
        self.folder: Path | None = None
        self.stopping = False
        self.doing_seconds = 0.0
        """The seconds for which the workers have been `doing` the same."""
        self.earlier_start: WorkerStartedEvent | None = None
        """The last start of a worker before this run was resumed."""

    @property
    def time_left(self) -> float | None:
        """The seconds until the run's last step."""
        return self.seconds_left(self.config.steps)

    @property
    def workers_here(self) -> int:
        """The number of workers that this machine is to have."""
        started = self.history.started
        return self.config.workers if started is None or self.elastic else started.workers

    @property
    def doing(self) -> str | None:
        """The words for what the workers do before the first step is logged; None from then on."""
        if self.earlier_start is not None and self.history.started == self.earlier_start:
            return DOING["starting"]
        workers = self.history.local_workers.values()
        if any(worker.has_logged for worker in workers):
            return None
        if len(workers) < self.workers_here:
            return DOING["starting"]
        taken = [worker.first_step_seconds for worker in workers if worker.first_step_seconds is not None]
        if len(taken) == len(workers):
            interval = self.config.training.log_interval
            shown = f"every {interval} steps" if interval < self.config.steps else "at the end"
            return f"training: the first step took {max(taken):.1f} s, the loss is shown {shown}"
        state = next(worker.state for worker in workers if worker.first_step_seconds is None)
        return DOING.get(state, state or DOING["starting"])


class Display:
    """Shows a run from the preparation of its data to its end; use it as a context."""

    def __init__(self, console: Console, config: RunConfig) -> None:
        self.console = console
        self.config = config
        self._history = RunHistory()
        self._folder: Path | None = None
        self._stopping = False
        self._stop_shown = False
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next = 0.0
        self._stage = ""
        self._validations_shown = 0
        self._earlier_start: WorkerStartedEvent | None = None
        self._last_note: RunNote | None = None
        self._doing: str | None = None
        self._doing_since = time.monotonic()
        self._line = ""
        self._told_step = 0

    def __enter__(self) -> "Display":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Remove the live display, or print the last steps where no line has told them yet; later output is printed
        normally."""
        if self._live is not None:
            self._live.stop()
        elif self._told_step != (view := self.view()).step and view.doing is None:
            self._print_line(view)

    def view(self) -> RunView:
        """Return the run as it is now."""
        view = RunView(self.config, self._history)
        view.earlier_start = self._earlier_start
        view.folder = self._folder
        view.stopping = self._stopping
        view.doing_seconds = time.monotonic() - self._doing_since
        return view

    def show_preparation(self, stage: str, done: int, total: int | None) -> None:
        """Show the progress of the data preparation; `total` is None if unknown."""
        if self._live is not None:
            if self._due(_REFRESH_SECONDS) or done == total:
                line = Table.grid(padding=(0, 1))
                line.add_row(f"preparing the data: {stage}", ProgressBar(total, done, width=30))
                self._live.update(line, refresh=True)
        elif stage != self._stage:
            self._stage = stage
            self.console.print(f"preparing the data: {stage}", highlight=False)

    def follow(self, live: LiveHistory, *, resumed: bool = False) -> Callable[[], None]:
        """Return a function to call several times a second during the run, each time after `live` was brought up to
        date.

        `resumed`: what `live` has by now is of earlier starts, whose notes are not repeated.
        """
        self._history = live.history
        self._folder = live.folder
        if resumed:
            self._last_note = live.history.notes.last
            self._earlier_start = live.history.started
            self._validations_shown = len(RunView(self.config, live.history).perplexities)
        if self._live is None:
            self.console.print(Text(f"run folder: {live.folder}"), soft_wrap=True)

        def poll() -> None:
            self._history = live.history
            self._show()

        return poll

    def with_stop_message(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Return `stop` with a message on the screen after its first call.

        A signal may call it in the middle of anything, of printing too: the message comes with the next poll.
        """

        def announced() -> None:
            self._stopping = True
            stop()

        return announced

    def _due(self, interval: float) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + interval
        return True

    def _show(self) -> None:
        if self._live is not None and not self._due(_REFRESH_SECONDS):
            return
        view = self.view()
        new = view.doing != self._doing
        if new:
            self._doing = view.doing
            self._doing_since = time.monotonic()
            view.doing_seconds = 0.0
        if self._live is not None:
            self._live.update(render(view), refresh=True)
            return
        if self._stopping and not self._stop_shown:
            self._stop_shown = True
            self.console.print(_stopping(view), highlight=False)
        for note in self._history.notes.since(self._last_note):
            self.console.print(Text(note.text), soft_wrap=True)
        self._last_note = self._history.notes.last
        self._validations_shown = min(self._validations_shown, len(view.perplexities))
        for step, perplexity in view.perplexities[self._validations_shown :]:
            self.console.print(f"step {step}: validation perplexity {perplexity:.2f}", highlight=False)
        self._validations_shown = len(view.perplexities)
        if (new and self._doing is not None) or self._due(_PLAIN_SECONDS):
            self._next = time.monotonic() + _PLAIN_SECONDS
            self._print_line(view)

    def _print_line(self, view: RunView) -> None:
        line = plain_line(view)
        if line != self._line:  # where a step takes long, a line would come several times
            self.console.print(line, highlight=False, soft_wrap=True)
        self._line = line
        self._told_step = view.step


def plain_line(view: RunView) -> str:
    if view.doing is not None:
        return f"step {view.step}/{view.config.steps}  {_doing(view)}"
    loss = f"{view.loss:.3f}" if view.loss is not None else "-"
    return (
        f"step {view.step}/{view.config.steps}  loss {loss}  {view.tokens_per_second:,.0f} tokens/s  "
        f"rounds {view.merged_rounds}  on rounds {_on_rounds(view.utilization)}  members {view.present}  "
        f"left {duration(view.time_left)}"
    )


def _doing(view: RunView) -> str:
    """Return what the workers do, and the seconds that it has taken so far if they are several."""
    seconds = int(view.doing_seconds)
    return f"{view.doing} ({seconds} s so far)" if seconds >= _TOLD_SECONDS else str(view.doing)


def render(view: RunView) -> RenderableType:
    """Return the whole display."""
    more = [Text(line, style="yellow") for line in view.history.notes.lines[-_NOTES:]]
    if view.history.checkpoint_step:
        more.append(Text(f"checkpoint of step {view.history.checkpoint_step}", style="dim"))
    if view.folder is not None:
        more.append(Text(f"run folder: {view.folder}", style="dim"))
    if view.stopping:
        more.append(Text(_stopping(view), style="bold yellow"))
    if not view.workers:  # none has started
        return Group(_title(view), _progress(view), *more)
    swarm = [_swarm(view), Text()] if _listed(view) else []
    return Group(_title(view), _progress(view), Text(), _workers(view), *swarm, _round(view), _validation(view), *more)


def _stopping(view: RunView) -> str:
    if not view.config.elastic:
        return _STOPPING
    return _LEAVING if view.present > 1 else _LEAVING_ALONE


def _title(view: RunView) -> Text:
    config = view.config
    size = f", {view.history.parameters / 1e6:.2f}M parameters" if view.history.parameters else ""
    what = f"{short_name(config.model.name)}{size} · {config.mode} · {view.workers_here} workers"
    if config.elastic:
        what = f"{short_name(config.model.name)}{size} · {_of_how_many(view)} · {view.workers_here} here"
    if config.mode == "diloco":
        what += f" · H = {config.sync.num_inner_steps} · {config.sync.codec}"
    return Text.assemble(("diloco ", "bold cyan"), what)


def _of_how_many(view: RunView) -> str:
    return f"a swarm of {view.present}" if view.present else "a swarm"


def _progress(view: RunView) -> RenderableType:
    line = Table.grid(padding=(0, 1))
    progress = f"step {view.step}/{view.config.steps}"
    if view.doing is not None:
        turn = _SPINNER[int(view.doing_seconds / _REFRESH_SECONDS) % len(_SPINNER)]
        return Group(Text(progress), Text(f"{turn} {_doing(view)}", style="bold"))
    speed = f"{view.tokens_per_second:,.0f} tokens/s"
    line.add_row(
        ProgressBar(view.config.steps, view.step, width=_BAR), progress, speed, f"left {duration(view.time_left)}"
    )
    return line


def _workers(view: RunView) -> RenderableType:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("worker", "step", "loss", "tokens/s", "on rounds", "sent", ""):
        table.add_column(name, justify="left" if name in ("worker", "") else "right")
    for worker in view.local:
        table.add_row(str(worker.number), *_worker_cells(worker))
    return table


def _swarm(view: RunView) -> RenderableType:
    """Return a table of the members on other machines; the local ones are in the table above."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("member", "where", "step", "behind", "loss", "last contribution", ""):
        table.add_column(name, justify="left" if name in ("member", "where", "") else "right")
    members = _listed(view)
    first = max((int(member.values["step"] or 0) for member in members), default=0)
    for member in members:
        if member.number not in view.history.local_workers:
            table.add_row(str(member.number), *_member_cells(member, first))
    return table if table.row_count else Text("no other members", style="dim")


def _listed(view: RunView) -> list[MemberFigures]:
    """Return the members of the swarm's last list, and those that were in a round since."""
    return [member for member in view.members if member.number in view.history.members.listed]


def _member_cells(member: MemberFigures, first: int) -> list[str]:
    values = member.values
    step = int(values["step"] or 0)
    return [
        printable(member.label),
        str(step),
        str(max(0, first - step)),
        "-" if values["loss"] is None else f"{values['loss']:.3f}",
        "none yet" if values["contributed"] is None else f"round {int(values['contributed'])}",
        member.state,
    ]


def _worker_cells(worker: WorkerFigures) -> list[str]:
    loss = worker.values["loss"]
    logged = worker.history.has_logged
    return [
        str(worker.step),
        "-" if loss is None else f"{loss:.3f}",
        f"{worker.values['tokens_per_second'] or 0.0:,.0f}" if logged else "-",
        _on_rounds(worker.utilization) if logged else "-",
        megabytes(worker.bytes_sent) if worker.bytes_sent else "-",
        worker.state,
    ]


def _on_rounds(utilization: float | None) -> str:
    """Return the share of the time that was spent on rounds."""
    return f"{0.0 if utilization is None else 1 - utilization:.1%}"


def _round(view: RunView) -> Text:
    if view.config.mode == "data-parallel":
        return Text(f"averaging gradients at every step · {_members(view)}", style="dim")
    warm = view.config.sync.warm_start
    H = view.config.sync.num_inner_steps
    if view.step < warm:
        alone = view.config.elastic
        doing = "one worker trains alone, others wait," if alone else "averaging gradients"
        return Text(f"warm start: {doing} up to step {warm} · first round after step {warm + H}", "dim")
    if view.history.rounds.in_progress is not None:
        state = f"round {view.history.rounds.in_progress} in progress"
    elif view.config.sync.fragments > 1 or view.config.sync.fragments_by_hand:
        state = f"every fragment once in {H} steps{' or more' if view.config.sync.growth else ''}"
    else:
        schedule = turns(view.config)
        state = f"next round in {schedule.post_step(schedule.posts_until(view.step)) - view.step} steps"
    last = "" if view.last_round is None else _last_round(view.last_round)
    trouble = f" · {view.failed_rounds} failed" if view.failed_rounds else ""
    refused = f" · {view.refused} contributions refused" if view.refused else ""
    rounds = "1 round" if view.merged_rounds == 1 else f"{view.merged_rounds} rounds"
    # The title has the members of a swarm, and how many workers a fixed set has.
    shown = view.config.elastic or view.present in (0, view.workers_here)
    members = "" if shown else f" · {_members(view)}"
    return Text(f"{rounds}{trouble}{refused} · {state}{last}{members}", style="dim")


def _last_round(round_: RoundHistory) -> str:
    known = [
        statistic.text(value)
        for name, statistic in ROUND_STATISTICS.items()
        if statistic.brief and (value := round_.statistics[name]) is not None
    ]
    return f" · last {' · '.join(known)}" if known else ""


def _members(view: RunView) -> str:
    return "1 member" if view.present == 1 else f"{view.present} members"


def _validation(view: RunView) -> Text:
    if not view.perplexities:
        return Text("validation perplexity: after the first round", style="dim")
    points = "  ".join(f"{step}: {perplexity:,.1f}" for step, perplexity in view.perplexities[-4:])
    unigram = view.history.unigram_perplexity
    guessed = f"   (unigram {unigram:,.0f})" if unigram else ""
    return Text.assemble("validation perplexity  ", (points, "bold green"), (guessed, "dim"))
