"""Which corpora of the cache are in use: a process that has one holds a shared lock on its meta.json until it ends.

`diloco data clear` takes the exclusive lock, so it deletes nothing that a run reads. The system releases the lock of a
process that dies.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.data.corpus import META

_WAIT_SECONDS = 5.0
_POLL_SECONDS = 0.05
_held: dict[str, int] = {}
"""Files that this process keeps open and locked, by path."""


def hold(folder: Path) -> bool:
    """Keep the corpus from being cleared until this process ends, and note when it was last used.

    Returns False if it is not there, or is being deleted.
    """
    path = folder / META
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    end = time.monotonic() + _WAIT_SECONDS
    while not _lock(file, fcntl.LOCK_SH):
        if time.monotonic() > end:
            os.close(file)
            return False
        time.sleep(_POLL_SECONDS)
    if not _is_there(file, path):  # deleted meanwhile
        os.close(file)
        return False
    with suppress(OSError):  # the cache may be read-only
        os.utime(path)
    before = _held.pop(str(path), None)
    _held[str(path)] = file
    if before is not None:
        os.close(before)
    return True


@contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Whether no process holds the corpus; while the context lasts, none can begin to."""
    try:
        file = os.open(folder / META, os.O_RDONLY)
    except OSError:
        yield True
        return
    try:
        yield _lock(file, fcntl.LOCK_EX)
    finally:
        os.close(file)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _is_there(file: int, path: Path) -> bool:
    try:
        return os.fstat(file).st_ino == path.stat().st_ino
    except OSError:
        return False
