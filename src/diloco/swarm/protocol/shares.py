"""How the leader shares out the reduction of a round: which contributors reduce parts, and how many.

Every contributor exchanges parts with every reducer, and with no other worker. So

    bad pairs    two workers that cannot reach each other reduce nothing, and are both in the round: each exchanges its
                 parts with the others. A pair is bad while one of them does not name the other as live in its beats,
                 and for a while after a transfer between them has failed: a minute, then twice as long each time.
                 If no worker is left to reduce after that, those in most bad pairs are left out of the round
    slow lines   a worker whose parts arrive at less than half the usual rate reduces fewer parts, or none
    withheld     a worker that did not send the mean of its range, as several say, reduces nothing for ten minutes, then
                 for twice as long each time: its contribution counts as before

A mean has the same bits however it is shared out: each part is added up in worker order and encoded once.
"""

import statistics
from collections.abc import Sequence
from itertools import combinations

from diloco.swarm import timing
from diloco.swarm.network.limits import LruCache
from diloco.swarm.protocol.membership import Membership
from diloco.swarm.protocol.plan import MAX_WORKERS, Plan
from diloco.swarm.protocol.transfer_times import TransferTimes

_FULL = 4
_MAX_PAIRS = 4096


class Shares:
    def __init__(self, members: Membership, transfers: TransferTimes) -> None:
        self._members = members
        self._transfers = transfers
        self._failed: LruCache[tuple[float, float]] = LruCache(_MAX_PAIRS)
        """Pair -> until when it counts as bad, and for how long it did the last time."""
        self._withheld: LruCache[tuple[float, float]] = LruCache(MAX_WORKERS)
        """The same for a worker that did not send its means."""

    def record_failure(self, one: str, other: str) -> bool:
        """A transfer between two live workers has failed; return whether that is news."""
        return self._put_off(self._failed, _pair(one, other), timing.BAD_PAIR_SECONDS)

    def record_withheld(self, peer: str) -> bool:
        """A live worker has not sent the mean of its range; return whether that is news."""
        return self._put_off(self._withheld, peer, timing.WITHHELD_SECONDS)

    def is_blocked(self, plan: Plan) -> bool:
        """Whether a worker that reduces parts in this plan has lost another one since, and others can do without it."""
        apart = self._apart([entry.peer for entry in plan.entries])
        return not apart.isdisjoint(plan.reducers) and bool(self.make(plan))

    def make(self, plan: Plan) -> tuple[int, ...]:
        """Share out the reduction. Returns the share of each entry; () if all have the same one, or none can exchange
        parts with all others. Only contributors reduce: it is () too where none but others have a share."""
        names = [entry.peer for entry in plan.entries]
        contributing = {entry.peer for entry in plan.contributors}
        without = self._apart(names) | {name for name in names if self._is_off(self._withheld, name)}
        shares = tuple(0 if name in without else share for name, share in zip(names, self._by_rate(names), strict=True))
        of_reducers = [share for name, share in zip(names, shares, strict=True) if name in contributing]
        return () if not any(of_reducers) or len(set(shares)) == 1 else shares

    def cut_off(self, plan: Plan) -> set[str]:
        """Return the workers without which a contributor can reduce again, where every one is in a bad pair: those in
        most bad pairs first; none if it is not clear which these are."""
        rest = [entry.peer for entry in plan.entries]
        contributing = {entry.peer for entry in plan.contributors}
        out = set[str]()
        while contributing.intersection(rest) <= self._apart(rest):
            bad = {name: sum(self._is_off(self._failed, _pair(name, other)) for other in rest) for name in rest}
            own = {name: self._is_off(self._failed, _pair(name, self._members.me)) for name in rest}  # no other's word
            worst = max(rest, key=lambda name: (bad[name], own[name]), default=None)
            if worst is None or bad[worst] < 2:
                return set()
            out.add(worst)
            rest.remove(worst)
        return out

    def _apart(self, names: Sequence[str]) -> set[str]:
        """Return the workers that are in a bad pair."""
        return {name for pair in combinations(names, 2) if self._is_bad(*pair) for name in pair}

    def _is_bad(self, one: str, other: str) -> bool:
        return self._is_off(self._failed, _pair(one, other)) or not (self._sees(one, other) and self._sees(other, one))

    def _sees(self, one: str, other: str) -> bool:
        """Whether `one` names `other` as live. This node sees all workers of its own plans, and so does a peer that has
        named none."""
        peer = self._members.peers.get(one)
        return peer is None or peer.knows is None or other[-8:] in peer.knows

    def _by_rate(self, names: Sequence[str]) -> list[int]:
        rates = [self._transfers.rate(name) for name in names]
        known = [rate for rate in rates if rate is not None]
        usual = statistics.median_high(known) if known else 0.0
        return [_FULL if rate is None or not usual else _share(rate / usual) for rate in rates]

    def _put_off(self, until: LruCache[tuple[float, float]], name: str, seconds: float) -> bool:
        """Suspend `name`, doubling each time; False if it is suspended already."""
        if self._is_off(until, name):
            return False
        _, before = until.get(name) or (0.0, seconds / 2)
        longer = min(timing.LONGEST_BAD_SECONDS, 2 * before)
        until.put(name, (self._members.now() + longer, longer))
        return True

    def _is_off(self, until: LruCache[tuple[float, float]], name: str) -> bool:
        return self._members.now() < (until.get(name) or (0.0, 0.0))[0]


def _share(part: float) -> int:
    """4, 2, 1 or none, for a line that has at least a half, a quarter, an eighth of the usual rate, or less."""
    return next((share for share in (_FULL, 2, 1) if 8 * part >= share), 0)


def _pair(one: str, other: str) -> str:
    return "|".join(sorted((one, other)))
