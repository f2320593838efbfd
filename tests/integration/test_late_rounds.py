"""The policy for a late round: at its merge point a worker waits, until `sync.timeout_seconds` after the post at most.

A mean that comes by then is merged as if it had been in time. Later than that the round has failed: the anchor stays,
the worker trains on from its own parameters, and its next outer gradient carries the work of both rounds.
"""

import copy
import time
from dataclasses import replace
from typing import Any

import torch

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.local import LocalSwarm
from diloco.optimizer import DiLoCo
from support.problem import Net, build, loss_of
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
            assert optimizer.loop.counters.rounds_failed == 0
            return optimizer.anchor_digest()

        return in_threads(2, work)

    late = train(0.03)
    assert late == train(0.0)
    assert len(set(late)) == 1


def test_a_run_that_was_saved_with_a_late_round_in_flight_goes_on_bit_for_bit() -> None:
    """Saving waits for the late mean, which stays unmerged until its time comes."""

    def train(engine: Engine, model: Net, optimizer: DiLoCo, steps: range, late: bool) -> None:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, engine.worker, step).backward()
            optimizer.inner_step()
            if late and engine.worker:
                time.sleep(0.03)  # the other saves, or is at its merge point, by then
            optimizer.post()
            optimizer.merge()

    def whole(engine: Engine) -> str:
        model, optimizer = build(engine, SYNC)
        train(engine, model, optimizer, range(16), late=False)
        optimizer.finish()
        return optimizer.anchor_digest()

    def saved(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = build(engine, SYNC)
        train(engine, model, optimizer, range(9), late=True)
        assert len(optimizer.loop.in_flight) == 1  # posted after the eighth step
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def resumed(engine: Engine) -> str:
        model, optimizer = build(engine, SYNC)
        model.load_state_dict(states[engine.worker][0])
        optimizer.load_state_dict(states[engine.worker][1])
        train(engine, model, optimizer, range(9, 16), late=True)
        optimizer.finish()
        return optimizer.anchor_digest()

    states = in_threads(2, saved)
    assert in_threads(2, resumed) == in_threads(2, whole)


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
