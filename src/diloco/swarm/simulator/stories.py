"""Stories of a swarm in memory, on a virtual clock: found it, run rounds, stop a worker."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from typing import Any

from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, values

Story = Callable[[MemorySwarm], Awaitable[Any]]


def told(story: Story, **settings: Any) -> Any:
    async def run() -> Any:
        swarm = MemorySwarm(**{"lost_seconds": 0.5, "beat_seconds": 0.1, "patience": 50.0, **settings})
        try:
            async with asyncio.timeout(6000):
                return await story(swarm)
        finally:
            await swarm.close()

    return virtual_clock.run(run())


async def founded(swarm: MemorySwarm, workers: int) -> list[MemoryWorker]:
    for _ in range(workers):
        await (await swarm.start()).catch_up()
    await asyncio.sleep(0.25)
    return swarm.workers


async def rounds(workers: list[MemoryWorker], count: int) -> None:
    for _ in range(count):
        posts = (worker.post(values(worker.node.number, worker.trainer.sequence)) for worker in workers)
        for ended, _ in await asyncio.gather(*posts):
            assert ended.failure is None


def stop(swarm: MemorySwarm, worker: MemoryWorker) -> None:
    swarm.network.kill(worker.name)
    for task in worker.node._tasks:
        task.cancel()


async def sleep(swarm: MemorySwarm, worker: MemoryWorker, seconds: float) -> None:
    """The worker's machine is suspended: it says and hears nothing, and its own clock stands still."""
    node = worker.node
    swarm.network.cut.add(worker.name)
    for task in node._tasks:
        task.cancel()
    await asyncio.sleep(seconds)
    for peer in node.members.peers.values():
        peer.heard_at += seconds
        peer.asked_at += seconds
    swarm.network.cut.discard(worker.name)
    node._start_task(node.heartbeats.run())
    node._start_task(node._check_regularly())


def freeze(worker: MemoryWorker) -> None:
    """This process of the worker stands still; another one may have its name."""
    worker.node.transport.frozen = True  # type: ignore[attr-defined]
    for task in worker.node._tasks:
        task.cancel()


def thaw(worker: MemoryWorker) -> None:
    worker.node.transport.frozen = False  # type: ignore[attr-defined]
    worker.node._start_task(worker.node.heartbeats.run())
    worker.node._start_task(worker.node._check_regularly())


async def train(worker: MemoryWorker, until: int, step_seconds: float = 0.3) -> None:
    """Act as a trainer: post a round now and then, or when others wait for it, and fetch the state when told to."""
    trainer = worker.trainer
    while trainer.sequence < until:
        end = asyncio.get_running_loop().time() + step_seconds
        while asyncio.get_running_loop().time() < end and not any(call >= trainer.sequence for call in trainer.calls):
            await asyncio.sleep(0.05)
        digest = hashlib.sha256(b"".join(trainer.means)).hexdigest()[:16]
        outcome, _ = await worker.post(values(worker.node.number, trainer.sequence), digest=digest, seconds=60.0)
        assert not outcome.fatal, outcome
        if outcome.resync:
            await worker.catch_up()
