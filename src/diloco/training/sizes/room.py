"""The disk that a run takes, and what this machine has: room on a disk, memory.

Torch-free, so that both are known before a worker starts.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.training.checkpoints.manifests import FOLDER
from diloco.training.config.run import RunConfig

_FP32 = 4
_INNER_STATES = 2  # AdamW's two moments; Muon has one for the matrices of the blocks, and the estimate is then above
OUTER_STATES = {"nesterov": 1, "sgd": 0, "sgdm": 1, "adam": 2}
"""Buffers of each outer optimizer: `state_names` of core/outer_optimizers.py."""


@dataclass(frozen=True)
class DiskUse:
    """The disk of this machine's workers together, in bytes."""

    checkpoint_bytes: int
    """One checkpoint of all local workers."""
    checkpoints: int
    """How many the whole run writes."""
    at_once: int
    """How many are on the disk at a time, the one being written among them."""
    model_bytes: int
    """The model folder at the end."""

    @property
    def peak_bytes(self) -> int:
        return self.checkpoint_bytes * self.at_once + self.model_bytes

    @property
    def written_bytes(self) -> int:
        """All that is written over the run."""
        return self.checkpoint_bytes * self.checkpoints + self.model_bytes


def kept_copies(config: RunConfig) -> dict[str, int]:
    """Return what a worker keeps from one round to the next for averaging, in copies of its trained parameters."""
    if config.mode != "diloco":
        return {}
    if config.sync.asynchronous:  # the outer optimizer is worker 0's, in `anchor_copies`
        return {"anchor": 1}
    states = OUTER_STATES[config.outer.optimizer]
    own_shares = {"none": 0, "delayed": 1, "eager": 1 + states}  # a worker's start, and the momentum of its own shares
    return {
        "anchor": 1,
        "outer optimizer": states,
        "starts of eager updates": own_shares[config.sync.outer_overlap],
        "error feedback": int(config.sync.feedback_decay is not None),
    }


def saved_copies(config: RunConfig) -> int:
    """Return how many fp32 copies of the parameters a worker's checkpoint holds at most: parameters, moments, what is
    kept for averaging, and the means of rounds that travel when it is saved."""
    in_flight = config.sync.outer_overlap != "none" or config.sync.overlap_steps > 0  # of fragments: at most all
    return 1 + _INNER_STATES + sum(kept_copies(config).values()) + (config.mode == "diloco" and in_flight)


def anchor_copies(config: RunConfig) -> int:
    """Return the copies that worker 0 of asynchronous workers saves besides: the anchor that all move, and its two
    buffers."""
    return 3 if config.mode == "diloco" and config.sync.asynchronous else 0


def disk_use(
    config: RunConfig, parameters: int, workers: int | None = None, *, trainable: int | None = None
) -> DiskUse:
    """Return the disk that a run takes. `workers`: those of this machine (default: the configuration's). `trainable`:
    the parameters that are trained (default: all of them), which alone are in checkpoints; those of adapters are
    written besides the merged model."""
    copies = saved_copies(config) * (config.workers if workers is None else workers) + anchor_copies(config)
    checkpoint = _FP32 * (parameters if trainable is None else trainable) * copies
    count = config.num_checkpoints
    return DiskUse(checkpoint if count else 0, count, min(count, config.checkpoint.keep + 1), _FP32 * parameters)


def check_disk(
    config: RunConfig, parameters: int, folder: Path, workers: int | None = None, *, trainable: int | None = None
) -> None:
    """Refuse a run whose checkpoints and model have no room where its folder is, or will be."""
    use = disk_use(config, parameters, workers, trainable=trainable)
    room = free_disk(folder) + folder_bytes(folder / FOLDER)  # a resumed run has some checkpoints already
    if use.peak_bytes > room:
        raise ConfigError(
            f"there is no room for this run's checkpoints in {folder}: {size_text(use.peak_bytes)} needed "
            f"({use.at_once} of {size_text(use.checkpoint_bytes)} at a time, and the model), {size_text(room)} free; "
            f"{remedy(config, use)}"
        )


def remedy(config: RunConfig, use: DiskUse) -> str:
    """Return what to do about too little disk."""
    ways = ["make room", "choose another place with --out"]
    if use.at_once > 2:
        ways.append("keep fewer (--checkpoint.keep 1)")
    if use.at_once:
        ways.append("save none (--checkpoint.interval 0)")
    if config.workers > 1:
        ways.append("start fewer workers here")
    return f"{', '.join(ways[:-1])}, or {ways[-1]}"


def size_text(count: float) -> str:
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}" if count < 99.5 * unit else f"{count / unit:.0f} {name}"
    return f"{count:.0f} bytes"


# This machine


def available_memory() -> int | None:
    """Return the bytes that new processes can take without swapping, within a container's limit too; None if that is
    not known."""
    limits = [_meminfo_available(), _container_available(Path("/sys/fs/cgroup"))]
    known = [size for size in limits if size is not None]
    return min(known) if known else None


def resident_bytes() -> int:
    """Return the memory of this process; 0 where /proc does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_disk(folder: Path) -> int:
    """Return the bytes free where `folder` is, or will be."""
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    return shutil.disk_usage(existing).free


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, which may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def _meminfo_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _container_available(cgroup: Path) -> int | None:
    """Return what the limits of control groups leave, version 2 or 1; file caches count as available."""
    for limit, used, stat in (
        ("memory.max", "memory.current", "memory.stat"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
    ):
        try:
            most = int((cgroup / limit).read_text())
            now = int((cgroup / used).read_text())
            values = dict(line.split()[:2] for line in (cgroup / stat).read_text().splitlines())
        except (OSError, ValueError):  # there is none, or it is "max"
            continue
        return most - now + int(values.get("inactive_file", 0)) + int(values.get("active_file", 0))
    return None
