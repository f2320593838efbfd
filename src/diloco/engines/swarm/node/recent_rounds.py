"""The last rounds, kept for whoever missed their end: plans, and the encoded means."""

from collections import OrderedDict
from dataclasses import dataclass

from diloco.engines.swarm.node.plan import Plan

_KEEP_ROUNDS = 8
_KEEP_BYTES = 1 << 30


@dataclass(frozen=True)
class Kept:
    plan: Plan
    mean: bytes
    """Empty if the round had none."""


class KeptRounds:
    """At least the last round, at most eight and a gigabyte of them."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[int, Kept] = OrderedDict()
        self.held: int | None = None
        """The round after the last one that this worker's trainer has merged; None: it may have none of them."""
        self.largest = 1 << 40
        """A mean is never longer than this: what others say is not believed beyond it."""

    def keep(self, plan: Plan, mean: bytes) -> None:
        self._rounds[plan.key.sequence] = Kept(plan, mean)
        while len(self._rounds) > 1 and (
            len(self._rounds) > _KEEP_ROUNDS or sum(len(kept.mean) for kept in self._rounds.values()) > _KEEP_BYTES
        ):
            self._rounds.popitem(last=False)

    def has(self, sequence: int) -> bool:
        return sequence in self._rounds

    def get(self, sequence: int) -> Kept | None:
        return self._rounds.get(sequence)
