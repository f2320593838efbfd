"""How the leader shares out the reduction of a round: which contributors reduce parts, and how many.

Every contributor exchanges parts with every reducer, and with no other worker. So

    bad pairs    two workers that cannot reach each other reduce nothing, and are both in the round: each exchanges its
                 parts with the others. A pair is bad while one of them does not name the other as live in its beats,
                 and for a while after a transfer between them has failed: a minute, then twice as long each time
    slow lines   a worker whose parts arrive at less than half the usual rate reduces fewer parts, or none

A mean has the same bits however it is shared out: each part is added up in worker order and encoded once.
"""

import statistics
from collections.abc import Sequence
from itertools import combinations

from diloco.engines.swarm.network.limits import LruCache
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.membership.members import Members
from diloco.engines.swarm.node.plan import Entry, Plan
from diloco.engines.swarm.node.rounds.transfer_times import TransferTimes

_FULL = 4
_BAD_SECONDS, _LONGEST_BAD_SECONDS = 60.0, 3600.0
_MAX_PAIRS = 4096


class Shares:
    def __init__(self, members: Members, transfers: TransferTimes) -> None:
        self._members, self._transfers = members, transfers
        self._failed: LruCache[tuple[float, float]] = LruCache(_MAX_PAIRS)
        """Pair -> until when it counts as bad, and for how long it did the last time."""

    def record_failure(self, one: str, other: str) -> bool:
        """A transfer between two live workers has failed; whether that is news."""
        pair = _pair(one, other)
        until, seconds = self._failed.get(pair) or (0.0, _BAD_SECONDS / 2)
        if clock.now() < until:
            return False
        seconds = min(_LONGEST_BAD_SECONDS, 2 * seconds)
        self._failed.put(pair, (clock.now() + seconds, seconds))
        return True

    def is_blocked(self, plan: Plan) -> bool:
        """Whether a worker that reduces parts in this plan has lost another one since, and others can do without it."""
        apart = self._apart([entry.peer for entry in plan.entries])
        reducing = (
            [e.peer for e, share in zip(plan.entries, plan.shares, strict=False) if share] if plan.shares else apart
        )
        return not apart.isdisjoint(reducing) and bool(self.make(plan.entries))

    def make(self, entries: Sequence[Entry]) -> tuple[int, ...]:
        """The share of each; () if all have the same one, or none can exchange parts with all others."""
        names = [entry.peer for entry in entries]
        apart = self._apart(names)
        shares = tuple(0 if name in apart else share for name, share in zip(names, self._by_rate(names), strict=True))
        return () if not any(shares) or len(set(shares)) == 1 else shares

    def _apart(self, names: Sequence[str]) -> set[str]:
        """The workers that are in a bad pair."""
        return {name for pair in combinations(names, 2) if self._is_bad(*pair) for name in pair}

    def _is_bad(self, one: str, other: str) -> bool:
        until, _ = self._failed.get(_pair(one, other)) or (0.0, 0.0)
        return clock.now() < until or not (self._sees(one, other) and self._sees(other, one))

    def _sees(self, one: str, other: str) -> bool:
        """As far as `one` has said; this node itself sees all that are in a plan of its own."""
        peer = self._members.peers.get(one)
        return peer is None or peer.knows is None or other[-8:] in peer.knows

    def _by_rate(self, names: Sequence[str]) -> list[int]:
        rates = [self._transfers.rate(name) for name in names]
        known = [rate for rate in rates if rate is not None]
        usual = statistics.median_high(known) if known else 0.0
        return [_FULL if rate is None or not usual else _share(rate / usual) for rate in rates]


def _share(part: float) -> int:
    """4, 2, 1 or none, for a line that has at least a half, a quarter, an eighth of the usual rate, or less."""
    return next((share for share in (_FULL, 2, 1) if 8 * part >= share), 0)


def _pair(one: str, other: str) -> str:
    return "|".join(sorted((one, other)))
