"""The places of the readers of a member's state: few at a time, one for each member, and no slow reader keeps one.

A reader holds the snapshot that it reads in this machine's memory, so that there are few places. One that finds them
all taken waits for a turn; then the slowest reader gives up its place, if it is slower than the one that waits has been
so far. What a member's line has brought belongs to its key: a slow reader that comes again displaces no faster one,
and a newcomer may displace any. A reader that was displaced asks another member, or comes again.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from diloco.swarm.network.limits import LruCache
from diloco.swarm.network.transport import Unreachable
from diloco.swarm.node import clock

_MAX_READERS = 1024
"""Members whose rates are remembered."""


@dataclass(eq=False)
class ReaderPlace:
    peer: str
    since: float = field(default_factory=clock.now)
    sent_bytes: int = 0
    displaced: bool = False
    _task: "asyncio.Task[None] | None" = None

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.sent_bytes / max(1e-3, clock.now() - self.since)

    async def run(self, sending: Coroutine[Any, Any, None]) -> None:
        """Send, until the end or until another reader gets this place (Unreachable)."""
        self._task = asyncio.create_task(sending)
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.displaced:
                self._task.cancel()
                raise
            raise Unreachable(f"{self.peer} reads slowly, and another member waits") from None

    def displace(self) -> None:
        self.displaced = True
        if self._task is not None:
            self._task.cancel()


class Places:
    def __init__(self, number: int, turn_seconds: float) -> None:
        """`turn_seconds`: a reader keeps its place for so long in any case, and the next one waits for so long."""
        self._number = number
        self._turn = turn_seconds
        self._taken: dict[str, ReaderPlace] = {}
        self._rates: LruCache[float] = LruCache(_MAX_READERS)
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def take(self, peer: str) -> AsyncIterator[ReaderPlace]:
        """Wait for a place. A second request of a member takes the place of its first one."""
        if peer in self._taken:
            self._give_up(self._taken[peer])
        while len(self._taken) >= self._number:
            self._freed.clear()
            try:
                async with asyncio.timeout(self._turn):
                    await self._freed.wait()
            except TimeoutError:
                slowest = self._slowest(self._rates.get(peer))
                if slowest is not None:
                    self._give_up(slowest)
        place = self._taken[peer] = ReaderPlace(peer)
        try:
            yield place
        finally:
            self._leave(place)

    def _slowest(self, rate: float | None) -> ReaderPlace | None:
        """Find the reader that has had its turn and is the slowest, if it is slower than this rate."""
        old = [place for place in self._taken.values() if clock.now() - place.since >= self._turn]
        slowest = min(old, key=lambda place: place.rate, default=None)
        return slowest if slowest is not None and (rate is None or slowest.rate < rate) else None

    def _give_up(self, place: ReaderPlace) -> None:
        self._leave(place)
        place.displace()

    def _leave(self, place: ReaderPlace) -> None:
        if self._taken.get(place.peer) is place:
            del self._taken[place.peer]
            self._rates.put(place.peer, place.rate)
            self._freed.set()
