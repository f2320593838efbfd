"""Direct connections between two private peers, where their routers allow it (hole punching).

A asks a relay for B. The relay tells each of them where it sees the other, and both connect to each other at the same
moment, from the port at which p2pd listens: each router then takes the other's first packet for an answer to its own.
p2pd cannot do this, so the connection is made here and its bytes are forwarded to p2pd at both ends, which authenticate
each other over it as over any connection. It works where routers keep the port of outgoing connections, as most home
routers do; elsewhere the relay is used. A peer connects in this way only when a relay that it chose itself says so.
"""

import asyncio
import contextlib
import ipaddress
import socket
import time

import msgspec

from diloco.swarm import timing
from diloco.swarm.network import multiaddr
from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.p2pd.control import Control, DaemonError, DaemonGone, HandlerError

_MAX_REQUEST_BYTES = 256
_BURST = 16
_PER_SECOND = 1.0
_MAX_PEERS = 1024
_MAX_AT_A_TIME = 16
_PIECE_BYTES = 256 << 10
_FAILURES = (DaemonError, DaemonGone, HandlerError, TimeoutError, OSError, ValueError, msgspec.DecodeError)

Endpoint = tuple[str, int]
"""Host and port."""


class PunchRequest(msgspec.Struct):
    """A request to a relay: the sender wants to connect to this peer. The answer is that peer's address, or null."""

    peer: str


class PunchOrder(msgspec.Struct):
    """A relay's order: connect to this peer at this address, now."""

    peer: str
    address: str


def relays_in(addresses: list[str]) -> list[str]:
    """Find the relays that these addresses lead through."""
    before = (address.partition(multiaddr.CIRCUIT)[0] for address in addresses if multiaddr.CIRCUIT in address)
    return list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in before if "/p2p/" in address))


class HolePuncher:
    """Plays all three roles: the peer that asks, the relay, and the peer that is asked for.

    `p2pd` is always the endpoint where this machine's own p2pd listens.
    """

    def __init__(self, own_peer: str, protocol: str) -> None:
        self._own_peer = own_peer
        self._protocol = protocol
        self._rate = PeerRateLimit(_BURST, _PER_SECOND, _MAX_PEERS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, control: Control, relay: str, peer: str, p2pd: Endpoint) -> bool:
        """Act as the peer that asks; return whether p2pd now has a direct connection to `peer`."""
        try:
            async with asyncio.timeout(timing.PUNCH_SECONDS):
                request = msgspec.json.encode(PunchRequest(peer))
                answer = await control.call(relay, f"{self._protocol}/punch", request)
                address = msgspec.json.decode(answer, type=str | None)
                if address is None:
                    return False
                self._start(control, PunchOrder(peer, address), p2pd)
                while peer not in await control.list_peers():
                    await asyncio.sleep(timing.PUNCH_POLL_SECONDS)
        except _FAILURES:
            return False
        return True

    async def answer_as_relay(self, control: Control, peer: str, request: bytes) -> bytes:
        """Tell the two peers where each of them is seen, if both are connected to this one directly."""
        if len(request) > _MAX_REQUEST_BYTES or not self._rate.take(peer, time.monotonic()):
            return b"null"
        connected = await control.list_peers()
        wanted = msgspec.json.decode(request, type=PunchRequest).peer
        asking_address = _direct_address(connected.get(peer, []))
        wanted_address = _direct_address(connected.get(wanted, []))
        if asking_address is None or wanted_address is None:
            return b"null"
        try:
            async with asyncio.timeout(timing.PUNCH_SECONDS):
                order = msgspec.json.encode(PunchOrder(peer, asking_address))
                await control.call(wanted, f"{self._protocol}/punched", order)
        except _FAILURES:
            return b"null"
        return msgspec.json.encode(wanted_address)

    def answer_as_target(self, control: Control, request: bytes, p2pd: Endpoint) -> bytes:
        """Act as the peer that is asked for. The caller has checked that a relay of this peer sent the order."""
        if len(request) <= _MAX_REQUEST_BYTES:
            self._start(control, msgspec.json.decode(request, type=PunchOrder), p2pd)
        return b"true"

    def _start(self, control: Control, order: PunchOrder, p2pd: Endpoint) -> None:
        """Connect in a task. The peer with the lower id opens the libp2p connection: perhaps both have asked."""
        if len(self._tasks) < _MAX_AT_A_TIME:
            opens = self._own_peer < order.peer
            task = asyncio.create_task(_open_libp2p(control, order, p2pd) if opens else _accept_libp2p(order, p2pd))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()


