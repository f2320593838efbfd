"""One worker's checkpoints: written beside training, complete or not there at all, and the old ones removed.

A save copies the state to CPU memory and returns; a thread writes it, data first, manifest last, each forced to the
disk (durable.py). The next save waits for it. A write that fails (a full disk) never ends training: it is told and
counted, what it left is removed, and the checkpoints before it stay. The one that a start went on from is never written
again: nothing has been trained since.

Old checkpoints are removed only below a step that all workers are known to have: each tells its latest one with every
round. So whatever is killed, and whenever, there is a checkpoint that all have. In a swarm each worker's are its own.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.engines.rounds import Member
from diloco.errors import DiLoCoError
from diloco.outer.tensor_pieces import Numbers, TensorPieces
from diloco.training.checkpoints.durable import PARTIAL, make_folder, remove_folder, replace_file, sync_folder
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
from diloco.training.config.tables import CheckpointConfig

logger = logging.getLogger(__name__)

Tell = Callable[..., None]
"""Writes an event: a type and its fields."""


@dataclass(frozen=True)
class CheckpointOwner:
    """Whose checkpoints these are."""

    worker: int = 0
    workers: int | None = 1
    """None in a swarm: whoever goes on from a checkpoint does so alone, and the others come to it."""
    rank: int = 0
    ranks: int = 1


class CheckpointStore:
    """Saves, tells, forgets. All but the writing happens in the caller's thread."""

    def __init__(
        self, run_folder: Path, owner: CheckpointOwner, config: CheckpointConfig, lasting: Mapping[str, Any], tell: Tell
    ) -> None:
        """`lasting` is what a run must have in common with this one to go on from these checkpoints."""
        self.folder, self.owner, self.config, self.lasting, self._tell = run_folder, owner, config, lasting, tell
        self.failed = 0
        self.attempt = 1
        self._written: list[int] = []  # steps of this start that this rank has written
        self._told: dict[int, set[int]] = {}  # worker: steps that it said it has, of this start
        self._started_from: int | None = None  # the step of a checkpoint
        self._thread: threading.Thread | None = None
        self._due: int | None = None

    # Saving

    def save(self, step: int, rounds: int, tensors: Mapping[str, TensorPieces], state: Numbers) -> None:
        """Returns once the state may change again; the writing goes on beside training."""
        self.wait()
        if step in self._written or step == self._started_from:  # all know of the latter: they agreed on it
            return
        mine = {name: held for name, held in tensors.items() if self.owner.rank == 0 or not held.replicated}
        moment = Moment(rounds, self.attempt, self.owner.workers or 0)
        if not self.config.asynchronous:
            self._write_or_tell(step, moment, mine, state)
            return
        staged = {name: held.copied() for name, held in mine.items()}
        self._thread = threading.Thread(
            target=self._write_or_tell, args=(step, moment, staged, state), name="diloco-checkpoint", daemon=True
        )
        self._thread.start()

    def became_due(self, due: int) -> bool:
        """Of a worker in a swarm, whose position may jump: whether a checkpoint has become due since the last time."""
        before, self._due = self._due, due
        return before is not None and due > before

    def wait(self) -> None:
        """Until what is being written is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write_or_tell(self, step: int, moment: Moment, tensors: Mapping[str, TensorPieces], state: Numbers) -> None:
        started = time.monotonic()
        folder = worker_folder(self.folder, step, self.owner.worker)
        try:
            size = self._write(folder, step, moment, tensors, state)
            self._written.append(step)
        except Exception as error:  # noqa: BLE001 - a thread that dies in silence would be taken for one that has saved
            self.failed += 1
            reason = str(error) if isinstance(error, OSError | DiLoCoError) else repr(error)
            logger.error("the checkpoint of step %d was not written: %s; training goes on", step, reason)
            self._take_back(folder)
            self._say("checkpoint_failed", step=step, reason=reason)
            return
        try:
            self._forget_old()
        except OSError as error:  # the new one is there all the same
            logger.error("an old checkpoint could not be removed: %s", error)
        self._say("checkpoint", step=step, rounds=moment.rounds, bytes=size, seconds=time.monotonic() - started)

    def _write(
        self, folder: Path, step: int, moment: Moment, tensors: Mapping[str, TensorPieces], state: Numbers
    ) -> int:
        owner = self.owner
        path = folder / f"rank-{owner.rank}{SUFFIX}"
        make_folder(folder)
        temporary = path.with_name(path.name + PARTIAL)
        file = write_tensors(temporary, tensors)  # until it is there whole, what was there before stays
        manifest = Manifest(
            moment,
            step,
            owner.worker,
            owner.rank,
            owner.ranks,
            {path.name: file},
            self.common_step,
            self.lasting,
            state,
        )
        text, listed = manifest.text(), manifest_path(folder, owner.rank)
        try:
            listed.unlink(missing_ok=True)
            temporary.replace(path)
            if owner.rank == 0:
                self._remove_surplus(folder)
            for parent in (folder.parent, folder.parent.parent, self.folder):
                sync_folder(parent)
            replace_file(listed, text)
        except OSError:
            listed.unlink(missing_ok=True)  # it may be there, but not on the disk
            raise
        return file.bytes

    def _remove_surplus(self, folder: Path) -> None:
        """What ranks that no longer take part have left here would belong to this checkpoint otherwise."""
        for suffix in (".json", SUFFIX):  # the manifests first
            for rank, path in numbered(folder, "rank-", suffix):
                if rank >= self.owner.ranks:
                    path.unlink(missing_ok=True)

    def _say(self, type_: str, **fields: object) -> None:
        try:
            self._tell(type_, **fields)
        except OSError as error:  # the disk that is full may be the log's too
            logger.error("the event '%s' was not written: %s", type_, error)

    # What all have

    @property
    def latest(self) -> int:
        """The newest step of this start that all ranks of this worker have written; 0 if there is none."""
        ranks = range(self.owner.ranks)
        for step in sorted(self._written, reverse=True):
            folder = worker_folder(self.folder, step, self.owner.worker)
            if self.owner.ranks == 1 or all(manifest_path(folder, rank).exists() for rank in ranks):
                return step
        return 0

    @property
    def common_step(self) -> int:
        """The newest step that all workers have told they have saved, or the one started from; 0 if there is none."""
        if self.owner.workers is None:
            return max(self._written, default=self._started_from or 0)
        told = [self._told.get(worker, set()) for worker in range(self.owner.workers)]
        return max(set.intersection(*told), default=self._started_from or 0)

    def note_reports(self, members: Iterable[Member]) -> None:
        """What a round taught of the others' checkpoints."""
        for member in members:
            if member.report.checkpoint_step:
                self._told.setdefault(member.worker, set()).add(member.report.checkpoint_step)
        common = self.common_step
        self._told = {worker: {step for step in steps if step >= common} for worker, steps in self._told.items()}

    # Forgetting

    def begin(self, attempt: int, start: Checkpoint | None) -> None:
        """A start of the run: from here on what lies after `start` is another story, and is removed."""
        self.attempt, self._started_from = attempt, None if start is None else start.step
        if self.owner.rank:
            return
        for worker, folder in worker_folders(self.folder):
            if self._mine(worker) and (start is None or folder.parent.name > start.folder.parent.name):
                self._remove(folder)

    def _mine(self, worker: int) -> bool:
        """Checkpoints of workers that no longer take part have an heir."""
        if self.owner.workers is None:
            return worker == self.owner.worker
        return worker % self.owner.workers == self.owner.worker

    def _forget_old(self) -> None:
        """Keep the newest `keep`, everything from the common step on, and what another rank may still be writing."""
        if self.owner.rank:
            return
        complete, _ = find_checkpoints(self.folder)
        mine = [checkpoint for checkpoint in complete if checkpoint.worker == self.owner.worker]
        kept = {checkpoint.step for checkpoint in mine[-self.config.keep :]}
        old = {c.folder for c in complete if self._mine(c.worker) and c.step < self.common_step and c.step not in kept}
        whole = {checkpoint.folder for checkpoint in complete}
        for worker, folder in worker_folders(self.folder):
            if self._mine(worker) and (folder in old or (folder not in whole and not self._in_use(folder))):
                self._remove(folder)

    def _remove(self, folder: Path) -> None:
        """The manifests first: what is half removed must not look complete."""
        remove_folder(folder, [path for _, path in numbered(folder, "rank-", ".json")])

    def _in_use(self, folder: Path) -> bool:
        """Another rank may still write there; and a manifest that cannot be read is evidence, not litter."""
        return bool(numbered(folder, "rank-", ".json")) or folder.parent.name in {
            f"step-{step:08d}" for step in self._written
        }

    def _take_back(self, folder: Path) -> None:
        """What a failed write left, but not what was whole before; other ranks' files are theirs to remove."""
        try:
            whole = manifest_path(folder, self.owner.rank).exists()
            for path in folder.glob(f"rank-{self.owner.rank}.*"):
                if path.name.endswith(PARTIAL) or not whole:
                    path.unlink()
            folder.rmdir()
            folder.parent.rmdir()
        except OSError as error:
            logger.info("%s is left behind, and is not counted as a checkpoint: %s", folder, error)
