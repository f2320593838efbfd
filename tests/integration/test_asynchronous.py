"""Asynchronous workers with delayed Nesterov: whole runs on a virtual clock, in one thread, the same every time."""

import os
import threading
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD, Nesterov
from diloco.engines.asynchronous import replay
from diloco.engines.local import LocalEngine, LocalSwarm, alone
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.errors import ConfigError
from diloco.methods.dynamic_steps import DynamicSteps
from diloco.optimizer import DiLoCo
from support.elastic import ElasticSwarm
from support.methods import method_of
from support.problem import Net, build, flat, loss_of
from support.processes import World as ProcessWorld

H = 4
ASYNC = SyncConfig(H, "fp32", asynchronous=True, timeout_seconds=60.0)
SECONDS = (1.0, 3.1)


class World:
    """Workers of given speeds on the local engine; a step of worker i takes seconds[i]."""

    def __init__(self, seconds: Sequence[float] = SECONDS, sync: SyncConfig = ASYNC, saved: Any = None) -> None:
        self.seconds, self.time = seconds, 0.0
        self.models: list[Net] = []
        self.optimizers: list[DiLoCo] = []
        for engine in LocalSwarm(len(seconds)).engines():
            model, optimizer = build(engine, sync)
            self.models.append(model)
            self.optimizers.append(optimizer)
        if saved is not None:
            for model, optimizer, (of_model, of_optimizer) in zip(self.models, self.optimizers, saved, strict=True):
                model.load_state_dict(of_model)
                optimizer.load_state_dict(of_optimizer)

    def step(self, worker: int) -> None:
        model, optimizer = self.models[worker], self.optimizers[worker]
        optimizer.zero_grad()
        loss_of(model, worker, optimizer.loop.state.steps_taken).backward()
        optimizer.step()

    def run(self, until: float) -> "World":
        """Every inner step that ends by then."""
        taken = [optimizer.loop.state.steps_taken for optimizer in self.optimizers]
        replay(self.step, self.seconds, until, taken)
        return self

    def finish(self) -> list[list[float]]:
        for optimizer in self.optimizers:  # in worker order, so that the last arrivals are the same every time
            if optimizer.loop.state.steps_taken > optimizer.loop.state.merged_at[0]:
                optimizer.loop.post_fragment(0)
                optimizer.loop.merge_pending()
        threads = [threading.Thread(target=one.finish, daemon=True) for one in self.optimizers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive()
        return [flat(model).tolist() for model in self.models]

    def saved(self) -> list[Any]:
        pairs = zip(self.models, self.optimizers, strict=True)
        return deepcopy([(model.state_dict(), optimizer.state_dict()) for model, optimizer in pairs])


def test_a_replay_gives_the_same_bits_every_time_and_all_end_with_the_same_parameters() -> None:
    first, second = World().run(50.0), World().run(50.0)
    steps = [optimizer.loop.state.steps_taken for optimizer in first.optimizers]
    assert steps == [50, 16]
    one, other = first.finish(), second.finish()
    assert one == other
    assert one[0] == one[1]
    assert first.optimizers[0].rounds == first.optimizers[1].rounds == 12 + 4 + 1


def test_the_order_of_arrivals_counts() -> None:
    assert World((1.0, 3.1)).run(50.0).finish() != World((1.1, 3.1)).run(50.0).finish()


def test_a_run_that_was_saved_goes_on_bit_for_bit() -> None:
    whole = World().run(30.0)
    resumed = World(saved=whole.saved())
    assert whole.run(50.0).finish() == resumed.run(50.0).finish()


def test_alone_and_with_momentum_at_every_arrival_it_is_diloco_bit_for_bit() -> None:
    def run(sync: SyncConfig) -> list[float]:
        model, optimizer = build(alone(), sync, outer=Nesterov(0.7, 0.9))
        for step in range(5 * H):
            optimizer.zero_grad()
            loss_of(model, 0, step).backward()
            optimizer.step()
        optimizer.finish()
        return flat(model).tolist()

    assert run(ASYNC) == run(SyncConfig(H, "fp32"))


def test_an_arrival_moves_the_anchor_by_the_senders_steps_alone_and_others_go_on_from_where_they_are() -> None:
    world = World()
    start = flat(world.models[0])
    for _ in range(H - 1):
        world.step(0)
    own = flat(world.models[1])
    model, optimizer = world.models[0], world.optimizers[0]
    optimizer.zero_grad()
    loss_of(model, 0, H - 1).backward()
    optimizer.inner_step()
    delta = start - flat(model)
    optimizer.post()
    optimizer.merge()
    torch.testing.assert_close(flat(model), start - 0.7 * delta / 2)  # N = 2: half of it, and no momentum yet
    assert torch.equal(flat(world.models[1]), own)


def test_with_dynamic_steps_a_slow_worker_arrives_as_often_as_a_fast_one() -> None:
    sync = SyncConfig(12, "fp32", asynchronous=True, dynamic_steps=True, timeout_seconds=60.0)
    world = World((1.0, 3.0), sync)
    for worker, optimizer in enumerate(world.optimizers):
        pace, state = method_of(optimizer.loop, DynamicSteps), optimizer.loop.state
        assert pace is not None
        pace.clock = lambda state=state, worker=worker: state.steps_taken * (1.0, 3.0)[worker]  # type: ignore[misc]
        pace.begin_anew()
    world.run(36.0 + 4 * 12.0)
    assert [optimizer.position // 12 for optimizer in world.optimizers] == [7, 5]
    assert [optimizer.loop.state.steps_taken for optimizer in world.optimizers] == [84, 12 + 4 * 4]


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"overlap_steps": 2}, "overlap_steps = 2: an exchange is with the anchor alone"),
        ({"outer_overlap": "eager"}, "outer_overlap = eager"),
        ({"fragments": 2}, "fragments = 2: all of the model"),
        ({"warm_start": 2}, "warm_start = 2: its steps are synchronous"),
        ({"codec": "topk"}, "error_feedback: an error that is sent later"),
        ({"second_moment_every": 2}, "no round of all workers"),
        ({"asynchronous": False, "momentum_arrivals": 2}, "momentum_arrivals = 2 has no effect"),
        ({"momentum_arrivals": 0}, "must be at least 1"),
    ],
)
def test_combinations_that_make_no_sense_are_refused_with_the_reason(more: dict[str, Any], complaint: str) -> None:
    options = {"num_inner_steps": H, "asynchronous": True} | more
    with pytest.raises(ConfigError, match=complaint):
        SyncConfig(**options)


