"""Streams between two peers: over a socket to p2pd (`SocketStream`), and paced, so that calls get through beside them.

Bytes go between memory and the daemon without copies on the way. A read or write fails after its time limit without
progress; a few bytes now and then are none: each byte that arrives extends the limit by its time at LEAST_RATE, up to
the whole limit. A stream may be closed at any time, also while another task reads or writes: that task then gets
Unreachable.

`PacedStream` leaves room for calls on the same line. All streams and calls between two peers share one connection. On a
slow line a transfer would fill its buffers with many seconds of bytes, and a heartbeat would wait behind them until its
sender counts as lost. So the receiver acknowledges what it has read, and the sender has at most a window of bytes under
way. The window grows while acknowledgements come within half a second, and shrinks when they take longer than one and a
half: whatever the rate of the line is, its queue stays short. What arrives is a sign of life too (`heard_at`).

A paced stream that is closed stays open below until the peer has acknowledged all: p2pd resets one whose end is gone
when an acknowledgement comes, and loses what is in transit.

On the wire of a paced stream, in both directions: a length in four bytes, then as many bytes of data; with the highest
bit set it is an acknowledgement of so many bytes instead.
"""

import asyncio
import contextlib
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator

from diloco.swarm import timing
from diloco.swarm.network.transport import LEAST_RATE, Stream, Unreachable

FIRST_WINDOW = 1 << 16
LEAST_WINDOW = 1 << 16
MOST_WINDOW = 1 << 24
_LEAST_PIECE = 1 << 14
MOST_PIECE = 1 << 20
_ACK_BYTES = 1 << 14
"""Read bytes are acknowledged when there are so many."""
_HEAD = struct.Struct("<I")
_ACK = 1 << 31
_lingering: set[asyncio.Task[None]] = set()
"""Closed streams whose last bytes are under way."""
_PIECE_BYTES = 256 << 10
"""Handed to the kernel at once; each piece has the whole time limit."""
_TURN_BYTES = 1 << 20
"""After this many bytes the other tasks of the loop get a turn, however fast the bytes come."""


