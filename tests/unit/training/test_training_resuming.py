"""Which checkpoint the workers go on from: the latest that all have whole, and what is said if there is none."""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diloco.data.order import ShardProgress
from diloco.errors import CheckpointError, ConfigError
from diloco.outer.tensors import pieces_of
from diloco.training.checkpoints.manifests import Moment, find_checkpoints, worker_folder
from diloco.training.checkpoints.resume import agree_on_start, check_same_run
from diloco.training.checkpoints.store import CheckpointOwner, CheckpointStore
from diloco.training.config.run import CheckpointConfig
from support.saved_runs import Gathering, agreed

CONFIG = CheckpointConfig(keep=9, asynchronous=False)


def save(
    folder: Path, worker: int, step: int, *, rounds: int, workers: int = 2, attempt: int = 1, warm_steps: int = 0
) -> None:
    checkpoints = CheckpointStore(folder, CheckpointOwner(worker, workers), CONFIG, {"seed": 1}, lambda *_, **__: None)
    checkpoints.attempt = attempt
    progress = {str(shard): [0, step] for shard in range(worker, 6, workers)}
    state = {"also": {"reading": {"progress": progress}}}
    checkpoints.save(step, rounds, {"w": pieces_of(torch.full((50,), float(step)))}, state, warm_steps=warm_steps)


