"""Frames on streams: a length in four bytes, then the data. Every wait is bounded."""

import asyncio
import struct

from diloco.swarm.network.transport import LEAST_RATE, Stream, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.protocol.wire import Malformed

_LENGTH = struct.Struct("<I")


async def write_frame(stream: Stream, data: bytes | memoryview, seconds: float) -> None:
    """Write the length in four bytes, then the data."""
    await stream.write_both(_LENGTH.pack(len(data)), data, seconds)


async def read_frame(stream: Stream, limit: int, seconds: float) -> bytes:
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size, seconds))
    if length > limit:
        raise Malformed(f"a frame of {length} bytes, more than {limit}")
    return await stream.read(length, seconds) if length else b""


class Quiet(Unreachable):
    """The peer is live, and sends no data."""


class DataFrames:
    """The frames of a stream. Empty ones say that the sender is alive; progress is counted in bytes of data.

    The sender may take `quiet_seconds`, and for each byte the time that it takes at half of LEAST_RATE, up to
    `quiet_seconds` again.
    """

    def __init__(self, stream: Stream, seconds: float, quiet_seconds: float) -> None:
        """`seconds`: as for the methods of a stream."""
        self._stream = stream
        self._seconds = seconds
        self._quiet = quiet_seconds
        self._end = clock.now() + quiet_seconds

    async def read_into(self, buffer: memoryview) -> int:
        """Read the next frame with data into the beginning of `buffer`; returns its length. Raises Quiet, too."""
        length = 0
        try:
            async with asyncio.timeout_at(self._end):
                while not length:
                    (length,) = _LENGTH.unpack(await self._stream.read(_LENGTH.size, self._seconds))
        except TimeoutError:
            raise Quiet(f"{self._stream.peer} has sent almost nothing but empty frames for {self._quiet:g} s") from None
        if length > len(buffer):
            raise Malformed(f"a frame of {length} bytes, more than the {len(buffer)} that are left")
        await self._stream.read_into(buffer[:length], self._seconds)
        self._end = min(clock.now() + self._quiet, self._end + 2 * length / LEAST_RATE)
        return int(length)
