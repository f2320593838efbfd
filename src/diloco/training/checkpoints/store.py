"""One worker's checkpoints on disk: written beside training, complete or not there at all; old ones are removed.

`save` copies the state (`take_snapshot`) and returns; a thread writes the tensors, then the manifest, each forced to
the disk. Training does not depend on the disk: a write that fails (disk full) and a save that is due while the one
before is still being written are logged, reported as an event and counted, and training goes on; the checkpoints before
stay. The checkpoint that a start resumed from is never written again: nothing has been trained since.

Old checkpoints are removed only below a step that all workers have reported to have; each reports its latest one with
every round. So at any time there is a checkpoint that all have. In a swarm each worker's checkpoints are its own.
"""

import contextlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diloco.atomic_files import replace_file, sync_folder, write_file
from diloco.engines.rounds import Member
from diloco.errors import DiLoCoError
from diloco.history.events import CheckpointEvent, CheckpointFailedEvent, Emit, Event
from diloco.outer.tensors import Numbers, TensorPieces
from diloco.training.checkpoints.manifests import (
    Checkpoint,
    Manifest,
    Moment,
    find_checkpoints,
    manifest_path,
    numbered,
    worker_folder,
    worker_folders,
)
from diloco.training.checkpoints.tensor_files import SUFFIX, write_tensors
from diloco.training.config.run import CheckpointConfig

logger = logging.getLogger(__name__)

NEXT_SECONDS = 20.0
"""Training waits at most so long for a checkpoint that is still being written when the next is due."""
END_SECONDS = 600.0
"""At the end of a run there is more time."""
_ATTEMPTS = 10


@dataclass(frozen=True)
class CheckpointOwner:
    """The rank whose checkpoints these are."""

    worker: int = 0
    workers: int | None = 1
    """None in a swarm: one worker resumes alone, and the others join it."""
    rank: int = 0
    ranks: int = 1


@dataclass
class _UnfinishedWrite:
    """A checkpoint that is being written."""

    step: int
    thread: threading.Thread
    seconds_left: float
    """How long training still waits for it."""


