"""A wait that is cancelled ends, also when what it waits for happens at the same moment.

Python 3.11's `asyncio.wait_for` returns normally in that case: a loop around it then went on for ever.
"""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from diloco.swarm.node.audit import TransferAudit
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.plan import Authority, Entry, Plan
from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.workers import MemorySwarm, values
from diloco.swarm.trainer import PresentWorker

TICKS = range(5)


async def is_cancelled(wait: Callable[[], Awaitable[None]], happen: Callable[[], None], ticks: int) -> bool:
    """Whether a loop of waits ends when it is cancelled so many turns of the event loop after what it waits for."""

    async def forever() -> None:
        while True:
            await wait()

    task = asyncio.create_task(forever())
    await asyncio.sleep(0.5)
    happen()
    for _ in range(ticks):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=60)
    ended = task.cancelled()
    task.cancel()
    return ended


@pytest.mark.parametrize("ticks", TICKS)
def test_a_wait_for_a_change_of_membership(ticks: int) -> None:
    async def work() -> bool:
        swarm = MemorySwarm()
        members = (await swarm.start()).node.members
        return await is_cancelled(lambda: members.wait_for_change(10.0), members.changed, ticks)

    assert virtual_clock.run(work())


@pytest.mark.parametrize("ticks", TICKS)
def test_a_reducers_wait_for_parts(ticks: int) -> None:
    async def work() -> bool:
        swarm = MemorySwarm()
        worker = await swarm.start()
        posting = worker.posting(values(0))
        entry = Entry(worker.name, PresentWorker(0, posting.header, b""))
        plan = Plan(posting.key, Authority(1, 0, 1), worker.name, (entry,), (0,), False, posting.max_norm_ratio)
        transfer = Transfer(
            plan, posting, worker.node.transport, 10.0, worker.node.outcomes.notary, TransferAudit(plan), 10.0
        )
        return await is_cancelled(lambda: transfer._wait_until(lambda: False, 10.0), transfer._notify, ticks)

    assert virtual_clock.run(work())
