"""Checks of `diloco doctor`: packages, GPU and disk of this machine.

Imports nothing that may be missing. Each check says what it found and, unless that is good, what to do.
"""

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from diloco.errors import install_hint
from diloco.swarm.installed import PACKAGES

State = Literal["ok", "warning", "failed"]

HIVEMIND_VERSION = "1.1.12"
"""The only version whose daemon and control messages are known to fit."""
_OLDEST_TORCH = (2, 11)
_LITTLE_DISK_BYTES = 20 << 30
_TOO_LITTLE_DISK_BYTES = 2 << 30


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    state: State
    message: str
    remedy: str | None = None


def check_packages() -> Iterator[Finding]:
    yield _torch()
    for name in PACKAGES:
        yield _package(name)


def _torch() -> Finding:
    installed = _version("torch")
    if installed is None:
        return Finding("torch", "failed", "is not installed", "install it as the README says")
    wanted = ".".join(map(str, _OLDEST_TORCH))
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:2] if part.isdigit())
    if not numbers:
        return Finding("torch", "warning", "is of unknown version", f"diloco needs torch {wanted} or newer")
    if numbers < _OLDEST_TORCH:
        return Finding("torch", "failed", f"{installed} is older than {wanted}", f"install torch {wanted} or newer")
    return Finding("torch", "ok", installed)


def _package(name: str) -> Finding:
    installed = _version(name)
    if installed is None:
        return Finding(name, "failed", "is not installed", install_hint("swarm"))
    if name == "hivemind" and installed != HIVEMIND_VERSION:
        message = f"{installed} is not {HIVEMIND_VERSION}, which diloco is made for"
        return Finding(name, "warning", message, install_hint("swarm"))
    return Finding(name, "ok", installed)


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


def check_disk(folder: Path) -> Finding:
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    message = f"{free / (1 << 30):.1f} GiB free at {existing}"
    if free < _TOO_LITTLE_DISK_BYTES:
        return Finding("disk", "failed", message, "free some: a run keeps its data, state and checkpoints there")
    if free < _LITTLE_DISK_BYTES:
        return Finding("disk", "warning", message, "enough for small models only; free some, or use another folder")
    return Finding("disk", "ok", message)


def check_gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("GPU", "warning", "not checked, since torch is not installed", "install torch")
    if not torch.cuda.is_available():
        return Finding("GPU", "warning", "none that torch can use", "this machine trains on its processor, slowly")
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = [f"{device.name} ({device.total_memory / (1 << 30):.0f} GiB)" for device in devices]
    return Finding("GPU", "ok", ", ".join(names))