class SocketStream(Stream):
    """A stream over a socket that p2pd has connected to the peer."""

    def __init__(self, peer: str, sock: socket.socket, on_close: Callable[[], None]) -> None:
        self.peer = peer
        self.bytes_sent = 0
        self.bytes_received = 0
        self._socket = sock
        self._on_close = on_close
        self._users = 0
        """Tasks that read or write now."""
        self._since_turn = 0
        """Bytes since the other tasks of the loop last had a turn."""
        self._closed = False

    @contextlib.contextmanager
    def _using(self, doing: str, seconds: float) -> Iterator[None]:
        if self._closed:
            raise Unreachable(f"the stream with {self.peer} is closed")
        self._users += 1
        try:
            yield
        except TimeoutError:
            raise Unreachable(f"no progress {doing} {self.peer} for {seconds:g} s") from None
        except OSError as error:
            raise Unreachable(f"the stream with {self.peer} broke ({error.strerror or error})") from error
        finally:
            self._users -= 1
            self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._closed and self._users == 0:
            self._socket.close()

    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        await self.write_both(b"", data, seconds)

    async def write_both(self, head: bytes, data: bytes | memoryview, seconds: float) -> None:
        view = memoryview(data).cast("B")
        with self._using("sending to", seconds):
            sent = self._send(head, view[:_PIECE_BYTES])
            if sent < len(head):
                await self._send_all(memoryview(head)[sent:], seconds)
            view = view[max(0, sent - len(head)) :]
            while len(view):
                await self._send_all(view[:_PIECE_BYTES], seconds)
                view = view[_PIECE_BYTES:]
            await self._give_turn()

    def _send(self, head: bytes, data: memoryview) -> int:
        """Send as much as there is room for now; return how many bytes that was.

        Both go at once: p2pd makes a message of each piece that it gets.
        """
        try:
            sent = self._socket.sendmsg([head, data])
        except BlockingIOError:
            return 0
        self.bytes_sent += sent
        self._since_turn += sent
        return sent

    async def _send_all(self, data: memoryview, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await asyncio.get_running_loop().sock_sendall(self._socket, data)
        self.bytes_sent += len(data)
        self._since_turn += len(data)

    async def _give_turn(self) -> None:
        if self._since_turn >= _TURN_BYTES:
            self._since_turn = 0
            await asyncio.sleep(0)

    async def read(self, size: int, seconds: float) -> bytes:
        data = bytearray(size)
        await self.read_into(memoryview(data), seconds)
        return bytes(data)

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        view = memoryview(buffer).cast("B")
        with self._using("receiving from", seconds):
            arriving = _Arriving(self._socket, view, seconds)
            try:
                if not arriving.receive():
                    await arriving.wait()
            except EOFError:
                raise Unreachable(f"the stream from {self.peer} ended {arriving.missing} bytes too early") from None
            finally:
                arrived = len(view) - arriving.missing
                self.bytes_received += arrived
                self._since_turn += arrived
            await self._give_turn()

    def close(self) -> None:
        """Close the stream; what was written before still arrives."""
        if self._closed:
            return
        self._closed = True
        if self._users:  # the loop watches this descriptor: wake the tasks that use it; the last one closes it
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._close_if_unused()
        self._on_close()


class _Arriving:
    """Bytes that a task waits for. Each time some arrive they go into its memory, and the last ones wake it."""

    def __init__(self, sock: socket.socket, memory: memoryview, seconds: float) -> None:
        self._socket = sock
        self._rest = memory
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + seconds
        self._done: asyncio.Future[None] = self._loop.create_future()

    @property
    def missing(self) -> int:
        return len(self._rest)

    def receive(self) -> bool:
        """Take what has arrived; return whether that is all. Raises EOFError at the end of the stream."""
        if not self._rest:
            return True
        try:
            count = self._socket.recv_into(self._rest)
        except BlockingIOError:
            return False
        if count == 0:
            raise EOFError
        self._rest = self._rest[count:]
        self._end = min(self._loop.time() + self._seconds, self._end + count / LEAST_RATE)
        return not self._rest

    async def wait(self) -> None:
        """Wait until all bytes are there. Raises EOFError, OSError or TimeoutError."""
        self._loop.add_reader(self._socket, self._on_readable)
        self._timer = self._loop.call_at(self._end, self._on_time)
        try:
            await self._done
        finally:
            self._loop.remove_reader(self._socket)
            self._timer.cancel()

    def _on_readable(self) -> None:
        try:
            if self.receive():
                self._finish(None)
        except (EOFError, OSError) as problem:
            self._finish(problem)

    def _on_time(self) -> None:
        if self._loop.time() < self._end:
            self._timer = self._loop.call_at(self._end, self._on_time)
        else:
            self._finish(TimeoutError())

    def _finish(self, problem: Exception | None) -> None:
        if self._done.done():
            return
        if problem is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(problem)


class PacedStream(Stream):
    """A paced stream over another stream. One task may read and another one write at a time."""

    def __init__(self, raw: Stream, window: int = FIRST_WINDOW) -> None:
        self.raw = raw
        self.peer = raw.peer
        self.window = window
        """The number of bytes that may be under way."""
        self.bytes_sent = 0
        self.bytes_received = 0
        """Bytes of data, without lengths and acknowledgements."""
        self._under_way: deque[tuple[int, float]] = deque()
        """Pieces that are not acknowledged: all bytes written up to its end, and when it was written."""
        self._written = 0
        self._acknowledged = 0
        self._shrunk_at = 0.0
        self._piece_lacks = 0
        """Bytes that the piece which is arriving still lacks."""
        self._early = bytearray()
        """Bytes that arrived while only a writer was waiting."""
        self._read_since = 0
        """Bytes that were read since the last acknowledgement: fewer than `_ACK_BYTES`."""
        self._to_acknowledge = 0
        """Bytes to acknowledge now: the task that writes does it after its piece."""
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()
        self._news = asyncio.Event()
        self._closed = False
        self.heard_at = 0.0
        """When something last arrived."""

    def close(self) -> None:
        """Close the stream: at once if a task still reads or writes, since it is given up then."""
        if self._closed:
            return
        self._closed = True
        busy = self._reading.locked() or self._writing.locked()
        if busy or not (self._unacknowledged or self._read_since):
            self.raw.close()
            return
        task = asyncio.get_running_loop().create_task(self._linger())
        _lingering.add(task)
        task.add_done_callback(_lingering.discard)

    async def _linger(self) -> None:
        with contextlib.suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(timing.LINGER_SECONDS):
                self._to_acknowledge += self._read_since
                self._read_since = 0
                await self._acknowledge(timing.LINGER_SECONDS)
                while self._unacknowledged and not self._early:  # data that none reads: the peer must be told
                    await self._advance(None, timing.LINGER_SECONDS)
        self.raw.close()

    # Writing

    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        await self.write_both(b"", data, seconds)

    async def write_both(self, head: bytes, data: bytes | memoryview, seconds: float) -> None:
        view = memoryview(data).cast("B")
        while head or len(view):
            piece = view[: max(_LEAST_PIECE, min(MOST_PIECE, self.window // 4)) - len(head)]
            size = len(head) + len(piece)
            while self._unacknowledged and self._unacknowledged + size > self.window:
                await self._advance(None, seconds)
            self._written += size
            self._under_way.append((self._written, _now()))
            async with self._writing:
                await self.raw.write_both(_HEAD.pack(size) + head, piece, seconds)
                self.bytes_sent += size
                await self._acknowledge(seconds)
            head = b""
            view = view[len(piece) :]

    @property
    def _unacknowledged(self) -> int:
        return self._written - self._acknowledged

    def _record_acknowledged(self, count: int) -> None:
        if count > self._unacknowledged:
            raise Unreachable(f"{self.peer} acknowledges {count} bytes of {self._unacknowledged}")
        was_full = 2 * self._unacknowledged > self.window  # else the window does not hold the sender up
        self._acknowledged += count
        written_at: float | None = None
        while self._under_way and self._under_way[0][0] <= self._acknowledged:
            written_at = self._under_way.popleft()[1]
        seconds = 0.0 if written_at is None else _now() - written_at
        if seconds < timing.PACING_SHORT_SECONDS:
            if was_full:
                self.window = min(MOST_WINDOW, self.window + count)
        elif seconds > timing.PACING_LONG_SECONDS and _now() - self._shrunk_at > seconds:  # once for each window
            self.window = max(LEAST_WINDOW, int(self.window * timing.PACING_SHORT_SECONDS / seconds))
            self._shrunk_at = _now()

    # Reading

    async def read(self, size: int, seconds: float) -> bytes:
        data = bytearray(size)
        await self.read_into(memoryview(data), seconds)
        return bytes(data)

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        view = memoryview(buffer).cast("B")
        while len(view):
            early = self._early[: len(view)]
            if early:
                count = len(early)
                view[:count] = early
                del self._early[:count]
            else:
                count = await self._advance(view, seconds)
            view = view[count:]
            self._read_since += count
            self.bytes_received += count
            if self._read_since >= _ACK_BYTES:
                self._to_acknowledge += self._read_since
                self._read_since = 0
                if not self._writing.locked():  # else the task that writes does it, after its piece
                    async with self._writing:
                        await self._acknowledge(seconds)

    async def _acknowledge(self, seconds: float) -> None:
        while self._to_acknowledge:
            owed = self._to_acknowledge
            self._to_acknowledge = 0
            with contextlib.suppress(Unreachable):  # the peer may have closed it, with all that it had to say
                await self.raw.write(_HEAD.pack(_ACK | owed), seconds)

    async def _advance(self, into: memoryview | None, seconds: float) -> int:
        """Wait until something has arrived; return how many bytes of data went into `into`.

        One task at a time waits for the peer, the other one for that task.
        """
        if self._reading.locked():
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                raise Unreachable(f"no progress with {self.peer} for {seconds:g} s") from None
            return 0
        async with self._reading:
            try:
                return await self._take(into, seconds)
            finally:
                self._news.set()
                self._news = asyncio.Event()

    async def _take(self, into: memoryview | None, seconds: float) -> int:
        if not self._piece_lacks:
            (head,) = _HEAD.unpack(await self.raw.read(_HEAD.size, seconds))
            self.heard_at = _now()
            if head & _ACK:
                self._record_acknowledged(head ^ _ACK)
                return 0
            if head > MOST_PIECE:
                raise Unreachable(f"{self.peer} sends a piece of {head} bytes, more than {MOST_PIECE}")
            self._piece_lacks = head
        if into is None:
            data = await self.raw.read(self._piece_lacks, seconds)
            self._piece_lacks = 0
            self._early += data
            return 0
        count = min(self._piece_lacks, len(into))
        await self.raw.read_into(into[:count], seconds)
        self._piece_lacks -= count
        return count


def _now() -> float:
    return asyncio.get_running_loop().time()
