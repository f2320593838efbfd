"""Threads that work on rows of one tensor side by side, each on one core.

torch's own threads share out a single operation, which for the few parts that fit into a cache costs more than it
gains. Here each thread takes some rows through all operations. There are as many threads as torch may use.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

_START_SECONDS = 60.0  # for threads to begin; far more than they need
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a child process has none of its parent's threads


def for_each(work: Callable[[slice], None], rows: Sequence[slice]) -> None:
    """Call `work` for all of `rows`, which must not depend on each other; raises the first error."""
    threads = min(torch.get_num_threads(), len(rows))
    if threads <= 1:
        for some in rows:
            work(some)
        return
    for done in _pool(torch.get_num_threads()).map(work, rows):
        assert done is None


def _pool(threads: int) -> ThreadPoolExecutor:
    with _lock:
        if threads not in _pools:
            started = threading.Barrier(threads + 1, timeout=_START_SECONDS)

            def begin() -> None:
                torch.set_num_threads(1)  # of this thread; and the default of threads that start later
                started.wait()

            pool = ThreadPoolExecutor(threads, "diloco-reduce", begin)
            for _ in range(threads):  # a thread starts with a task if no other is idle
                pool.submit(lambda: None)
            started.wait()
            torch.set_num_threads(threads)  # the default again
            _pools[threads] = pool
        return _pools[threads]
