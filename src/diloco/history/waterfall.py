"""The round waterfall: what each worker did at every moment.

    compute   inner steps, with the evaluations and checkpoints between them
    encode    its outer gradient was computed and encoded
    wait      training stood still until the others had posted, or for what no engine can measure
    send      training stood still while parts and means travelled
    reduce    training stood still while this worker computed its part of the mean
    merge     the outer step

With overlap a round travels while the worker trains: only what training waited for is in the waterfall.
A worker of another machine tells the seconds of a round with its next one; its round ends here when it does for this
machine, since the two share no clock.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from diloco.history.rounds import RoundHistory, WorkerRound

Phase = Literal["compute", "encode", "send", "wait", "reduce", "merge"]
PHASES: tuple[Phase, ...] = ("compute", "encode", "send", "wait", "reduce", "merge")


@dataclass(frozen=True)
class PhaseSpan:
    """A worker in one phase, from `start` to `end` in seconds since 1970."""

    worker: int
    sequence: int
    """The round that the phase is part of, or that the inner steps are for."""
    phase: Phase
    start: float
    end: float
    failed: bool = False
    """The round gave this worker no mean."""


def round_spans(rounds: Sequence[RoundHistory], began: Mapping[int, Sequence[float]]) -> list[PhaseSpan]:
    """Return the spans of all workers, each in the order of time; inner steps after the last round are in none.

    `began`: when each worker of this machine began to take inner steps.
    """
    workers = sorted({worker for round_ in rounds for worker in round_.workers})
    return [
        span
        for worker in workers
        for span in _Timeline(worker).spans_of(
            began.get(worker, ()),
            [(round_.sequence, round_.workers[worker]) for round_ in rounds if worker in round_.workers],
        )
    ]


class _Timeline:
    """The spans of one worker."""

    def __init__(self, worker: int) -> None:
        self.worker = worker
        self._now: float | None = None
        self._spans: list[PhaseSpan] = []

    def spans_of(self, began: Iterable[float], rounds: Iterable[tuple[int, WorkerRound]]) -> list[PhaseSpan]:
        """Go through what happened in the order of time; with overlap a round is posted before another has ended."""
        moments = [(time, 0, -1, WorkerRound()) for time in began]
        for sequence, part in rounds:
            moments += [(time, order, sequence, part) for time, order in _moments(part)]
        for time, order, sequence, part in sorted(moments, key=lambda moment: moment[:2]):
            if order == 0:
                self._now = time if self._now is None else max(self._now, time)
            elif order == 1:
                self._until(time - part.seconds.get("encode", 0.0), "compute", sequence)
                self._until(time, "encode", sequence)
            else:
                self._ended(time, sequence, part)
        return self._spans

    def _ended(self, time: float, sequence: int, part: WorkerRound) -> None:
        """Add the spans of a round that has ended. The engine's phases count from the post on: what of them is before
        the wait was beside inner steps."""
        failed = part.failure is not None
        merge_start = time - part.seconds.get("merge", 0.0)
        self._until(merge_start - part.seconds.get("waited", 0.0), "compute", sequence)
        if "others" in part.seconds:
            heard = (merge_start if part.posted is None else part.posted) + part.seconds["others"]
            sent = heard + part.seconds.get("send", 0.0)
            reduced = sent + part.seconds.get("reduce", 0.0)
            self._until(min(heard, merge_start), "wait", sequence, failed)
            self._until(min(sent, merge_start), "send", sequence, failed)
            self._until(min(reduced, merge_start), "reduce", sequence, failed)
        self._until(merge_start, "wait", sequence, failed)
        self._until(time, "merge", sequence, failed)

    def _until(self, end: float, phase: Phase, sequence: int, failed: bool = False) -> None:
        if self._now is not None and end > self._now:
            self._spans.append(PhaseSpan(self.worker, sequence, phase, self._now, end, failed))
        self._now = end if self._now is None else max(self._now, end)


def _moments(part: WorkerRound) -> Iterator[tuple[float, int]]:
    """Yield the moments of a part: (time, 0) its inner steps began, if only a report tells it; (time, 1) it was posted;
    (time, 2) it ended."""
    if part.elsewhere and part.posted is not None:
        yield part.posted - part.seconds.get("encode", 0.0) - (part.compute_seconds or 0.0), 0
    if part.posted is not None:
        yield part.posted, 1
    if part.ended is not None:
        yield part.ended, 2
