"""One worker of a run: how far it is, how fast it is now, and what it did at each moment.

`bytes_sent` and `rounds` of a StepEvent are from before the round that is due at that step. A worker's bytes are
therefore its last step's and those of the rounds since, so that bytes, rounds and tokens are of the same moment.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco.history.columns import Columns
from diloco.history.events import (
    Event,
    FirstStepEvent,
    JoinedEvent,
    MemberReport,
    ResumedEvent,
    ResyncEvent,
    RoundEndedEvent,
    RoundPostedEvent,
    StepEvent,
    WorkerEndedEvent,
    WorkerStartedEvent,
)

_WINDOW_SECONDS = 60.0
"""The present speed is that of the last minute of training, and of at least one whole round."""
_COUNTERS = ("tokens", "elapsed_seconds", "sync_seconds", "bytes_sent", "rounds")
DOING = {
    "validation": "measuring the validation loss before the first step",
    "first step": "taking the first step",
    "compiling": "compiling the model and taking the first step, which may take minutes",
    "started": "starting the workers",
    "starting": "starting the workers",
    "joined": "taking the first step",
    "waiting": "waiting for more workers (swarm.min_workers)",
    "warm_start": "waiting for the end of the warm start, which one worker trains alone",
}
"""The words for what a worker does before its first step is over, by its state."""


class Mark(NamedTuple):
    """A worker's counters at a moment."""

    time: float
    step: int
    tokens: int
    elapsed_seconds: float
    rounds: int


