"""The policy for a late round: at its merge point a worker waits, until `sync.timeout_seconds` after the post at most.

A mean that comes by then is merged as if it had been in time. Later than that the round has failed: the anchor stays,
the worker trains on from its own parameters, and its next outer gradient carries the work of both rounds.
"""

import time
from dataclasses import replace

import torch

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.local import LocalSwarm
from support.problem import build, loss_of
from support.threads import in_threads

SYNC = SyncConfig(4, "fp32", overlap_steps=2, timeout_seconds=60.0)


def test_a_round_that_is_late_within_the_bound_changes_no_bit() -> None:
    def train(late_seconds: float) -> list[str]:
        def work(engine: Engine) -> str:
            worker = engine.worker
            model, optimizer = build(engine, SYNC)
            for step in range(12):
                optimizer.zero_grad()
                loss_of(model, worker, step).backward()
                optimizer.inner_step()
                if worker:
                    time.sleep(late_seconds)  # the other is at its merge point by then
                optimizer.post()
                optimizer.merge()
            optimizer.finish()
            assert optimizer.loop.rounds_failed == 0
            return optimizer.anchor_digest()

        return in_threads(2, work)

    late = train(0.03)
    assert late == train(0.0)
    assert len(set(late)) == 1


def test_a_round_that_is_later_than_the_bound_has_failed_and_its_work_comes_with_the_next() -> None:
    swarm = LocalSwarm(2)
    first, second = swarm.engines()
    sync = replace(SYNC, timeout_seconds=0.05)
    model, optimizer = build(first, sync)
    build(second, sync)  # it is there, and never posts
    before = optimizer.anchor_digest()
    failures = []
    optimizer.loop.on_round = lambda event: failures.append(event.failure)
    own: list[torch.Tensor] = []
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.inner_step()
        own = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer.post()
        optimizer.merge()
    assert failures == ["round 0: nothing from workers [1] before the deadline"]
    assert optimizer.anchor_digest() == before
    assert all(torch.equal(kept, now) for kept, now in zip(own, model.parameters(), strict=True))
    optimizer.loop.replica.finish_posts()
    weights = [swarm.rounds[sequence].headers[0].claim.weight for sequence in (0, 1)]
    assert weights[1] == 2 * weights[0]
