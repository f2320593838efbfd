"""Which worker takes which inner step, with absent and slow workers, as plain tables.

A worker that is absent posts every round without work, so that it has no weight in the mean and follows the anchor. It
begins, or begins again, from the anchor. One that is slow by steps takes them at even distances.
"""

import numpy as np
from numpy.typing import NDArray

from diloco.lab.arm import Arm

Table = NDArray[np.bool_]


def presence(arm: Arm) -> Table:
    """[steps, workers]: whether the worker is there in that step."""
    there = np.ones((arm.steps, arm.workers), bool)
    if arm.active_workers:
        H = arm.sync_config.num_inner_steps
        rounds = np.arange(arm.steps) // H * H / arm.steps
        part = np.minimum((rounds * len(arm.active_workers)).astype(int), len(arm.active_workers) - 1)
        there &= np.arange(arm.workers) < np.array(arm.active_workers)[part][:, None]
    for worker, first, end in arm.absences:
        there[first:end, worker] = False
    return there


def working(arm: Arm, there: Table) -> Table:
    """[steps, workers]: whether the worker takes that inner step."""
    if arm.slow == "wait":
        return there
    ends = np.floor(np.outer(np.arange(1, arm.steps + 1), arm.speeds) + 1e-9)
    begins = np.floor(np.outer(np.arange(arm.steps), arm.speeds) + 1e-9)
    return there & (ends > begins)
