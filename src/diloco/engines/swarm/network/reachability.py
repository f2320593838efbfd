"""Whether others can reach this peer, and how: what it tells p2pd about that, and how peers find it out for each other.

A peer that others can call is *open*: it also relays for those that are not. A peer behind a router or firewall is
*closed*: it keeps a place at one or more open peers, and others reach it through them. A peer that has nobody to ask,
or is alone in its own network, is *unknown*. Nothing here knows who belongs to the run: an answer costs little.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
import time
from dataclasses import dataclass, replace
from typing import Literal

from diloco.engines.swarm.network import multiaddr
from diloco.engines.swarm.network.addresses import ListenConfig
from diloco.engines.swarm.network.p2pd import Daemon, check_ports
from diloco.engines.swarm.network.p2pd_control import Control, DaemonError, DaemonGone
from diloco.errors import ConfigError, RendezvousError

Kind = Literal["open", "closed", "unknown"]

_GREETING = b"\x13/multistream/1.0.0\n"
_HOP = "/libp2p/circuit/relay/0.2.0/hop"
_RELAY_BYTES = 1 << 40
_RELAY_TIME = "720h"
_RELAY_CIRCUITS = 256
_RELAY_STARTS = 6
_ONE_PROCESSOR = {"GOMAXPROCS": "1"}
"""With more, the wrong one of p2pd's two relays wins more often than not; see `_relays_well`."""
_PROBE_SECONDS = 3.0
_DIAL_BACK_SECONDS = 1.5
"""A router that drops what it does not know makes the asker wait so long; one lost packet is made up for."""
_PAUSE_SECONDS = 1.0
_PROBES_AT_A_TIME = 8
MAX_RELAYS = 8


@dataclass(frozen=True)
class Reach:
    """How this peer can be reached, as far as is known; at `outside` if others see it there, or through `relays`."""

    kind: Kind = "unknown"
    outside: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()

    def arguments(self, network: ListenConfig) -> list[str]:
        """p2pd's. Raises if the port is taken, or something was written that cannot be."""
        listening = network.listen_addresses()
        told = network.announced_addresses()
        check_ports(listening)
        arguments = [f"-hostAddrs={','.join(listening)}"]
        if told or self.outside:
            arguments.append(f"-announceAddrs={','.join([*told, *self.outside])}")
        if self.kind == "open":
            limits = [f"-relayDataLimit={_RELAY_BYTES}", f"-relayTimeLimit={_RELAY_TIME}"]
            return [*arguments, "-forceReachabilityPublic", *limits, f"-relayMaxCircuits={_RELAY_CIRCUITS}"]
        if self.kind == "closed":
            client = [
                "-dhtClient",
                "-relayDiscovery=0",
            ]  # p2pd insists on a DHT; without bootstrap peers it stays alone
            places = f"-trustedRelays={','.join(self.relays)}"
            return [*arguments, "-autoRelay", "-forceReachabilityPrivate", places, *client]
        return arguments


def first_guess(network: ListenConfig) -> Reach:
    """Before anybody has been asked: open if an address of this machine, or one that the user told, is public."""
    if network.guest:
        return Reach()
    if network.announce:
        told = network.announced_addresses()
        return Reach("open" if any(map(multiaddr.is_public, told)) else "unknown")
    if network.host is not None:
        mine = network.listen_addresses()
    else:
        mine = [f"/ip{ip.version}/{ip}" for ip in own_addresses()]
    return Reach("open" if any(map(multiaddr.is_public, mine)) else "unknown")


