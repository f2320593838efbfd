"""A stream over a socket to p2pd: bytes go between memory and the daemon without copies on the way.

A read or write fails after its time limit without progress; a few bytes now and then are none: each byte that arrives
extends the limit by its time at LEAST_RATE, up to the whole limit. A stream
may be closed at any time, also while another task reads or writes: that task then gets Unreachable.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

from diloco.swarm.network.transport import LEAST_RATE, Stream, Unreachable

_PIECE_BYTES = 256 << 10
"""Handed to the kernel at once; each piece has the whole time limit."""
_TURN_BYTES = 1 << 20
"""After this many bytes the other tasks of the loop get a turn, however fast the bytes come."""


class SocketStream(Stream):
    def __init__(self, peer: str, sock: socket.socket, on_close: Callable[[], None]) -> None:
        self.peer, self.bytes_sent, self.bytes_received = peer, 0, 0
        self._socket, self._on_close = sock, on_close
        self._users = self._since_turn = 0
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
        """As much as there is room for now. Both at once: p2pd makes a message of each piece that it gets."""
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
                got = len(view) - arriving.missing
                self.bytes_received += got
                self._since_turn += got
            await self._give_turn()

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


class _Arriving:
    """Bytes that a task waits for. Each time some arrive they go into its memory, and the last ones wake it."""

    def __init__(self, sock: socket.socket, memory: memoryview, seconds: float) -> None:
        self._socket, self._rest, self._seconds = sock, memory, seconds
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + seconds
        self._done: asyncio.Future[None] = self._loop.create_future()

    @property
    def missing(self) -> int:
        return len(self._rest)

    def receive(self) -> bool:
        """Take what is there; whether that is all. Raises EOFError at the end of the stream."""
        if not self._rest:
            return True
        try:
            got = self._socket.recv_into(self._rest)
        except BlockingIOError:
            return False
        if got == 0:
            raise EOFError
        self._rest = self._rest[got:]
        self._end = min(self._loop.time() + self._seconds, self._end + got / LEAST_RATE)
        return not self._rest

    async def wait(self) -> None:
        """Until all is there. Raises TimeoutError, too."""
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