class CheckpointStore:
    """One rank's checkpoints: saves, reports and removes them. All but the writing happens in the caller's thread."""

    def __init__(
        self,
        run_folder: Path,
        owner: CheckpointOwner,
        config: CheckpointConfig,
        lasting: Mapping[str, Any],
        emit: Emit,
    ) -> None:
        """`lasting` is the configuration that a run must share with this one to resume from these checkpoints."""
        self.folder = run_folder
        self.owner = owner
        self.config = config
        self.lasting = lasting
        self._emit = emit
        self.failed = 0
        """Checkpoints that were not written: the disk was full, or too slow."""
        self.attempt = 1
        self._written: list[int] = []  # steps of this start that this rank has written
        self._reported: dict[int, set[int]] = {}  # worker: steps of this start that it reported to have
        self._started_from: int | None = None  # the step of a checkpoint
        self._write: _UnfinishedWrite | None = None
        self._due: int | None = None

    # Saving

    def save(
        self,
        step: int,
        rounds: int,
        tensors: Mapping[str, TensorPieces],
        state: Numbers,
        *,
        warm_steps: int = 0,
        last: bool = False,
    ) -> None:
        """Save the state, and return once it may change again; the writing goes on beside training.

        A hanging disk delays training by NEXT_SECONDS a write at most; the `last` save of a run waits for END_SECONDS
        if another is being written.
        """
        if self._write is not None and self._write.step == step and self._write.thread.is_alive():
            return  # `close` waits for it
        if self._still_writing(END_SECONDS if last else None):
            self._skip(step)
            return
        if step in self._written or step == self._started_from:  # all workers agreed on the latter
            return
        saved = {name: tensor for name, tensor in tensors.items() if self.owner.rank == 0 or not tensor.replicated}
        moment = Moment(rounds, self.attempt, self.owner.workers or 0, warm_steps)
        if not self.config.asynchronous:
            self._try_to_write(step, moment, saved, state)
            return
        copied, wait = take_snapshot(saved)

        def write() -> None:
            wait()
            self._try_to_write(step, moment, copied, state)

        thread = threading.Thread(target=write, name="diloco-checkpoint", daemon=True)
        self._write = _UnfinishedWrite(step, thread, NEXT_SECONDS)
        thread.start()

    def _still_writing(self, seconds: float | None = None) -> bool:
        """Wait for the write in progress, `seconds` or as long as training has left; return whether it goes on."""
        write = self._write
        if write is None:
            return False
        started = time.monotonic()
        write.thread.join(write.seconds_left if seconds is None else seconds)
        if write.thread.is_alive():
            write.seconds_left = max(0.0, write.seconds_left - (time.monotonic() - started))
            return True
        self._write = None
        return False

    def _skip(self, step: int) -> None:
        assert self._write is not None
        self.failed += 1
        reason = f"the disk is too slow: the checkpoint of step {self._write.step} is still being written"
        logger.warning("no checkpoint of step %d: %s; training goes on", step, reason)
        self._report(CheckpointFailedEvent(step=step, reason=reason))

    def became_due(self, due: int) -> bool:
        """Return whether more checkpoints are due than at the last call: in a swarm a worker's step may jump."""
        before = self._due
        self._due = due
        return before is not None and due > before

    def close(self) -> None:
        """Wait until everything is on the disk; after END_SECONDS report what is not."""
        if not self._still_writing(END_SECONDS):
            return
        assert self._write is not None
        self.failed += 1
        reason = f"the disk has not finished within {END_SECONDS:g} s: check it before resuming from {self.folder}"
        logger.error("the checkpoint of step %d was not written: %s", self._write.step, reason)
        self._report(CheckpointFailedEvent(step=self._write.step, reason=reason))

    def _try_to_write(self, step: int, moment: Moment, tensors: Mapping[str, TensorPieces], state: Numbers) -> None:
        started = time.monotonic()
        folder = worker_folder(self.folder, step, self.owner.worker)
        try:
            size = self._write_files(folder, step, moment, tensors, state)
            self._written.append(step)
        except Exception as error:  # noqa: BLE001 - an error that ends the thread would go unseen
            self.failed += 1
            reason = str(error) if isinstance(error, OSError | DiLoCoError) else repr(error)
            logger.error("the checkpoint of step %d was not written: %s; training goes on", step, reason)
            self._remove_failed(folder)
            self._report(CheckpointFailedEvent(step=step, reason=reason))
            return
        try:
            self._remove_old()
        except OSError as error:
            logger.error("an old checkpoint could not be removed: %s", error)
        self._report(CheckpointEvent(step=step, rounds=moment.rounds, bytes=size, seconds=time.monotonic() - started))

    def _write_files(
        self, folder: Path, step: int, moment: Moment, tensors: Mapping[str, TensorPieces], state: Numbers
    ) -> int:
        owner = self.owner
        path = folder / f"rank-{owner.rank}{SUFFIX}"
        manifest = manifest_path(folder, owner.rank)
        make_folder(folder)
        with replace_file(path, durable=True) as file:
            write_tensors(file, tensors)
            files = {path.name: file.finish()}
            text = Manifest(
                moment, step, owner.worker, owner.rank, owner.ranks, files, self.common_step, self.lasting, state
            ).text()
            manifest.unlink(missing_ok=True)  # until here an earlier checkpoint of this step is complete
        try:
            if owner.rank == 0:
                self._remove_surplus(folder)
            for parent in (folder.parent, folder.parent.parent, self.folder):
                sync_folder(parent)
            write_file(manifest, text, durable=True)
        except OSError:
            manifest.unlink(missing_ok=True)  # it may have been renamed already, and not be on the disk
            raise
        return files[path.name].bytes

    def _remove_surplus(self, folder: Path) -> None:
        """Remove the files of ranks that this worker no longer has; they would count as part of this checkpoint."""
        for suffix in (".json", SUFFIX):  # the manifests first
            for rank, path in numbered(folder, "rank-", suffix):
                if rank >= self.owner.ranks:
                    path.unlink(missing_ok=True)

    def _report(self, event: Event) -> None:
        try:
            self._emit(event)
        except OSError as error:  # the full disk may be the log's too
            logger.error("the event '%s' was not written: %s", event.type, error)

    # What all have

    @property
    def latest(self) -> int:
        """Return the newest step of this start that all ranks of this worker have written; 0 if there is none."""
        ranks = range(self.owner.ranks)
        for step in sorted(self._written, reverse=True):
            folder = worker_folder(self.folder, step, self.owner.worker)
            if self.owner.ranks == 1 or all(manifest_path(folder, rank).exists() for rank in ranks):
                return step
        return 0

    @property
    def common_step(self) -> int:
        """Return the newest step that all workers reported to have saved, or the one started from; 0: there is none."""
        if self.owner.workers is None:
            return max(self._written, default=self._started_from or 0)
        reported = [self._reported.get(worker, set()) for worker in range(self.owner.workers)]
        return max(set.intersection(*reported), default=self._started_from or 0)

    def note_reports(self, members: Iterable[Member]) -> None:
        """Remember the checkpoints that the members of a round reported."""
        for member in members:
            if member.report.checkpoint_step:
                self._reported.setdefault(member.worker, set()).add(member.report.checkpoint_step)
        common = self.common_step
        self._reported = {worker: {s for s in steps if s >= common} for worker, steps in self._reported.items()}

    # Removing

    def begin(self, attempt: int, start: Checkpoint | None) -> None:
        """Begin a start of the run; remove what an earlier start saved after `start`, since it may differ now."""
        self.attempt = attempt
        self._started_from = None if start is None else start.step
        if self.owner.rank:
            return
        for step, worker, folder in worker_folders(self.folder):
            if self._owns(worker) and (start is None or step > start.step):
                self._remove(folder)

    def _owns(self, worker: int) -> bool:
        """Return whether this worker removes a worker's checkpoints: worker i has also those of workers i + k, i + 2k,
        ... of an earlier start with more."""
        if self.owner.workers is None:
            return worker == self.owner.worker
        return worker % self.owner.workers == self.owner.worker

    def _remove_old(self) -> None:
        """Keep the newest `keep`, everything from the common step on, and what another rank may still be writing."""
        if self.owner.rank:
            return
        complete, damage = find_checkpoints(self.folder)
        kept = [c.step for c in complete if c.worker == self.owner.worker][-self.config.keep :]
        whole = {c.folder for c in complete}
        damaged = {file.path.parent for file in damage}
        all_ranks_at = min(self.latest, self.common_step)
        for step, worker, folder in worker_folders(self.folder):
            if not self._owns(worker) or folder in damaged:
                continue
            if folder in whole:
                old = step < self.common_step and step not in kept
            else:  # a rank is still writing its part, or could not write it
                started = step in self._written or numbered(folder, "rank-", ".json")
                old = step < all_ranks_at or not started
            if old:
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """Remove a checkpoint, its manifests first: what is half removed must not look complete."""
        remove_folder(folder, [path for _, path in numbered(folder, "rank-", ".json")])

    def _remove_failed(self, folder: Path) -> None:
        """Remove this rank's file after a failed write, unless it is of an earlier, complete checkpoint."""
        try:
            if not manifest_path(folder, self.owner.rank).exists():
                (folder / f"rank-{self.owner.rank}{SUFFIX}").unlink(missing_ok=True)
            folder.rmdir()
            folder.parent.rmdir()
        except OSError as error:
            logger.info("%s is left behind, and is not counted as a checkpoint: %s", folder, error)


