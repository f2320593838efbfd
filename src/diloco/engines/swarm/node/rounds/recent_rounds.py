"""The last rounds, kept for workers that missed their end: plans, and the encoded means."""

from collections import OrderedDict
from dataclasses import dataclass

from diloco.engines.swarm.node.plan import Plan

MAX_ROUNDS = 8
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class EndedRound:
    plan: Plan
    mean: bytes
    """Empty if the round had none."""


class RecentRounds:
    """At least the last round; at most eight rounds, and at most 1 GiB."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[int, EndedRound] = OrderedDict()
        self.next_to_merge: int | None = None
        """The round after the last one that this worker's trainer has merged; None: it may have merged none."""
        self.max_mean_bytes = 1 << 40
        """A longer mean is refused before it is read."""

    def add(self, plan: Plan, mean: bytes) -> None:
        self._rounds[plan.key.sequence] = EndedRound(plan, mean)
        while len(self._rounds) > 1 and (
            len(self._rounds) > MAX_ROUNDS or sum(len(ended.mean) for ended in self._rounds.values()) > MAX_BYTES
        ):
            self._rounds.popitem(last=False)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._rounds

    def get(self, sequence: int) -> EndedRound | None:
        return self._rounds.get(sequence)
