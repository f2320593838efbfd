"""Several members can give one state, and the first that does is enough.

They are asked in their order. While the one that is asked makes no progress the next is asked beside it: a member that
is slow, on purpose or not, holds up a joiner no longer than that. An honest line that is as slow costs bytes, no time:
the first state that is whole counts.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from diloco.swarm.node import clock
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.membership import Peer

_AT_ONCE = 2
_T = TypeVar("_T")


@dataclass
class Attempt:
    """A source that is asked, and when a piece of the state last came from it."""

    source: Peer
    moved_at: float = field(default_factory=clock.now)

    def moved(self) -> None:
        self.moved_at = clock.now()


async def fetch_first(
    sources: Sequence[Peer], fetch: Callable[[Attempt], Awaitable[_T | None]], patience_seconds: float
) -> tuple[_T | None, list[Peer]]:
    """What the first source gives, None if none gives it; and those that were asked before and had not ended.

    `patience_seconds`: without progress until another one is asked.
    """
    rest, running = list(sources), dict[asyncio.Task[_T | None], Attempt]()
    try:
        while rest or running:
            quiet = all(clock.now() - attempt.moved_at > patience_seconds for attempt in running.values())
            if rest and quiet and len(running) < _AT_ONCE:
                attempt = Attempt(rest.pop(0))
                running[asyncio.ensure_future(fetch(attempt))] = attempt
            done, _ = await asyncio.wait(running, timeout=timing.POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = running.pop(task).source
                if (fetched := task.result()) is not None:
                    earlier = sources[: sources.index(source)]
                    return fetched, [one.source for one in running.values() if one.source in earlier]
        return None, []
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