@dataclass
class WorkerProgress:
    """The counters of one worker in all its starts; `update` with each of its events, in the order of the log."""

    step: int = 0
    loss: float | None = None
    tokens: int = 0
    elapsed_seconds: float = 0.0
    sync_seconds: float = 0.0
    bytes_sent: int = 0
    rounds: int = 0
    """Merged rounds, as the worker itself has counted them."""

    def __post_init__(self) -> None:
        self._tokens_per_step = 0
        self._joined_at = 0  # the steps before this position are not this worker's
        self._before = OwnWork()  # until it joined: what it tells begins at 0 then
        self._first_step: tuple[float, int] | None = None  # of this start: when it ended, and its number
        self._begun: Mark | None = None  # the first mark of this start
        self._marks: deque[Mark] = deque()  # those of the last _WINDOW_SECONDS

    def update(self, event: Event) -> None:
        """Take in an event of this worker."""
        match event:
            case StepEvent():
                self._logged(event)
            case RoundPostedEvent():
                self.step = max(self.step, event.step)
            case RoundEndedEvent():
                self.bytes_sent += event.bytes_sent
            case WorkerStartedEvent():
                self._tokens_per_step = event.tokens_per_step
                self._restart()
            case FirstStepEvent():
                self._first_step = (event.time, self.step + 1)
            case ResumedEvent():
                self.step = event.step
                self.rounds = event.rounds
                self._restart()
            case ResyncEvent():
                self.step = event.step
                self._restart()
            case JoinedEvent():
                self._begin_at(event.step)
            case WorkerEndedEvent():
                self.step = event.inner_steps
                self._count(event)

    def restore(self, values: Mapping[str, float | None]) -> None:
        """Take over the counters of an earlier moment, which a resume has gone back to."""
        self.step = int(values["step"] or 0)
        self.loss = values["loss"]
        self.tokens = int(values["tokens"] or 0)
        self.bytes_sent = int(values["bytes_sent"] or 0)
        self.rounds = int(values["rounds"] or 0)
        self.elapsed_seconds = values["elapsed_seconds"] or 0.0
        self.sync_seconds = values["sync_seconds"] or 0.0

    def report(self, report: MemberReport, *, elsewhere: bool, time: float) -> bool:
        """Take in what the worker told the others with a round, from before that round. Return whether it has joined
        again since the last one.

        `elsewhere`: it writes no events into this log, and reports are all that is known of it.
        """
        step = report.inner_steps or 0
        if step < self.step:
            return False  # the log knows more
        fewer = self._before.tokens + (report.tokens or 0) < self.tokens
        fewer = fewer or self._before.elapsed_seconds + (report.elapsed_seconds or 0.0) < self.elapsed_seconds
        if fewer and not elsewhere:
            return False
        if fewer:  # counters never fall, but when a worker joins
            self._begin_at(step)
        self.step = step
        self.tokens = self._before.tokens + (report.tokens or 0)
        self.elapsed_seconds = self._before.elapsed_seconds + (report.elapsed_seconds or 0.0)
        self.sync_seconds = self._before.sync_seconds + (report.sync_seconds or 0.0)
        if elsewhere:
            self.loss = report.loss
            self.bytes_sent = self._before.bytes_sent + (report.bytes_sent or 0)
            self._mark(time, self.rounds + 1)
        return fewer

    def _restart(self) -> None:
        """Forget the marks of the start before, which say nothing of the present speed."""
        self._first_step = None
        self._begun = None
        self._marks.clear()

    def _begin_at(self, position: int) -> None:
        """Begin at the position of the swarm: what the worker tells from now on is its work since then."""
        self.step = position
        self._joined_at = position
        self._before = OwnWork(self.tokens, self.elapsed_seconds, self.sync_seconds, self.bytes_sent)
        self._restart()

    def _logged(self, event: StepEvent) -> None:
        self.step = event.step
        self.loss = event.loss
        self._count(event)
        if self._begun is None and self._first_step is not None:
            self._mark_first_step(event.time, *self._first_step)
        self._mark(event.time, self.rounds)

    def _count(self, event: StepEvent | WorkerEndedEvent) -> None:
        for name in _COUNTERS:
            if (value := getattr(event, name)) is not None:
                setattr(self, name, value + getattr(self._before, name, 0))

    def _mark_first_step(self, time: float, ended: float, number: int) -> None:
        """Mark where the first step of this start ended. Speed is measured from there: that step may have compiled the
        model."""
        steps = self.step - number
        taken = time - ended
        if steps > 0 and self._tokens_per_step and 0 < taken < self.elapsed_seconds:
            tokens = self.tokens - steps * self._tokens_per_step
            self._begun = Mark(ended, number, tokens, self.elapsed_seconds - taken, self.rounds)
            self._marks.append(self._begun)

    def _mark(self, time: float, rounds: int) -> None:
        mark = Mark(time, self.step, self.tokens, self.elapsed_seconds, rounds)
        if self._marks and mark.elapsed_seconds <= self._marks[-1].elapsed_seconds:
            return
        self._begun = self._begun or mark
        self._marks.append(mark)
        while len(self._marks) > 2:  # the first one stays as long as the second is too young to be the first
            second = self._marks[1]
            if mark.elapsed_seconds - second.elapsed_seconds < _WINDOW_SECONDS or mark.rounds == second.rounds:
                break
            self._marks.popleft()

    @property
    def tokens_per_second(self) -> float:
        """The present speed; the mean since the start as long as two steps were not logged."""
        if len(self._marks) > 1:
            first = self._marks[0]
            last = self._marks[-1]
            return (last.tokens - first.tokens) / (last.elapsed_seconds - first.elapsed_seconds)
        return self.tokens / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def mean_position_seconds(self) -> float | None:
        """The seconds of training from one position of the schedule to the next since it joined, rounds included and
        evaluations not; None before its first step."""
        seconds = self.elapsed_seconds - self._before.elapsed_seconds
        positions = self.step - self._joined_at
        return seconds / positions if positions > 0 and seconds else None

    @property
    def position_seconds(self) -> float | None:
        """The seconds of the clock from one position to the next at the present speed, with as much time for
        evaluations as so far; None before its first step."""
        seconds = self.mean_position_seconds
        if len(self._marks) > 1:
            first = self._marks[0]
            last = self._marks[-1]
            positions = last.step - first.step
            seconds = (last.elapsed_seconds - first.elapsed_seconds) / positions if positions > 0 else None
        return None if seconds is None else seconds * self._overhead()

    def _overhead(self) -> float:
        """Return the seconds of the clock for each second of training."""
        if self._begun is None or not self._marks:
            return 1.0
        trained = self._marks[-1].elapsed_seconds - self._begun.elapsed_seconds
        return max(1.0, (self._marks[-1].time - self._begun.time) / trained) if trained > 0 else 1.0


