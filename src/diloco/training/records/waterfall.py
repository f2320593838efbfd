"""The round waterfall: what each worker of this machine did at every moment, from its events. Torch-free.

    compute   inner steps, with the evaluations and checkpoints between them
    encode    its outer gradient was computed and encoded
    wait      training stood still until the others had posted, or for what no engine can measure
    send      training stood still while parts and means travelled
    reduce    training stood still while this worker computed its part of the mean
    merge     the outer step

With overlap a round travels while the worker trains: only what training waited for is in the waterfall.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diloco.training.records import history
from diloco.training.records.events import Event

Phase = Literal["compute", "encode", "send", "wait", "reduce", "merge"]
PHASES: tuple[Phase, ...] = ("compute", "encode", "send", "wait", "reduce", "merge")
TOLD = ("encode", "flight", "waited", "merge", "others", "send", "reduce")
"""What a worker tells the others of its last round (`Report.last_round_seconds`), after the round's number."""
_BEGINS = ("worker_started", "joined", "resumed", "starting")


@dataclass(frozen=True)
class Span:
    """A worker in one phase, from `start` to `end` in seconds since 1970."""

    worker: int
    sequence: int
    """The round that the phase is part of, or that the inner steps are for."""
    phase: Phase
    start: float
    end: float
    failed: bool = False
    """The round gave this worker no mean."""


def round_spans(events: Sequence[Event]) -> list[Span]:
    """Of all workers, each in the order of time. Steps after the last round are in none."""
    events = history.current(events)
    rounds = {(event["worker"], event["sequence"]): event for event in events if event["type"] == "round"}
    timelines: dict[int, _Timeline] = {}
    for event in events:
        timeline = timelines.setdefault(event["worker"], _Timeline(event["worker"]))
        if event["type"] in _BEGINS:
            timeline.now = event["time"]
        elif event["type"] == "round_posted":
            timeline.posted(event, rounds.get((event["worker"], event["sequence"])))
        elif event["type"] == "round":
            timeline.ended(event)
    return [span for worker in sorted(timelines) for span in timelines[worker].spans]


class _Timeline:
    def __init__(self, worker: int) -> None:
        self.worker = worker
        self.now: float | None = None
        self.spans: list[Span] = []
        self._posted: dict[int, float] = {}

    def posted(self, event: Event, ended: Event | None) -> None:
        sequence, time = event["sequence"], event["time"]
        self._posted[sequence] = time
        self._until(time - _seconds(ended, "encode_seconds"), "compute", sequence)
        self._until(time, "encode", sequence)

    def ended(self, event: Event) -> None:
        """The phases of the engine count from the post on; what of them is before the wait was beside inner steps."""
        sequence, failed = event["sequence"], event.get("failure") is not None
        merge_start = event["time"] - _seconds(event, "merge_seconds")
        self._until(merge_start - _seconds(event, "waited_seconds"), "compute", sequence)
        heard = self._posted.pop(sequence, merge_start) + _seconds(event, "others_seconds")
        if event.get("others_seconds") is not None:
            sent = heard + _seconds(event, "send_seconds")
            self._until(min(heard, merge_start), "wait", sequence, failed)
            self._until(min(sent, merge_start), "send", sequence, failed)
            self._until(min(sent + _seconds(event, "reduce_seconds"), merge_start), "reduce", sequence, failed)
        self._until(merge_start, "wait", sequence, failed)
        self._until(event["time"], "merge", sequence, failed)

    def _until(self, end: float, phase: Phase, sequence: int, failed: bool = False) -> None:
        if self.now is not None and end > self.now:
            self.spans.append(Span(self.worker, sequence, phase, self.now, end, failed))
        self.now = end if self.now is None else max(self.now, end)


def _seconds(event: dict[str, Any] | None, name: str) -> float:
    """0 where an event has none: of an earlier version, or of an engine that cannot measure it."""
    value = (event or {}).get(name)
    return max(0.0, float(value)) if isinstance(value, int | float) else 0.0
