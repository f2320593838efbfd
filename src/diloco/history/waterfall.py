"""The round waterfall: what each worker did at every moment, from the events of this machine. Torch-free.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diloco.history import resuming as history
from diloco.history.log import Event

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
    events = [*events, *_told(events)]
    rounds = {(event["worker"], event["sequence"]): event for event in events if event["type"] == "round"}
    timelines: dict[int, _Timeline] = {}
    for event in events:
        timeline = timelines.setdefault(event["worker"], _Timeline(event["worker"]))
        if event["type"] in _BEGINS:
            timeline.now = event["time"] if timeline.now is None else max(timeline.now, event["time"])
        elif event["type"] == "round_posted":
            timeline.posted(event, rounds.get((event["worker"], event["sequence"])))
        elif event["type"] == "round":
            timeline.ended(event)
    return [span for worker in sorted(timelines) for span in timelines[worker].spans]


def _told(events: Sequence[Event]) -> Iterator[Event]:
    """Events of rounds as the workers of other machines would have written them, from what they report."""
    here = {event["worker"] for event in events if event["type"] in ("worker_started", "step", "round_posted")}
    ended: dict[int, float] = {}  # sequence -> when it ended here
    worked: dict[int, float] = {}  # worker -> its seconds of inner steps, at its last report
    computed: dict[tuple[int, int], float] = {}  # worker, sequence -> seconds of inner steps for that round
    for event in events:
        if event["type"] != "round" or event["sequence"] in ended:
            continue
        ended[event["sequence"]] = event["time"]
        for member in event.get("members") or ():
            worker, report = member["worker"], member.get("report") or {}
            if worker in here:
                continue
            so_far = _seconds(report, "elapsed_seconds") - _seconds(report, "sync_seconds")
            computed[worker, event["sequence"]] = max(0.0, so_far - worked.get(worker, so_far))
            worked[worker] = so_far
            sequence, *told = report.get("last_round_seconds") or [-1]
            if sequence in ended and len(told) == len(TOLD):
                seconds = {f"{name}_seconds": value for name, value in zip(TOLD, told, strict=True)}
                yield from _events_of(worker, int(sequence), ended[sequence], computed.get((worker, sequence)), seconds)


def _events_of(
    worker: int, sequence: int, end: float, computed: float | None, seconds: dict[str, Any]
) -> Iterator[Event]:
    """The beginning of its inner steps, where that is known, its post, and the round's end."""
    common = {"worker": worker, "sequence": sequence}
    posted = end - sum(_seconds(seconds, f"{name}_seconds") for name in ("flight", "waited", "merge"))
    if computed is not None:
        began = posted - _seconds(seconds, "encode_seconds") - computed
        yield {"type": _BEGINS[0], "time": began, "worker": worker}
    yield {"type": "round_posted", "time": posted, **common}
    yield {"type": "round", "time": end, **common, **seconds}


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
