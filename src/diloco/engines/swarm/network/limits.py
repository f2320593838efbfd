"""How much others can cause here: how often they may knock, how many of them are remembered. Reads no clock."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value")


@dataclass
class TokenBucket:
    """`burst` at once, then `per_second`. A clock that is set back gives nothing and takes nothing."""

    burst: float
    per_second: float
    left: float
    at: float

    @classmethod
    def full(cls, burst: float, per_second: float, now: float) -> "TokenBucket":
        return cls(burst, per_second, burst, now)

    def take(self, now: float) -> bool:
        self.left = min(self.burst, self.left + max(0.0, now - self.at) * self.per_second)
        self.at = now
        if self.left < 1:
            return False
        self.left -= 1
        return True


class LruCache(Generic[Value]):
    """The values of the last `most` names that were used; the one not used for longest makes room."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[str, Value] = {}

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def get(self, name: str) -> Value | None:
        if name not in self._values:
            return None
        value = self._values[name] = self._values.pop(name)
        return value

    def put(self, name: str, value: Value) -> None:
        self._values.pop(name, None)
        self._values[name] = value
        if len(self._values) > self._most:
            del self._values[next(iter(self._values))]

    def drop(self, name: str) -> None:
        self._values.pop(name, None)


class ConcurrencyLimit:
    """How many things of others are being done, for each peer and in all."""

    def __init__(self, per_peer: int, in_all: int) -> None:
        self._per_peer, self._in_all = per_peer, in_all
        self._taken: Counter[str] = Counter()

    def take(self, peer: str) -> bool:
        if self._taken[peer] >= self._per_peer or self._taken.total() >= self._in_all:
            return False
        self._taken[peer] += 1
        return True

    def give_back(self, peer: str) -> None:
        self._taken[peer] -= 1
        if not self._taken[peer]:
            del self._taken[peer]
