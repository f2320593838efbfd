"""Threads of rounds that do not interrupt the trainer's thread when they wake up."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def stay_behind_training() -> None:
    """Let the calling thread wait for the end of a running thread's time slice; it has its fair share of a core
    as before. Without it a post or a merge ends with the trainer waiting for the thread that it has just woken. Linux
    only; elsewhere nothing changes but the time."""
    if hasattr(os, "SCHED_BATCH"):
        _set_policy(os.SCHED_BATCH)


@contextmanager
def threads_behind_training() -> Iterator[None]:
    """Let threads that the calling thread starts meanwhile stay behind training; it is itself as before at the end."""
    if not hasattr(os, "SCHED_BATCH") or not _has_usual_policy():
        yield
        return
    stay_behind_training()
    try:
        yield
    finally:
        _set_policy(os.SCHED_OTHER)


def _has_usual_policy() -> bool:
    with suppress(OSError):
        return os.sched_getscheduler(0) == os.SCHED_OTHER
    return False


def _set_policy(policy: int) -> None:
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, policy, os.sched_param(0))
