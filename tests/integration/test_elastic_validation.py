"""Validation while workers come and go: one figure for each step, over all of the text, the same on every machine."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.data.corpus import Corpus
from diloco.engines.note import Note, ValidationFigure
from diloco.engines.rounds import Member, Report
from diloco.outer.loop import OuterLoop
from diloco.training.config.run import RunConfig
from diloco.training.loop import Training
from diloco.training.records.summary import summarize
from diloco.training.swarm.shard_claims import ShardClaims
from diloco.training.swarm.validation import SwarmValidation, _Measurement, _Round, add_up
from diloco.training.validation import Evaluation
from support.elastic_training import STEPS, Swarm, joins_at, make_run
from support.event_log import history_of, read_events
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
    validation.after_round(1, [Member(0, "", 1.0, 1.0, Report())], {})  # the round of step 8, the first after 6
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
    summary = summarize(swarm.config, history_of(read_events(tmp_path / "machine-0")))
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


def validation_at(made: tuple[RunConfig, Corpus], folder: Path, step: int) -> SwarmValidation:
    training = Swarm(made, folder).worker(0)
    assert isinstance(training.validation, SwarmValidation) and isinstance(training.mode.averager, OuterLoop)
    training.mode.averager.state.inner_steps = step
    return training.validation


def tells(*figures: ValidationFigure | None) -> dict[int, Note]:
    return {worker: Note(validation=figure) for worker, figure in enumerate(figures, 1)}


HONEST, LIE = ValidationFigure(8, 2.0, 32), ValidationFigure(8, 7.0, 32)


@pytest.mark.parametrize(
    "notes",
    [
        tells(LIE, None, None),
        tells(LIE, HONEST, None),
        tells(ValidationFigure(99, 2.0, 32)),  # of a step that no worker has come to
        tells(ValidationFigure(8, 2.0, 1 << 40)),  # over more text than there is
    ],
)
def test_no_figure_is_taken_from_the_notes_that_most_do_not_tell(
    made: tuple[RunConfig, Corpus], tmp_path: Path, notes: dict[int, Note]
) -> None:
    validation = validation_at(made, tmp_path, 9)
    validation._take_in_figures(notes)
    assert validation.announced_step == -1


def test_a_worker_that_was_absent_takes_the_figure_of_most_others_and_names_them(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    validation = validation_at(made, tmp_path, 9)
    validation._take_in_figures(tells(HONEST, LIE, HONEST))
    told = [event for event in read_events(tmp_path / "machine-0") if event["type"] == "validation"]
    assert [(event["step"], event["loss"], event["told_by"]) for event in told] == [(8, 2.0, [1, 3])]
    later = ValidationFigure(9, 5.0, 32)
    validation._take_in_figures(tells(later))  # it is in the rounds now, and measures with the other one itself
    assert validation.announced_step == 8
    validation.record_absence()
    validation._take_in_figures(tells(later))
    assert validation.announced_step == 9


@pytest.mark.parametrize("lie", [0.0, 1e6, math.nan, 1.5])
def test_one_share_cannot_move_the_figure_by_more_than_its_part_of_a_twentieth(lie: float) -> None:
    honest = {worker: Evaluation(2.0 + worker / 1000, 10) for worker in range(4)}
    whole, doubtful = add_up(honest | {4: Evaluation(lie, 10)}, 0)
    assert abs(whole.loss / 2.0 - 1) < 0.05 / 5 + 0.002 and whole.tokens == 50
    assert doubtful.keys() == {4}
    assert add_up(honest, 0) == (Evaluation(sum(honest[i].loss * 10 for i in range(4)) / 40, 40), {})


def test_of_two_shares_a_worker_believes_its_own() -> None:
    shares = {0: Evaluation(2.0, 10), 1: Evaluation(900.0, 10)}
    assert add_up(shares, 0) == (Evaluation(2.5, 20), {1: 900.0})
    assert add_up({0: Evaluation(2.0, 10), 1: Evaluation(2.4, 10)}, 0) == (Evaluation(2.2, 20), {})


def reports(step: int, shares: dict[int, tuple[float, int]]) -> list[Member]:
    return [
        Member(worker, "", 1.0, 1.0, Report(validation_loss=loss, validation_tokens=tokens, validation_step=step))
        for worker, (loss, tokens) in shares.items()
    ]


def test_a_share_withheld_for_the_second_time_or_of_other_tokens_is_left_out_and_named(
    made: tuple[RunConfig, Corpus], tmp_path: Path
) -> None:
    validation = validation_at(made, tmp_path, 100)
    tokens = [validation._evaluator.share_tokens(index, 3) for index in range(3)]
    for step, sequence in ((8, 1), (12, 2)):
        measured = _Round(sequence, step, (0, 1, 2))
        validation._open[step] = _Measurement(measured, sequence + 3, {0: Evaluation(2.0, tokens[0])})
    told = {1: (2.2, tokens[1]), 2: (9.0, 10**9)}
    for sequence in (2, 3):
        validation.after_round(sequence, reports(8 if sequence == 2 else 12, told), {})
        assert validation.announced_step == -1
    validation.after_round(6, reports(12, told), {})
    (event,) = [event for event in read_events(tmp_path / "machine-0") if event["type"] == "validation"]
    assert (event["step"], event["measured_by"], event["withheld"]) == (12, [0, 1], [2])
    assert event["loss"] == pytest.approx(2.1, rel=0.02) and event["tokens"] == tokens[0] + tokens[1]


def test_a_fault_in_reading_what_others_told_does_not_end_the_training(
    made: tuple[RunConfig, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError("a mistake of our own")

    monkeypatch.setattr(ShardClaims, "read_note", fails)
    swarm = Swarm(made, tmp_path)
    swarm.start(swarm.worker(0, **joins_at(swarm, 5)))
    swarm.end()
    assert all(swarm.events(number, "worker_finished") for number in (0, 1))
    reasons = {event["reason"] for event in swarm.events(0, "internal_error")}
    assert reasons == {"ZeroDivisionError: a mistake of our own"}
