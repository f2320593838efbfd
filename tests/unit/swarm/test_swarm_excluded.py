"""A worker that is out of the run (revoked, or replaced by another process of its identity) learns so, and ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import Excluded
from diloco.swarm.settings import Settings
from diloco.swarm.sidecar.link import LinkClosed
from diloco.swarm.sidecar.messages import FetchState
from diloco.swarm.sidecar.supervisor import SidecarSupervisor
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import MemorySwarm, date, values
from diloco.swarm.trainer import RoundOutcome


@pytest.mark.parametrize("count", [2, 3])
def test_a_revoked_worker_is_told_so_once_and_its_next_round_fails_for_good(count: int) -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[tuple[str, dict[str, Any]]], RoundOutcome]:
        workers = await founded(swarm, count)
        await rounds(workers, 1)
        revoked = workers[-1]
        record = swarm.run_key.revoke([revoked.name], None, date())
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


def test_a_worker_that_is_excluded_while_it_fetches_the_state_ends() -> None:
    async def story(swarm: MemorySwarm) -> None:
        workers = await founded(swarm, 3)
        joiner = await swarm.start()
        for worker in workers:  # they have the state, and do not give it
            swarm.network.pairs.append({worker.name, joiner.name})
        fetching = asyncio.create_task(joiner.catch_up())
        await asyncio.sleep(0.1)
        joiner.node.members.exclude_self("replaced: another process has taken its place")
        with pytest.raises(Excluded, match="has taken its place"):
            await fetching

    told(story, lost_seconds=5.0)


def test_a_worker_that_its_swarm_does_not_admit_again_ends_and_starts_no_further_sidecar(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its sidecar died, and meanwhile a copy of its run folder has taken its place."""
    lives: list[Exception] = [LinkClosed("it died (signal 9)"), Excluded("replaced: another has taken its place")]

    def live(supervisor: SidecarSupervisor) -> None:
        if not supervisor._first_start.done():
            supervisor._first_start.set_result(7)
        raise lives.pop(0)

    monkeypatch.setattr(SidecarSupervisor, "_run_sidecar", live)
    nothing: Any = lambda *_: None  # noqa: E731
    supervisor = SidecarSupervisor(Settings(str(tmp_path), "worker-0"), tmp_path / "log", nothing, nothing, nothing)
    assert supervisor.start(10.0) == 7
    with pytest.raises(Excluded, match="has taken its place"):
        supervisor.request(FetchState(1, None)).result(10.0)
    assert lives == []
