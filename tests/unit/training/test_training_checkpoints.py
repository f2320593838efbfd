"""A worker's checkpoints on disk: complete or not there at all, wherever a kill or a full disk strikes; old ones go."""

import errno
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from diloco import atomic_files
from diloco.engines.rounds import Member, Report
from diloco.history.events import Event, event_fields
from diloco.outer.tensors import pieces_of
from diloco.training.checkpoints import store
from diloco.training.checkpoints.manifests import Manifest, Moment, find_checkpoints, manifest_path, worker_folder
from diloco.training.checkpoints.store import CheckpointOwner, CheckpointStore
from diloco.training.config.run import CheckpointConfig

SYNC = CheckpointConfig(keep=2, asynchronous=False)
TENSORS = {"w": pieces_of(torch.arange(6.0)), "s": pieces_of(torch.tensor(1.0))}


class Told:
    """The events of a worker."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, type_: str) -> list[dict[str, Any]]:
        return [event_fields(event) for event in self.events if event.type == type_]


def made(
    folder: Path, worker: int = 0, workers: int = 1, config: CheckpointConfig = SYNC, tell: Told | None = None
) -> CheckpointStore:
    return CheckpointStore(folder, CheckpointOwner(worker, workers), config, {"seed": 1}, tell or Told())


def save(checkpoints: CheckpointStore, *steps: int) -> None:
    for step in steps:
        checkpoints.save(step, step // 10, TENSORS, {"step": step, "nan": float("nan")}, warm_steps=min(step, 15))


def steps(folder: Path, worker: int = 0) -> list[int]:
    complete, damage = find_checkpoints(folder)
    assert not damage and not any(checkpoint.damage() for checkpoint in complete)
    return [checkpoint.step for checkpoint in complete if checkpoint.worker == worker]


def heard(latest: dict[int, int]) -> list[Member]:
    return [Member(worker, "", 1.0, 1.0, Report(checkpoint_step=step)) for worker, step in latest.items()]


def test_a_saved_state_is_found_with_everything_that_was_said_of_it(tmp_path: Path) -> None:
    told = Told()
    checkpoints = made(tmp_path, worker=1, workers=3, tell=told)
    save(checkpoints, 20)
    (found,), _ = find_checkpoints(tmp_path)
    assert (found.step, found.worker, found.moment) == (20, 1, Moment(2, 1, 3, 15))
    manifest = found.manifests[0]
    assert manifest.config == {"seed": 1} and manifest.state["step"] == 20 and manifest.state["nan"] != 0
    assert checkpoints.latest == 20
    assert told.of("checkpoint")[0]["bytes"] == manifest.files["rank-0.safetensors"].bytes


class BlockingDisk:
    """Writes no tensors until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        real = store.write_tensors

        def write(*args: Any) -> None:
            assert self.released.wait(60)
            real(*args)

        monkeypatch.setattr(store, "write_tensors", write)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_save_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = BlockingDisk(monkeypatch)
    tensor = torch.ones(2)
    checkpoints = made(tmp_path, config=CheckpointConfig(asynchronous=True))
    checkpoints.save(10, 1, {"w": pieces_of(tensor)}, {})
    tensor.zero_()  # training
    assert steps(tmp_path) == [] and checkpoints.latest == 0
    disk.released.set()
    checkpoints.save(20, 2, {"w": pieces_of(tensor)}, {})
    checkpoints.close()
    assert steps(tmp_path) == [10, 20] and checkpoints.latest == 20
    saved = [load_file(worker_folder(tmp_path, step, 0) / "rank-0.safetensors")["w"].tolist() for step in (10, 20)]
    assert saved == [[1, 1], [0, 0]]


def test_a_disk_that_hangs_costs_the_next_checkpoints_but_does_not_hold_up_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, told = BlockingDisk(monkeypatch), Told()
    monkeypatch.setattr(store, "NEXT_SECONDS", 0.1)
    checkpoints = made(tmp_path, config=CheckpointConfig(asynchronous=True), tell=told)
    save(checkpoints, 10, 20, 30)  # returns, though nothing is written
    assert [event["step"] for event in told.of("checkpoint_failed")] == [20, 30] and checkpoints.failed == 2
    reason = told.of("checkpoint_failed")[0]["reason"]
    assert reason == "the disk is too slow: the checkpoint of step 10 is still being written"
    disk.released.set()
    checkpoints.close()
    save(checkpoints, 40)
    checkpoints.close()
    assert steps(tmp_path) == [10, 40] and checkpoints.failed == 2


