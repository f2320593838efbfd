"""How long the transfer of a round takes, as this worker has seen it, how long one may take at most, and at which rate
each worker sends.

All participants of a transfer wait for the slowest, so its time is known of each of them. A participant that has not
voted in time is left behind, and the next transfer waits for it for longer: its line may have become slower.
"""

import math
from collections.abc import Iterable, Mapping

from diloco.swarm import timing
from diloco.swarm.network.limits import LruCache
from diloco.swarm.protocol.plan import MAX_WORKERS, Plan


class TransferTimes:
    def __init__(self) -> None:
        self._seconds: LruCache[float] = LruCache(MAX_WORKERS)
        """The seconds of the last transfer that each peer took part in."""
        self._rates: LruCache[float] = LruCache(MAX_WORKERS)
        """Bytes a second from each peer, in the last transfer that had enough of them."""

    def record(self, plan: Plan, seconds: float, rates: Mapping[str, float]) -> None:
        for entry in plan.contributors:
            self._seconds.put(entry.peer, seconds)
        for peer, rate in rates.items():
            self._rates.put(peer, rate)

    def rate(self, peer: str) -> float | None:
        """Return bytes a second; None if it is not known."""
        return self._rates.get(peer)

    def expect_slower(self, peers: Iterable[str], least: float) -> None:
        """Allow peers that were left behind twice their expected time in the next transfer, at least `least`."""
        for peer in peers:
            self._seconds.put(peer, max(least, 2.0 * (self._seconds.get(peer) or 0.0)))

    def grace(self, plan: Plan, least: float, unknown: float) -> float:
        """Return how long the last votes may take once most are there: as long as a transfer, `unknown` if a worker is
        new."""
        known = [self._seconds.get(entry.peer) for entry in plan.contributors]
        return max([least, *(unknown if seconds is None else seconds for seconds in known)])

    def limit(self, plan: Plan, least: float) -> float:
        """Twice the longest of its contributors' last transfers, at least `least`; inf while one of them is new."""
        known = [self._seconds.get(entry.peer) for entry in plan.contributors]
        longest = max((math.inf if seconds is None else seconds for seconds in known), default=math.inf)
        return max(least, timing.TRANSFER_SHARE * longest)

    def seconds_for_parts(self, plan: Plan, lost_seconds: float) -> float:
        """Return how long a worker may take before its next parts arrive."""
        return min(
            timing.MOST_TRANSFER_SHARE * lost_seconds, self.limit(plan, timing.LEAST_TRANSFER_SHARE * lost_seconds)
        )