def own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Those that this machine would use towards the internet. Nothing is sent."""
    found = []
    for family, target in ((socket.AF_INET, "8.8.8.8"), (socket.AF_INET6, "2001:4860:4860::8888")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 53))
            found.append(ipaddress.ip_address(probe.getsockname()[0]))
    return found


async def start(reach: Reach, network: ListenConfig, common: list[str]) -> Daemon:
    """A daemon for that; an open one relays as much as it should.

    Where any port will do it is chosen here, so that IPv4 and IPv6 have the same: who sees this peer come over one of
    them is told the port of both.
    """
    for _ in range(_RELAY_STARTS):
        tried = network if network.port is not None else replace(network, port=_free_port())
        if reach.kind != "open":
            return await Daemon.start([*common, *reach.arguments(tried)])
        daemon = await Daemon.start([*common, *reach.arguments(tried)], _ONE_PROCESSOR)
        if await _relays_well(daemon, common, tried.listen_addresses()):
            return daemon
        await daemon.stop()
    raise RendezvousError(
        f"p2pd did not come up as a relay in {_RELAY_STARTS} starts; start again, or listen at a private address only"
    )


def _free_port() -> int:
    with socket.socket() as probe:  # that of IPv4 is free for IPv6 too, but for a rare neighbour; p2pd then says so
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


async def _relays_well(daemon: Daemon, common: list[str], listening: list[str]) -> bool:
    """p2pd starts two relays, ours and one for 128 KiB a connection; which one answers is a matter of luck. Ask."""
    flags = [flag for flag in common if not flag.startswith("-id=")]
    visitor = await Daemon.start([*flags, "-noListenAddrs"])
    near, far = Control(daemon.control, daemon.streams), Control(visitor.control, visitor.streams)
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            await far.connect()
            peer, _ = await near.identify()
            local = [way.replace("/0.0.0.0/", "/127.0.0.1/").replace("/::/", "/::1/") for way in listening]
            await far.connect_peer(peer, local, _PROBE_SECONDS)
            return await relay_limit(far, peer) >= _RELAY_BYTES
    except (TimeoutError, DaemonError, DaemonGone, OSError):
        return False
    finally:
        await far.close()
        await visitor.stop()


async def relay_limit(control: Control, relay: str) -> int:
    """How many bytes a connection through that peer may carry each way; asks for a place, which ends by itself."""
    sock = await control.open_stream(relay, _HOP, _PROBE_SECONDS)
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, b"\x02\x08\x00")  # RESERVE
        message = b""
        while len(message) < 2 or len(message) < 2 + (message[0] & 0x7F) + (message[1] << 7):
            data = await loop.sock_recv(sock, 4096)
            if not data:
                return 0
            message += data
    finally:
        sock.close()
    limit = _fields(message[2:]).get(4, b"")
    assert isinstance(limit, bytes)
    data_limit = _fields(limit).get(2, 0)
    return data_limit if isinstance(data_limit, int) else 0


def _fields(data: bytes) -> dict[int, int | bytes]:
    """Protobuf without a schema: numbers and bytes by field number."""
    found: dict[int, int | bytes] = {}
    while data:
        tag, data = multiaddr.take_varint(data)
        value, data = multiaddr.take_varint(data)
        if tag & 7 == 2:
            found[tag >> 3], data = data[:value], data[value:]
        elif tag & 7 == 0:
            found[tag >> 3] = value
        else:
            raise ConfigError("a message that makes no sense")
    return found


@dataclass(frozen=True)
class Seen:
    """What another peer says of us: where it sees us come from, and whether it could call us there at our port."""

    ip: str
    reachable: bool

    def outside(self, port: int) -> str:
        return f"/ip{ipaddress.ip_address(self.ip).version}/{self.ip}/tcp/{port}"


def ask(port: int) -> bytes:
    return json.dumps({"port": port}).encode()


def answered(data: bytes) -> Seen | None:
    """None: the other peer could not tell."""
    try:
        value = json.loads(data)
        return Seen(str(ipaddress.ip_address(value["ip"])), value["reachable"] is True) if value else None
    except (ValueError, KeyError, TypeError):
        return None


class DialBack:
    """Answers others who ask: connects to the address they come from, and nowhere else."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._busy = 0

    async def answer(self, control: Control, peer: str, request: bytes) -> bytes:
        now = time.monotonic()
        if len(request) > 64 or self._busy >= _PROBES_AT_A_TIME or now - self._last.get(peer, -1e9) < _PAUSE_SECONDS:
            return b"null"
        self._last = {name: at for name, at in self._last.items() if now - at < _PAUSE_SECONDS} | {peer: now}
        port = json.loads(request)["port"]
        ways = [way for way in (await control.list_peers()).get(peer, []) if multiaddr.CIRCUIT not in way]
        ip = next(filter(None, map(multiaddr.ip_of, ways)), None)
        if ip is None or not isinstance(port, int) or not 0 < port < 65536:
            return b"null"
        self._busy += 1
        try:
            return json.dumps({"ip": str(ip), "reachable": await greets(str(ip), port, _DIAL_BACK_SECONDS)}).encode()
        finally:
            self._busy -= 1


async def greets(host: str, port: int, seconds: float) -> bool:
    """Whether somebody there speaks libp2p."""
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
