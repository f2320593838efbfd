"""Whether other peers can connect to this one, and how they find that out for each other.

*public*: others can connect to it directly; it also relays for peers that are private.
*private*: behind a router or firewall; it holds reservations at public peers, and others reach it through them.
*unknown*: there was no public peer to ask, as in a local network; right there, and checked again later.

A peer asks a public one to connect back to it (`DialBack`). Every peer may ask, of this run or not.
"""

import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Protocol

import msgspec

from diloco.errors import DiLoCoError
from diloco.swarm import timing
from diloco.swarm.network import multiaddr
from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.control import Control
from diloco.swarm.network.transport import CallRefused, Unreachable

log = logging.getLogger(__name__)

Kind = Literal["public", "private", "unknown"]

_GREETING = b"\x13/multistream/1.0.0\n"
_BURST = 1
_PER_SECOND = 1.0
_MAX_PEERS = 1024
_MAX_AT_A_TIME = 8
_MAX_REQUEST_BYTES = 64
_MAX_RELAYS = 8
"""Public peers that are asked, or used as relays, at a time."""


@dataclass(frozen=True)
class Reachability:
    """The ways in which this peer can be reached, as far as they are known."""

    kind: Kind = "unknown"
    seen_at: tuple[str, ...] = ()
    """The addresses where others see it, to be announced."""
    relays: tuple[str, ...] = ()
    """The addresses of the relays that a private peer uses."""


def guess_reachability(config: ListenConfig) -> Reachability:
    """Return the guess before any peer was asked: public if an address of this machine, or an announced one, is
    public."""
    if config.guest:
        return Reachability()
    if config.announce:
        addresses = config.announced_addresses()
    elif config.host is not None:
        addresses = config.listen_addresses()
    else:
        addresses = [f"/ip{ip.version}/{ip}" for ip in own_addresses()]
    return Reachability("public" if any(map(multiaddr.is_public, addresses)) else "unknown")


def own_addresses() -> list[multiaddr.IpAddress]:
    """Return the addresses that this machine would use towards the internet. Nothing is sent."""
    addresses = []
    for family, target in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 53))
            addresses.append(ipaddress.ip_address(probe.getsockname()[0]))
    return addresses


class DialBackRequest(msgspec.Struct):
    """The request to connect to the address that the sender comes from, at this port."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class DialBackResult(msgspec.Struct, frozen=True):
    """The address that the asking peer comes from, and whether it can be reached there at the port it named."""

    ip: str
    reachable: bool

    def address(self, port: int) -> str:
        return f"/ip{ipaddress.ip_address(self.ip).version}/{self.ip}/tcp/{port}"


def encode_dial_back(port: int) -> bytes:
    return msgspec.json.encode(DialBackRequest(port))


def decode_dial_back(data: bytes) -> DialBackResult | None:
    """Read the result; None if the other peer could not find out, or if its answer is not valid."""
    try:
        result = msgspec.json.decode(data, type=DialBackResult | None)
        if result is not None:
            ipaddress.ip_address(result.ip)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    return result


class DialBack:
    """Answers DialBackRequests: connects to the address that the asking peer comes from, and to no other."""

    def __init__(self) -> None:
        self._rate = PeerRateLimit(_BURST, _PER_SECOND, _MAX_PEERS)
        self._running = 0

    async def answer(self, control: Control, peer: str, request: bytes) -> bytes:
        """Return an encoded DialBackResult, or null if this peer cannot or will not find out."""
        if len(request) > _MAX_REQUEST_BYTES or self._running >= _MAX_AT_A_TIME:
            return b"null"
        if not self._rate.take(peer, time.monotonic()):
            return b"null"
        try:
            port = msgspec.json.decode(request, type=DialBackRequest).port
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return b"null"
        direct = [a for a in (await control.list_peers()).get(peer, []) if multiaddr.CIRCUIT not in a]
        ip = next(filter(None, map(multiaddr.ip_of, direct)), None)
        if ip is None:
            return b"null"
        self._running += 1
        try:
            reachable = await speaks_libp2p(str(ip), port, timing.DIAL_BACK_SECONDS)
        finally:
            self._running -= 1
        return msgspec.json.encode(DialBackResult(str(ip), reachable))


async def speaks_libp2p(host: str, port: int, seconds: float) -> bool:
    """Return whether something at this address answers libp2p's greeting."""
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_GREETING)
                return await reader.readexactly(len(_GREETING)) == _GREETING
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False


class MonitoredTransport(Protocol):
    """The part of a P2pdTransport that the monitor uses."""

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
    """Finds out whether others can connect to this peer, and keeps a reservation at a relay if they cannot.

    Public peers are asked at the start; again later if none answered then, or when all relays are lost. Every change
    restarts p2pd: its connections end, and the next call makes them anew.
    """

    def __init__(self, transport: MonitoredTransport, config: ListenConfig) -> None:
        self._transport = transport
        self._config = config
        self._was_told = False
        """A public peer has said whether this one can be reached."""

    async def find_out(self, seeds: Iterable[str]) -> bool:
        """Ask the public ones of these addresses, and restart p2pd to suit the answer; False if none could tell."""
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
        """Ask all at once; the first answer counts."""
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
        """Restart p2pd with these relays; return whether one of them has given a reservation."""
        await self._transport.restart(Reachability("private", relays=tuple(relays[:_MAX_RELAYS])), self._config)
        end = time.monotonic() + timing.REACHABLE_ASK_SECONDS
        while not await self._has_reservation():
            if time.monotonic() > end:
                log.warning("no relay has accepted this peer yet: it can call others, but others cannot call it")
                return False
            await asyncio.sleep(timing.RESERVATION_POLL_SECONDS)
        return True

    async def _has_reservation(self) -> bool:
        return any(multiaddr.CIRCUIT in address for address in await self._transport.addresses())

    async def run(self) -> None:
        """Keep watch until cancelled. Attempts that do not help become rarer."""
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
        """Do what is needed now; True if that was nothing, or if it is done."""
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
    """Find the addresses among these that are public and lead to their peer directly."""
    return list(dict.fromkeys(a for a in addresses if multiaddr.is_public(a) and multiaddr.CIRCUIT not in a))


async def answers_libp2p(address: str, seconds: float) -> bool:
    """Return whether a peer answers at this address, whichever it is.

    An address through a relay counts as one that answers: only p2pd can try it.
    """
    if multiaddr.CIRCUIT in address or "/tcp/" not in address:
        return True
    _, _, host, _, port, *_ = address.split("/")
    return await speaks_libp2p(host, int(port), seconds)
