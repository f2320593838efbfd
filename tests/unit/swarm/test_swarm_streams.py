"""A stream over a socket: bytes arrive whole, however little room there is, and a close ends every wait."""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from diloco.swarm.network.p2pd.streams import SocketStream
from diloco.swarm.network.transport import Unreachable


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
