"""The simulated machines of an arm: which worker takes which inner step, how fast, and how much time that takes.

**Which worker takes which step** is a table. A worker that is absent posts every round without work, so that it has no
weight in the mean and follows the anchor. It begins, or begins again, from the anchor. A worker that takes fewer steps
because it is slow takes them at even distances. Random faults depend on the seed alone: arms with equal numbers of
workers and rounds have the same ones.

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
_AWAY_STREAM = 1 << 21  # part of the generator's seed: above the numbers of workers, which their texts are drawn with
_SLOW_STREAM = _AWAY_STREAM + 1
_SAVED = ("taken", "times", "compute", "absent", "link_free")


# Which worker takes which step


def presence_table(arm: Arm, seed: int) -> Table:
    """Return whether each worker is present in each step: [steps, workers]."""
    present = np.ones((arm.steps, arm.workers), bool)
    if arm.active_workers:
        H = arm.sync_config.num_inner_steps
        rounds = np.arange(arm.steps) // H * H / arm.steps
        period = np.minimum((rounds * len(arm.active_workers)).astype(int), len(arm.active_workers) - 1)
        present &= np.arange(arm.workers) < np.array(arm.active_workers)[period][:, None]
    for worker, first, end in arm.absences:
        present[first:end, worker] = False
    if not present.any(1).all():
        raise ConfigError(f"absences = {arm.absences}: no worker is there in step {present.any(1).argmin()}; keep one")
    if arm.away:
        luck = np.where(present, _draw_per_round(arm, seed, _AWAY_STREAM), -1.0)
        present &= (luck >= arm.away) | (luck == luck.max(1, keepdims=True))  # the luckiest one stays
    return present


def pace_table(arm: Arm, seed: int) -> Paces:
    """Return the speed of each worker in each step: [steps, workers]. 1 is the nominal one."""
    slow, slower = _slow_steps(arm, seed)
    speeds: Paces = np.where(slow, slower, 1.0) * np.array(arm.speeds or 1.0)
    return speeds


def work_table(arm: Arm, seed: int) -> Table:
    """Return whether each worker takes each inner step: [steps, workers]."""
    present = presence_table(arm, seed)
    if arm.slow == "wait":
        return present
    slow, slower = _slow_steps(arm, seed)
    slow_so_far = np.cumsum(slow, 0)
    nominal = np.arange(1, arm.steps + 1)[:, None] - slow_so_far + slower * slow_so_far
    ends = np.floor(nominal * np.array(arm.speeds or 1.0) + 1e-9)
    return present & (np.diff(ends, axis=0, prepend=0.0) > 0)


def _slow_steps(arm: Arm, seed: int) -> tuple[Table, float]:
    """Return whether each worker is slow by chance in each step, [steps, workers], and the factor of its speed then."""
    if not arm.slow_rounds:
        return np.zeros((arm.steps * arm.updates_multiplier, arm.workers), bool), 1.0
    probability, slower = arm.slow_rounds
    return _draw_per_round(arm, seed, _SLOW_STREAM) < probability, slower


def _draw_per_round(arm: Arm, seed: int, stream: int) -> Paces:
    """Draw a number from 0 to 1 for each round and worker, repeated for the round's steps: [steps, workers]."""
    steps_per_draw = arm.sync_config.num_inner_steps if arm.mode == "diloco" else 1
    rounds = np.arange(arm.steps * arm.updates_multiplier) // steps_per_draw
    drawn: Paces = np.random.default_rng([seed, stream]).random((rounds[-1] + 1, arm.workers))[rounds]
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
        """Take a step. `working`: the workers that take it; `present`: those that are there at all, though they may be
        between two steps because they are slow."""
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
        """Begin a round in which each worker sends and receives at most `num_bytes`."""
        posted = max(time for time, is_present in zip(self._times, present, strict=True) if is_present)
        self._link_free = max(posted, self._link_free) + self._link.round_seconds(num_bytes, num_bytes)
        self._ends[sequence] = self._link_free

    def merge(self, sequence: int, worker: int) -> None:
        """Let a worker wait for the end of a round."""
        self._times[worker] = max(self._times[worker], self._ends[sequence])

    def average_gradients(self, num_bytes: int) -> None:
        """End a data-parallel step: all workers wait for the slowest, and for the part of the exchange that the
        backward pass does not hide."""
        slowest = max(self._times)
        hidden = BACKWARD_SHARE * max(self._step)
        waited = max(0.0, self._link.round_seconds(num_bytes, num_bytes) - hidden) if num_bytes else 0.0
        self._times = [slowest + waited] * len(self._times)

    def saved(self) -> dict[str, Any]:
        """Return the state as JSON, for `load`."""
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
        """Return the share of inner steps in a worker's time, absences left out: the mean over the workers."""
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
