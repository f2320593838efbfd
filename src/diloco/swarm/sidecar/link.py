"""The link between a trainer and its sidecar: whole messages over a pair of connected Unix sockets.

A message (messages.py) travels as msgpack in one packet, its shared memory as file descriptors beside it. A message
that is too long for a packet goes into shared memory of its own. Nothing is unpickled: `msgspec` checks the type of
every field. The trainer's end (`BlockingLink`) is for threads, the sidecar's (`AsyncLink`) for an asyncio loop. No end
ever waits without a bound.
"""

import array
import asyncio
import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar.messages import Message

MAX_PACKET_BYTES = 1 << 16
"""A longer message goes into shared memory: the kernel limits the size of a packet."""
MAX_MESSAGE_BYTES = 1 << 26
_MAX_FDS = 253  # SCM_MAX_FD of Linux
_MAX_UNSENT = 4096

Received = TypeVar("Received")


class LinkError(Exception):
    """A message could not be sent or decoded."""


class LinkClosed(LinkError):
    """The other end is closed."""


class LinkFull(LinkError):
    """The other end does not read what it was sent."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends; packets stay whole, and each end notices the other's death."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class _LongMessage(msgspec.Struct, tag=True, tag_field="message", frozen=True):
    """The content of a packet when the message itself is in shared memory."""

    memory: SharedMemory


@dataclass(frozen=True)
class _Packet:
    data: bytes
    memories: tuple[SharedMemory, ...]
    """They must live until the packet is sent: their descriptors travel with it."""

    @classmethod
    def of(cls, message: Message) -> "_Packet":
        """Encode a message; in its place in the data each shared memory is (its index in `memories`, its size)."""
        name = type(message).__name__
        memories: list[SharedMemory] = []

        def encode_memory(value: object) -> tuple[int, int]:
            if not isinstance(value, SharedMemory):
                raise TypeError(f"a {type(value).__name__} in a {name} cannot be sent over the link")
            memories.append(value)
            return len(memories) - 1, value.num_bytes

        data = msgspec.msgpack.encode(message, enc_hook=encode_memory)
        if len(data) > MAX_MESSAGE_BYTES:
            raise LinkError(f"a {name} of {len(data)} bytes is too long: at most {MAX_MESSAGE_BYTES}")
        if len(data) > MAX_PACKET_BYTES:
            data = msgspec.msgpack.encode(_LongMessage(SharedMemory.copy_of(data)), enc_hook=encode_memory)
        if len(memories) > _MAX_FDS:
            raise LinkError(f"a {name} with {len(memories)} shared memories: at most {_MAX_FDS}")
        return cls(data, tuple(memories))

    def send(self, end: socket.socket) -> None:
        """Send the packet, or raise BlockingIOError if there is no room."""
        fds = array.array("i", [memory.fd for memory in self.memories])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        try:  # not socket.send_fds: Python 3.11's forgets the flags
            end.sendmsg([self.data], ancillary, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            raise
        except OSError as error:
            raise LinkClosed(f"the other end is closed ({error})") from error


def _receive(end: socket.socket, receives: Any) -> Any:
    """Receive a message of one of the types in the union `receives`, or raise BlockingIOError if there is none."""
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    fds = array.array("i")
    try:
        data, ancillary, received_flags, _ = end.recvmsg(
            MAX_PACKET_BYTES, socket.CMSG_LEN(_MAX_FDS * fds.itemsize), flags
        )
    except BlockingIOError:
        raise
    except OSError as error:
        raise LinkClosed(f"the other end is closed ({error})") from error
    for level, kind, sent in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(sent[: len(sent) - len(sent) % fds.itemsize])
    unused = set(fds)
    try:
        if not data:
            raise LinkClosed("the other end is closed")
        if received_flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise LinkError("a packet was cut: too many open files, or another version at the other end")
        return _decode(data, receives, list(fds), unused)
    finally:
        for fd in unused:
            os.close(fd)


def _decode(data: bytes, receives: Any, fds: list[int], unused: set[int]) -> Any:
    """Decode a message, and take the descriptors that it uses out of `unused`."""

    def decode_memory(kind: type, value: Any) -> SharedMemory:
        assert kind is SharedMemory
        index, size = msgspec.convert(value, tuple[int, int])
        if not (0 <= index < len(fds) and fds[index] in unused and 0 <= size <= os.fstat(fds[index]).st_size):
            raise ValueError(f"there is no shared memory {index} of {size} bytes")
        shared = SharedMemory(fds[index], size)
        unused.discard(fds[index])
        return shared

    try:
        message = msgspec.msgpack.decode(data, type=receives | _LongMessage, dec_hook=decode_memory)
        if isinstance(message, _LongMessage):
            message = msgspec.msgpack.decode(message.memory.view, type=receives, dec_hook=decode_memory)
    except msgspec.MsgspecError as error:
        raise LinkError(f"not a message of this version: {data[:80]!r} ({error})") from error
    return message


class BlockingLink(Generic[Received]):
    """An end for threads: any number may send, one receives."""

    def __init__(self, end: socket.socket, receives: Any) -> None:
        """`receives` is the union of the messages that the other end may send."""
        self._end = end
        self._receives = receives
        self._sending = threading.Lock()

    def send(self, message: Message, seconds: float) -> None:
        """Send a message; raise LinkFull if the other end leaves no room for so long, LinkClosed if it is closed."""
        packet = _Packet.of(message)
        deadline = time.monotonic() + seconds
        with self._sending:
            while True:
                try:
                    return packet.send(self._end)
                except BlockingIOError:
                    if not self._ready(select.POLLOUT, deadline - time.monotonic()):
                        raise LinkFull(f"the other end took no message within {seconds:g} s") from None

    def receive(self, seconds: float) -> Received | None:
        """Return the next message, or None if nothing arrives in that time; raise LinkClosed at the end."""
        deadline = time.monotonic() + seconds
        while self._ready(select.POLLIN, deadline - time.monotonic()):
            with contextlib.suppress(BlockingIOError):
                received: Received = _receive(self._end, self._receives)
                return received
        return None

    def _ready(self, event: int, seconds: float) -> bool:
        if self._end.fileno() < 0:
            raise LinkClosed("this end is closed")
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def shut(self) -> None:
        """End the link: both ends see LinkClosed; the descriptor stays valid for a thread that is receiving."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


class AsyncLink(Generic[Received]):
    """An end in the running asyncio loop: `on_message` is called there for every message."""

    def __init__(self, end: socket.socket, receives: Any, on_message: Callable[[Received], None]) -> None:
        self._end = end
        self._receives = receives
        self._on_message = on_message
        self._unsent: deque[_Packet] = deque()
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done when the other end is closed; raises what `on_message` raised."""
        end.setblocking(False)
        self._loop.add_reader(end, self._readable)

    def send(self, message: Message) -> None:
        """Send a message without waiting: what the other end has no room for yet is kept. After the end, do nothing."""
        if self.ended.done():
            return
        if len(self._unsent) >= _MAX_UNSENT:
            self._end_with(LinkFull(f"the other end has left {_MAX_UNSENT} messages unread"))
            return
        self._unsent.append(_Packet.of(message))
        if len(self._unsent) == 1:
            self._writable()

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
            self._on_message(_receive(self._end, self._receives))
        except BlockingIOError:
            pass
        except LinkClosed:
            self._end_with(None)
        except Exception as error:  # noqa: BLE001  raised again by `ended`
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