def make_folder(folder: Path) -> None:
    """Make a folder with its parents; try again, since another worker may remove a parent that it found empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def remove_folder(folder: Path, first: Iterable[Path]) -> None:
    """Remove a folder, the files `first` before all others; and its parent, if that is empty then."""
    for path in first:
        path.unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def take_snapshot(tensors: Mapping[str, TensorPieces]) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
    """Return copies, and what to call before reading them, in any thread. The tensors may change from now on.

    tensors on the CPU   are copied there
    on a GPU             are copied within its memory if that leaves as much free again: it takes milliseconds, and the
                         writing thread fetches the copies on a stream of its own
    on a full GPU        are copied to pinned CPU memory, which is kept for the next time: training waits as long as the
                         transfer takes, and no longer
    """
    live = [piece.tensor.detach() for tensor in tensors.values() for piece in tensor.pieces]
    copies, wait = _copy_all(live)
    rest = iter(copies)
    return {
        name: replace(tensor, pieces=tuple(replace(piece, tensor=next(rest)) for piece in tensor.pieces))
        for name, tensor in tensors.items()
    }, wait


def _copy_all(tensors: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    if not on_gpu:
        return [tensor.to("cpu", copy=True) for tensor in tensors], lambda: None
    room = _has_room(on_gpu)
    try:
        copies = [_copy(tensor, within_gpu=room) for tensor in tensors]
    except torch.OutOfMemoryError:
        logger.info("no room on the GPU for a copy of the state: it is copied to the CPU")
        copies = [_copy(tensor, within_gpu=False) for tensor in tensors]
    done: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(on_gpu[0].device))
    return copies, done.synchronize


def _has_room(tensors: Sequence[Tensor]) -> bool:
    """Return whether a copy of all leaves as much free again: training may need more at times."""
    device = tensors[0].device
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached >= 2 * needed


def _copy(tensor: Tensor, *, within_gpu: bool) -> Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    if within_gpu:
        return tensor.clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
