"""`sync.dynamic_steps` in whole training runs: what is evaluated, saved, counted and resumed when positions jump."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.outer.loop import OuterLoop
from diloco.training.config.run import RunConfig
from diloco.training.records.summary import write_summary
from support.saved_runs import (
    STEPS,
    H,
    assert_same_end,
    events_of,
    quick_runs,
    small_config,
    small_corpus,
    steps_saved,
    train,
)

DYNAMIC = SyncConfig(H, "fp16", dynamic_steps=True)
SLOW_STEPS = H + 2 + 2 + 1  # of worker 1: in the first turn all H, then a third, and one in the last two positions


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataConfig, Corpus]]:
    def virtual_seconds(loop: OuterLoop) -> float:
        """Worker 1 is three times slower."""
        return loop.state.steps_taken * (1.0 + 2.0 * loop.engine.worker)

    with quick_runs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(OuterLoop, "_training_seconds", virtual_seconds)
        yield small_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data: tuple[DataConfig, Corpus], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RunConfig]:
    folder, config = tmp_path_factory.mktemp("whole"), small_config(data[0], DYNAMIC)
    train(folder, config, data[1])
    return folder, config


def test_all_end_at_the_last_step_and_tokens_are_those_of_the_steps_that_were_taken(
    whole: tuple[Path, RunConfig],
) -> None:
    folder, config = whole
    finished = events_of(folder, "worker_finished")
    assert [event["inner_steps"] for event in finished] == [STEPS, STEPS]
    assert [event["tokens"] for event in finished] == [n * config.tokens_per_step for n in (STEPS, SLOW_STEPS)]
    assert not finished[0]["stopped_early"] and finished[0]["rounds_failed"] == 0
    assert write_summary(folder, config)["tokens"] == (STEPS + SLOW_STEPS) * config.tokens_per_step


def test_all_evaluate_and_save_at_the_ends_of_turns(whole: tuple[Path, RunConfig]) -> None:
    folder, config = whole
    assert [event["step"] for event in events_of(folder, "evaluation")] == [0, 6, 12, 18] * 2
    assert [event["step"] for event in events_of(folder, "validation")] == [0, 6, 12, 18, 20]
    assert steps_saved(folder, 0) == steps_saved(folder, 1) == [12, 18, 20]
    other = replace(config, training=replace(config.training, eval_interval=4))
    assert [step for step in range(1, 40) if other.evaluation_due(step)] == [6, 12, 18, 24, 30, 36]
    other = replace(config, sync=replace(DYNAMIC, warm_start=4), training=replace(config.training, eval_interval=9))
    assert [step for step in range(5, 40) if other.evaluation_due(step)] == [16, 22, 34]


@pytest.mark.parametrize("ends", [{0: 16, 1: 15}, {0: 9, 1: 9}])
def test_a_killed_run_goes_on_bit_for_bit(
    whole: tuple[Path, RunConfig], data: tuple[DataConfig, Corpus], tmp_path: Path, ends: dict[int, int]
) -> None:
    folder, config = whole
    saved = min(ends.values()) // H * H
    train(tmp_path, config, data[1], ends=ends)
    train(tmp_path, config, data[1], resume=True)
    assert [event["step"] for event in events_of(tmp_path, "resumed")] == [saved, saved]
    assert_same_end(folder, tmp_path)


@pytest.mark.parametrize("stops", [{0: 8}, {1: 10}, {0: 14, 1: 16}])
def test_a_stopped_run_goes_on_as_if_it_had_never_been_stopped(
    whole: tuple[Path, RunConfig], data: tuple[DataConfig, Corpus], tmp_path: Path, stops: dict[int, int]
) -> None:
    folder, config = whole
    train(tmp_path, config, data[1], stops=stops)
    assert all(event["stopped_early"] for event in events_of(tmp_path, "worker_finished"))
    train(tmp_path, config, data[1], resume=True)
    assert_same_end(folder, tmp_path)
