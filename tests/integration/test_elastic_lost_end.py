"""A worker of a swarm that does not hear how a round has ended, and takes it for failed."""

from dataclasses import replace
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.engines.rounds import RoundResult
from diloco.errors import RoundFailed
from support import elastic
from support.elastic import ElasticWorld

PLAIN = SyncConfig(6, "fp32")


@pytest.mark.parametrize("resync", [False, True])
def test_the_mean_of_a_round_that_failed_for_this_worker_alone_is_merged_when_it_arrives_later(
    resync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commit was lost and its deadline over: only a later round tells the worker that it lacks a mean."""
    world, wait = ElasticWorld(2, PLAIN), elastic._Pending.wait

    def lost(self: elastic._Pending) -> RoundResult:
        result = wait(self)
        if (self.engine.worker, self.key.sequence) == (1, 0):
            raise RoundFailed("round 0: no result within 5 s", resync=resync)
        return result

    def since_round_0(worker: int) -> Any:
        mine = world.swarm.providers[worker]()
        return world.swarm._since(replace(mine, tensors={}, numbers={"sequence": 0}))

    monkeypatch.setattr(elastic._Pending, "wait", lost)
    monkeypatch.setattr(world.swarm, "state_for", since_round_0)
    world.swarm.leave_out(1, 1)
    world.step(times=2 * PLAIN.num_inner_steps)
    assert world.workers[1].loop.counters.rounds_failed == 2
    assert len(world.digests()) == 1
