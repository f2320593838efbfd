"""A thread of rounds that does not interrupt the trainer's thread when it wakes up."""

import os


def stay_behind_training() -> None:
    """For the calling thread. It waits for the end of a running thread's time slice, and has its fair share of a core
    as before. Without it a post or a merge ends with the trainer waiting for the thread that it has just woken. Linux
    only; elsewhere nothing changes but the time."""
    if hasattr(os, "SCHED_BATCH"):
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # a sandbox may forbid it
            return
