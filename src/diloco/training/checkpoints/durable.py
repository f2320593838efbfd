"""Writing files that are there after a power cut: every byte counted, hashed and forced to the disk. Torch-free.

The order is what makes a checkpoint atomic: the data first, then the list that names it (checkpoints.py). Nothing here
knows what the bytes mean.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 1 << 22
_WRITE_BYTES = 1 << 24
_ATTEMPTS = 10
PARTIAL = ".partial"
"""Ends the name of what is not whole yet."""


@dataclass(frozen=True)
class FileFacts:
    """By which a file is known again."""

    bytes: int
    sha256: str


def write_file(path: Path, chunks: Iterable[memoryview]) -> FileFacts:
    """Write a file from nothing and force it to the disk. A kill leaves some first part of it."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for chunk in chunks:
            for start in range(0, len(chunk), _WRITE_BYTES):
                piece = chunk[start : start + _WRITE_BYTES]
                _write(file.fileno(), piece)
                digest.update(piece)
                size += len(piece)
        os.fsync(file.fileno())
    return FileFacts(size, digest.hexdigest())


def _write(file: int, data: memoryview) -> None:
    while data:
        data = data[os.write(file, data) :]


def replace_file(path: Path, text: str) -> None:
    """A small file appears under its name whole, or not at all; everything written before is on the disk by then."""
    temporary = path.with_name(path.name + PARTIAL)
    sync_folder(path.parent)
    write_file(temporary, [memoryview(text.encode())])
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """The names in a folder are on the disk too."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def facts(path: Path) -> FileFacts:
    """Of a file as it is now."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileFacts(size, digest.hexdigest())


def make_folder(folder: Path) -> None:
    """With those above it, though another process may be removing one of them, which it found empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return
    folder.mkdir(parents=True, exist_ok=True)


def remove_folder(folder: Path, first: Iterable[Path]) -> None:
    """Remove a folder, some of its files before all others; also the one above it, once that is empty."""
    for path in first:
        path.unlink(missing_ok=True)
    sync_folder(folder)
    shutil.rmtree(folder)
    with contextlib.suppress(OSError):
        folder.parent.rmdir()
