"""One process at a time trains in a run folder. Torch-free.

A lock of the operating system (flock) ends with the process that holds it: a killed run leaves none behind. The
launcher holds one; each worker process holds a second, since workers may outlive a killed launcher for a moment.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from diloco.errors import ConfigError

_LAUNCHER = ".lock"
_WORKERS = ".lock-workers"
_LEFTOVER_SECONDS = 20.0
_POLL_SECONDS = 0.05
_LOOK_SECONDS = 1.0  # `is_training` holds the lock for a moment


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Refuse a folder in which another process trains; wait for the workers of a killed launcher to end."""
    file = os.open(folder / _LAUNCHER, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _locked(file, fcntl.LOCK_EX, 0.0):
            raise ConfigError(f"another process trains in {folder} at this moment: wait for it, or stop it first")
        _wait_for_leftovers(folder)
        yield
    finally:
        os.close(file)


def is_training(folder: Path) -> bool:
    """Return whether a process of this machine trains in a run folder at this moment."""
    return any(_held(folder / name) for name in (_LAUNCHER, _WORKERS))


def _held(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _locked(file, fcntl.LOCK_EX, 0.0)
    finally:
        os.close(file)


def _wait_for_leftovers(folder: Path) -> None:
    file = os.open(folder / _WORKERS, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _locked(file, fcntl.LOCK_EX, _LEFTOVER_SECONDS):
            raise ConfigError(f"workers of an earlier start still run in {folder}: end them first")
    finally:
        os.close(file)


def hold_as_worker(folder: Path) -> Callable[[], None]:
    """Hold the workers' lock of this folder, as long as this process lives or until the returned function is called."""
    file = os.open(folder / _WORKERS, os.O_RDWR | os.O_CREAT, 0o644)
    _locked(file, fcntl.LOCK_SH, _LOOK_SECONDS)
    return partial(os.close, file)


def hold_alone(path: Path) -> Callable[[], None] | None:
    """Hold the lock of this file, as long as this process lives or until the returned function is called; None if
    another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if not _locked(file, fcntl.LOCK_EX, _LOOK_SECONDS):
        os.close(file)
        return None
    return partial(os.close, file)


def _locked(file: int, kind: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        else:
            return True
