"""What of the events becomes a number in a sink."""

import math

import pytest

from diloco.history.events import read_event
from diloco.history.run_history import RunHistory
from diloco.sinks.base import Point
from diloco.sinks.follower import points_of
from support.event_log import Event
from support.recorded_runs import RUN, event, member, merged, started, step, validation

Values = dict[tuple[str, int | None], list[tuple[int, float]]]


def read(*events: Event) -> Values:
    history, values = RunHistory(), Values()
    for each in map(read_event, events):
        history.update(each)
        for point in points_of(each, history):
            values.setdefault((point.name, point.worker), []).append((point.step, point.value))
    return values


def test_each_worker_has_its_own_loss_rate_tokens_and_speed() -> None:
    values = read(*RUN)
    assert values["train/loss", 0] == [(10, 4.0), (20, 3.0)]
    assert values["train/loss", 1] == [(10, 5.0), (20, 3.5)]
    assert values["train/learning_rate", 0] == [(10, 0.5), (20, 0.5)]
    assert values["train/tokens", 1] == [(10, 1000.0), (20, 2000.0)]
    assert values["train/tokens_per_second", 1] == [(10, 1000.0), (20, 1000.0)]


def test_a_round_is_told_once_for_all_and_for_each_worker_what_is_its_own() -> None:
    values = read(*RUN)
    assert values["round/similarity", None] == [(10, 0.25), (20, 0.25)]
    assert values["round/mean_norm", None] == [(10, 0.5), (20, 0.5)]
    assert values["round/contributors", None] == [(10, 2.0), (20, 2.0)]
    assert values["round/norm", 1] == [(10, 3.0), (20, 3.0)]
    assert values["round/bytes_sent", 0] == [(10, 64.0), (20, 64.0)]
    assert values["round/waited_seconds", 0] == [(10, 0.125), (20, 0.125)]


def test_validation_is_of_all_workers_together() -> None:
    assert read(*RUN)["validation/perplexity", None] == [(0, 64.0), (10, 8.0)]


def test_failed_rounds_and_refused_contributions_are_counted_once_however_many_tell_of_them() -> None:
    failed = {"failure": "nobody answered", "mean_norm": None, "contributors": [], "members": []}
    refused = {"refused": {"1": "its norm is infinite"}}
    values = read(
        *(started(0), started(1), merged(0, 0, 10, **failed), merged(1, 0, 10, **failed)),
        *(merged(0, 1, 20, **refused), merged(1, 1, 20, **refused)),
    )
    assert values["round/failed", None] == [(10, 1.0), (20, 1.0)]
    assert values["round/refused", None] == [(10, 0.0), (20, 1.0)]


def test_workers_of_other_machines_are_known_from_the_rounds() -> None:
    values = read(started(0), merged(0, 0, 10, members=[member(0, 10, 4.0), member(1, 9, 5.5)]))
    assert values["train/loss", 1] == [(9, 5.5)]
    assert ("train/loss", 0) not in values  # this machine's own come from its steps


def test_a_round_without_work_is_no_round() -> None:
    assert read(started(0), merged(0, 5, 40, mean_norm=None, contributors=[])) == {}


@pytest.mark.parametrize("nothing", [None, "text", [1.0]])
def test_what_is_not_a_number_is_left_out(nothing: object) -> None:
    values = read({**step(0, 10, 1.0), "loss": nothing}, validation(10, None))
    assert ("train/loss", 0) not in values
    assert ("validation/loss", None) not in values
    assert values["train/tokens", 0] == [(10, 1000.0)]


def test_events_of_unknown_types_are_ignored() -> None:
    assert read(event("something_new", step=3), event("sample", text="x")) == {}


def test_a_label_names_the_worker() -> None:
    assert Point("train/loss", math.pi, 1, 0.0, 3).label == "train/loss/worker_3"
    assert Point("validation/loss", math.pi, 1, 0.0).label == "validation/loss"
