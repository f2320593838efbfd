"""Copies a run's events into one sink, during the run or long after it; continues where it stopped.

Each sink has a folder in the run folder, `sinks/NAME/`. Its `state.json` counts the events processed and the events
that could not be written; removing the folder starts from the beginning. A second process for the same sink is refused.
"""

import fcntl
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from diloco.atomic_files import write_file
from diloco.errors import ConfigError
from diloco.history.events import (
    ROUND_STATISTICS,
    Event,
    RoundEndedEvent,
    StepEvent,
    UnknownEvent,
    ValidationEvent,
    WorkerStartedEvent,
)
from diloco.history.run_history import LiveHistory, RunHistory
from diloco.sinks.base import Point, Sink
from diloco.training.config.run_file import read_run_file
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import SUMMARY_FILE

STATE_FILE = "state.json"
logger = logging.getLogger(__name__)
_STEP_NUMBERS = ("loss", "learning_rate", "gradient_norm", "tokens", "bytes_sent")
_WORKER_NUMBERS_OF_A_ROUND = (
    *(name for name, statistic in ROUND_STATISTICS.items() if statistic.of_each_worker),
    "norm",
    "waited_seconds",
    "bytes_sent",
)
_NUMBERS_OF_A_ROUND = tuple(name for name, statistic in ROUND_STATISTICS.items() if not statistic.of_each_worker)
_Number = tuple[str, Any, int, int | None]  # name, value, step, worker


@dataclass
class SinkState:
    """The content of state.json."""

    events: int = 0
    """Events processed."""
    lost: int = 0
    """Events of these that could not be written."""
    error: str | None = None
    """The first error."""


def sink_folder(run: Path, name: str) -> Path:
    return run / "sinks" / name


