"""The checkpoints in a run folder: which are complete, and whether their bytes are the ones written. Torch-free.

    RUN/checkpoints/step-00000120/worker-0/rank-0.safetensors   tensors of rank 0 of worker 0 after inner step 120
                                           rank-0.json          its manifest: everything that is not a tensor, with
                                                                size and SHA-256 of the file and of the manifest

A manifest is written last, so a worker's checkpoint is complete when every rank's manifest is there. A folder without
all of them is a save that was interrupted; it is ignored. A manifest or file whose bytes have changed is damage: it is
reported, and the checkpoint is not used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diloco.atomic_files import FileDigest, digest_file

FORMAT = 1
FOLDER = "checkpoints"


class Moment(NamedTuple):
    """The numbers that the checkpoints of all workers must have in common to resume together, bit for bit.

    The inner steps may differ: between two rounds the workers do not communicate, so the number of rounds posted is
    enough. In a warm start they communicate at every step.
    """

    rounds: int
    attempt: int
    """The number of this start of the run, from 1 on."""
    workers: int
    warm_steps: int = 0
    """Inner steps of the warm start that were taken (not in a swarm, where one worker takes them alone)."""


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a checkpoint."""

    moment: Moment
    step: int
    worker: int
    rank: int
    ranks: int
    files: Mapping[str, FileDigest]
    common_step: int
    """The newest step that all workers were known to have saved or started from before this; 0 if none."""
    config: Mapping[str, Any]
    """The configuration that a run must share with this one to resume from here."""
    state: Mapping[str, Any]

    def text(self) -> str:
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        body |= {"moment": self.moment._asdict(), "files": {name: vars(file) for name, file in self.files.items()}}
        return json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Read a manifest; raise ValueError with the reason if it is not as written."""
        data = path.read_bytes()
        try:
            whole = json.loads(data)
            version = whole["format"]
            digest = whole["sha256"]
            body = whole["body"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"it is cut or changed ({error})") from error
        if version != FORMAT:
            raise ValueError(f"it has format {version}, and this version of diloco reads format {FORMAT}")
        if _digest(body) != digest:
            raise ValueError("its content does not have the sha256 that it states")
        try:
            files = {name: FileDigest(**file) for name, file in body["files"].items()}
            manifest = cls(**body | {"moment": Moment(**body["moment"]), "files": files})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"its content is not that of a manifest ({error!r})") from error
        if manifest.text().encode() != data:
            raise ValueError("it is cut or changed between its values")
        return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Damage:
    """A file of a checkpoint that is not as written."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Checkpoint:
    """A worker's complete checkpoint."""

    folder: Path
    manifests: tuple[Manifest, ...]
    """One for each rank, in order."""

    @property
    def moment(self) -> Moment:
        return self.manifests[0].moment

    @property
    def step(self) -> int:
        return self.manifests[0].step

    @property
    def worker(self) -> int:
        return self.manifests[0].worker

    def damage(self) -> list[Damage]:
        """Return the files that are not as written; reads every byte."""
        return [
            Damage(path, reason)
            for manifest in self.manifests
            for name, file in manifest.files.items()
            if (reason := _difference(path := self.folder / name, file)) is not None
        ]


def _difference(path: Path, written: FileDigest) -> str | None:
    try:
        size = path.stat().st_size
        if size != written.bytes:
            return f"it has {size} bytes, and {written.bytes} were written"
        if digest_file(path) != written:
            return "its content does not have the sha256 of what was written"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def worker_folder(run_folder: Path, step: int, worker: int) -> Path:
    return run_folder / FOLDER / f"step-{step:08d}" / f"worker-{worker}"


def manifest_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def worker_folders(run_folder: Path) -> list[tuple[int, int, Path]]:
    """Return (step, worker, folder) of every checkpoint, complete or not; oldest first."""
    steps = numbered(run_folder / FOLDER, "step-", "")
    return [(step, worker, path) for step, folder in steps for worker, path in numbered(folder, "worker-", "")]


def numbered(folder: Path, before: str, after: str) -> list[tuple[int, Path]]:
    """Return (N, path) of everything in a folder named BEFORE N AFTER, in order; nothing if another worker has removed
    it."""
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    candidates = [(name.removeprefix(before).removesuffix(after), name) for name in names]
    return sorted(
        (int(number), folder / name)
        for number, name in candidates
        if name == f"{before}{number}{after}" and number.isdigit()
    )


def find_checkpoints(run_folder: Path) -> tuple[list[Checkpoint], list[Damage]]:
    """Return the complete checkpoints of all workers here, oldest first, and damaged manifests. Reads no tensors."""
    complete = []
    damage = []
    for _, _, folder in worker_folders(run_folder):
        manifests = []
        for _, path in numbered(folder, "rank-", ".json"):
            try:
                manifests.append(Manifest.read(path))
            except FileNotFoundError:  # removed meanwhile
                continue
            except (OSError, ValueError) as error:
                damage.append(Damage(path, str(error)))
        together = len({(manifest.moment, manifest.ranks) for manifest in manifests}) == 1
        if together and [manifest.rank for manifest in manifests] == list(range(manifests[0].ranks)):
            complete.append(Checkpoint(folder, tuple(manifests)))
    return sorted(complete, key=lambda checkpoint: (checkpoint.step, checkpoint.worker)), damage
