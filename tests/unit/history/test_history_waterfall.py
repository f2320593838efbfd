"""The round waterfall: spans that never overlap, and the same seconds as the events tell."""

from itertools import pairwise
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.history.events import event_fields
from diloco.history.waterfall import PhaseSpan
from diloco.outer.rounds import RoundEvent
from diloco.training.records.agreement import Agreement
from diloco.training.records.worker_events import round_ended
from support.event_log import Event, history_of
from support.in_turn import InTurn


def event(type_: str, time: float, **fields: Any) -> Event:
    return {"v": 1, "time": time, "worker": 0, "type": type_, **fields}


def ended(time: float, **fields: Any) -> Event:
    return event("round", time, **({"sequence": 0, "step": 5, "failure": None, "merge_seconds": 1.0} | fields))


def seconds(spans: list[PhaseSpan]) -> list[tuple[str, float]]:
    return [(span.phase, pytest.approx(span.end - span.start)) for span in spans]


def spans_of(events: list[Event]) -> list[PhaseSpan]:
    return history_of(events).spans()


BEGIN = event("starting", 100.0, doing="first step")
POSTED = event("round_posted", 112.0, sequence=0, step=5)


def test_a_round_is_split_into_its_phases() -> None:
    times = {"encode_seconds": 2.0, "waited_seconds": 7.0, "others_seconds": 3.0, "send_seconds": 2.0}
    spans = spans_of([BEGIN, POSTED, ended(120.0, **times, reduce_seconds=1.5)])
    parts = [("compute", 10.0), ("encode", 2.0), ("wait", 3.0), ("send", 2.0), ("reduce", 1.5), ("wait", 0.5)]
    assert seconds(spans) == [*parts, ("merge", 1.0)]


def test_what_no_engine_measured_is_waiting() -> None:
    spans = spans_of([BEGIN, POSTED, ended(120.0, waited_seconds=7.0, others_seconds=None, send_seconds=None)])
    assert seconds(spans) == [("compute", 12.0), ("wait", 7.0), ("merge", 1.0)]


def test_a_round_that_travelled_beside_inner_steps_shows_only_what_they_waited_for() -> None:
    times = {"encode_seconds": 2.0, "waited_seconds": 1.0, "others_seconds": 3.0, "send_seconds": 3.5}
    spans = spans_of([BEGIN, POSTED, ended(120.0, **times, reduce_seconds=0.5)])
    parts = [("compute", 10.0), ("encode", 2.0), ("compute", 6.0), ("send", 0.5), ("reduce", 0.5), ("merge", 1.0)]
    assert seconds(spans) == parts


def test_a_failed_round_is_marked() -> None:
    spans = spans_of([BEGIN, POSTED, ended(120.0, waited_seconds=8.0, merge_seconds=None, failure="late")])
    assert [(span.phase, span.failed) for span in spans] == [("compute", False), ("wait", True)]


def test_events_of_an_earlier_version_have_a_waterfall_too() -> None:
    old = event("round", 120.0, sequence=0, step=5, failure=None, waited_seconds=7.0)
    assert seconds(spans_of([BEGIN, POSTED, old])) == [("compute", 12.0), ("compute", 1.0), ("wait", 7.0)]


def test_a_pause_before_a_resume_is_no_computing() -> None:
    resumed = event("resumed", 500.0, step=5, rounds=1, workers=1)
    later = event("round_posted", 510.0, sequence=1, step=10)
    spans = spans_of([BEGIN, POSTED, ended(120.0, waited_seconds=7.0), resumed, later])
    assert spans[-1] == PhaseSpan(0, 1, "compute", 500.0, 510.0)


@pytest.mark.parametrize("overlap", [0, 1])
def test_the_seconds_of_a_round_are_told_by_the_loop(overlap: int) -> None:
    world = InTurn(2, SyncConfig(2, "int8", overlap_steps=overlap), fail_at=[(1, 1)])
    told: list[tuple[int, RoundEvent]] = []
    for worker, optimizer in enumerate(world.optimizers):
        optimizer.on_round = lambda event, worker=worker: told.append((worker, event))  # type: ignore[misc]
    world.step(6)
    assert len(told) == 6 - overlap * 2
    for worker, one in told:
        fields = event_fields(round_ended(one, Agreement()))
        known = [fields[f"{name}_seconds"] for name in ("encode", "flight", "waited")]
        assert all(value is not None and value >= 0 for value in known)
        failed = (worker, one.key.sequence) == (1, 1)
        missing = [fields[name] is None for name in ("failure", "merge_seconds", "others_seconds")]
        assert missing == [not failed, failed, failed]
        assert fields["send_seconds"] is None  # nothing travels in one process


def test_a_worker_of_another_machine_is_in_the_waterfall_from_its_reports() -> None:
    events = [BEGIN]
    for sequence in range(3):
        time = 112.0 + sequence * 20
        events.append(event("round_posted", time, sequence=sequence, step=sequence))
        report = {"elapsed_seconds": 10.0 + sequence * 18, "sync_seconds": 1.0 + sequence * 3}
        report["last_round_seconds"] = [sequence - 1, 0.5, 0.0, 3.0, 0.25, 2.0, 0.75, None] if sequence else []
        times = {"waited_seconds": 7.0, "members": [{"worker": 4, "report": report}]}
        events.append(ended(time + 8, **times, sequence=sequence, step=sequence))
    spans = [span for span in spans_of(events) if span.worker == 4]
    parts = [("encode", 0.5), ("wait", 2.0), ("send", 0.75), ("wait", 0.25), ("merge", 0.25)]
    assert seconds(spans)[:5] == parts, "its inner steps are known from its second report on"
    assert seconds(spans)[5:] == [("compute", 15.0), *parts]
    assert spans[4].end == 120.0 and spans[-1].end == 140.0, "its rounds end when they end here"
    assert all(one.end <= other.start for one, other in pairwise(spans))


def test_spans_of_a_worker_never_overlap() -> None:
    events = [BEGIN]
    for sequence in range(5):
        time = 110.0 + sequence * 8
        events.append(event("round_posted", time, sequence=sequence, step=sequence))
        times = {"encode_seconds": 9.0, "waited_seconds": 9.0, "others_seconds": 4.0, "send_seconds": 30.0}
        events.append(ended(time + 6, **times, sequence=sequence, step=sequence))
    spans = spans_of(events)
    assert spans and all(one.end <= other.start for one, other in pairwise(spans))