def read_state(run: Path, name: str) -> SinkState:
    """Return the state as last saved; a new one if it cannot be read."""
    try:
        return SinkState(**json.loads((sink_folder(run, name) / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return SinkState()


class Follower:
    """Copies the events of one run to one sink; use `with open_follower(...)`."""

    def __init__(self, run: Path, name: str, sink: Sink) -> None:
        self.run = run
        self.name = name
        self.sink = sink
        self.state = read_state(run, name)
        self._live = LiveHistory(run)
        self._seen = 0
        self._beginnings = 0
        self._reached: dict[int | None, int] = {}
        self._restarted: set[int | None] = set()  # workers whose next point may go back
        self._started: set[int] = set()

    def start(self) -> None:
        self.sink.start(read_run_file(self.run / RUN_FILE), resumed=self.state.events > 0)

    def catch_up(self) -> int:
        """Write the new events and return their number; an event that the sink refuses is counted and skipped."""
        before = self.state.events
        for event in self._live.new_events():
            if self._live.beginnings > self._beginnings:  # read from the beginning again, under other numbers
                self._beginnings = self._live.beginnings
                self._seen = 0
            self._seen += 1
            self._process(event, write=self._seen > self.state.events)
        if self.state.events > before:
            self._attempt(self.sink.flush, 0)
            self._save()
        return self.state.events - before

    def finish(self) -> None:
        """Write the rest, and the summary if the run has ended with one."""
        self.catch_up()
        path = self.run / SUMMARY_FILE
        if path.exists():
            summary = json.loads(path.read_text(encoding="utf-8"))
            self._attempt(lambda: self.sink.finish(summary), 1)
        self._attempt(self.sink.close, 1)
        self._save()

    def _process(self, event: Event, *, write: bool) -> None:
        points = points_of(event, self._live.history)
        if isinstance(event, UnknownEvent) and event.problem is not None:
            self._failed(ValueError(f"an event {event.name} was left out: {event.problem}"), 1 if write else 0)
        if isinstance(event, WorkerStartedEvent):
            self._note_start(event.worker)
        for point in points:
            back = point.worker in self._restarted and point.step <= self._reached[point.worker]
            self._restarted.discard(point.worker)
            if back and write:
                self._attempt(partial(self.sink.rewind, point.worker, point.step), 0)
            self._reached[point.worker] = point.step if back else max(point.step, self._reached.get(point.worker, 0))
        if write:
            self.state.events += 1
            if points:
                self._attempt(lambda: self.sink.write(points), 1)

    def _note_start(self, worker: int) -> None:
        """Note that a worker has started. A second time marks a new start of the run: all workers may go back."""
        again = worker in self._started
        self._started = {worker} if again else self._started | {worker}
        self._restarted |= set(self._reached) if again else {worker} & set(self._reached)

    def _attempt(self, work: Callable[[], None], events: int) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - a sink may raise anything; the next event may succeed
            self._failed(error, events)

    def _failed(self, error: Exception, events: int) -> None:
        if self.state.error is None:
            logger.exception("the sink %s failed; continuing with the next event", self.name, exc_info=error)
            self.state.error = f"{type(error).__name__}: {error}".splitlines()[0]
        self.state.lost += events

    def _save(self) -> None:
        path = sink_folder(self.run, self.name) / STATE_FILE
        write_file(path, json.dumps(asdict(self.state)) + "\n")


@contextmanager
def open_follower(run: Path, name: str, kind: type[Sink]) -> Iterator[Follower]:
    """Start a follower with an exclusive lock; it is finished at the end of the block, also after an error."""
    folder = sink_folder(run, name)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"another process is writing {run} to {name}: wait until it ends") from error
        follower = Follower(run, name, kind(run, folder))
        follower.start()
        try:
            yield follower
        finally:
            follower.finish()


# The numbers of a run that a sink plots, event by event


def points_of(event: Event, history: RunHistory) -> list[Point]:
    """Return the numbers that an event brings, after the history has taken it in; what is not a number is left out."""
    numbers: Iterator[_Number] = iter(())
    if isinstance(event, StepEvent):
        numbers = _step_numbers(event, history)
    elif isinstance(event, RoundEndedEvent) and (event.mean_norm is not None or event.failure is not None):
        numbers = _round_numbers(event, history)  # without either it is a round without work, as at the end of a run
    elif isinstance(event, ValidationEvent):
        numbers = _validation_numbers(event)
    return [
        Point(name, float(value), step, event.time, worker)
        for name, value, step, worker in numbers
        if value is not None
    ]


def _step_numbers(event: StepEvent, history: RunHistory) -> Iterator[_Number]:
    for name in _STEP_NUMBERS:
        yield f"train/{name}", getattr(event, name), event.step, event.worker
    speed = history.workers[event.worker].progress.tokens_per_second
    yield "train/tokens_per_second", speed or None, event.step, event.worker


def _round_numbers(event: RoundEndedEvent, history: RunHistory) -> Iterator[_Number]:
    step = event.step
    for name in _WORKER_NUMBERS_OF_A_ROUND:
        yield f"round/{name}", getattr(event, name), step, event.worker
    for name in _NUMBERS_OF_A_ROUND:
        if history.rounds.was_first_to_know(event, name):
            yield f"round/{name}", getattr(event, name), step, None
    if not history.rounds.was_first_to_tell(event):
        return
    yield "round/contributors", len(event.contributors), step, None
    yield "round/failed", len(history.rounds.failed), step, None
    yield "round/refused", history.rounds.refused, step, None
    for member in event.members:  # workers on other machines write their own logs
        report = member.report
        if member.worker not in history.local_workers and report.inner_steps is not None:
            for name in ("loss", "tokens", "bytes_sent"):
                yield f"train/{name}", getattr(report, name), report.inner_steps, member.worker


def _validation_numbers(event: ValidationEvent) -> Iterator[_Number]:
    for name in ("loss", "perplexity"):
        yield f"validation/{name}", getattr(event, name), event.step, None