def test_a_swarm_and_other_outer_optimizers_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="a swarm has no such worker"):
        build(ElasticSwarm().engine(0), ASYNC)
    with pytest.raises(ConfigError, match="needs the outer optimizer 'nesterov'"):
        build(alone(), ASYNC, outer=SGD(1.0))


def test_an_outer_gradient_that_is_not_finite_is_refused_and_moves_nothing() -> None:
    world = World().run(10.0)
    before = world.optimizers[0].loop.engine.server._anchor.clone()  # type: ignore[attr-defined]
    with torch.no_grad():
        world.models[1].exit.bias.fill_(float("nan"))
    while world.optimizers[1].failures == 0:
        world.step(1)
    assert torch.equal(before, world.optimizers[0].loop.engine.server._anchor)  # type: ignore[attr-defined]


# Real processes


def test_a_worker_whose_outer_gradient_was_refused_asks_no_other_for_a_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over torch.distributed all would have to answer, and none of them waits."""
    world = World()
    monkeypatch.setattr(LocalEngine, "fetch_state", lambda _: pytest.fail("it asks for a state"))
    model, optimizer = world.models[1], world.optimizers[1]
    for _ in range(H - 1):
        world.step(1)
    own = deepcopy(model.state_dict())
    with torch.no_grad():
        model.exit.bias.fill_(float("nan"))
    optimizer.zero_grad()
    optimizer.step()  # without gradients: no more than the count, and the post
    model.load_state_dict(own)
    for _ in range(H):
        world.step(1)
    assert (optimizer.failures, optimizer.rounds) == (1, 1)


def one_worker(engine: TorchDistributedEngine, steps: list[int], dies: int | None) -> tuple[list[float], int, int]:
    model, optimizer = build(engine, replace(ASYNC, codec="fp16", timeout_seconds=30.0))
    for step in range(steps[engine.worker]):
        if engine.worker == dies and step == H + 1:
            os._exit(17)  # as a kill would
        optimizer.zero_grad()
        loss_of(model, engine.worker, step).backward()
        optimizer.step()
    optimizer.finish()
    return flat(model).tolist(), optimizer.rounds, optimizer.bytes_sent


@pytest.mark.slow
def test_over_gloo_no_worker_waits_for_one_that_dies_and_the_others_end_with_the_same_parameters() -> None:
    with ProcessWorld(3, one_worker, [5 * H, 3 * H + 1, 100 * H], 2) as world:
        first, second = world.result(0), world.result(1)
    assert first[0] == second[0]
    assert first[1] == second[1] == 5 + 4 + 1, "what the third had sent before it died counts"
    assert first[2] == 0 < second[2]
