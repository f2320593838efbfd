"""The line between a trainer and its sidecar: whole messages over a pair of connected Unix sockets.

A message (messages.py) travels as JSON in one packet: bytes as base64, shared memory as a file descriptor beside it,
and a JSON that is too long for a packet as such memory too. Nothing is unpickled. The trainer's end (`Link`) is for
threads; the sidecar's (`AsyncLink`) is part of an asyncio loop. Neither end ever waits without a bound, and neither
knows what the messages mean.
"""

import array
import asyncio
import base64
import contextlib
import dataclasses
import json
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, get_args

from diloco.engines.swarm.shared_memory import SharedMemory
from diloco.engines.swarm.sidecar.messages import Message

MAX_PACKET_BYTES = 1 << 16
"""A longer JSON goes into shared memory: the kernel limits what a packet can hold."""
MAX_MESSAGE_BYTES = 1 << 26
_MAX_FDS = 8
_MAX_UNSENT = 4096

_TYPES: dict[str, Any] = {kind.__name__: kind for kind in get_args(Message)}


class LinkError(Exception):
    """A message could not be sent or understood."""


class LinkClosed(LinkError):
    """The other end is gone."""


class LinkFull(LinkError):
    """The other end has not taken what it was sent before."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends; packets stay whole, and either end hears of the other's death."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@dataclasses.dataclass(frozen=True)
class _Packet:
    data: bytes
    memories: tuple[SharedMemory, ...]
    """They must live until the packet is sent: their descriptors travel with it."""

    @classmethod
    def of(cls, message: Message) -> "_Packet":
        memories: list[SharedMemory] = []

        def plain(value: object) -> object:
            if isinstance(value, bytes):
                return {"b64": base64.b64encode(value).decode("ascii")}
            if isinstance(value, SharedMemory):
                memories.append(value)
                return {"memory": [len(memories) - 1, value.num_bytes]}
            raise TypeError(f"a {type(value).__name__} cannot be sent over the link")

        fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
        data = json.dumps([type(message).__name__, fields], default=plain).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise LinkError(f"a {type(message).__name__} of {len(data)} bytes is too long: at most {MAX_MESSAGE_BYTES}")
        if len(data) > MAX_PACKET_BYTES:
            long = SharedMemory.create(len(data))
            long.view[:] = data
            return cls(json.dumps(["long", len(data)]).encode(), (*memories, long))
        return cls(data, tuple(memories))

    def send(self, end: socket.socket) -> None:
        """Raises BlockingIOError where there is no room."""
        fds = array.array("i", [memory.fd for memory in self.memories])
        beside = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        try:  # not socket.send_fds: Python 3.11's forgets the flags
            end.sendmsg([self.data], beside, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(f"the other end is gone ({error})") from error


def _receive(end: socket.socket) -> Message:
    """The next message; raises BlockingIOError where there is none."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    fds = array.array("i")
    try:
        data, beside, got, _ = end.recvmsg(MAX_PACKET_BYTES, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), flags)
    except BlockingIOError:
        raise
    except OSError as error:
        raise LinkClosed(f"the other end is gone ({error})") from error
    for level, kind, sent in beside:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(sent[: len(sent) - len(sent) % fds.itemsize])
    unused = set(fds)
    try:
        if not data:
            raise LinkClosed("the other end is gone")
        if got & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise LinkError("a packet was cut: too many open files, or another version at the other end")
        return _understood(data, list(fds), unused)
    finally:
        for fd in unused:
            os.close(fd)


def _understood(data: bytes, fds: list[int], unused: set[int]) -> Message:
    def memory(index: int, size: int) -> SharedMemory:
        fd = fds[index]
        if not 0 <= size <= os.fstat(fd).st_size:
            raise LinkError(f"shared memory of {os.fstat(fd).st_size} bytes was announced as {size}")
        taken = SharedMemory(fd, size)
        unused.discard(fd)
        return taken

    def rich(value: dict[str, Any]) -> Any:
        if value.keys() == {"b64"}:
            return base64.b64decode(value["b64"], validate=True)
        if value.keys() == {"memory"}:
            return memory(*value["memory"])
        return value

    try:
        kind, fields = json.loads(data, object_hook=rich)
        if kind == "long":
            kind, fields = json.loads(bytes(memory(len(fds) - 1, fields)), object_hook=rich)
        message: Message = _TYPES[kind](**fields)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise LinkError(f"a message that is none: {data[:80]!r} ({error!r})") from error
    return message


class Link:
    """An end for threads: any number may send, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: Message, seconds: float) -> None:
        """Raises LinkFull where the other end leaves no room for so long, and LinkClosed where it is gone."""
        packet, deadline = _Packet.of(message), time.monotonic() + seconds
        with self._sending:
            while True:
                try:
                    return packet.send(self._end)
                except BlockingIOError:
                    if not self._ready(select.POLLOUT, deadline - time.monotonic()):
                        raise LinkFull(f"the other end took no message within {seconds:g} s") from None

    def receive(self, seconds: float) -> Message | None:
        """None where nothing came in that time; raises LinkClosed at the end."""
        deadline = time.monotonic() + seconds
        while self._ready(select.POLLIN, deadline - time.monotonic()):
            with contextlib.suppress(BlockingIOError):
                return _receive(self._end)
        return None

    def _ready(self, event: int, seconds: float) -> bool:
        if self._end.fileno() < 0:
            raise LinkClosed("this end is closed")
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def shut(self) -> None:
        """Both ends hear that it is over; the descriptor stays for whoever is receiving."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


class AsyncLink:
    """An end in the running asyncio loop: `on_message` is called there for every message."""

    def __init__(self, end: socket.socket, on_message: Callable[[Message], None]) -> None:
        self._end, self._on_message = end, on_message
        self._unsent: deque[_Packet] = deque()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the other end is gone; raises what `on_message` raised."""
        end.setblocking(False)
        self._loop.add_reader(end, self._readable)

    def send(self, message: Message) -> None:
        """Never waits; what the other end has no room for yet is kept. Nothing happens once it is gone."""
        if self.ended.done():
            return
        if len(self._unsent) >= _MAX_UNSENT:
            self._end_with(LinkFull(f"the other end has left {_MAX_UNSENT} messages untaken"))
            return
        self._unsent.append(_Packet.of(message))
        if len(self._unsent) == 1:
            self._writable()

    async def flush(self, seconds: float) -> None:
        """Until everything is sent, or that time is over."""
        deadline = time.monotonic() + seconds
        while self._unsent and not self.ended.done() and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _writable(self) -> None:
        try:
            while self._unsent:
                self._unsent[0].send(self._end)
                self._unsent.popleft()
            self._loop.remove_writer(self._end)
        except BlockingIOError:
            self._loop.add_writer(self._end, self._writable)
        except LinkClosed:
            self._end_with(None)

    def _readable(self) -> None:
        try:
            self._on_message(_receive(self._end))
        except BlockingIOError:
            pass
        except LinkClosed:
            self._end_with(None)
        except Exception as error:  # noqa: BLE001  whoever waits for the end raises it
            self._end_with(error)

    def _end_with(self, error: Exception | None) -> None:
        self.close()
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def close(self) -> None:
        if self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
            self._loop.remove_writer(self._end)
            self._end.close()
        self._unsent.clear()
