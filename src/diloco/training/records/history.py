"""The events of an interrupted run as one run: what a resume took back is left out, and pauses do not count.

A worker that resumes from step 120 takes its later steps again, so the log's earlier events of these steps no longer
count. The log itself is only ever appended to.
"""

from collections.abc import Iterator, Sequence

from diloco.training.records.events import Event

_ENDS = ("worker_finished", "worker_failed", "sample", "sample_skipped")


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
    if event["worker"] != resumed["worker"] and event["worker"] < resumed["workers"]:
        return False
    return event["type"] in _ENDS or event.get("step", 0) > resumed["step"]


def starts(events: Sequence[Event]) -> Iterator[list[Event]]:
    """The events of each start of the run: a worker that starts a second time begins another.

    In a swarm a worker's first event is `swarm`.
    """
    here: list[Event] = []
    started: set[tuple[int, str]] = set()
    for event in events:
        if event["type"] in ("swarm", "worker_started"):
            first = (event["worker"], event["type"])
            if first in started:
                yield here
                here, started = [], set()
            started.add(first)
        here.append(event)
    if here:
        yield here


def seconds(events: Sequence[Event]) -> float:
    """From the first event to the last, without the pauses in which nothing ran."""
    return sum((start[-1]["time"] - start[0]["time"] for start in starts(events)), 0.0)


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
