"""What checkpoints a run folder has, which are complete, and whether their bytes are the ones written. Torch-free.

    RUN/checkpoints/step-00000120/worker-0/rank-0.safetensors   what rank 0 of worker 0 held after inner step 120
                                           rank-0.json          its manifest: everything that is not a tensor, with
                                                                the size and sha256 of the file, and its own sha256

A manifest is written last, so a worker's checkpoint is complete when every rank's manifest is there. A folder without
all of them is a save that was cut short: it is not counted and nothing is said to be wrong. A manifest or file whose
bytes have changed is damage: it is named, and the checkpoint is not used.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from diloco.training.checkpoints.durable import FileFacts, facts

FORMAT = 1
FOLDER = "checkpoints"


class Moment(NamedTuple):
    """When all workers together were saved: states with the same moment go on together bit for bit.

    Between two rounds the workers do not know of each other, so it is not the inner step that they must have in common
    but the number of rounds posted. `attempt` counts the starts of the run, and `workers` who took part.
    """

    rounds: int
    attempt: int
    workers: int


@dataclass(frozen=True)
class Manifest:
    """One rank's part of a checkpoint."""

    moment: Moment
    step: int
    worker: int
    rank: int
    ranks: int
    files: Mapping[str, FileFacts]
    common_step: int
    """The newest step that all workers were known to have saved or started from before this; 0 if none."""
    config: Mapping[str, Any]
    """What a run that goes on from here must have in common with the one that saved."""
    state: Mapping[str, Any]

    def text(self) -> str:
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        body |= {"moment": self.moment._asdict(), "files": {name: vars(file) for name, file in self.files.items()}}
        return json.dumps({"format": FORMAT, "sha256": _digest(body), "body": body}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Raises ValueError with the reason if it is not as it was written."""
        data = path.read_bytes()
        try:
            whole = json.loads(data)
            version, digest, body = whole["format"], whole["sha256"], whole["body"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"it is cut or changed ({error})") from error
        if version != FORMAT:
            raise ValueError(f"it has format {version}, and this version of diloco reads format {FORMAT}")
        if _digest(body) != digest:
            raise ValueError("its content does not have the sha256 that it states")
        files = {name: FileFacts(**file) for name, file in body["files"].items()}
        manifest = cls(**body | {"moment": Moment(**body["moment"]), "files": files})
        if manifest.text().encode() != data:
            raise ValueError("it is cut or changed between its values")
        return manifest


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Damage:
    """A file of a checkpoint that is not as it was written."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


@dataclass(frozen=True)
class Checkpoint:
    """A worker's complete checkpoint."""

    folder: Path
    manifests: tuple[Manifest, ...]
    """Of each rank."""

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
        """Reads every byte."""
        return [
            Damage(path, reason)
            for manifest in self.manifests
            for name, file in manifest.files.items()
            if (reason := _difference(path := self.folder / name, file)) is not None
        ]


def _difference(path: Path, written: FileFacts) -> str | None:
    try:
        size = path.stat().st_size
        if size != written.bytes:
            return f"it has {size} bytes, and {written.bytes} were written"
        if facts(path) != written:
            return "its content does not have the sha256 of what was written"
    except OSError as error:
        return f"it cannot be read ({error.strerror})"
    return None


def worker_folder(run_folder: Path, step: int, worker: int) -> Path:
    return run_folder / FOLDER / f"step-{step:08d}" / f"worker-{worker}"


def manifest_path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def worker_folders(run_folder: Path) -> list[tuple[int, Path]]:
    """Every worker's folder of every step, complete or not, with the worker's number; oldest first."""
    steps = numbered(run_folder / FOLDER, "step-", "")
    return [found for _, step in steps for found in numbered(step, "worker-", "")]


def numbered(folder: Path, before: str, after: str) -> list[tuple[int, Path]]:
    """What is in a folder under a name with a number; nothing if another worker has removed it meanwhile."""
    try:
        names = [path.name for path in folder.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(name.removeprefix(before).removesuffix(after), name) for name in names]
    return sorted(
        (int(number), folder / name)
        for number, name in found
        if name == f"{before}{number}{after}" and number.isdigit()
    )


def find_checkpoints(run_folder: Path) -> tuple[list[Checkpoint], list[Damage]]:
    """The complete checkpoints of all workers here, oldest first, and damaged manifests; files are not read."""
    complete, damage = [], []
    for _, folder in worker_folders(run_folder):
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
