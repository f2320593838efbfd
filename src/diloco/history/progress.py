"""How far one worker is and how fast it is now, from its events: for the terminal and the page alike. Torch-free.

`bytes_sent` and `rounds` of a `step` event are from before the round that is due at that step. A worker's bytes are
therefore its last `step` and the rounds since, so that bytes, rounds and tokens are of the same moment.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from diloco.history.log import Event

_WINDOW_SECONDS = 60.0
"""The present speed is that of the last minute of training, and of at least one whole round."""
_COUNTED = ("tokens", "elapsed_seconds", "sync_seconds", "bytes_sent", "rounds")


DOING = {  # by a worker's state before its first step is over
    "validation": "measuring the validation loss before the first step",
    "first step": "taking the first step",
    "compiling": "compiling the model and taking the first step, which may take minutes",
    "started": "starting the workers",
    "starting": "starting the workers",
    "joined": "taking the first step",
    "waiting": "waiting for more workers (swarm.min_workers)",
    "warm_start": "waiting for the end of the warm start, which one worker trains alone",
}


class Mark(NamedTuple):
    """A worker's counters at a moment."""

    time: float
    step: int
    tokens: int
    elapsed_seconds: float
    rounds: int


@dataclass
class WorkerProgress:
    """The counters of one worker; `update` with each of its events, in the order of the log."""

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
        self._joined_at = 0  # a position whose steps before it are none of this worker's
        self._first_step: tuple[float, int] | None = None  # of this start: when it ended, and its number
        self._begun: Mark | None = None
        self._marks: deque[Mark] = deque()

    def update(self, event: Event) -> bool:
        """Whether a counter may have changed."""
        handler = getattr(self, f"_on_{event['type']}", None)
        if handler is None:
            return False
        handler(event)
        return True

    def restore(self, values: Mapping[str, float | None]) -> None:
        """Take over the counters of an earlier moment, which a resume has gone back to."""
        self.step, self.loss = int(values["step"] or 0), values["loss"]
        self.tokens, self.bytes_sent = int(values["tokens"] or 0), int(values["bytes_sent"] or 0)
        self.rounds = int(values["rounds"] or 0)
        self.elapsed_seconds, self.sync_seconds = values["elapsed_seconds"] or 0.0, values["sync_seconds"] or 0.0

    def report(self, report: Mapping[str, Any], *, elsewhere: bool, time: float) -> None:
        """What the worker told the others with a round, from before that round.

        `elsewhere`: it writes no events into this log, and reports are all that is known of it.
        """
        told = {name: report.get(name) or 0 for name in ("inner_steps", "tokens", "elapsed_seconds")}
        if any(
            value < known
            for value, known in zip(told.values(), (self.step, self.tokens, self.elapsed_seconds), strict=True)
        ):
            return  # the log knows more
        self.step = told["inner_steps"]
        for name in ("tokens", "elapsed_seconds", "sync_seconds"):
            setattr(self, name, report.get(name) or 0)
        if elsewhere:
            self.loss = report.get("loss")
            self.bytes_sent = report.get("bytes_sent") or 0
            self._mark(time, self.rounds + 1)

    def _on_worker_started(self, event: Event) -> None:
        self._tokens_per_step = event.get("tokens_per_step") or 0
        self._restart()

    def _restart(self) -> None:
        """Earlier marks say nothing of the present speed."""
        self._first_step = self._begun = None
        self._marks.clear()

    def _on_resumed(self, event: Event) -> None:
        self.step = event["step"]
        self._restart()

    def _on_joined(self, event: Event) -> None:
        """The worker begins at the position of the swarm, and counts its own work from 0."""
        self.step, self.tokens, self.elapsed_seconds, self.sync_seconds = event["step"], 0, 0.0, 0.0
        self._joined_at = event["step"]
        self._restart()

    def _on_resync(self, event: Event) -> None:
        self.step = event["step"]
        self._restart()

    def _on_first_step(self, event: Event) -> None:
        self._first_step = (event["time"], self.step + 1)

    def _on_step(self, event: Event) -> None:
        self.step, self.loss = event["step"], event["loss"]
        self._count(event)
        if self._begun is None and self._first_step is not None:
            self._mark_first_step(event["time"], *self._first_step)
        self._mark(event["time"], self.rounds)

    def _count(self, event: Event) -> None:
        for name in _COUNTED:
            if (value := event.get(name)) is not None:
                setattr(self, name, value)

    def _mark_first_step(self, time: float, ended: float, number: int) -> None:
        """The end of the first step of this start, which may have compiled the model and counts for no speed."""
        steps, taken = self.step - number, time - ended
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

    def _on_round_posted(self, event: Event) -> None:
        self.step = max(self.step, event["step"])

    def _on_round(self, event: Event) -> None:
        self.bytes_sent += event.get("bytes_sent") or 0

    def _on_worker_finished(self, event: Event) -> None:
        self.step = event["inner_steps"]
        self._count(event)

    def _on_worker_failed(self, event: Event) -> None:
        self._on_worker_finished(event)

    @property
    def tokens_per_second(self) -> float:
        """The present speed; the mean since the start as long as two steps were not logged."""
        if len(self._marks) > 1:
            first, last = self._marks[0], self._marks[-1]
            return (last.tokens - first.tokens) / (last.elapsed_seconds - first.elapsed_seconds)
        return self.tokens / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def sync_share(self) -> float:
        return self.sync_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0

    def seconds_until(self, step: int) -> float | None:
        """Until this position, at the present speed, with as much time for evaluations as there was so far."""
        seconds, positions = self.elapsed_seconds, self.step - self._joined_at
        if len(self._marks) > 1:
            first, last = self._marks[0], self._marks[-1]
            seconds, positions = last.elapsed_seconds - first.elapsed_seconds, last.step - first.step
        if positions <= 0 or not seconds:
            return None
        return max(0, step - self.step) * seconds / positions * self._overhead()

    def _overhead(self) -> float:
        """Seconds of the clock for each second of training."""
        if self._begun is None or not self._marks:
            return 1.0
        trained = self._marks[-1].elapsed_seconds - self._begun.elapsed_seconds
        return max(1.0, (self._marks[-1].time - self._begun.time) / trained) if trained > 0 else 1.0


def seconds_left(workers: Iterable[WorkerProgress], steps: int, *, elastic: bool) -> float | None:
    """Until the run's last step: of the worker that needs longest; in a swarm of the one that is there first."""
    known = [left for one in workers if (left := one.seconds_until(steps)) is not None]
    return (min if elastic else max)(known, default=None)
