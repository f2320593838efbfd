"""The simulated machines of an arm: which worker takes which inner step, how fast, and how much time that takes.

**Who works** is plain tables. A worker that is absent posts every round without work, so that it has no weight in the
mean and follows the anchor. It begins, or begins again, from the anchor. One that is slow by steps takes them at even
distances. What is drawn depends on the seed alone: equal numbers of workers and rounds have the same bad luck in every
arm.

**The clock** says what a run would take on these machines and the link that the arm describes. Each worker has a time
of its own. An inner step adds its compute time; a round begins when the last worker has posted and the link is free,
takes as long as its bytes, and a worker that merges it before its end waits. The share of inner steps in a worker's
time is its utilisation. Encoding and outer steps cost nothing here, and neither does evaluation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.codecs.encoded import EncodedVector
from diloco.engines.header import HEADER_BYTES
from diloco.engines.reduction import traffic
from diloco.errors import ConfigError
from diloco.lab.arm import Arm
from diloco.network import BACKWARD_SHARE, NetworkLink

Table = NDArray[np.bool_]
Paces = NDArray[np.float64]
_AWAY = 1 << 21  # the generator of these draws: no worker's text has such a number
_SLOW = _AWAY + 1
_SAVED = ("taken", "times", "compute", "absent", "link_free")


# Who works


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


# The clock


class Clock:
    """The times of all workers of a simulation, in seconds; `paces` is their speed in each step."""

    def __init__(self, arm: Arm, paces: Paces) -> None:
        self._link: NetworkLink = arm.link
        self._paces = paces
        self._taken = 0
        self._nominal = arm.step_seconds
        self._step = [arm.step_seconds] * arm.workers
        self._times = [0.0] * arm.workers
        self._compute = [0.0] * arm.workers
        self._absent = [0.0] * arm.workers
        self._link_free = 0.0
        self._ends: dict[int, float] = {}

    def take_step(self, working: Sequence[bool], present: Sequence[bool]) -> None:
        """`working`: takes this inner step; `present`: is there at all (a slow worker may be between two steps)."""
        self._step = [self._nominal / pace for pace in self._paces[self._taken].tolist()]
        self._taken += 1
        for worker, seconds in enumerate(self._step):
            if working[worker]:
                self._times[worker] += seconds
                self._compute[worker] += seconds
            elif not present[worker]:
                self._times[worker] += self._nominal
                self._absent[worker] += self._nominal

    def post(self, sequence: int, num_bytes: int, present: Sequence[bool]) -> None:
        """A round of which each worker sends and receives at most so many bytes."""
        posted = max(time for time, there in zip(self._times, present, strict=True) if there)
        self._link_free = max(posted, self._link_free) + self._link.round_seconds(num_bytes, num_bytes)
        self._ends[sequence] = self._link_free

    def merge(self, sequence: int, worker: int) -> None:
        self._times[worker] = max(self._times[worker], self._ends[sequence])

    def average_gradients(self, num_bytes: int) -> None:
        """A data-parallel step: all wait for the slowest, and for what the backward pass does not hide."""
        slowest = max(self._times)
        hidden = BACKWARD_SHARE * max(self._step)
        waited = max(0.0, self._link.round_seconds(num_bytes, num_bytes) - hidden) if num_bytes else 0.0
        self._times = [slowest + waited] * len(self._times)

    def saved(self) -> dict[str, Any]:
        """Return what `load` goes on from."""
        return {name: getattr(self, f"_{name}") for name in _SAVED} | {"ends": list(self._ends.items())}

    def load(self, saved: Mapping[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, f"_{name}", saved[name])
        self._ends = dict(saved["ends"])

    @property
    def seconds(self) -> float:
        return max(self._times)

    @property
    def utilisation(self) -> float:
        """Mean over the workers that were there."""
        spent = [time - absent for time, absent in zip(self._times, self._absent, strict=True)]
        shares = [compute / time for compute, time in zip(self._compute, spent, strict=True) if time > 0]
        return sum(shares) / max(1, len(shares))


def round_bytes(vector: EncodedVector | None, workers: int) -> list[int]:
    """Return the bytes that each worker sends for one mean, headers included; it receives about as many.

    `vector` None: there is no mean.
    """
    headers = HEADER_BYTES * (workers - 1)
    if workers == 1 or vector is None:
        return [headers] * workers
    return [traffic(vector, workers, worker)[0] + headers for worker in range(workers)]
