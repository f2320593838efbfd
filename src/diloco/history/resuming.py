"""The events of an interrupted run as one run: what a resume took back is left out, and pauses do not count.

A worker that resumes from step 120 takes its later steps again, so the log's earlier events of these steps no longer
count. The log itself is only ever appended to.
"""

from collections.abc import Iterator, Sequence

from diloco.history.log import Event

_ENDS = ("worker_finished", "worker_failed", "sample", "sample_skipped")
_FIRST = ("sizes", "swarm", "worker_started")
"""What a worker writes first: in a swarm `swarm`; elsewhere `sizes`, which one worker writes, or `worker_started`."""


def current(events: Sequence[Event]) -> list[Event]:
    """The events without those that a resume has taken back."""
    kept: list[Event] = []
    for event in events:
        if event["type"] == "resumed":
            kept = [earlier for earlier in kept if not _taken_back(earlier, event)]
        elif event["type"] == "joined":  # back in a swarm after it had left or was lost
            kept = [one for one in kept if one["worker"] != event["worker"] or one["type"] not in _ENDS]
        kept.append(event)
    return kept


def _taken_back(event: Event, resumed: Event) -> bool:
    """Also events of workers no longer in the run; of all workers if a swarm was restarted (`workers` is 0)."""
    if event["worker"] != resumed["worker"] and event["worker"] < _number(resumed, "workers"):
        return False
    return event["type"] in _ENDS or _number(event, "step") > _number(resumed, "step")


def _number(event: Event, name: str) -> float:
    """A field of the event, 0 if it has none or another kind of value: a log may have been changed by hand."""
    value = event.get(name, 0)
    return value if isinstance(value, int | float) else 0


class RunClock:
    """The time that a run has taken: from its first event to its last, without the pauses in which nothing ran."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last: float | None = None
        self.pauses: list[tuple[float, float]] = []
        """When the run was started again, and for how many seconds nothing had run."""
        self._begun: set[tuple[int, str]] = set()

    def update(self, event: Event) -> bool:
        """Whether the event begins another start of the run: one of _FIRST that its worker has written before."""
        again, time = False, event["time"]
        if event["type"] in _FIRST:
            first = (event["worker"], event["type"])
            again = first in self._begun
            if again and self.last is not None:
                self.pauses.append((time, max(0.0, time - self.last)))
                self._begun.clear()
            self._begun.add(first)
        self.first = time if self.first is None else min(self.first, time)
        self.last = time if self.last is None else max(self.last, time)
        return again

    def seconds(self, until: float | None = None) -> float | None:
        end = self.last if until is None else until
        if end is None or self.first is None:
            return None
        return max(0.0, end - self.first - sum(taken for at, taken in self.pauses if at <= end))


def starts(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events of each start of the run: a worker that starts a second time begins another."""
    here: list[Event] = []
    clock = RunClock()
    for event in events:
        if clock.update(event):
            yield here
            here = []
        here.append(event)
    if here:
        yield here


def latest_start(events: Sequence[Event]) -> list[Event]:
    """The events since the run was last started; empty if there are none."""
    *_, latest = [[], *starts(events)]
    return list(latest)


def would_end_the_same(events: Sequence[Event]) -> bool:
    """Whether resuming the run is of no use: in its latest start a loss was not finite, or the swarm refused it."""
    return any(event["type"] in ("loss_not_finite", "excluded") for event in latest_start(events))


def seconds(events: Sequence[Event]) -> float:
    """From the first event to the last, without the pauses in which nothing ran."""
    clock = RunClock()
    for event in events:
        clock.update(event)
    return clock.seconds() or 0.0


def steps_not_taken(events: Sequence[Event]) -> dict[int, int]:
    """Per worker that joined after the first step: the steps that it is counted for and did not take."""
    missed: dict[int, int] = {}
    reached: dict[int, int] = {}
    for event in current(events):
        worker, step = event["worker"], event.get("step", 0)
        if event["type"] == "resumed" and event["new"]:
            missed[worker] = missed.get(worker, 0) + step - reached.get(worker, 0)
        if event["type"] in ("step", "round", "resumed"):
            reached[worker] = max(reached.get(worker, 0), step)
    return missed
