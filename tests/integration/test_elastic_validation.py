"""Validation while workers come and go: one figure for each step, over all of the text, the same on every machine."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.data.corpus import Corpus
from diloco.engines.rounds import Member, Report
from diloco.outer.loop import OuterLoop
from diloco.training.config.run import RunConfig
from diloco.training.loop import Training
from diloco.training.records.events import read_events
from diloco.training.records.summary import summarize
from diloco.training.swarm.validation import SwarmValidation
from support.elastic_training import STEPS, Swarm, joins_at, make_run
from support.saved_runs import quick_runs


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_runs():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Corpus]:
    return make_run(tmp_path_factory.mktemp("corpus"))


def figures(swarm: Swarm, number: int) -> dict[int, float]:
    """Step -> loss; each step once, and each over all of the text."""
    told = swarm.events(number, "validation")
    windows = swarm.config.training.eval_windows * swarm.config.data.sequence_length
    assert [event["tokens"] for event in told] == [windows] * len(told)
    losses = {event["step"]: event["loss"] for event in told}
    assert len(losses) == len(told), "a step was told twice"
    return losses


def test_every_machine_tells_the_same_figure_once_over_the_whole_text(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 5), step13=lambda _: swarm.start(swarm.worker(2))))
    swarm.end()
    first, second, third = (figures(swarm, number) for number in (0, 1, 2))
    assert first.keys() == {0, 8, 12, 20, STEPS}  # the first round at or after each multiple of 6, and the end
    assert first == second
    assert third == {step: first[step] for step in third} and third.keys() >= {12, 20, STEPS}


@pytest.mark.parametrize(
    "sync",
    [SyncConfig(4, fragments=2), SyncConfig(4, fragments=2, overlap_steps=2), SyncConfig(4, outer_overlap="eager")],
)
def test_the_figure_is_the_same_with_fragments_and_overlap(
    made: tuple[RunConfig, Corpus], tmp_path: Path, sync: SyncConfig
) -> None:
    swarm = Swarm((replace(made[0], sync=sync), made[1]), tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 5)))
    swarm.end()
    first, second = figures(swarm, 0), figures(swarm, 1)
    assert len(first) >= 4 and first.keys() >= {0, STEPS}
    assert second == {step: first[step] for step in second} and len(second) >= len(first) - 1


def test_the_workers_measure_a_share_each(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 5)))
    swarm.end()
    windows = made[0].training.eval_windows * made[0].data.sequence_length
    shares = [{event["step"]: event["tokens"] for event in swarm.events(n, "evaluation")} for n in (0, 1)]
    assert [[event["doing"] for event in swarm.events(n, "starting")] for n in (0, 1)] == [
        ["validation", "first step"],
        ["first step"],
    ]
    assert shares[0] == {0: windows, 8: windows // 2, 12: windows // 2, 20: windows // 2}
    assert shares[1] == {8: windows // 2, 12: windows // 2, 20: windows // 2}


def test_before_the_first_step_only_the_worker_that_starts_the_run_measures(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)
    both = [swarm.worker(0), swarm.worker(1)]
    for training in both:
        swarm.start(training)
    swarm.end()
    assert swarm.events(1, "evaluation")[0]["step"] > 0
    assert figures(swarm, 0) == figures(swarm, 1) and 0 in figures(swarm, 0)


def test_an_anchor_that_has_moved_on_is_not_measured(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    training = Swarm(made, tmp_path).worker(0)
    validation, outer = training.validation, training.mode.averager
    assert isinstance(validation, SwarmValidation) and isinstance(outer, OuterLoop)
    validation.after_round(1, [Member(0, "", 1.0, 1.0, Report())])  # the round of step 8, the first after 6
    for merged, due in ((1, False), (2, True), (3, False)):
        outer.state.unmerged = merged
        assert validation.due(8) is due


def test_what_a_worker_that_left_did_not_report_is_measured_again_after_the_next_round(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    config = replace(made[0], training=replace(made[0].training, eval_interval=8))
    swarm = Swarm((config, made[1]), tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 5, step9=Training.request_stop)))
    swarm.end()
    assert swarm.events(1, "evaluation")[-1]["step"] == 8  # and it has left before the round of step 12
    assert figures(swarm, 0).keys() == {0, 12, 16, STEPS}


def test_a_worker_that_missed_the_round_measures_nothing_and_hears_the_figure(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.meeting.drop = frozenset({(1, 2)})  # the round of step 12, which is due
    swarm.start(swarm.worker(0, **joins_at(swarm, 5)))
    swarm.end()
    assert swarm.events(1, "resync")
    assert 12 not in {event["step"] for event in swarm.events(1, "evaluation")}
    assert figures(swarm, 0) == figures(swarm, 1)


def test_a_joiner_tells_the_latest_figure_of_the_others(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 17)))
    swarm.end()
    before = {step: loss for step, loss in figures(swarm, 1).items() if step < 18}
    assert before and before == {step: figures(swarm, 0)[step] for step in before}


class Killed(BaseException):
    """Where a kill would have been."""


def test_a_share_that_is_lost_at_the_end_is_measured_by_the_workers_that_remain(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    swarm = Swarm(made, tmp_path)

    def dies_at_the_end(training: Training) -> None:
        def die(*_: Any) -> None:
            raise Killed

        training.validation.measure_end = die  # type: ignore[method-assign]

    swarm.start(swarm.worker(0, **joins_at(swarm, 5, step20=dies_at_the_end)))
    with pytest.raises(Killed):
        swarm.end()
    assert STEPS in figures(swarm, 0)
    summary = summarize(swarm.config, read_events(tmp_path / "machine-0"))
    assert summary["status"] == "complete" and summary["validation_step"] == STEPS
    assert (summary["workers"], len(summary["anchor_digests"])) == (1, 1)  # no other worker has confirmed the end


def test_a_worker_that_leaves_early_measures_nothing_more(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    swarm = Swarm(made, tmp_path)
    measured: list[int] = []

    def stop(training: Training) -> None:
        training.request_stop()
        training.evaluator.measure = lambda *_: measured.append(1)  # type: ignore[assignment, method-assign]

    swarm.start(swarm.worker(0, **joins_at(swarm, 5, step13=stop)))
    swarm.end()
    assert swarm.events(1, "worker_finished")[0]["stopped_early"] and not measured


def test_a_measurement_ends_when_its_worker_is_to_stop(made: tuple[RunConfig, Corpus], tmp_path: Path) -> None:
    training = Swarm(made, tmp_path).worker(0)
    training.request_stop()
    training.validation.measure_start(training.mode, joined=False)
    assert [event["type"] for event in read_events(tmp_path / "machine-0")] == [
        "starting"
    ] and training.validation.announced_step == -1


@pytest.mark.parametrize(
    "note",
    [b'{"validation": [99, 2.0, 32]}', b'{"validation": "x"}', b'{"validation": [0, 2.0, 0]}', b'{"validation": [0]}'],
)
def test_a_note_from_the_future_or_of_another_form_is_ignored(
    made: tuple[RunConfig, Corpus], tmp_path: Path, note: bytes
) -> None:
    training = Swarm(made, tmp_path).worker(0)
    training.validation.read_note(note)  # type: ignore[attr-defined]
    assert training.validation.announced_step == -1
