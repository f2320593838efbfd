"""I5: interrupted and resumed is never interrupted, bit for bit: every tensor, number, random state and batch."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.errors import ConfigError
from diloco.history.run_history import read_history
from diloco.training.config.run import CheckpointConfig, ComputeConfig, RunConfig
from diloco.training.loop import Training
from support.saved_runs import (
    STEPS,
    H,
    agreed,
    assert_same_end,
    events_of,
    losses,
    quick_runs,
    small_config,
    small_corpus,
    steps_saved,
    tensors_of,
    train,
)
from support.shard_progress import merge_progress

PLAIN = SyncConfig(H, "fp16")
STREAMED = SyncConfig(H, "fp16", fragments=2, overlap_steps=4, mixing=0.5)
CASES: dict[str, dict[str, object]] = {
    "fp16": {"sync": PLAIN},
    "int8": {"sync": replace(PLAIN, codec="int8")},
    "streamed fp16": {"sync": STREAMED},
    "streamed int8": {"sync": replace(STREAMED, codec="int8")},
    "topk": {"sync": replace(PLAIN, codec="topk")},
    "streamed 2bit, pruned": {"sync": replace(STREAMED, codec="2bit", prune=0.25)},
    "fp16 autocast, a loss scale": {"sync": PLAIN, "compute": ComputeConfig(precision="fp16")},
    "eager": {"sync": replace(PLAIN, outer_overlap="eager")},
    "warm start": {"sync": replace(PLAIN, warm_start=H + 3)},
    "data-parallel": {"sync": replace(PLAIN, codec="fp32"), "mode": "data-parallel"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataConfig, Corpus]]:
    with quick_runs():
        yield small_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module", params=CASES.keys())
def whole(
    request: pytest.FixtureRequest, data: tuple[DataConfig, Corpus], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, RunConfig, Corpus]:
    """A run that was left in peace."""
    config = small_config(data[0], **CASES[request.param])
    folder = tmp_path_factory.mktemp("whole")
    train(folder, config, data[1])
    return folder, config, data[1]


def test_i5_a_killed_run_goes_on_bit_for_bit(whole: tuple[Path, RunConfig, Corpus], tmp_path: Path) -> None:
    folder, config, corpus = whole
    train(tmp_path, config, corpus, ends={0: 16, 1: 16})
    saved = 15
    assert steps_saved(tmp_path, 0)[-1] == saved
    train(tmp_path, config, corpus, resume=True)
    assert_same_end(folder, tmp_path)
    assert [event["step"] for event in events_of(tmp_path, "resumed")] == [saved, saved]
    for worker in range(2):
        assert losses(tmp_path, worker) == losses(folder, worker)


@pytest.mark.parametrize("whole", ["fp16", "streamed int8"], indirect=True)
def test_i5_workers_go_on_from_different_steps_between_two_rounds(
    whole: tuple[Path, RunConfig, Corpus], tmp_path: Path
) -> None:
    folder, config, corpus = whole
    train(tmp_path, config, corpus, ends={0: 11, 1: 11})
    later = sorted((tmp_path / "checkpoints" / "step-00000009" / "worker-1").iterdir())
    for path in later:  # as if worker 1 had been killed before its last save
        path.unlink()
    train(tmp_path, config, corpus, resume=True)
    assert_same_end(folder, tmp_path)
    apart = config.sync.fragments == 1  # the streamed run has posted a round between the two steps
    assert [event["step"] for event in events_of(tmp_path, "resumed")] == ([9, 6] if apart else [6, 6])


@pytest.mark.parametrize("whole", ["streamed int8", "data-parallel"], indirect=True)
def test_i5_interrupted_again_and_again(whole: tuple[Path, RunConfig, Corpus], tmp_path: Path) -> None:
    folder, config, corpus = whole
    train(tmp_path, config, corpus, ends={0: 5, 1: 5})
    for cut in (6, 11, 10, 19):
        train(tmp_path, config, corpus, resume=True, ends={0: cut, 1: cut})
    train(tmp_path, config, corpus, resume=True)
    assert_same_end(folder, tmp_path)
    assert logged_steps(tmp_path).count(7) == 2


@pytest.mark.parametrize(
    ("stops", "saved", "interval"),
    [
        ({0: 8, 1: 8}, [8, 8], None),
        ({0: 8, 1: 10}, [8, 10], 3),  # within a round the workers' own steps are kept, though they are not the same
        ({0: 11, 1: 13}, [11, 11], 3),  # a worker that was waiting at step 12 is saved without the round cut short
        ({0: 11, 1: 13}, [11, 11], None),
    ],
)
def test_i5_after_ctrl_c_a_run_goes_on_as_if_it_had_never_been_stopped(
    data: tuple[DataConfig, Corpus], tmp_path: Path, stops: dict[int, int], saved: list[int], interval: int | None
) -> None:
    checkpoint = CheckpointConfig(interval=interval, keep=3, asynchronous=False)
    config, corpus = small_config(data[0], PLAIN, checkpoint=checkpoint), data[1]
    train(tmp_path / "whole", config, corpus)
    train(tmp_path / "stopped", config, corpus, stops=stops)
    assert len(events_of(tmp_path / "stopped", "worker_finished")) == 2
    assert [steps_saved(tmp_path / "stopped", worker)[-1] for worker in range(2)] == saved
    train(tmp_path / "stopped", config, corpus, resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")
    assert [event["step"] for event in events_of(tmp_path / "stopped", "resumed")] == saved
    assert losses(tmp_path / "stopped", 1) == losses(tmp_path / "whole", 1)


@pytest.mark.parametrize("stops", [{0: 9, 1: 9}, {0: 13, 1: 16}])
@pytest.mark.parametrize("sync", [STREAMED, replace(PLAIN, outer_overlap="eager")], ids=["streamed", "eager"])
def test_i5_after_ctrl_c_with_rounds_in_flight(
    data: tuple[DataConfig, Corpus], tmp_path: Path, sync: SyncConfig, stops: dict[int, int]
) -> None:
    config, corpus = small_config(data[0], sync), data[1]
    train(tmp_path / "whole", config, corpus)
    train(tmp_path / "stopped", config, corpus, stops=stops)
    train(tmp_path / "stopped", config, corpus, resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "stopped")


def test_a_complete_run_trains_on_with_more_steps_from_before_its_last_rounds(
    data: tuple[DataConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = small_config(data[0], PLAIN, steps=10), data[1]
    train(tmp_path, config, corpus)
    longer = replace(config, steps=16)
    train(tmp_path, longer, corpus, resume=True)
    resumed = events_of(tmp_path, "resumed")
    assert [event["step"] for event in resumed] == [10, 10]
    assert "steps was 10 and is 16" in resumed[0]["notes"][0] and resumed[1]["notes"] == []
    assert len(losses(tmp_path, 0)) == 16
    with pytest.raises(ConfigError, match="is at step 16 already: give --steps at least that"):
        train(tmp_path, config, corpus, resume=True)


def test_without_checkpoints_a_killed_run_begins_again_and_says_so(
    data: tuple[DataConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = small_config(data[0], PLAIN, checkpoint=CheckpointConfig(interval=0)), data[1]
    train(tmp_path, config, corpus, ends={0: 8, 1: 8})
    train(tmp_path, config, corpus, resume=True)
    assert not (tmp_path / "checkpoints").exists()
    told = events_of(tmp_path, "resumed")
    assert told[0]["step"] == 0 and "starts again at its first step" in told[0]["notes"][0]
    assert logged_steps(tmp_path).count(5) == 2


# Another number of workers


def logged_steps(folder: Path) -> list[int]:
    """The steps that count, of all workers."""
    columns = [worker.columns.until(None) for worker in read_history(folder).local_workers.values()]
    return [int(step) for rows in columns for step in rows["step"][rows["logged"] > 0]]


def progress_of(workers: list[Training]) -> dict[int, tuple[int, int]]:
    told = [worker.reader.progress() for worker in workers]
    return {shard: tuple(read) for shard, read in merge_progress(told).items()}


@pytest.mark.parametrize("sync", [PLAIN, STREAMED], ids=["plain", "streamed"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_goes_on_with_another_number_of_workers_and_says_what_that_means(
    data: tuple[DataConfig, Corpus], tmp_path: Path, workers: int, sync: SyncConfig
) -> None:
    config, corpus = small_config(data[0], sync), data[1]
    train(tmp_path, config, corpus, ends={0: 10, 1: 10})
    before = {shard: read for start in agreed(tmp_path, workers) for shard, read in (start.progress or {}).items()}
    assert sum(read.consumed for read in before.values()) == 9 * 2 * 2 and len(before) == 6
    ended = train(tmp_path, replace(config, workers=workers), corpus, resume=True)
    assert len({worker.mode.anchor_digest() for worker in ended}) == 1
    after = progress_of(ended)
    assert all(after[shard] >= tuple(before[shard]) for shard in before)  # nothing is read again
    assert sum(read for _, read in after.values()) == 9 * 2 * 2 + (STEPS - 9) * 2 * workers
    notes = [note for event in events_of(tmp_path, "resumed") for note in event["notes"]]
    assert f"the shards are dealt again, from 2 workers to {workers}" in notes
    if workers == 3:
        assert "worker 2 is new: it starts from the anchor, with the inner optimizer of worker 0" in notes
    else:
        lost = 3 if sync is PLAIN else 9 - 0
        assert f"worker 1 is not started again: its {lost} inner steps since its last round are lost" in notes


def test_what_is_not_known_of_a_worker_that_is_left_out_is_said(
    data: tuple[DataConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = small_config(data[0], PLAIN, workers=3), data[1]
    train(tmp_path, config, corpus, ends=dict.fromkeys(range(3), 10))
    for path in (tmp_path / "checkpoints").glob("*/worker-2/*"):  # it was on another machine
        path.unlink()
    train(tmp_path, replace(config, workers=2), corpus, resume=True, ends={0: 10, 1: 10})
    notes = [note for event in events_of(tmp_path, "resumed") for note in event["notes"]]
    lost = "worker 2 is not started again: its inner steps since its last round are lost; no checkpoint of it here"
    assert any(note.startswith(lost) for note in notes)
    for worker, shard in ((0, 2), (1, 5)):
        unknown = f"no checkpoint here says how far the shards {shard} had been read: worker {worker} reads them from"
        assert any(note.startswith(unknown) for note in notes)


def test_a_new_worker_starts_from_the_anchor_with_another_workers_inner_optimizer(
    data: tuple[DataConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = small_config(data[0], PLAIN), data[1]
    train(tmp_path, config, corpus, ends={0: 10, 1: 10})
    source = tensors_of(tmp_path, 9, 0)
    workers = train(tmp_path, replace(config, workers=3), corpus, resume=True, ends={0: 9, 1: 9, 2: 9})
    new = workers[2]
    for name, parameter in new.model.named_parameters():
        assert torch.equal(parameter, source[f"outer.anchor.{name}"])
        assert not torch.equal(parameter, source[f"model.{name}"])
        assert torch.equal(new.inner.state[parameter]["exp_avg"], source[f"inner.exp_avg.{name}"])
    assert new.mode.averager.inner_steps == 9 and new.mode.averager.state.merged_at == [9]
    assert [worker.mode.averager.state.merged_at for worker in workers[:2]] == [[6], [6]]


def test_i5_a_run_whose_number_of_workers_has_changed_goes_on_bit_for_bit(
    data: tuple[DataConfig, Corpus], tmp_path: Path
) -> None:
    config, corpus = small_config(data[0], STREAMED), data[1]
    more = replace(config, workers=3)
    for name in ("whole", "killed"):
        train(tmp_path / name, config, corpus, ends={0: 10, 1: 10})
    train(tmp_path / "whole", more, corpus, resume=True)
    train(tmp_path / "killed", more, corpus, resume=True, ends=dict.fromkeys(range(3), 16))
    train(tmp_path / "killed", more, corpus, resume=True)
    assert_same_end(tmp_path / "whole", tmp_path / "killed", workers=3)
