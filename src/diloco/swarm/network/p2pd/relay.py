"""Starts p2pd as a public, private or unknown peer needs it; a public one relays with our limits."""

import asyncio
import socket
from dataclasses import replace

from diloco.errors import ConfigError, RendezvousError
from diloco.swarm.network import multiaddr
from diloco.swarm.network.addresses import ListenConfig
from diloco.swarm.network.listen_port import check_ports
from diloco.swarm.network.p2pd.control import Control
from diloco.swarm.network.p2pd.errors import DaemonError, DaemonGone
from diloco.swarm.network.p2pd.process import Daemon
from diloco.swarm.network.reachability import Reachability
from diloco.swarm.protocol import timing

_HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""A request for a reservation, as protobuf with its length."""
_RELAY_BYTES = 1 << 40
_RELAY_TIME = "720h"
_RELAY_CIRCUITS = 256
_RELAY_STARTS = 6
_ONE_PROCESSOR = {"GOMAXPROCS": "1"}
"""With more, the wrong one of p2pd's two relays wins more often than not; see `_has_our_relay`."""


def p2pd_arguments(reachability: Reachability, config: ListenConfig) -> list[str]:
    """Raises if the port is taken, or if an address in the options is not valid."""
    listening, announced = config.listen_addresses(), config.announced_addresses()
    check_ports(listening)
    arguments = [f"-hostAddrs={','.join(listening)}"]
    if announced or reachability.seen_at:
        arguments.append(f"-announceAddrs={','.join([*announced, *reachability.seen_at])}")
    if reachability.kind == "public":
        limits = [f"-relayDataLimit={_RELAY_BYTES}", f"-relayTimeLimit={_RELAY_TIME}"]
        return [*arguments, "-forceReachabilityPublic", *limits, f"-relayMaxCircuits={_RELAY_CIRCUITS}"]
    if reachability.kind == "private":
        # p2pd needs a DHT to use relays; without bootstrap peers that DHT stays alone.
        dht = ["-dhtClient", "-relayDiscovery=0"]
        relays = f"-trustedRelays={','.join(reachability.relays)}"
        return [*arguments, "-autoRelay", "-forceReachabilityPrivate", relays, *dht]
    return arguments


async def start_daemon(reachability: Reachability, config: ListenConfig, flags: list[str]) -> Daemon:
    """A running p2pd. `flags` are added to the arguments that follow from the other two.

    A free port is chosen here if the user named none: IPv4 and IPv6 must have the same, since a peer that sees this one
    over IPv4 is told the port for both.
    """
    for _ in range(_RELAY_STARTS):
        tried = config if config.port is not None else replace(config, port=_free_port())
        arguments = [*flags, *p2pd_arguments(reachability, tried)]
        if reachability.kind != "public":
            return await Daemon.start(arguments)
        daemon = await Daemon.start(arguments, _ONE_PROCESSOR)
        if await _has_our_relay(daemon, flags, tried.listen_addresses()):
            return daemon
        await daemon.stop()
    raise RendezvousError(
        f"p2pd did not come up as a relay in {_RELAY_STARTS} starts; start again, or listen at a private address only"
    )


def _free_port() -> int:
    with socket.socket() as probe:  # free for IPv4, and nearly always for IPv6 too; if not, p2pd says so
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


async def _has_our_relay(daemon: Daemon, flags: list[str], listening: list[str]) -> bool:
    """p2pd starts two relays, ours and libp2p's, which ends after 128 KiB. Which one answers is a race: ask it."""
    guest_flags = [flag for flag in flags if not flag.startswith("-id=")]
    guest = await Daemon.start([*guest_flags, "-noListenAddrs"])
    control, guest_control = Control(daemon.control, daemon.streams), Control(guest.control, guest.streams)
    try:
        async with asyncio.timeout(timing.RELAY_PROBE_SECONDS):
            await guest_control.connect()
            peer, _ = await control.identify()
            local = [a.replace("/0.0.0.0/", "/127.0.0.1/").replace("/::/", "/::1/") for a in listening]
            await guest_control.connect_peer(peer, local, timing.RELAY_PROBE_SECONDS)
            return await relay_limit(guest_control, peer) >= _RELAY_BYTES
    except (TimeoutError, DaemonError, DaemonGone, OSError):
        return False
    finally:
        await guest_control.close()
        await guest.stop()


async def relay_limit(control: Control, relay: str) -> int:
    """How many bytes a connection through that peer may carry each way; 0: it relays nothing.

    Asks for a reservation, which ends by itself.
    """
    sock = await control.open_stream(relay, _HOP_PROTOCOL, timing.RELAY_PROBE_SECONDS)
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, _RESERVE)
        message = b""
        while len(message) < 2 or len(message) < 2 + (message[0] & 0x7F) + (message[1] << 7):
            data = await loop.sock_recv(sock, 4096)
            if not data:
                return 0
            message += data
    finally:
        sock.close()
    limit = _protobuf_fields(message[2:]).get(4, b"")
    assert isinstance(limit, bytes)
    data_limit = _protobuf_fields(limit).get(2, 0)
    return data_limit if isinstance(data_limit, int) else 0


def _protobuf_fields(data: bytes) -> dict[int, int | bytes]:
    """A protobuf message without its schema: numbers and bytes by field number."""
    found: dict[int, int | bytes] = {}
    while data:
        tag, data = multiaddr.take_varint(data)
        value, data = multiaddr.take_varint(data)
        if tag & 7 == 2:
            found[tag >> 3], data = data[:value], data[value:]
        elif tag & 7 == 0:
            found[tag >> 3] = value
        else:
            raise ConfigError(f"a relay's answer has a field of unknown type {tag & 7}")
    return found
