"""Dropped communication, for experiments: Figure 8 of the paper (arXiv 2311.08105).

A worker whose outer gradient is dropped goes on from its own θ_i for the next H steps, and the mean is over the others.
Here it posts the round without work (weight 0), takes the outer step on the anchor, which all workers have in common,
and keeps its parameters: its next outer gradient, anchor − θ_i, carries the work of both rounds, and its weight.

Which contributions are dropped follows from the seed, the worker and the round alone: resuming changes nothing, and
each worker decides for itself. A worker that has no steps left drops nothing: no later round would carry its work.
"""

import hashlib

from diloco.core.config import FaultsConfig
from diloco.outer.method import Method, Options


class DroppedRounds(Method):
    """`faults.drop`: says which contributions of one worker are dropped."""

    @classmethod
    def chosen(cls, options: Options) -> "DroppedRounds | None":
        return cls(options.faults, options.engine.worker) if options.faults.drop else None

    def __init__(self, faults: FaultsConfig, worker: int) -> None:
        self._bound = round(faults.drop * 2**64)
        self._seed = faults.seed or 0
        self._worker = worker

    def drops(self, sequence: int) -> bool:
        if not self._bound:
            return False
        drawn = hashlib.blake2b(f"{self._seed} {self._worker} {sequence}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn, "big") < self._bound
