"""Limits on what other peers can make this one do and remember. Nothing here reads a clock."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass
class TokenBucket:
    """Allows `burst` events at once, then `per_second`. A clock that is set back adds and removes nothing."""

    burst: float
    per_second: float
    tokens: float
    updated_at: float

    @classmethod
    def full(cls, burst: float, per_second: float, now: float) -> "TokenBucket":
        return cls(burst, per_second, burst, now)

    def take(self, now: float) -> bool:
        """Return whether one more event is allowed now; if so, it is counted."""
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.updated_at) * self.per_second)
        self.updated_at = now
        if self.tokens < 1:
            return False
        self.tokens -= 1
        return True


class LruCache(Generic[Value]):
    """Values by name, at most `max_entries`; the least recently used makes room."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: dict[str, Value] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Value | None:
        """Return the value, which counts as used now; None if there is none."""
        if name not in self._values:
            return None
        value = self._values.pop(name)
        self._values[name] = value
        return value

    def put(self, name: str, value: Value) -> None:
        self._values.pop(name, None)
        self._values[name] = value
        if len(self._values) > self._max_entries:
            del self._values[next(iter(self._values))]

    def drop(self, name: str) -> None:
        self._values.pop(name, None)


class PeerRateLimit:
    """A token bucket for each peer, of the `max_peers` that came last."""

    def __init__(self, burst: float, per_second: float, max_peers: int) -> None:
        self._burst = burst
        self._per_second = per_second
        self._buckets: LruCache[TokenBucket] = LruCache(max_peers)

    def take(self, peer: str, now: float) -> bool:
        bucket = self._buckets.get(peer)
        if bucket is None:
            bucket = TokenBucket.full(self._burst, self._per_second, now)
            self._buckets.put(peer, bucket)
        return bucket.take(now)

    def give_back(self, peer: str) -> None:
        """Take back one event, which does not count after all."""
        bucket = self._buckets.get(peer)
        if bucket is not None:
            bucket.tokens = min(bucket.burst, bucket.tokens + 1)


class ConcurrencyLimit:
    """Bounds the requests that are handled at a time: at most `per_peer` of one peer and `in_all` of all peers."""

    def __init__(self, per_peer: int, in_all: int) -> None:
        self._per_peer = per_peer
        self._in_all = in_all
        self._running: Counter[str] = Counter()

    def acquire(self, peer: str) -> bool:
        """Count one more request; False if the limit is reached, else `release` must follow."""
        if self._running[peer] >= self._per_peer or self._running.total() >= self._in_all:
            return False
        self._running[peer] += 1
        return True

    def release(self, peer: str) -> None:
        self._running[peer] -= 1
        if not self._running[peer]:
            del self._running[peer]