def both(folder: Path, *steps: int) -> None:
    for step in steps:
        for worker in range(2):
            save(folder, worker, step, rounds=step // 10)


def chosen(folder: Path, workers: int = 2) -> list[int | None]:
    return [start.checkpoint and start.checkpoint.step for start in agreed(folder, workers)]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_all_take_the_latest_moment_that_all_have(tmp_path: Path) -> None:
    both(tmp_path, 10, 20)
    save(tmp_path, 0, 30, rounds=3)
    starts = agreed(tmp_path, 2)
    assert [start.checkpoint.step for start in starts if start.checkpoint] == [20, 20]
    assert {(start.attempt, start.warnings, start.progress) for start in starts} == {(2, (), None)}


def test_within_a_moment_each_takes_its_own_latest_state(tmp_path: Path) -> None:
    save(tmp_path, 0, 17, rounds=1)
    save(tmp_path, 1, 10, rounds=1)
    save(tmp_path, 1, 19, rounds=1)
    assert chosen(tmp_path) == [17, 19]


def test_within_a_warm_start_all_take_the_same_step_for_they_take_each_together(tmp_path: Path) -> None:
    for worker, step in ((0, 10), (0, 20), (1, 10)):  # a kill was faster than the disk of worker 1
        save(tmp_path, worker, step, rounds=0, warm_steps=step)
    assert chosen(tmp_path) == [10, 10]
    save(tmp_path, 1, 20, rounds=0, warm_steps=20)
    assert chosen(tmp_path) == [20, 20]


def test_workers_that_share_no_disk_agree_too(tmp_path: Path) -> None:
    machines = [tmp_path / "a", tmp_path / "b"]
    for worker, steps in ((0, (10, 20, 30)), (1, (10, 20))):
        for step in steps:
            save(machines[worker], worker, step, rounds=step // 10)
    gathering = Gathering(2)
    with ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(agree_on_start, machines[worker], worker, 2, gathering.of(worker)) for worker in range(2)]
    taken = [one.result().checkpoint for one in starts]
    assert [checkpoint.folder for checkpoint in taken if checkpoint] == [
        worker_folder(machines[worker], 20, worker) for worker in range(2)
    ]


DAMAGES = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("name", ["rank-0.safetensors", "rank-0.json"])
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_to_any_file_is_told_by_its_name_and_all_fall_back_to_the_one_before(
    tmp_path: Path, name: str, damage: object
) -> None:
    both(tmp_path, 10, 20)
    path = worker_folder(tmp_path, 20, 1) / name
    damage(path)  # type: ignore[operator]
    starts = agreed(tmp_path, 2)
    assert [start.checkpoint.step for start in starts if start.checkpoint] == [10, 10]
    told = [warning for start in starts for warning in start.warnings]
    if damage is DAMAGES["gone"] and name == "rank-0.json":
        assert told == []  # without its manifest it is a save that was cut short
    else:
        assert len(told) == 2 and all(str(path) in warning for warning in told)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_flipped_bit_goes_unnoticed(tmp_path: Path, data: st.DataObject) -> None:
    shutil.rmtree(tmp_path)
    both(tmp_path, 10, 20)
    path = data.draw(st.sampled_from([p for p in files(tmp_path) if "step-00000020" in str(p)]))
    content = bytearray(path.read_bytes())
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    starts = agreed(tmp_path, 2)
    assert {start.checkpoint and start.checkpoint.step for start in starts} == {10}
    assert all(str(path) in " ".join(start.warnings) for start in starts)


def test_if_all_are_damaged_nothing_starts_and_nothing_is_removed(tmp_path: Path) -> None:
    both(tmp_path, 10, 20)
    for step in (10, 20):
        path = worker_folder(tmp_path, step, 0) / "rank-0.safetensors"
        path.write_bytes(path.read_bytes()[:-3])
    before = files(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint that all workers can resume from .*Nothing was removed"):
        agreed(tmp_path, 2)
    assert files(tmp_path) == before


def test_a_run_killed_in_its_first_save_begins_again(tmp_path: Path) -> None:
    save(tmp_path, 0, 10, rounds=1)
    assert chosen(tmp_path) == [None, None]
    assert chosen(tmp_path / "none") == [None, None]


def test_a_run_that_has_lost_a_workers_checkpoints_does_not_begin_again(tmp_path: Path) -> None:
    for worker in range(2):
        checkpoints = CheckpointStore(tmp_path, CheckpointOwner(worker, 2), CONFIG, {}, lambda *_, **__: None)
        both(tmp_path, 10)
        checkpoints.begin(2, find_checkpoints(tmp_path)[0][worker])
        checkpoints.save(20, 2, {}, {})
    for step in (10, 20):
        shutil.rmtree(worker_folder(tmp_path, step, 1))
    with pytest.raises(CheckpointError, match="the workers have no moment in common"):
        agreed(tmp_path, 2)


def test_with_more_workers_the_new_ones_take_the_states_of_the_others_in_turn(tmp_path: Path) -> None:
    both(tmp_path, 10)
    starts = agreed(tmp_path, 5)
    assert [start.checkpoint.worker for start in starts if start.checkpoint] == [0, 1, 0, 1, 0]
    assert all(start.workers_before == 2 and len(start.progress or {}) == 6 for start in starts)


def test_with_fewer_workers_the_progress_of_those_left_out_is_kept(tmp_path: Path) -> None:
    save(tmp_path, 0, 17, rounds=1)
    save(tmp_path, 1, 19, rounds=1)
    (start,) = agreed(tmp_path, 1)
    assert start.checkpoint is not None and start.checkpoint.moment == Moment(1, 1, 2)
    assert start.progress == {shard: ShardProgress(0, 19 if shard % 2 else 17) for shard in range(6)}


def test_the_shards_of_a_worker_without_that_moment_go_on_from_its_newest_checkpoint_and_that_is_said(
    tmp_path: Path,
) -> None:
    for worker in range(3):
        save(tmp_path, worker, 10, rounds=1, workers=3)
    for worker in range(2):
        save(tmp_path, worker, 20, rounds=2, workers=3)
    starts = agreed(tmp_path, 2)
    for start in starts:
        assert start.checkpoint is not None and start.checkpoint.step == 20
        assert start.progress == {shard: ShardProgress(0, 10 if shard % 3 == 2 else 20) for shard in range(6)}
        assert start.warnings == (
            "worker 2 has no checkpoint of this moment here: 2 shards are read on from step 10, its newest one",
        )


def test_the_later_start_counts_when_the_number_of_workers_has_changed_between_two_rounds(tmp_path: Path) -> None:
    both(tmp_path, 10)
    for worker in range(3):
        save(tmp_path, worker, 15, rounds=1, workers=3, attempt=2)
    assert chosen(tmp_path, 3) == [15, 15, 15]
    assert {start.attempt for start in agreed(tmp_path, 3)} == {3}


def test_a_checkpoint_of_something_else_is_refused_with_the_keys_that_differ(tmp_path: Path) -> None:
    both(tmp_path, 10)
    checkpoint = find_checkpoints(tmp_path)[0][0]
    check_same_run(checkpoint, {"seed": 1})
    with pytest.raises(ConfigError, match=r"was saved with seed = 1, and the run now has 2.*\(seed differ\)"):
        check_same_run(checkpoint, {"seed": 2})
