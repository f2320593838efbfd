"""A network in memory: peers by name that can be killed and cut off, with calls and streams between them."""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec import Struct

from diloco.swarm.network.transport import CallRefused, OnCall, OnStream, Stream, Transport, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.protocol.messages import Addressed, decode
from diloco.swarm.protocol.wire import PeerMessage

Fate = Literal["arrives", "lost", "answer lost", "twice"]
LATENCY_SECONDS = 0.001
"""One way. Not 0: two peers that ask each other again and again must not stop the virtual clock."""


def request_in(data: bytes) -> PeerMessage:
    """Return what is asked in a call, without the processes that are named around it."""
    message = decode(data)
    return decode(message.request) if isinstance(message, Addressed) else message


class _Head(Struct):
    """The part of a message that the trace needs: its type, and what an Addressed one has inside."""

    t: str = ""
    request: bytes = b""


_head = msgspec.msgpack.Decoder(_Head)


def _type_of(message: bytes) -> str:
    try:
        head = _head.decode(message)
        return _head.decode(head.request).t if head.request else head.t
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "malformed"


class Trace:
    """The digest of all that happens on a network, with its virtual time.

    Of a message it has the type and the length, not the bytes: those have keys and sums that differ from run to run,
    or from processor to processor.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.keep: list[str] | None = None
        """The lines, if they are to be kept: to see where two runs part."""

    def record(self, peer: str, *what: object) -> None:
        line = " ".join(map(str, (clock.now(), peer[-8:], *what)))
        self._hash.update(line.encode() + b"\n")
        if self.keep is not None:
            self.keep.append(line)

    def record_call(self, caller: str, peer: str, request: bytes) -> None:
        self.record(caller, "calls", peer[-8:], _type_of(request), len(request))

    def record_answer(self, caller: str, peer: str, answer: bytes) -> None:
        self.record(peer, "answers", caller[-8:], _type_of(answer), len(answer))

    def digest(self) -> str:
        return self._hash.hexdigest()


class MemoryNetwork:
    """Peers by name. `cut` peers hear and say nothing, `dead` ones are known to be gone."""

    def __init__(self) -> None:
        self.trace = Trace()
        self.peers: dict[str, MemoryTransport] = {}
        self.first_answers = False
        """Whether the first of two processes that have one name answers; else the second one does."""
        self.cut: set[str] = set()
        self.sides: list[set[str]] = []
        """A peer of one side hears and says nothing to one of another; a peer of no side talks to all."""
        self.pairs: list[set[str]] = []
        """Two peers that do not hear each other, and talk to all others."""
        self.dead: set[str] = set()
        self.fate: Callable[[str, str, bytes], Fate] = lambda *_: "arrives"
        """(caller, peer, request) -> what becomes of a call."""
        self.delay: Callable[[], float] = lambda: 0.0
        """Seconds that a call or the opening of a stream takes longer, each way."""
        self._operations = 0
        self._pipes = 0
        self._at: int | None = None
        self._action: Callable[[], None] = lambda: None

    def after(self, operations: int, action: Callable[[], None]) -> None:
        """Do something in the middle of what goes on: after so many more reads, writes and calls."""
        self._at = self._operations + operations
        self._action = action

    def count_pipe(self) -> int:
        self._pipes += 1
        return self._pipes

    def check_alive(self, peer: str, other: str) -> None:
        """Raise Unreachable if one of the two is known to be dead."""
        if other in self.dead or peer in self.dead:
            raise Unreachable("connection refused", gone=True)

    def is_silent(self, peer: str, other: str) -> bool:
        """Count one more operation between two peers, and return whether they are cut off from each other."""
        self._operations += 1
        if self._at is not None and self._operations >= self._at:
            self._at = None
            self._action()
        apart = any(peer in side and other in rest for side in self.sides for rest in self.sides if rest is not side)
        return apart or {peer, other} in self.pairs or peer in self.cut or other in self.cut

    def forget_connections(self, name: str) -> None:
        for transport in self.peers.values():
            transport.connected.pop(name, None)

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.peers[name].killed = True
        for pipe in self.peers[name].pipes:
            pipe.break_()


class _Pipe:
    """Bytes one way."""

    def __init__(self, network: MemoryNetwork, ends: tuple[str, str]) -> None:
        self.network = network
        self.ends = ends
        self.data = bytearray()
        self.news = asyncio.Event()
        self.closed = False
        self.serial = network.count_pipe()

    def break_(self) -> None:
        self.closed = True
        self.news.set()

    async def put(self, data: bytes | memoryview, seconds: float) -> None:
        end = clock.now() + seconds
        while len(self.data) > 1 << 18 or self.network.is_silent(*self.ends):
            if self.closed or clock.now() > end:
                raise Unreachable("no progress in writing", gone=self.closed)
            await asyncio.sleep(0.005)
        if self.closed:
            raise Unreachable("stream reset", broken=True)
        self.data += data
        self.news.set()
        await asyncio.sleep(0)

    async def take(self, size: int, seconds: float) -> bytes:
        end = clock.now() + seconds
        while len(self.data) < size or self.network.is_silent(*self.ends):
            if self.closed:
                raise Unreachable("stream reset", broken=True)
            if clock.now() > end:
                raise Unreachable("no progress in reading")
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.news.wait()
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken


class MemoryStream(Stream):
    def __init__(self, peer: str, outgoing: _Pipe, incoming: _Pipe) -> None:
        self.peer = peer
        self._out = outgoing
        self._in = incoming
        self.bytes_sent = self.bytes_received = 0
        self._serial = outgoing.serial

    def __hash__(self) -> int:
        """The order of creation: a set of streams has the same order in every run."""
        return self._serial

    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        for first in range(0, len(data), 1 << 16):
            await self._out.put(data[first : first + (1 << 16)], seconds)
        self.bytes_sent += len(data)

    async def read(self, size: int, seconds: float) -> bytes:
        data = await self._in.take(size, seconds)
        self.bytes_received += size
        return data

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        for first in range(0, len(buffer), 1 << 16):
            piece = buffer[first : first + (1 << 16)]
            piece[:] = await self.read(len(piece), seconds)

    def close(self) -> None:
        self._out.break_()


class MemoryTransport(Transport):
    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.network = network
        self.peer = name
        self.pipes: list[_Pipe] = []
        self.on_call: OnCall | None = None
        self.on_stream: OnStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.frozen = False
        self.killed = False
        """Its process says nothing any more, also when another one has its name."""
        self.connected: dict[str, MemoryTransport] = {}
        """Peers that this one has a connection to -> the process at its other end."""
        self.twin = network.peers.get(name) if name not in network.dead else None
        """Another process with this name."""
        if self.twin is not None:
            self.twin.twin = self
        if self.twin is None or not network.first_answers:
            network.peers[name] = self
            network.forget_connections(name)
        network.dead.discard(name)

    async def serve(self, on_call: OnCall, on_stream: OnStream) -> None:
        self.on_call = on_call
        self.on_stream = on_stream

    async def addresses(self) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer}"]

    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None:
        del addresses
        await self._reach(peer, seconds)

    async def _reach(self, peer: str, seconds: float) -> "MemoryTransport":
        await asyncio.sleep(LATENCY_SECONDS + self.network.delay())
        if self.killed:
            raise Unreachable("this process is dead")
        self.network.check_alive(self.peer, peer)
        other = self.connected.get(peer) or self._dialled(peer)
        if other is None or other.on_call is None:
            raise Unreachable("connection refused", gone=True)
        end = clock.now() + seconds
        while self.network.is_silent(self.peer, peer) or self.frozen or other.frozen:
            if clock.now() > end:
                raise Unreachable("no answer")
            await asyncio.sleep(0.02)
        self.connected[peer] = other
        return other

    def _dialled(self, peer: str) -> "MemoryTransport | None":
        """Return the process that a new connection is to: one that is frozen takes none."""
        other = self.network.peers.get(peer)
        return other.twin if other is not None and other.frozen and other.twin is not None else other

    async def disconnect(self, peer: str) -> None:
        """The next connection is to the other of two processes that have one name, unless that one is frozen."""
        reached = self.connected.pop(peer, None) or self.network.peers.get(peer)
        if reached is not None and reached.twin is not None and not reached.twin.frozen:
            self.connected[peer] = reached.twin

    async def call(self, peer: str, request: bytes, seconds: float) -> bytes:
        other = await self._reach(peer, seconds)
        assert other.on_call is not None
        self.network.trace.record_call(self.peer, peer, request)
        fate = self.network.fate(self.peer, peer, request)
        if fate == "lost":
            await asyncio.sleep(seconds)
            raise Unreachable("no answer")
        try:
            async with asyncio.timeout(seconds):
                answer = await other.on_call(self.peer, request)
                if fate == "twice":
                    answer = await other.on_call(self.peer, request)
        except TimeoutError:
            raise Unreachable("no answer") from None
        except (Unreachable, AssertionError):
            raise
        except Exception as error:  # noqa: BLE001 - what a handler raises is told to the caller
            refused = CallRefused.read(str(error))
            self.network.trace.record(peer, "refuses", self.peer[-8:], refused.code)
            raise refused from None
        self.network.trace.record_answer(self.peer, peer, answer)
        if fate == "answer lost":
            await asyncio.sleep(seconds)
            raise Unreachable("no answer")
        await self._reach(peer, seconds)
        return answer

    async def open_stream(self, peer: str, seconds: float) -> Stream:
        other = await self._reach(peer, seconds)
        self.network.trace.record(self.peer, "opens a stream to", peer[-8:])
        forth = _Pipe(self.network, (self.peer, peer))
        back = _Pipe(self.network, (peer, self.peer))
        for transport in (self, other):
            transport.pipes += [forth, back]
        theirs = MemoryStream(self.peer, back, forth)

        async def serve() -> None:
            assert other.on_stream is not None
            try:
                await other.on_stream(theirs)
            finally:
                theirs.close()

        task = asyncio.create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return MemoryStream(peer, forth, back)

    async def close(self) -> None:
        if self.killed:
            return
        if self.twin is None:
            self.network.kill(self.peer)
            return
        self.network.peers[self.peer] = self.twin
        self.twin.twin = None
        self.network.forget_connections(self.peer)
        for pipe in self.pipes:
            pipe.break_()