@dataclass
class OwnWork:
    """The counters of a worker's work, without subtracting what a resume or a resync has taken back."""

    tokens: int = 0
    elapsed_seconds: float = 0.0
    sync_seconds: float = 0.0
    bytes_sent: int = 0

    def add(self, other: "OwnWork") -> "OwnWork":
        """Return the sum of both."""
        return OwnWork(
            self.tokens + other.tokens,
            self.elapsed_seconds + other.elapsed_seconds,
            self.sync_seconds + other.sync_seconds,
            self.bytes_sent + other.bytes_sent,
        )

    def read(self, event: StepEvent | WorkerEndedEvent) -> None:
        """Take over the counters of an event, which count since the worker joined."""
        for name in vars(self):
            if (value := getattr(event, name)) is not None:
                setattr(self, name, value)


class WorkerHistory:
    """The history of a worker of this machine (`local`), or of another one, as its reports with the rounds tell."""

    def __init__(self) -> None:
        self.local = False
        self.started: WorkerStartedEvent | None = None
        self.ended: WorkerEndedEvent | None = None
        """Its last event, unless it has begun again since."""
        self.progress = WorkerProgress()
        self.columns = Columns(
            "step", "loss", "tokens", "elapsed_seconds", "sync_seconds", "bytes_sent", "rounds",
            "tokens_per_second", "position_seconds", "learning_rate", "gradient_norm", "logged", "start",
        )  # fmt: skip
        """A row whenever its counters changed; `logged` is 1 where a step or a report told the loss."""
        self.starts = 0
        """How often it began to count: between its rows with the same `start` there was no pause."""
        self.states: list[tuple[float, str]] = []
        """Each change of its state: the time, and the state from then on."""
        self.not_finite: list[tuple[float, bool]] = []
        """When its loss became no number, or a number again."""
        self.reached = 0
        """The furthest step of its logged steps, ended rounds and end."""
        self.first_step_seconds: float | None = None
        """How long the first step of this start took; None until it is over."""
        self.has_logged = False
        """A step was logged in this start of the run."""
        self.began: list[float] = []
        """When it began to take inner steps: at its start, and when it joined or resumed."""
        self.own_work: OwnWork | None = None
        """Its work since it last joined; None for a worker of another machine."""
        self.earlier_work = OwnWork()
        """Its work before it last joined."""
        self.heard_of = False
        """A round has brought a report of it."""
        self.most_tokens_told = 0
        """The largest number of tokens that such a report had."""

    @property
    def state(self) -> str:
        """Its state now."""
        return self.states[-1][1] if self.states else ""

    def state_at(self, until: float | None) -> str | None:
        """Return its state at a moment; None if it was not there yet."""
        return next((state for time, state in reversed(self.states) if until is None or time <= until), None)

    def set_state(self, time: float, state: str) -> None:
        """Note the state, if it is another one than before."""
        if self.state != state:
            self.states.append((time, state))

    def diverged_at(self, until: float | None) -> bool:
        """Return whether its loss was no number at a moment."""
        return next((bad for time, bad in reversed(self.not_finite) if until is None or time <= until), False)

    def all_work(self) -> OwnWork:
        """Return its work in all its starts."""
        return self.earlier_work.add(self.own_work or OwnWork())

    def count(self, time: float, *, logged: bool = False, event: StepEvent | None = None) -> None:
        """Add a row with the counters as they are now."""
        now = self.progress
        row: dict[str, Any] = {
            "time": time,
            "step": now.step,
            "loss": now.loss,
            "tokens": now.tokens,
            "elapsed_seconds": now.elapsed_seconds,
            "sync_seconds": now.sync_seconds,
            "bytes_sent": now.bytes_sent,
            "rounds": now.rounds,
            "tokens_per_second": now.tokens_per_second,
            "position_seconds": now.position_seconds,
            "learning_rate": None if event is None else event.learning_rate,
            "gradient_norm": None if event is None else event.gradient_norm,
            "logged": int(logged),
            "start": self.starts,
        }
        self.columns.append(row)

    def go_back(self, time: float, step: int) -> None:
        """Forget what a resume from this step has taken back."""
        self.columns.drop("step", step)
        self.progress.restore({name: self.columns.last(name) for name in self.columns.names})
        self.reached = min(self.reached, step)
        self.ended = None
        self.not_finite.append((time, False))
