"""Direct connections between two peers that are both behind routers, where their routers allow it.

A asks the relay. The relay tells each where it sees the other, and both connect to the other at the same moment, from
the port at which p2pd listens: either router then takes the other's first packet for an answer to its own. p2pd cannot
do this itself, so the connection is made here and its bytes are passed on to p2pd at both ends, which prove to each
other who they are as over any other connection. It works where routers keep the port of what they pass on, as most
home routers do; where not, connections go through the relay. Nothing of the run is said here, and a peer connects so
only at the word of a relay that it has chosen itself.
"""

import asyncio
import contextlib
import ipaddress
import json
import socket
import time

from diloco.engines.swarm.network import multiaddr
from diloco.engines.swarm.network.limits import LruCache, TokenBucket
from diloco.engines.swarm.network.p2pd_control import Control, DaemonError, DaemonGone, HandlerError

SECONDS = 2.0
"""What an attempt may cost."""
_MAX_REQUEST = 256
_BURST, _PER_SECOND, _PEERS = 16, 1.0, 1024
_AT_A_TIME = 16
_LOOK_SECONDS = 0.02
_PIECE = 256 << 10
_BROKEN = (DaemonError, DaemonGone, HandlerError, TimeoutError, OSError, ValueError, KeyError, TypeError)


def relays_in(ways: list[str]) -> list[str]:
    """The peers through which these addresses lead."""
    before = (way.partition(multiaddr.CIRCUIT)[0] for way in ways if multiaddr.CIRCUIT in way)
    return list(dict.fromkeys(way.rpartition("/p2p/")[2] for way in before if "/p2p/" in way))


class Puncher:
    """For all three: who asks, the relay, and who is asked for. `inside` is where this machine's p2pd listens."""

    def __init__(self, me: str, protocol: str) -> None:
        self._me, self._protocol = me, protocol
        self._allowances: LruCache[TokenBucket] = LruCache(_PEERS)
        self._tasks: set[asyncio.Task[None]] = set()

    async def connect(self, control: Control, relay: str, peer: str, inside: tuple[str, int]) -> bool:
        """Who asks. Whether p2pd is now connected with that peer, directly."""
        try:
            async with asyncio.timeout(SECONDS):
                request = json.dumps({"peer": peer}).encode()
                way = json.loads(await control.call(relay, f"{self._protocol}/punch", request))
                if way is None:
                    return False
                self._begin(control, peer, str(way), inside)
                while peer not in await control.list_peers():
                    await asyncio.sleep(_LOOK_SECONDS)
        except _BROKEN:
            return False
        return True

    def _begin(self, control: Control, peer: str, way: str, inside: tuple[str, int]) -> None:
        """Both begin at once, and perhaps both have asked; the one whose name is first is the one that dials."""
        if len(self._tasks) < _AT_A_TIME:
            dials = self._me < peer
            task = asyncio.create_task(self._dial(control, peer, way, inside) if dials else _be_met(way, inside))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _dial(self, control: Control, peer: str, way: str, inside: tuple[str, int]) -> None:
        with contextlib.suppress(*_BROKEN):
            async with asyncio.timeout(SECONDS):
                far = await _meet(way, inside[1])
            with contextlib.closing(far), socket.create_server(("127.0.0.1", 0)) as server:
                server.setblocking(False)
                near_way = f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"
                dialling = asyncio.create_task(control.connect_peer(peer, [near_way], SECONDS))
                dialling.add_done_callback(lambda done: done.cancelled() or done.exception())
                async with asyncio.timeout(SECONDS):
                    near, _ = await asyncio.get_running_loop().sock_accept(server)
                server.close()
                with contextlib.closing(near):
                    near.setblocking(False)
                    await _join(near, far)

    async def relay(self, control: Control, peer: str, request: bytes) -> bytes:
        """Tells the one where the other is seen, and the other where the one is."""
        if len(request) > _MAX_REQUEST or not self._may(peer):
            return b"null"
        connected = await control.list_peers()
        wanted = str(json.loads(request)["peer"])
        here, there = (_direct(connected.get(name, [])) for name in (peer, wanted))
        if here is None or there is None:
            return b"null"
        try:
            async with asyncio.timeout(SECONDS):
                await control.call(
                    wanted, f"{self._protocol}/punched", json.dumps({"way": here, "peer": peer}).encode()
                )
        except _BROKEN:
            return b"null"
        return json.dumps(there).encode()

    def target(self, control: Control, request: bytes, inside: tuple[str, int]) -> bytes:
        """Who is asked for. The caller has seen to it that a relay of ours asks."""
        if len(request) <= _MAX_REQUEST:
            told = json.loads(request)
            self._begin(control, str(told["peer"]), str(told["way"]), inside)
        return b"true"

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _may(self, peer: str) -> bool:
        now = time.monotonic()
        allowance = self._allowances.get(peer) or TokenBucket.full(_BURST, _PER_SECOND, now)
        self._allowances.put(peer, allowance)
        return allowance.take(now)


def _direct(ways: list[str]) -> str | None:
    """Where a connected peer is seen, if not through a relay."""
    for way in ways:
        ip = multiaddr.ip_of(way)
        if multiaddr.CIRCUIT not in way and "/tcp/" in way and ip is not None and not ip.is_loopback:
            return way
    return None


async def _meet(way: str, port: int) -> socket.socket:
    """Connected from our port to the one there, which does the same; the caller has set a time limit."""
    _, kind, ip, _, far_port = way.split("/")
    if ipaddress.ip_address(ip).is_loopback:
        raise ValueError(way)
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
        except OSError:  # refused: the other one was not there yet
            sock.close()
            await asyncio.sleep(0.05)
        except BaseException:
            sock.close()
            raise


async def _be_met(way: str, inside: tuple[str, int]) -> None:
    with contextlib.suppress(*_BROKEN):
        async with asyncio.timeout(SECONDS):
            far = await _meet(way, inside[1])
        with contextlib.closing(far), contextlib.closing(socket.socket(far.family)) as near:
            near.setblocking(False)
            await asyncio.get_running_loop().sock_connect(near, inside)
            await _join(near, far)


async def _join(one: socket.socket, two: socket.socket) -> None:
    """Bytes from each to the other until either ends."""
    passing = [asyncio.ensure_future(_pass(one, two)), asyncio.ensure_future(_pass(two, one))]
    try:
        await asyncio.wait(passing, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in passing:
            task.cancel()
        await asyncio.wait(passing)


async def _pass(source: socket.socket, sink: socket.socket) -> None:
    loop, memory = asyncio.get_running_loop(), memoryview(bytearray(_PIECE))
    with contextlib.suppress(OSError):
        while size := await loop.sock_recv_into(source, memory):
            await loop.sock_sendall(sink, memory[:size])
            await asyncio.sleep(0)
