"""A stream over a socket to p2pd: bytes go between memory and the daemon without copies on the way.

A read or write fails after its time limit without progress; a few bytes now and then are none: each byte that arrives
extends the limit by its time at LEAST_RATE, up to the whole limit. A stream
may be closed at any time, also while another task reads or writes: that task then gets Unreachable.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from diloco.engines.swarm.network.transport import LEAST_RATE, Stream, Unreachable

_PIECE_BYTES = 256 << 10
"""Handed to the kernel at once; each piece has the whole time limit."""
_TURN_BYTES = 1 << 20
"""After this many bytes the other tasks of the loop get a turn, however fast the bytes come."""


class SocketStream(Stream):
    def __init__(self, peer: str, sock: socket.socket, on_close: Callable[[], None]) -> None:
        self.peer, self.bytes_sent, self.bytes_received = peer, 0, 0
        self._socket, self._on_close = sock, on_close
        self._users = 0
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
        loop, view = asyncio.get_running_loop(), memoryview(data).cast("B")
        with self._using("sending to", seconds):
            for start in range(0, len(view), _PIECE_BYTES):
                piece = view[start : start + _PIECE_BYTES]
                async with asyncio.timeout(seconds):
                    await loop.sock_sendall(self._socket, piece)
                self.bytes_sent += len(piece)
                if start % _TURN_BYTES == 0:
                    await asyncio.sleep(0)

    async def read(self, size: int, seconds: float) -> bytes:
        data = bytearray(size)
        await self.read_into(memoryview(data), seconds)
        return bytes(data)

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        view, since_turn = memoryview(buffer).cast("B"), 0
        now = asyncio.get_running_loop().time
        end = now() + seconds
        with self._using("receiving from", seconds):
            while view:
                got = await self._receive(view, end)
                end = min(now() + seconds, end + got / LEAST_RATE)
                if got == 0:
                    raise Unreachable(f"the stream from {self.peer} ended {len(view)} bytes too early")
                view = view[got:]
                self.bytes_received += got
                since_turn += got
                if since_turn >= _TURN_BYTES:
                    since_turn = 0
                    await asyncio.sleep(0)

    async def _receive(self, view: memoryview, end: float) -> int:
        try:
            return self._socket.recv_into(view)
        except BlockingIOError:
            async with asyncio.timeout_at(end):
                return await asyncio.get_running_loop().sock_recv_into(self._socket, view)

    def close(self) -> None:
        """What was written before still arrives."""
        if self._closed:
            return
        self._closed = True
        if self._users:  # the loop watches this descriptor: wake the tasks that use it; the last one closes it
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._close_if_unused()
        self._on_close()
