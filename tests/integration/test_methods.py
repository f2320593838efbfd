"""Every method by itself and with every other: it trains, alone too, resumes, is joined, or is refused with the reason.

What each method does is in the tests of its own (docs/methods.md names them); here no cell of the table is left out.
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.core.config import FaultsConfig, SyncConfig, refuse_combinations
from diloco.core.outer_optimizers import Nesterov
from diloco.core.rates import Course, LearningRateCurve
from diloco.engines.base import Engine
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from support.elastic import ElasticWorld
from support.problem import Net, build, flat, loss_of
from support.threads import in_threads

H, STEPS = 3, 10
PLAIN = SyncConfig(H, "fp16", timeout_seconds=60.0)
COURSE = Nesterov(course=Course(2, start_momentum=0.1, final_lr=0.3, plain_rounds=1, rounds=4))
METHODS: dict[str, dict[str, Any]] = {
    "fragments": {"fragments": 2},
    "overlap_steps": {"overlap_steps": 2, "mixing": 0.5},
    "eager": {"outer_overlap": "eager"},
    "delayed": {"outer_overlap": "delayed"},
    "warm_start": {"warm_start": 3},
    "growth": {"growth": 0.02},
    "second_moment_every": {"second_moment_every": 2},
    "dynamic_steps": {"dynamic_steps": True},
    "asynchronous": {"asynchronous": True},
    "drop": {"drop": 0.4},
    "prune": {"prune": 0.5},
    "error_feedback": {"codec": "2bit"},
}
EXCLUDE_EACH_OTHER = {"eager", "delayed"}  # two values of one option


def options(*names: str) -> tuple[SyncConfig, dict[str, Any]]:
    """The options of some methods together, and what else DiLoCo is given."""
    given: dict[str, Any] = {}
    for name in names:
        given |= METHODS[name]
    drop = given.pop("drop", 0.0)
    sync = replace(PLAIN, **given)
    faults = FaultsConfig(drop, seed=1) if drop else None
    refuse_combinations(sync, faults or FaultsConfig())
    more: dict[str, Any] = {} if sync.asynchronous else {"outer": COURSE}
    if faults is not None:
        more["faults"] = faults
    return sync, more | ({} if sync.growth is None else {"learning_rates": LearningRateCurve(0.01, STEPS)})


def train(model: Net, optimizer: DiLoCo, worker: int, until: int) -> None:
    while optimizer.position < until:
        optimizer.zero_grad()
        loss_of(model, worker, optimizer.loop.state.steps_taken).backward()
        optimizer.step()


@pytest.mark.parametrize("name", METHODS)
def test_a_worker_alone_with_any_method_trains_and_goes_on_bit_for_bit(name: str) -> None:
    sync, more = options(name)
    model, optimizer = build(alone(), sync, **more)
    train(model, optimizer, 0, 7)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other, again = build(alone(), sync, **more)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    for one, its in ((model, optimizer), (other, again)):
        train(one, its, 0, STEPS)
        its.finish()
    assert torch.equal(flat(model), flat(other)) and again.anchor_digest() == optimizer.anchor_digest()
    assert optimizer.rounds == again.rounds > 1


@pytest.mark.parametrize("name", METHODS)
def test_two_methods_together_train_or_are_refused_with_the_reason(name: str) -> None:
    """A refusal names both, and says why and what to do; else both workers end with the same parameters."""
    shown = {"eager": "outer_overlap", "delayed": "outer_overlap", "drop": "faults.drop"}
    for other in list(METHODS)[list(METHODS).index(name) + 1 :]:
        if {name, other} == EXCLUDE_EACH_OTHER:
            continue
        try:
            sync, more = options(name, other)
        except ConfigError as refusal:
            said = str(refusal)
            assert all(shown.get(one, one) in said for one in (name, other)) and "leave out" in said, said
            assert len(said.split(": ", 1)[1]) > 40, said
            continue

        def work(engine: Engine, sync: SyncConfig = sync, more: dict[str, Any] = more) -> tuple[str, int, bytes]:
            model, optimizer = build(engine, sync, **more)
            train(model, optimizer, engine.worker, STEPS)
            optimizer.finish()
            return optimizer.anchor_digest(), optimizer.loop.counters.rounds_failed, flat(model).numpy().tobytes()

        first, second = in_threads(2, work)
        assert first == second and first[1] == 0, (name, other)


NOT_HERE = ("asynchronous", "warm_start", "dynamic_steps")  # refused in a swarm; test_warm_start, test_dynamic_steps


@pytest.mark.parametrize("name", [name for name in METHODS if name not in NOT_HERE])
def test_a_joiner_takes_part_in_the_rounds_of_any_method_wherever_it_comes(name: str) -> None:
    sync, more = options(name)
    world = ElasticWorld(2, sync, more.pop("outer"), **more)
    world.step(times=H + 1)
    worker = 2
    for _ in range(2):  # with a round in flight, where the method has one, and without
        joiner = world.join(worker)
        assert joiner.loop.inner_steps == world.workers[0].loop.inner_steps
        world.step(times=H - 1)
        worker += 1
    world.step(times=H)
    world.finish()
    assert len(world.digests()) == 1
    assert len({flat(one.model).numpy().tobytes() for one in world.workers.values()}) == 1
    assert all(one.loop.counters.rounds_failed == one.loop.counters.resyncs == 0 for one in world.workers.values())
    assert all(one.loop.rounds > 0 for one in world.workers.values())


@pytest.mark.parametrize("tau", [1, 3, 5])
def test_whatever_the_overlap_a_joiner_comes_between_post_and_merge_and_all_stay_equal(tau: int) -> None:
    sync = replace(PLAIN, num_inner_steps=6, fragments=2, overlap_steps=tau, mixing=0.5 * (tau % 2))
    world = ElasticWorld(1, sync, Nesterov(lr=0.4))
    for step in range(1, 16):
        world.step()
        if step in (7, 10):
            joiner = world.join(step)
            assert joiner.loop.state.steps_taken == 0
    assert len(world.workers) == 3
    world.finish()
    assert len(world.digests()) == 1
    assert len({flat(one.model).numpy().tobytes() for one in world.workers.values()}) == 1
