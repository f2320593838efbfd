"""The event loop that the swarm's protocol tests run on."""

import asyncio
import re
import time
from pathlib import Path

import pytest

from diloco.swarm import node
from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.workers import MemorySwarm


def test_hours_pass_at_once_and_in_order() -> None:
    async def work() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []
        loop = asyncio.get_running_loop()

        async def note(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, loop.time() - virtual_clock.START))

        await asyncio.gather(note("late", 7200.0), note("early", 3600.0), note("now", 0.0))
        return seen

    assert virtual_clock.run(work()) == [("now", 0.0), ("early", 3600.0), ("late", 7200.0)]


def test_time_stands_still_while_work_is_done_however_long_it_takes() -> None:
    async def work() -> float:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(0.001):
            await asyncio.to_thread(time.sleep, 0.01)
            time.sleep(0.01)  # as slow code or a busy machine does
            await asyncio.sleep(0)
        return loop.time()

    assert virtual_clock.run(work()) == virtual_clock.START


def test_what_an_executor_raises_is_raised_where_it_is_awaited() -> None:
    async def work() -> None:
        await asyncio.get_running_loop().run_in_executor(None, int, "x")

    with pytest.raises(ValueError, match="invalid literal"):
        virtual_clock.run(work())


def test_a_wait_that_nothing_can_end_is_an_error() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(virtual_clock.Stuck):
        virtual_clock.run(work())


def test_a_set_of_tasks_or_futures_has_the_same_order_in_every_run() -> None:
    async def work() -> list[int]:
        loop = asyncio.get_running_loop()
        made: list[asyncio.Future[None]] = [loop.create_task(asyncio.sleep(0)) for _ in range(40)]
        return [hash(one) - hash(made[0]) for one in [*made, loop.create_future()]]

    assert virtual_clock.run(work()) == list(range(41))


def test_what_waits_for_a_change_of_the_members_goes_on_in_the_order_of_waiting() -> None:
    async def work() -> list[int]:
        worker, woken = await MemorySwarm().start(), list[int]()

        async def wait(number: int) -> None:
            await worker.node.members.wait_for_change(1.0)
            woken.append(number)

        waiting = [asyncio.create_task(wait(number)) for number in range(40)]
        await asyncio.sleep(0)
        worker.node.members.changed()
        await asyncio.gather(*waiting)
        return woken

    assert virtual_clock.run(work()) == list(range(40))


def test_the_node_reads_no_clock_but_its_event_loops() -> None:
    """A guest has its loop in another thread, and measures from outside."""
    folder = Path(node.__file__).parent
    files = [path for path in folder.rglob("*.py") if path.name != "guest.py"]
    assert len(files) > 10
    for path in files:
        assert not re.search(r"monotonic|perf_counter|time\.sleep|wait_for\(", path.read_text()), path
