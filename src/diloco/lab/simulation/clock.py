"""The simulated clock: what a run would take on the machines and the link that an arm describes.

Each worker has a time of its own. An inner step adds its compute time; a round begins when the last worker has posted
and the link is free, takes as long as its bytes, and a worker that merges it before its end waits. The share of inner
steps in a worker's time is its utilisation. Encoding and outer steps cost nothing here, and neither does evaluation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diloco.codecs.encoded import EncodedVector
from diloco.engines.header import HEADER_BYTES
from diloco.engines.reduction import traffic
from diloco.lab.arm import Arm
from diloco.lab.simulation.presence import Paces
from diloco.network import BACKWARD_SHARE, NetworkLink

_SAVED = ("taken", "times", "compute", "absent", "link_free")


class Clock:
    """The times of all workers of a simulation, in seconds; `paces` is their speed in each step (presence.py)."""

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
