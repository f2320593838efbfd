"""Whether other peers can connect to this one, and how they find that out for each other.

*public*: others can connect to it directly; it also relays for peers that are private.
*private*: behind a router or firewall; it holds reservations at public peers, and others reach it through them.
*unknown*: there was no public peer to ask, as in a local network; right there, and checked again later.

A peer asks a public one to connect back to it (`DialBack`). Every peer may ask, of this run or not.
"""

import asyncio
import contextlib
import ipaddress
import socket
import time
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec

from diloco.swarm.network import multiaddr
from diloco.swarm.network.addresses import ListenConfig
from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.p2pd.control import Control
from diloco.swarm.protocol import timing

Kind = Literal["public", "private", "unknown"]

_GREETING = b"\x13/multistream/1.0.0\n"
_BURST, _PER_SECOND, _MAX_PEERS = 1, 1.0, 1024
_MAX_AT_A_TIME = 8
_MAX_REQUEST_BYTES = 64


@dataclass(frozen=True)
class Reachability:
    """How this peer can be reached, as far as is known."""

    kind: Kind = "unknown"
    seen_at: tuple[str, ...] = ()
    """The addresses where others see it, to be announced."""
    relays: tuple[str, ...] = ()
    """The addresses of the relays that a private peer uses."""


def guess_reachability(config: ListenConfig) -> Reachability:
    """Before any peer was asked: public if an address of this machine, or an announced one, is public."""
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
    """The addresses that this machine would use towards the internet. Nothing is sent."""
    found = []
    for family, target in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 53))
            found.append(ipaddress.ip_address(probe.getsockname()[0]))
    return found


class DialBackRequest(msgspec.Struct):
    """Please connect to the address that I come from, at this port."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]


class DialBackResult(msgspec.Struct, frozen=True):
    """The address that the asking peer comes from, and whether it can be reached there at the port it named."""

    ip: str
    reachable: bool

    def address(self, port: int) -> str:
        return f"/ip{ipaddress.ip_address(self.ip).version}/{self.ip}/tcp/{port}"


def encode_request(port: int) -> bytes:
    return msgspec.json.encode(DialBackRequest(port))


def decode_result(data: bytes) -> DialBackResult | None:
    """None: the other peer could not find out, or its answer is not valid."""
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
        """An encoded DialBackResult, or null if this peer cannot or will not find out."""
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
    """Whether something at this address answers libp2p's greeting."""
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
