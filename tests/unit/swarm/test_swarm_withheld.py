"""A worker that answers and does not send its parts, or its means, delays a round once, and not the next ones."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from diloco.swarm.network.transport import LEAST_RATE, Stream
from diloco.swarm.node import clock
from diloco.swarm.node.frames import DataFrames, Quiet, write_frame
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, values

BAD, ROUNDS = 3, 4
STALL_SECONDS = 2.0
"""With the `lost_seconds` of these stories."""


def stories(rounds: int = ROUNDS) -> tuple[list[Plan], list[float], list[str]]:
    """The plans of these rounds, the seconds that each took, and the events of their leader."""

    async def story(swarm: MemorySwarm) -> tuple[list[Plan], list[float], list[str]]:
        workers = await founded(swarm, 4)
        await asyncio.sleep(1.0)
        plans, took = [], []
        for sequence in range(rounds):
            started = clock.now()
            await workers[BAD].catch_up()
            bad = asyncio.create_task(workers[BAD].post(values(BAD, 0, 5000), sequence=sequence, seconds=200.0))
            posts = [w.post(values(w.node.number, 0, 5000), sequence=sequence, seconds=200.0) for w in workers[:3]]
            ended = await asyncio.gather(*posts)
            took.append(clock.now() - started)
            assert {one.failure for one, _ in ended} == {None} and len({mean for _, mean in ended}) == 1
            kept = workers[0].node.outcomes.recent.get(sequence)
            assert kept is not None
            plans.append(kept.plan)
            bad.cancel()
            await asyncio.sleep(1.0)
        return plans, took, [kind for kind, _ in workers[0].trainer.events]

    return told(story, patience=0.5)  # type: ignore[no-any-return]


def reducers(made: Plan) -> set[int]:
    ranges = made.ranges(5)
    return {entry.number for entry in made.contributors if len(ranges[entry.peer])}


async def only_alive(_: Transfer, stream: Stream) -> None:
    while True:
        await write_frame(stream, b"", 1.0)
        await asyncio.sleep(0.2)


async def byte_by_byte(self: Transfer, stream: Stream) -> None:
    for byte in bytes(self._mean(self._mine)):
        await write_frame(stream, bytes([byte]), 1.0)
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("send", "first", "most"), [(only_alive, 0, 3.5), (byte_by_byte, 0, 3.5), (only_alive, 1, 1.5)]
)
def test_a_reducer_that_keeps_its_mean_to_itself_reduces_no_more_and_stays_in_the_rounds(
    send: Callable[[Transfer, Stream], Awaitable[None]], first: int, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its first round on, when its line is not known, or from a later one."""
    honest = Transfer._send_mean

    async def send_mean(self: Transfer, stream: Stream) -> None:
        bad = self._transport.peer == NAMES[BAD] and self.plan.key.sequence >= first
        await (send if bad else honest)(self, stream)

    monkeypatch.setattr(Transfer, "_send_mean", send_mean)
    plans, took, events = stories()
    assert all(made.decision.contributors == (0, 1, 2, 3) for made in plans)
    assert took[first] < most * STALL_SECONDS and max(took[first + 1 :]) < STALL_SECONDS
    assert all(reducers(made) == {0, 1, 2} for made in plans[first:])
    assert events.count("reducer_passed_over") == 1


def test_a_worker_that_never_sends_its_parts_is_left_out_and_is_tried_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = Transfer._send

    async def send(self: Transfer, stream: Stream, data: memoryview) -> None:
        if self._transport.peer != NAMES[BAD]:
            await honest(self, stream, data)

    monkeypatch.setattr(Transfer, "_send", send)
    plans, took, events = stories(8)
    assert all(made.decision.contributors == (0, 1, 2) for made in plans)
    assert max(took) < 2.5 * STALL_SECONDS and sum(seconds >= STALL_SECONDS for seconds in took[3:]) <= 1
    assert "reducer_passed_over" not in events


def test_a_reducer_that_waits_for_the_parts_of_another_names_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then: no read stalls. The reducers send empty frames meanwhile, and are not blamed."""
    honest = Transfer._send

    async def send(self: Transfer, stream: Stream, data: memoryview) -> None:
        if self._transport.peer != NAMES[BAD]:
            return await honest(self, stream, data)
        while True:
            await stream.write(data[:1], 1.0)
            await asyncio.sleep(0.2)

    monkeypatch.setattr(Transfer, "_send", send)
    plans, took, events = stories(1)
    assert plans[0].decision.contributors == (0, 1, 2) and reducers(plans[0]) == {0, 1, 2}
    assert took[0] < 3.5 * STALL_SECONDS and "reducer_passed_over" not in events


class Frames(Stream):
    """A stream that brings frames of so many bytes, one each second."""

    peer, bytes_sent, bytes_received = "peer", 0, 0

    def __init__(self, size: int) -> None:
        self._size = size

    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        del data, seconds
        raise NotImplementedError

    async def read(self, size: int, seconds: float) -> bytes:
        del size, seconds
        await asyncio.sleep(1.0)
        return self._size.to_bytes(4, "little")

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        del buffer, seconds

    def close(self) -> None:
        return


@pytest.mark.parametrize(("size", "lasts"), [(0, False), (1, False), (int(LEAST_RATE), True), (1 << 20, True)])
def test_progress_is_counted_in_bytes_of_data(size: int, lasts: bool) -> None:
    async def story() -> float:
        frames, started = DataFrames(Frames(size), 5.0, 10.0), clock.now()
        with contextlib.nullcontext() if lasts else pytest.raises(Quiet):
            for _ in range(50):
                await frames.read_into(memoryview(bytearray(1 << 20)))
        return clock.now() - started

    assert virtual_clock.run(story()) == pytest.approx(50.0 if lasts else 10.0, abs=0.1)
