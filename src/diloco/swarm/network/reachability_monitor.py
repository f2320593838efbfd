"""Finds out whether others can connect to this peer, and keeps a reservation at a relay if they cannot.

Public peers are asked at the start; again later if none answered then, or when all relays are lost. Every change
restarts p2pd: its connections end, and the next call makes them anew.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from diloco.errors import DiLoCoError
from diloco.swarm.network import multiaddr
from diloco.swarm.network.addresses import ListenConfig
from diloco.swarm.network.reachability import DialBackResult, Reachability, speaks_libp2p
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.protocol import timing

log = logging.getLogger(__name__)

_MAX_RELAYS = 8


class MonitoredTransport(Protocol):
    """What the monitor needs of a P2pdTransport."""

    peer: str
    reachability: Reachability

    async def restart(self, reachability: Reachability, config: ListenConfig) -> None: ...
    def fail(self, reason: str) -> None: ...
    def known_addresses(self) -> list[str]: ...
    async def addresses(self) -> list[str]: ...
    async def port_and_addresses(self) -> tuple[int, list[str]]: ...
    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None: ...
    async def ask_dial_back(self, peer: str) -> DialBackResult | None: ...


class ReachabilityMonitor:
    def __init__(self, transport: MonitoredTransport, config: ListenConfig) -> None:
        self._transport, self._config = transport, config
        self._was_told = False
        """A public peer has said whether this one can be reached."""

    async def find_out(self, seeds: Iterable[str]) -> bool:
        """Ask the public ones of these addresses, and restart p2pd to suit the answer. False: none could tell."""
        public = public_addresses(seeds)
        if self._config.announce or not public:
            return False
        result = await self._ask_first(public)
        if result is None:
            return False
        self._was_told = True
        port, own = await self._transport.port_and_addresses()
        if not result.reachable:
            await self._reserve(public)
            return True
        seen_at = result.address(port)
        if seen_at not in own and multiaddr.is_public(seen_at):
            self._config = replace(self._config, port=port)
            await self._transport.restart(Reachability("public", seen_at=(seen_at, *own)), self._config)
        return True

    async def _ask_first(self, addresses: Sequence[str]) -> DialBackResult | None:
        """All are asked at once; the first answer counts."""
        asked = [asyncio.create_task(self._ask(address)) for address in addresses[:_MAX_RELAYS]]
        try:
            for done in asyncio.as_completed(asked):
                result = await done
                if result is not None:
                    return result
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.wait(asked)

    async def _ask(self, address: str) -> DialBackResult | None:
        _, peer = multiaddr.split_peer(address)
        if peer == self._transport.peer:
            return None
        with contextlib.suppress(Unreachable, CallRefused):
            await self._transport.connect(peer, [address], timing.REACHABLE_ASK_SECONDS)
            return await self._transport.ask_dial_back(peer)
        return None

    async def _reserve(self, relays: Sequence[str]) -> bool:
        """Restart p2pd with these relays; whether one of them has given a reservation."""
        await self._transport.restart(Reachability("private", relays=tuple(relays[:_MAX_RELAYS])), self._config)
        end = time.monotonic() + timing.REACHABLE_ASK_SECONDS
        while not await self._has_reservation():
            if time.monotonic() > end:
                log.warning("no relay has accepted this peer yet: it can call others, but others cannot call it")
                return False
            await asyncio.sleep(0.05)
        return True

    async def _has_reservation(self) -> bool:
        return any(multiaddr.CIRCUIT in address for address in await self._transport.addresses())

    async def run(self) -> None:
        """Until cancelled. Attempts that do not help become rarer."""
        pause = timing.REACHABLE_FIRST_PAUSE
        while True:
            await asyncio.sleep(timing.REACHABLE_CHECK_SECONDS)
            try:
                reachable = await self._check()
                pause = timing.REACHABLE_FIRST_PAUSE if reachable else min(timing.REACHABLE_LONGEST_PAUSE, 2 * pause)
                if not reachable:
                    await asyncio.sleep(pause)
            except Unreachable as problem:
                log.debug("this peer's reachability cannot be checked now: %s", problem)
            except DiLoCoError as problem:
                self._transport.fail(f"p2pd could not be started again: {problem}")
                return

    async def _check(self) -> bool:
        """True if nothing needed to be done, or if it was done."""
        kind = self._transport.reachability.kind
        if kind == "public" or (kind == "private" and await self._has_reservation()):
            return True
        public = public_addresses(self._transport.known_addresses())
        if kind == "unknown":
            return self._was_told or not public or await self.find_out(public)
        answers = await asyncio.gather(*(answers_libp2p(address, timing.REACHABLE_ASK_SECONDS) for address in public))
        relays = [address for address, answered in zip(public, answers, strict=True) if answered]
        return bool(relays) and await self._reserve(relays)


def public_addresses(addresses: Iterable[str]) -> list[str]:
    """Those that are public and lead to their peer directly."""
    return list(dict.fromkeys(a for a in addresses if multiaddr.is_public(a) and multiaddr.CIRCUIT not in a))


async def answers_libp2p(address: str, seconds: float) -> bool:
    """Whether a peer answers there, whichever it is. True for an address through a relay: only p2pd can try that."""
    if multiaddr.CIRCUIT in address or "/tcp/" not in address:
        return True
    _, _, host, _, port, *_ = address.split("/")
    return await speaks_libp2p(host, int(port), seconds)
