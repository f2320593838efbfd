"""The CPU threads of a swarm's worker: the workers of one user on one machine share its cores out. Torch-free.

Also those of separate `diloco join`s know of each other: each worker process holds the lock of a file of its own in a
folder of the user's. The operating system ends such a lock with its process, so a killed worker counts no longer. The
workers count each other again now and then, since others come and go. `--threads` and OMP_NUM_THREADS come first.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from diloco.history.events import Emit, ThreadsEvent

logger = logging.getLogger(__name__)

_COUNT_SECONDS = 5.0
_SUFFIX = ".worker"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def registry() -> Path:
    """Return the folder of this user's worker processes on this machine; it ends with the machine's uptime at the
    latest."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"diloco-workers-{os.getuid()}"


class SharedCores:
    """One worker's part of the cores."""

    def __init__(self, set_threads: Callable[[int], None], emit: Emit, *, fixed: int | None, folder: Path) -> None:
        """`set_threads` applies a number in this thread. `fixed` is the number that the user has chosen."""
        self._set_threads = set_threads
        self._emit = emit
        self._fixed = fixed
        self._folder = folder
        self._file: int | None = None
        self._counted_at = 0.0
        self._workers = 0

    def begin(self, local_workers: int) -> None:
        """Take a share before the first step. `local_workers`: those that start with this one, perhaps a little
        later."""
        if self._fixed is not None:
            self._set_threads(self._fixed)
            return
        try:
            self._register()
        except OSError as error:
            logger.warning("workers of other runs are not counted, %s cannot be used: %s", self._folder, error)
        self._share(max(local_workers, self._count()))

    def update(self) -> None:
        """Count the workers again every few seconds; called after every step."""
        now = time.monotonic()
        if self._file is None or now - self._counted_at < _COUNT_SECONDS:
            return
        self._counted_at = now
        workers = self._count()
        if workers != self._workers:
            self._share(workers)

    def _share(self, workers: int) -> None:
        self._workers = workers
        threads = max(1, cores() // workers)
        self._set_threads(threads)
        self._emit(ThreadsEvent(threads=threads, cores=cores(), workers=workers))

    def _register(self) -> None:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError("the folder belongs to another user")
        file, name = tempfile.mkstemp(dir=self._folder)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        Path(name).rename(f"{name}{_SUFFIX}")  # locked before others count it
        self._file = file

    def _count(self) -> int:
        """Return the number of live workers, this one included; remove the files of workers that are gone."""
        if self._file is None:
            return 1
        return sum(_is_live(path) for path in self._folder.glob(f"*{_SUFFIX}")) or 1

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _is_live(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:  # removed just now
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        path.unlink(missing_ok=True)
        return False
    finally:
        os.close(file)
