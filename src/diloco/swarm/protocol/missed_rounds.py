"""How many rounds of work a worker's contribution counts as at most: one, and one more for each round that it missed.

A worker that missed rounds has the work of several behind its next contribution (I6); one whose work is in the last
mean of a fragment has that of one round, whatever it claims. The leader writes into the plan what it has seen; each
worker compares that with what it has seen itself, and refuses a plan in which a contribution may count as more; then
all count as one round. What a node has not seen it does not refuse.

Rounds that failed were missed by all. A node that has missed a round itself begins anew: as a leader it believes what
workers claim that it has not seen since, and the others, which have, refuse a false claim.
"""

import math
from collections import deque
from collections.abc import Iterable

from diloco.core.merging import MAX_WEIGHT_ROUNDS
from diloco.swarm.protocol.plan import Entry, Plan


class MissedRounds:
    def __init__(self) -> None:
        self._rounds: dict[int, deque[frozenset[str]]] = {}
        """Fragment -> the contributors to its last rounds, without a gap; the latest last."""
        self._forgot = False

    def record(self, fragment: int, contributors: Iterable[str]) -> None:
        """A round of this worker has ended; without contributors if it failed."""
        self._rounds.setdefault(fragment, deque(maxlen=MAX_WEIGHT_ROUNDS)).append(frozenset(contributors))

    def forget(self) -> None:
        """This worker has taken over the others' state, with rounds in it that it has not seen."""
        self._rounds.clear()
        self._forgot = True

    def rounds_of(self, fragment: int, entries: Iterable[Entry]) -> tuple[int, ...]:
        """Return the rounds of work that each entry of a plan counts as at most; () if each counts as one."""
        rounds = tuple(min(MAX_WEIGHT_ROUNDS, self._rounds_of(fragment, entry)) for entry in entries)
        return rounds if any(count > 1 for count in rounds) else ()

    def _rounds_of(self, fragment: int, entry: Entry) -> int:
        missed, seen = self._missed(fragment, entry.peer)
        claim = entry.parsed.claim
        if seen or not self._forgot or not claim.round_weight > 0:
            return 1 + missed
        return max(1, math.ceil(min(claim.weight / claim.round_weight, MAX_WEIGHT_ROUNDS)))

    def find_excess(self, plan: Plan) -> str | None:
        """Find a worker that counts as more rounds of work in this plan than it can have, as this node has seen."""
        for entry, count in zip(plan.entries, plan.rounds, strict=False):
            missed, seen = self._missed(plan.key.fragment, entry.peer)
            if seen and count > 1 + missed:
                return entry.peer
        return None

    def _missed(self, fragment: int, peer: str) -> tuple[int, bool]:
        """Return the last rounds of a fragment without this peer, and whether it was in the one before."""
        rounds = self._rounds.get(fragment, ())
        for missed, contributors in enumerate(reversed(rounds)):
            if peer in contributors:
                return missed, True
        return len(rounds), False