def test_at_the_end_a_disk_that_hangs_is_waited_for_within_a_bound_and_what_is_missing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, told = BlockingDisk(monkeypatch), Told()
    monkeypatch.setattr(store, "END_SECONDS", 0.1)
    checkpoints = made(tmp_path, config=CheckpointConfig(asynchronous=True), tell=told)
    save(checkpoints, 10)
    for step in (10, 20):  # the one being written is not a skipped one
        checkpoints.save(step, 2, TENSORS, {}, last=True)
    checkpoints.close()
    skipped, unfinished = told.of("checkpoint_failed")
    assert skipped["step"] == 20 and "step 10 is still being written" in skipped["reason"]
    assert unfinished["step"] == 10 and "the disk has not finished within 0.1 s" in unfinished["reason"]
    assert checkpoints.failed == 2
    disk.released.set()


def test_the_last_save_does_not_wait_for_a_write_of_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the end of a run would wait for the disk before its last rounds, with nothing more to save."""
    disk = BlockingDisk(monkeypatch)
    checkpoints = made(tmp_path, config=CheckpointConfig(asynchronous=True))
    save(checkpoints, 10)
    checkpoints.save(10, 1, TENSORS, {}, last=True)  # would wait for minutes
    assert steps(tmp_path) == []
    disk.released.set()
    checkpoints.close()
    assert steps(tmp_path) == [10] and checkpoints.failed == 0


def test_the_last_save_waits_longer_than_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = BlockingDisk(monkeypatch)
    monkeypatch.setattr(store, "NEXT_SECONDS", 0.0)
    checkpoints = made(tmp_path, config=CheckpointConfig(asynchronous=True))
    save(checkpoints, 10)
    threading.Timer(0.2, disk.released.set).start()
    checkpoints.save(20, 2, TENSORS, {}, last=True)
    checkpoints.close()
    assert steps(tmp_path) == [10, 20] and checkpoints.failed == 0


def test_what_one_rank_wrote_of_a_checkpoint_that_another_skipped_is_removed_later(tmp_path: Path) -> None:
    ranks = [CheckpointStore(tmp_path, CheckpointOwner(0, 1, rank, 2), SYNC, {}, Told()) for rank in (0, 1)]
    save(ranks[1], 10)  # rank 0 did not write it
    for step in (20, 30):
        for one in ranks:
            save(one, step)
            one.note_reports(heard({0: one.latest}))
    save(ranks[0], 40)
    assert not worker_folder(tmp_path, 10, 0).exists() and steps(tmp_path) == [20, 30]


class Killed(BaseException):
    """Where SIGKILL would have struck."""


class Strike:
    """Strikes before the n-th thing that is done to the disk; after a kill nothing more is done."""

    def __init__(self, number: int, strike: Callable[[], None]) -> None:
        self.reached = False
        self._count, self._number, self._strike = itertools.count(), number, strike

    def before(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = next(self._count)
            if number == self._number or (number > self._number and self._strike is kill):
                self.reached = True
                self._strike()
            return real(*args, **kwargs)

        return call


@contextmanager
def struck(monkeypatch: pytest.MonkeyPatch, number: int, strike: Callable[[], None]) -> Iterator[Strike]:
    one = Strike(number, strike)
    with monkeypatch.context() as patch:
        for owner, name in ((os, "write"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir")):
            patch.setattr(owner, name, one.before(getattr(owner, name)))
        patch.setattr(Path, "replace", one.before(Path.replace))
        patch.setattr(atomic_files, "_WRITE_BYTES", 128)
        yield one


def kill() -> None:
    raise Killed


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_kill_at_any_moment_of_a_save_leaves_the_earlier_checkpoint_and_never_half_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in itertools.count():
        folder = tmp_path / str(number)
        checkpoints = made(folder, config=CheckpointConfig(keep=1, asynchronous=False))
        ended = 0
        with struck(monkeypatch, number, kill) as strike, suppress(Killed):
            for step in (10, 20, 30):
                save(checkpoints, step)
                ended = step
                checkpoints.note_reports(heard({0: checkpoints.latest}))
        there = steps(folder)
        assert there == sorted(there) and set(there) <= {10, 20, 30}
        if ended:
            assert there and there[-1] >= ended  # what was told is there
        save(made(folder), 40)  # another start finds its way
        assert steps(folder)[-1] == 40
        if not strike.reached:
            break
    assert number > 40


def test_a_disk_that_is_full_at_any_moment_ends_no_training_and_costs_no_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in itertools.count():
        folder, told = tmp_path / str(number), Told()
        checkpoints = made(folder, tell=told)
        with struck(monkeypatch, number, full) as strike:
            save(checkpoints, 10, 20, 30)
        failed = [fields["step"] for fields in told.of("checkpoint_failed")]
        assert checkpoints.failed == len(failed) <= 1
        assert set(steps(folder)) == {10, 20, 30} - set(failed)
        assert all("No space left" in fields["reason"] for fields in told.of("checkpoint_failed"))
        save(checkpoints, 40)
        assert steps(folder)[-1] == 40
        if not strike.reached:
            break
    assert number > 40 and not failed


def test_the_newest_stay_and_older_ones_go_once_all_workers_have_a_newer_one(tmp_path: Path) -> None:
    mine, other = (made(tmp_path, worker, workers=2) for worker in range(2))
    for step in (10, 20, 30, 40):
        for one in (mine, other):
            one.note_reports(heard({0: mine.latest, 1: other.latest}))
        save(mine, step)
        save(other, step)
    assert steps(tmp_path, 0) == steps(tmp_path, 1) == [30, 40]
    assert not (tmp_path / "checkpoints" / "step-00000010").exists()


def test_nothing_goes_while_another_worker_has_no_newer_one(tmp_path: Path) -> None:
    mine = made(tmp_path, 0, workers=2)
    for step in (10, 20, 30, 40):
        mine.note_reports(heard({0: mine.latest, 1: 10 if step > 10 else 0}))
        save(mine, step)
    assert steps(tmp_path) == [10, 20, 30, 40]
    mine.note_reports(heard({0: 40, 1: 45}))  # it has a newer one, but none that this worker has too
    save(mine, 50)
    assert steps(tmp_path) == [10, 20, 30, 40, 50] and mine.common_step == 10
    mine.note_reports(heard({0: 50, 1: 50}))
    save(mine, 60)
    assert steps(tmp_path) == [50, 60]


def test_a_start_removes_what_lies_after_it_and_nothing_else(tmp_path: Path) -> None:
    for worker in range(3):
        save(made(tmp_path, worker, workers=3), 10, 20, 30)
    complete, _ = find_checkpoints(tmp_path)
    start = next(c for c in complete if c.step == 20 and c.worker == 0)
    made(tmp_path, 0, workers=2).begin(2, start)
    assert [steps(tmp_path, worker) for worker in range(3)] == [[10, 20], [10, 20, 30], [10, 20]]  # 2's heir is 0


def test_a_worker_of_several_ranks_has_a_checkpoint_once_all_of_them_have_written(tmp_path: Path) -> None:
    ranks = [CheckpointStore(tmp_path, CheckpointOwner(0, 1, rank, 2), SYNC, {}, Told()) for rank in range(2)]
    save(ranks[0], 10)
    assert steps(tmp_path) == [] and ranks[0].latest == 0
    save(ranks[1], 10)
    assert steps(tmp_path) == [10] and ranks[0].latest == ranks[1].latest == 10
    files = [load_file(worker_folder(tmp_path, 10, 0) / f"rank-{rank}.safetensors") for rank in range(2)]
    assert [sorted(file) for file in files] == [["s", "w"], []]  # what all have is written once


def test_a_manifest_says_when_it_is_of_another_format_or_was_changed(tmp_path: Path) -> None:
    save(made(tmp_path), 10)
    path = manifest_path(worker_folder(tmp_path, 10, 0), 0)
    text = path.read_text()
    path.write_text(text.replace('"format": 1', '"format": 7'))
    with pytest.raises(ValueError, match="it has format 7, and this version of diloco reads format 1"):
        Manifest.read(path)
    path.write_text(text.replace('"step": 10', '"step": 11'))
    with pytest.raises(ValueError, match="does not have the sha256 that it states"):
        Manifest.read(path)


def test_workers_that_remove_and_write_in_the_same_folders_do_not_get_in_each_others_way(tmp_path: Path) -> None:
    told = [Told(), Told(), Told()]
    workers = [
        made(tmp_path, worker, 3, CheckpointConfig(keep=1, asynchronous=False), told[worker]) for worker in range(3)
    ]

    def work(mine: CheckpointStore) -> None:
        for step in range(1, 40):
            save(mine, step)
            mine.note_reports(heard(dict.fromkeys(range(3), step)))

    threads = [threading.Thread(target=work, args=(mine,)) for mine in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [mine.failed for mine in workers] == [0, 0, 0]
    assert [len(one.of("checkpoint")) for one in told] == [39, 39, 39]
    assert all(steps(tmp_path, worker) == [38, 39] for worker in range(3))


def started(folder: Path, step: int, config: CheckpointConfig = SYNC, tell: Told | None = None) -> CheckpointStore:
    """Of another start, which goes on from there."""
    checkpoints = made(folder, config=config, tell=tell)
    checkpoints.begin(2, next(one for one in find_checkpoints(folder)[0] if one.step == step))
    return checkpoints


def test_the_checkpoint_that_a_start_went_on_from_is_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(made(tmp_path), 10)
    before = {path: path.read_bytes() for path in tmp_path.rglob("rank-*")}
    checkpoints = started(tmp_path, 10, CheckpointConfig(keep=1, asynchronous=False))
    with struck(monkeypatch, 0, full) as strike:
        save(checkpoints, 10)
    assert not strike.reached and checkpoints.failed == 0 and checkpoints.common_step == 10
    assert {path: path.read_bytes() for path in tmp_path.rglob("rank-*")} == before
    save(checkpoints, 20)
    assert steps(tmp_path) == [10, 20]


def test_a_worker_that_is_stopped_before_its_first_step_is_saved_so_that_the_others_keep_theirs(tmp_path: Path) -> None:
    for checkpoints, step in ((made(tmp_path, 0, 2), 0), (made(tmp_path, 1, 2), 4)):
        checkpoints.begin(1, None)
        save(checkpoints, step)
    assert steps(tmp_path, 0) == [0] and steps(tmp_path, 1) == [4]


def test_a_write_over_another_that_fails_leaves_that_one_or_none_but_never_a_mixture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        save(made(folder), 10)
        again, tensors = made(folder), {"w": pieces_of(torch.zeros(300))}
        again.attempt = 2
        with struck(monkeypatch, number, full) as strike:
            again.save(10, 1, tensors, {})
        complete, damage = find_checkpoints(folder)
        assert not damage and not any(checkpoint.damage() for checkpoint in complete)
        left.append([checkpoint.moment.attempt for checkpoint in complete])
        if not strike.reached:
            break
    assert left[1:10] == [[1]] * 9 and left[-1] == [2]  # the old one stood while the tensors were being written


def test_fewer_ranks_leave_nothing_of_the_others_in_a_checkpoint_of_theirs(tmp_path: Path) -> None:
    for rank in range(3):
        save(CheckpointStore(tmp_path, CheckpointOwner(0, 1, rank, 3), SYNC, {}, Told()), 10)
    save(made(tmp_path), 10)
    assert steps(tmp_path) == [10]
    names = sorted(path.name for path in worker_folder(tmp_path, 10, 0).iterdir())
    assert names == ["rank-0.json", "rank-0.safetensors"]


def test_ranks_that_wrote_at_different_starts_make_no_checkpoint(tmp_path: Path) -> None:
    for rank, attempt in ((0, 1), (1, 2)):
        checkpoints = CheckpointStore(tmp_path, CheckpointOwner(0, 1, rank, 2), SYNC, {}, Told())
        checkpoints.attempt = attempt
        save(checkpoints, 10)
    assert steps(tmp_path) == []


def test_an_old_checkpoint_that_cannot_be_removed_costs_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    checkpoints = made(tmp_path, config=CheckpointConfig(keep=1, asynchronous=False), tell=told)
    save(checkpoints, 10, 20)
    checkpoints.note_reports(heard({0: 20}))

    def busy(*_: object) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty")

    monkeypatch.setattr("diloco.training.checkpoints.store.remove_folder", busy)
    save(checkpoints, 30)
    assert steps(tmp_path) == [10, 20, 30] and checkpoints.latest == 30
    assert checkpoints.failed == 0 and [event["step"] for event in told.of("checkpoint")] == [10, 20, 30]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_cannot_be_written_for_another_reason_than_the_disk_is_told_and_counted_too(
    tmp_path: Path, asynchronous: bool
) -> None:
    told = Told()
    checkpoints = made(tmp_path, config=CheckpointConfig(asynchronous=asynchronous), tell=told)
    checkpoints.save(10, 1, {"w": pieces_of(torch.zeros(2, dtype=torch.complex64))}, {})
    checkpoints.save(20, 2, TENSORS, {"no JSON": object()})
    checkpoints.save(30, 3, TENSORS, {})
    checkpoints.close()
    reasons = {fields["step"]: fields["reason"] for fields in told.of("checkpoint_failed")}
    assert "'w' is a tensor of torch.complex64, which cannot be saved: use one of float32" in reasons[10]
    assert "not JSON serializable" in reasons[20]
    assert checkpoints.failed == len(reasons) == 2 and steps(tmp_path) == [30] and checkpoints.latest == 30
