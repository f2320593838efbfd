"""Which worker takes which inner step, and how fast, with absent and slow workers, as plain tables.

A worker that is absent posts every round without work, so that it has no weight in the mean and follows the anchor. It
begins, or begins again, from the anchor. One that is slow by steps takes them at even distances. What is drawn depends
on the seed alone: equal numbers of workers and rounds have the same bad luck in every arm.
"""

import numpy as np
from numpy.typing import NDArray

from diloco.errors import ConfigError
from diloco.lab.arm import Arm

Table = NDArray[np.bool_]
Paces = NDArray[np.float64]
_AWAY = 1 << 21  # the generator of these draws: no worker's text has such a number
_SLOW = _AWAY + 1


def presence(arm: Arm, seed: int) -> Table:
    """[steps, workers]: whether the worker is there in that step."""
    there = np.ones((arm.steps, arm.workers), bool)
    if arm.active_workers:
        H = arm.sync_config.num_inner_steps
        rounds = np.arange(arm.steps) // H * H / arm.steps
        part = np.minimum((rounds * len(arm.active_workers)).astype(int), len(arm.active_workers) - 1)
        there &= np.arange(arm.workers) < np.array(arm.active_workers)[part][:, None]
    for worker, first, end in arm.absences:
        there[first:end, worker] = False
    if not there.any(1).all():
        raise ConfigError(f"absences = {arm.absences}: no worker is there in step {there.any(1).argmin()}; keep one")
    if arm.away:
        luck = np.where(there, _drawn(arm, seed, _AWAY), -1.0)
        there &= (luck >= arm.away) | (luck == luck.max(1, keepdims=True))  # the luckiest one stays
    return there


def paces(arm: Arm, seed: int) -> Paces:
    """[steps, workers]: the worker's speed in that step; 1 is the nominal one."""
    slow, slower = _slow(arm, seed)
    speeds: Paces = np.where(slow, slower, 1.0) * np.array(arm.speeds or 1.0)
    return speeds


def working(arm: Arm, seed: int) -> Table:
    """[steps, workers]: whether the worker takes that inner step."""
    there = presence(arm, seed)
    if arm.slow == "wait":
        return there
    slow, slower = _slow(arm, seed)
    slow_steps = np.cumsum(slow, 0)
    nominal = np.arange(1, arm.steps + 1)[:, None] - slow_steps + slower * slow_steps
    ends = np.floor(nominal * np.array(arm.speeds or 1.0) + 1e-9)
    return there & (np.diff(ends, axis=0, prepend=0.0) > 0)


def _slow(arm: Arm, seed: int) -> tuple[Table, float]:
    """[steps, workers]: whether a worker is slow in that step, by chance; and its speed then, as a part of its own."""
    if not arm.slow_rounds:
        return np.zeros((arm.steps * arm.updates_multiplier, arm.workers), bool), 1.0
    probability, slower = arm.slow_rounds
    return _drawn(arm, seed, _SLOW) < probability, slower


def _drawn(arm: Arm, seed: int, which: int) -> Paces:
    """Draw numbers from 0 to 1, one a round and worker, repeated for the steps of the round: [steps, workers]."""
    length = arm.sync_config.num_inner_steps if arm.mode == "diloco" else 1
    rounds = np.arange(arm.steps * arm.updates_multiplier) // length
    drawn: Paces = np.random.default_rng([seed, which]).random((rounds[-1] + 1, arm.workers))[rounds]
    return drawn
