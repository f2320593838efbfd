"""How a peer stands to the others: it finds out whether they can call it, and keeps a place at a relay if they cannot.

Asked at the start, of whoever is known to be public; again later if nobody answered then, or when all relays are lost.
Every change is a new start of p2pd: connections end, and are made anew by the next call.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco.engines.swarm.network import multiaddr
from diloco.engines.swarm.network import reachability as reaching
from diloco.engines.swarm.network.addresses import ListenConfig
from diloco.engines.swarm.network.reachability import Reach, Seen
from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.errors import DiLoCoError

if TYPE_CHECKING:
    from diloco.engines.swarm.network.p2pd_transport import P2pdTransport

log = logging.getLogger(__name__)

_ASK_SECONDS = 5.0
_LOOK_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 5.0, 300.0


class Standing:
    def __init__(self, transport: "P2pdTransport", network: ListenConfig) -> None:
        self._transport, self._network = transport, network
        self._told = False
        """Somebody has said how this peer can be reached."""

    async def find_out(self, seeds: Iterable[str]) -> bool:
        """Whether others can call this peer; if not, it gets places at those who can be called. False: not known."""
        public = public_ones(seeds)
        if self._network.announce or not public:
            return False
        seen = await self._ask(public)
        if seen is None:
            return False
        self._told = True
        port, mine = await self._transport.own()
        if not seen.reachable:
            await self._get_place(public)
        elif seen.outside(port) not in mine and multiaddr.is_public(seen.outside(port)):
            self._network = replace(self._network, port=port)
            await self._transport.restart(Reach("open", outside=(seen.outside(port), *mine)), self._network)
        return True

    async def _ask(self, addresses: Sequence[str]) -> Seen | None:
        """All at once; the first that can tell."""
        asked = [asyncio.create_task(self._ask_one(address)) for address in addresses[: reaching.MAX_RELAYS]]
        try:
            for done in asyncio.as_completed(asked):
                seen = await done
                if seen is not None:
                    return seen
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)

    async def _ask_one(self, address: str) -> Seen | None:
        _, peer = multiaddr.split_peer(address)
        if peer == self._transport.peer:
            return None
        with contextlib.suppress(Unreachable, CallRefused):
            await self._transport.connect(peer, [address], _ASK_SECONDS)
            return await self._transport.ask_reach(peer)
        return None

    async def _get_place(self, relays: Sequence[str]) -> bool:
        await self._transport.restart(Reach("closed", relays=tuple(relays[: reaching.MAX_RELAYS])), self._network)
        end = time.monotonic() + _ASK_SECONDS
        while not await self._has_place():
            if time.monotonic() > end:
                log.warning("no relay has a place for this peer yet: others cannot call it, it can only call them")
                return False
            await asyncio.sleep(0.05)
        return True

    async def _has_place(self) -> bool:
        return any(multiaddr.CIRCUIT in address for address in await self._transport.addresses())

    async def look_after(self) -> None:
        """Until cancelled. Tries less and less often while it does not help."""
        pause = _FIRST_PAUSE
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                well = await self._is_well()
                pause = _FIRST_PAUSE if well else min(_LONGEST_PAUSE, 2 * pause)
                if not well:
                    await asyncio.sleep(pause)
            except Unreachable as problem:
                log.debug("this peer's standing cannot be looked after: %s", problem)
            except DiLoCoError as problem:
                self._transport.give_up(f"p2pd could not be started again: {problem}")
                return

    async def _is_well(self) -> bool:
        kind = self._transport.reach.kind
        if kind == "open" or (kind == "closed" and await self._has_place()):
            return True
        public = public_ones(self._transport.known())
        if kind == "unknown":
            return self._told or not public or await self.find_out(public)
        there = await asyncio.gather(*(answers_libp2p(address, _ASK_SECONDS) for address in public))
        answering = [address for address, answers in zip(public, there, strict=True) if answers]
        return bool(answering) and await self._get_place(answering)


def public_ones(addresses: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(a for a in addresses if multiaddr.is_public(a) and multiaddr.CIRCUIT not in a))


async def answers_libp2p(address: str, seconds: float) -> bool:
    """Whether somebody speaks libp2p there; not who."""
    if multiaddr.CIRCUIT in address or "/tcp/" not in address:
        return True  # p2pd must find out
    _, _, host, _, port, *_ = address.split("/")
    return await reaching.greets(host, int(port), seconds)
