"""Paced streams: bulk bytes leave room for calls on the same line.

All streams and calls between two peers share one connection. On a slow line a transfer would fill its buffers with many
seconds of bytes, and a heartbeat would wait behind them until its sender counts as lost. So the receiver acknowledges
what it has read, and the sender has at most a window of bytes under way. The window grows while acknowledgements come
within half a second, and shrinks when they take longer than one and a half: whatever the rate of the line is, its queue
stays short. What arrives is a sign of life too (`heard_at`).

A stream that is closed stays open below until the peer has acknowledged all: p2pd resets one whose end is gone when an
acknowledgement comes, and loses what is in transit.

On the wire, in both directions: a length in four bytes, then as many bytes of data; with the highest bit set it is an
acknowledgement of so many bytes instead.
"""

import asyncio
import contextlib
import struct
from collections import deque

from diloco.swarm.network.transport import Stream, Unreachable
from diloco.swarm.protocol import timing

FIRST_WINDOW, LEAST_WINDOW, MOST_WINDOW = 1 << 16, 1 << 16, 1 << 24
_LEAST_PIECE, MOST_PIECE = 1 << 14, 1 << 20
_ACK_BYTES = 1 << 14
"""Read bytes are acknowledged when there are so many."""
_lingering: set[asyncio.Task[None]] = set()
_HEAD = struct.Struct("<I")
_ACK = 1 << 31


class PacedStream(Stream):
    """Over another stream. One task may read and another one write at a time."""

    def __init__(self, raw: Stream, window: int = FIRST_WINDOW) -> None:
        self.raw, self.peer, self.window = raw, raw.peer, window
        self.bytes_sent = self.bytes_received = 0  # without lengths and acknowledgements
        self._under_way: deque[tuple[int, float]] = deque()
        """Pieces that are not acknowledged: all bytes written up to its end, and when it was written."""
        self._written = self._acknowledged = 0
        self._shrunk_at = 0.0
        self._left = 0
        """Bytes of a piece that has begun to arrive."""
        self._early = bytearray()
        """Arrived while only a writer was waiting."""
        self._read = self._owed = 0
        """Bytes that were read: fewer than `_ACK_BYTES`; and those to acknowledge now."""
        self._reading, self._writing = asyncio.Lock(), asyncio.Lock()
        self._news = asyncio.Event()
        self._closed = False
        self.heard_at = 0.0
        """When something last arrived."""

    def close(self) -> None:
        """At once if a task still reads or writes: the stream is given up."""
        if self._closed:
            return
        self._closed = True
        busy = self._reading.locked() or self._writing.locked()
        if busy or not (self._unacknowledged or self._read):
            self.raw.close()
            return
        task = asyncio.get_running_loop().create_task(self._linger())
        _lingering.add(task)
        task.add_done_callback(_lingering.discard)

    async def _linger(self) -> None:
        with contextlib.suppress(Unreachable, TimeoutError):
            async with asyncio.timeout(timing.LINGER_SECONDS):
                self._owed, self._read = self._owed + self._read, 0
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
            head, view = b"", view[len(piece) :]

    @property
    def _unacknowledged(self) -> int:
        return self._written - self._acknowledged

    def _record_acknowledged(self, count: int) -> None:
        if count > self._unacknowledged:
            raise Unreachable(f"{self.peer} acknowledges {count} bytes of {self._unacknowledged}")
        limited = 2 * self._unacknowledged > self.window
        self._acknowledged += count
        written_at: float | None = None
        while self._under_way and self._under_way[0][0] <= self._acknowledged:
            written_at = self._under_way.popleft()[1]
        seconds = 0.0 if written_at is None else _now() - written_at
        if seconds < timing.PACING_SHORT_SECONDS:
            self.window = min(MOST_WINDOW, self.window + count * limited)
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
            got = len(early) if (early := self._early[: len(view)]) else await self._advance(view, seconds)
            if early:
                view[:got] = early
                del self._early[:got]
            view = view[got:]
            self._read, self.bytes_received = self._read + got, self.bytes_received + got
            if self._read >= _ACK_BYTES:
                self._owed, self._read = self._owed + self._read, 0
                if not self._writing.locked():  # else the task that writes does it, after its piece
                    async with self._writing:
                        await self._acknowledge(seconds)

    async def _acknowledge(self, seconds: float) -> None:
        while self._owed:
            owed, self._owed = self._owed, 0
            with contextlib.suppress(Unreachable):  # the peer may have closed it, with all that it had to say
                await self.raw.write(_HEAD.pack(_ACK | owed), seconds)

    async def _advance(self, into: memoryview | None, seconds: float) -> int:
        """Wait until something has arrived, and how many bytes of data went into `into`. One task at a time waits for
        the peer, the other one for that task."""
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
        if not self._left:
            (head,) = _HEAD.unpack(await self.raw.read(_HEAD.size, seconds))
            self.heard_at = _now()
            if head & _ACK:
                self._record_acknowledged(head ^ _ACK)
                return 0
            if head > MOST_PIECE:
                raise Unreachable(f"{self.peer} sends a piece of {head} bytes, more than {MOST_PIECE}")
            self._left = head
        if into is None:
            data, self._left = await self.raw.read(self._left, seconds), 0
            self._early += data
            return 0
        got = min(self._left, len(into))
        await self.raw.read_into(into[:got], seconds)
        self._left -= got
        return got


def _now() -> float:
    return asyncio.get_running_loop().time()
