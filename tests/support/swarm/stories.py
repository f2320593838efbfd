"""Stories of a swarm in memory, on a virtual clock: found it, run rounds, stop a worker."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from support import virtual_clock
from support.swarm.memory import MemorySwarm, MemoryWorker, values

Story = Callable[[MemorySwarm], Awaitable[Any]]


def told(story: Story, **settings: Any) -> Any:
    async def run() -> Any:
        swarm = MemorySwarm(**{"lost_seconds": 0.5, "beat_seconds": 0.1, "patience": 50.0, **settings})
        try:
            async with asyncio.timeout(600):
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
