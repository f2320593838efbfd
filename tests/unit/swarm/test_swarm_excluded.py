"""A worker that the owner has revoked learns so from the others, and does not take it for their silence."""

import asyncio
from typing import Any

import pytest

from diloco.engines.swarm.node.trainer import RoundOutcome
from support.swarm.memory import MemorySwarm, date, values
from support.swarm.stories import founded, rounds, told


@pytest.mark.parametrize("count", [2, 3])
def test_a_revoked_worker_is_told_so_once_and_its_next_round_fails_for_good(count: int) -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[tuple[str, dict[str, Any]]], RoundOutcome]:
        workers = await founded(swarm, count)
        await rounds(workers, 1)
        revoked = workers[-1]
        record = swarm.run_key.revoke([revoked.name], None, [], date())
        workers[0].node.members.add_revocations([record.data])
        async with asyncio.timeout(60):
            while "excluded" not in dict(revoked.trainer.events):
                await asyncio.sleep(0.1)
        await asyncio.sleep(10.0)  # long enough to notice that no other worker is live
        ended, _ = await revoked.post(values(count - 1, 1))
        return revoked.trainer.events, ended

    events, ended = told(story)
    types = [type_ for type_, _ in events]
    assert types.count("excluded") == 1 and "alone" not in types
    assert "was revoked by the owner of the run" in dict(events)["excluded"]["reason"]
    assert ended.fatal and ended.failure is not None and "revoked by the owner" in ended.failure