def _direct_address(addresses: list[str]) -> str | None:
    """Find the address where a connected peer is seen; None if it is connected through a relay only."""
    for address in addresses:
        ip = multiaddr.ip_of(address)
        if multiaddr.CIRCUIT not in address and "/tcp/" in address and ip is not None and not ip.is_loopback:
            return address
    return None


async def _open_libp2p(control: Control, order: PunchOrder, p2pd: Endpoint) -> None:
    """Have p2pd dial a local port, whose bytes go to the other peer."""
    with contextlib.suppress(*_FAILURES):
        async with asyncio.timeout(timing.PUNCH_SECONDS):
            remote = await _connect_simultaneously(order.address, p2pd[1])
        with contextlib.closing(remote), socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            address = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
            dialling = asyncio.create_task(control.connect_peer(order.peer, [address], timing.PUNCH_SECONDS))
            dialling.add_done_callback(lambda done: done.cancelled() or done.exception())
            async with asyncio.timeout(timing.PUNCH_SECONDS):
                local, _ = await asyncio.get_running_loop().sock_accept(server)
            server.close()
            with contextlib.closing(local):
                local.setblocking(False)
                await _forward_both_ways(local, remote)


async def _accept_libp2p(order: PunchOrder, p2pd: Endpoint) -> None:
    """Connect to p2pd's own port, and forward the other peer's bytes to it."""
    with contextlib.suppress(*_FAILURES):
        async with asyncio.timeout(timing.PUNCH_SECONDS):
            remote = await _connect_simultaneously(order.address, p2pd[1])
        with contextlib.closing(remote), contextlib.closing(socket.socket(remote.family)) as local:
            local.setblocking(False)
            await asyncio.get_running_loop().sock_connect(local, p2pd)
            await _forward_both_ways(local, remote)


async def _connect_simultaneously(address: str, port: int) -> socket.socket:
    """Connect from our port to an address whose owner does the same; the caller has set a time limit."""
    _, kind, ip, _, far_port = address.split("/")
    if ipaddress.ip_address(ip).is_loopback:
        raise ValueError(f"{address} is on this machine")
    while True:
        sock = socket.socket(socket.AF_INET if kind == "ip4" else socket.AF_INET6)
        try:
            sock.setblocking(False)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                sock.setsockopt(socket.SOL_SOCKET, option, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.bind(("", port))
            await asyncio.get_running_loop().sock_connect(sock, (ip, int(far_port)))
            return sock
        except OSError:  # refused: the other peer has not begun yet
            sock.close()
            await asyncio.sleep(timing.PUNCH_RETRY_SECONDS)
        except BaseException:
            sock.close()
            raise


async def _forward_both_ways(local: socket.socket, remote: socket.socket) -> None:
    """Forward bytes until either side ends."""
    directions = [asyncio.ensure_future(_forward(local, remote)), asyncio.ensure_future(_forward(remote, local))]
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in directions:
            task.cancel()
        await asyncio.wait(directions)


async def _forward(source: socket.socket, sink: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    memory = memoryview(bytearray(_PIECE_BYTES))
    with contextlib.suppress(OSError):
        while size := await loop.sock_recv_into(source, memory):
            await loop.sock_sendall(sink, memory[:size])
            await asyncio.sleep(0)
