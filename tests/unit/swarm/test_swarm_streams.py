"""Streams: over a socket bytes arrive whole, however little room there is, and a close ends every wait.

Paced streams, over pipes of a given rate on a virtual clock: how much is under way, and that all of it arrives.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from diloco.swarm.network.p2pd.streams import FIRST_WINDOW, PacedStream, SocketStream
from diloco.swarm.network.transport import Stream, Unreachable
from diloco.swarm.simulator import virtual_clock

SLOW, FAST = 125_000.0, 125_000_000.0
"""Bytes a second: 1 Mbit/s, 1 Gbit/s."""


@contextlib.contextmanager
def pair(kind: int = socket.SOCK_STREAM) -> Iterator[tuple[SocketStream, SocketStream]]:
    ends = socket.socketpair(socket.AF_UNIX, kind)
    for end in ends:
        end.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    one, other = (SocketStream("peer", end, lambda: None) for end in ends)
    yield one, other
    one.close()
    other.close()


def test_a_head_and_megabytes_after_it_arrive_whole_through_a_small_buffer_in_both_directions() -> None:
    async def talk(stream: SocketStream, data: bytes, size: int) -> bytes:
        async def read() -> bytes:
            return await stream.read(7, 20.0) + await stream.read(size - 7, 20.0)

        got, _ = await asyncio.gather(read(), stream.write_both(b"head", data, 20.0))
        assert (stream.bytes_sent, stream.bytes_received) == (4 + len(data), size)
        return got

    async def story() -> None:
        there, back = os.urandom(3_000_001), os.urandom(1_000_003)
        with pair() as (one, other):
            got = await asyncio.gather(talk(one, there, 4 + len(back)), talk(other, back, 4 + len(there)))
        assert got == [b"head" + back, b"head" + there]

    asyncio.run(story())


def test_a_head_and_the_data_after_it_leave_as_one_piece() -> None:
    async def story() -> None:
        with pair(socket.SOCK_SEQPACKET) as (one, other):
            await one.write_both(b"head", b"data", 20.0)
            assert await other.read(8, 20.0) == b"headdata"

    asyncio.run(story())


@pytest.mark.parametrize("closed", [0, 1])
def test_a_reader_is_told_when_either_end_is_closed_before_all_has_arrived(closed: int) -> None:
    async def story() -> None:
        with pair() as ends:
            reading = asyncio.create_task(ends[0].read(10, 20.0))
            await ends[1].write(b"1234", 20.0)
            while ends[0]._users == 0:
                await asyncio.sleep(0)
            ends[closed].close()
            with pytest.raises(Unreachable, match="bytes too early"):
                await reading

    asyncio.run(story())


def test_a_read_that_is_cancelled_leaves_what_comes_later_to_the_next_one() -> None:
    async def story() -> None:
        with pair() as (one, other):
            reading = asyncio.create_task(one.read(4, 20.0))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait({reading})
            await other.write(b"1234", 20.0)
            assert await one.read(4, 20.0) == b"1234"

    asyncio.run(story())


# Paced streams


class Line(Stream):
    """One end of a line that takes any number of bytes at once, and carries them at a rate. As p2pd does, it loses what
    is in transit if bytes arrive at an end that is closed."""

    def __init__(self, rate: float) -> None:
        self.peer = "peer"
        self.bytes_sent = 0
        self.bytes_received = 0
        self.rate = rate
        self.free_at = 0.0
        self.queued = 0
        self.most_queued = 0
        self.arrived = bytearray()
        self.news = asyncio.Event()
        self.closed = False
        self.reset = False
        self.other: Line = self

    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        if self.closed or self.reset:
            raise Unreachable("broken pipe")
        del seconds
        loop = asyncio.get_running_loop()
        sent = bytes(data)
        self.free_at = max(self.free_at, loop.time()) + len(sent) / self.rate
        self.queued += len(sent)
        self.most_queued = max(self.most_queued, self.queued)
        loop.call_at(self.free_at, self._carry, sent)
        self.bytes_sent += len(sent)

    def _carry(self, sent: bytes) -> None:
        self.queued -= len(sent)
        if self.other.closed:
            self.reset = self.other.reset = True
        if not self.reset:
            self.other.arrived += sent
        self.other.news.set()
        self.news.set()

    async def read(self, size: int, seconds: float) -> bytes:
        try:
            async with asyncio.timeout(seconds):
                while len(self.arrived) < size:
                    if self.reset or self.closed or (self.other.closed and not self.other.queued):
                        raise Unreachable("the stream ended too early")
                    self.news.clear()
                    await self.news.wait()
        except TimeoutError:
            raise Unreachable("no progress") from None
        data = bytes(self.arrived[:size])
        del self.arrived[:size]
        return data

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        buffer[:] = await self.read(len(buffer), seconds)

    def close(self) -> None:
        self.closed = True
        self.other.news.set()


def paced_ends(rate: float, back: float | None = None) -> tuple[PacedStream, PacedStream]:
    one, other = Line(rate), Line(rate if back is None else back)
    one.other, other.other = other, one
    return PacedStream(one), PacedStream(other)


@pytest.mark.parametrize(("rate", "size"), [(SLOW, 1_000_000), (FAST, 100_000_000)])
def test_less_than_a_second_of_bytes_is_under_way_and_a_line_is_used_to_the_full(rate: float, size: int) -> None:
    async def story() -> tuple[float, float]:
        sender, receiver = paced_ends(rate)
        data = os.urandom(size // 100) * 100
        started = asyncio.get_running_loop().time()
        got, _ = await asyncio.gather(receiver.read(size, 20.0), sender.write(data, 20.0))
        assert got == data
        line = sender.raw
        assert isinstance(line, Line)
        return line.most_queued / rate, asyncio.get_running_loop().time() - started

    queued, seconds = virtual_clock.run(story())
    assert queued < 1.5
    assert seconds < 1.2 * size / rate + 0.1


def test_both_directions_at_once_arrive_whole_over_a_lopsided_line() -> None:
    async def story() -> bool:
        one, other = paced_ends(FAST, SLOW)
        there, back = os.urandom(300_000), os.urandom(300_000)

        async def talk(stream: PacedStream, data: bytes, size: int) -> bytes:
            got, _ = await asyncio.gather(stream.read(size, 20.0), stream.write(data, 20.0))
            stream.close()
            return got

        return await asyncio.gather(talk(one, there, len(back)), talk(other, back, len(there))) == [back, there]

    assert virtual_clock.run(story())


def test_what_was_written_before_a_close_arrives_and_both_ends_are_closed_then() -> None:
    """p2pd resets a stream on which an acknowledgement comes to an end that is gone."""

    async def story() -> tuple[bytes, list[bool]]:
        sender, receiver = paced_ends(SLOW)
        await sender.write(bytes(20_000), 20.0)
        sender.close()
        got = await receiver.read(20_000, 20.0)
        receiver.close()
        await asyncio.sleep(30.0)
        closed = [stream.raw.closed for stream in (sender, receiver) if isinstance(stream.raw, Line)]
        return got, closed

    got, closed = virtual_clock.run(story())
    assert got == bytes(20_000) and closed == [True, True]


def test_a_writer_whose_peer_reads_nothing_is_told_after_its_time() -> None:
    async def story() -> None:
        sender, _ = paced_ends(FAST)
        await sender.write(bytes(2 * FIRST_WINDOW), 5.0)

    with pytest.raises(Unreachable, match="no progress"):
        virtual_clock.run(story())
