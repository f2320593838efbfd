"""The bytes between peers: typed messages (msgspec, as msgpack maps with a tag) and frames on streams.

A message comes from outside. It is decoded strictly, into one of the types of messages.py and within their bounds;
anything else is Malformed. Nothing is unpickled.
"""

import struct

import msgspec

from diloco.engines.swarm.network.transport import Stream, Unreachable
from diloco.engines.swarm.node import clock

PROTOCOL = 6
"""Raised when peers of two versions would misunderstand each other."""

_LENGTH = struct.Struct("<I")


class Malformed(ValueError):
    """A message that no honest peer of this version sends."""


class PeerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="t"):
    """The base of all messages between peers; its class name is the tag."""


def encode(message: PeerMessage) -> bytes:
    return msgspec.msgpack.encode(message)


async def write_frame(stream: Stream, data: bytes | memoryview, seconds: float) -> None:
    """The length in four bytes, then the data."""
    await stream.write(_LENGTH.pack(len(data)), seconds)
    if len(data):
        await stream.write(data, seconds)


async def read_frame(stream: Stream, limit: int, seconds: float) -> bytes:
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size, seconds))
    if length > limit:
        raise Malformed(f"a frame of {length} bytes, more than {limit}")
    return await stream.read(length, seconds) if length else b""


async def read_data_into(stream: Stream, buffer: memoryview, seconds: float, quiet_seconds: float) -> int:
    """The same as `read_frame_into`, without empty frames: they say that the sender is alive, for so long at most."""
    end = clock.now() + quiet_seconds
    while (length := await read_frame_into(stream, buffer, seconds)) == 0:
        if clock.now() > end:
            raise Unreachable(f"{stream.peer} has sent nothing but empty frames for {quiet_seconds:g} s")
    return length


async def read_frame_into(stream: Stream, buffer: memoryview, seconds: float) -> int:
    """Read a frame into the beginning of `buffer`; returns its length."""
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size, seconds))
    if length > len(buffer):
        raise Malformed(f"a frame of {length} bytes, more than the {len(buffer)} that are left")
    if length:
        await stream.read_into(buffer[:length], seconds)
    return int(length)
