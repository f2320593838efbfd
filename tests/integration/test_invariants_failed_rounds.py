"""I6: a failed round changes no anchor and loses no local work, and the worker that missed it finds back."""

import math
import time
from typing import Any

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD, Nesterov
from diloco.engines.base import Engine
from diloco.engines.rounds import RoundResult
from diloco.outer.loop import OuterLoop
from diloco.outer.rounds import RoundInFlight
from support.in_turn import InTurn
from support.problem import Story, anchors, flat, train
from support.threads import in_threads


def missing_its_second_round(H: int, workers: int) -> InTurn:
    """All have merged round 0; worker 1's contribution to round 1 gets lost; the steps before round 1 are taken."""
    world = InTurn(workers, SyncConfig(H, "fp32"), Nesterov(), fail_at=[(1, 1)])
    world.step(H)
    world.step(H - 1)
    world.inner_step()
    return world


@pytest.mark.parametrize("H", [1, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_i6_the_dropped_worker_keeps_its_anchor_and_its_parameters(H: int, workers: int) -> None:
    world = missing_its_second_round(H, workers)
    dropped = world.optimizers[1]
    own, anchor = flat(world.models[1]), anchors(dropped)
    world.post()
    world.merge()
    assert torch.equal(flat(world.models[1]), own)
    assert torch.equal(anchors(dropped), anchor)
    assert (dropped.loop.rounds, dropped.loop.counters.rounds_failed) == (1, 1)
    assert not torch.equal(anchors(world.optimizers[0]), anchor)
    assert (world.optimizers[0].loop.rounds, world.optimizers[0].loop.counters.rounds_failed) == (2, 0)


@pytest.mark.parametrize("H", [1, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_i6_its_work_is_in_the_next_mean_taken_from_the_others_anchor(H: int, workers: int) -> None:
    world = missing_its_second_round(H, workers)
    world.post()
    world.merge()
    world.step(H - 1)
    world.inner_step()
    anchor = anchors(world.optimizers[0]).double()
    momentum = world.optimizers[0].loop.state.fragments[0].state["momentum"].double().clone()
    own = [flat(model).double() for model in world.models]
    world.post()
    assert torch.equal(anchors(world.optimizers[1]).double(), anchor)  # it has caught up before it posted
    world.merge()
    # By hand: worker 1 has twice the work behind it.
    weights = [2.0 if worker == 1 else 1.0 for worker in range(workers)]
    delta = sum(w * (anchor - theta) for w, theta in zip(weights, own, strict=True)) / sum(weights)
    momentum = 0.9 * momentum + delta
    expected = anchor - 0.7 * (delta + 0.9 * momentum)
    for model, optimizer in zip(world.models, world.optimizers, strict=True):
        torch.testing.assert_close(anchors(optimizer).double(), expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(flat(model), anchors(optimizer))
        assert optimizer.loop.rounds == 3
    assert len(set(world.digests())) == 1


@pytest.mark.parametrize("H", [1, 3])
def test_i6_a_round_that_fails_for_everyone_changes_nothing_and_loses_nothing(H: int) -> None:
    world = InTurn(2, SyncConfig(H, "fp32"), SGD(lr=1.0), fail_at=[(0, 0), (1, 0)])
    start = anchors(world.optimizers[0])
    world.step(H)
    for optimizer in world.optimizers:
        assert torch.equal(anchors(optimizer), start)
        assert (optimizer.loop.rounds, optimizer.loop.counters.rounds_failed) == (0, 1)
    world.step(H - 1)
    world.inner_step()
    mean = (flat(world.models[0]).double() + flat(world.models[1]).double()) / 2
    world.post()
    world.merge()
    for optimizer in world.optimizers:
        torch.testing.assert_close(anchors(optimizer).double(), mean, rtol=1e-6, atol=1e-7)


def test_i6_a_worker_alone_trains_on_after_a_failed_round() -> None:
    world = InTurn(1, SyncConfig(2, "fp32"), SGD(lr=1.0), fail_at=[(0, 0)])
    world.step(2)
    assert world.optimizers[0].loop.counters.rounds_failed == 1
    own = flat(world.models[0])
    assert not torch.equal(anchors(world.optimizers[0]), own)
    world.step(2)
    torch.testing.assert_close(anchors(world.optimizers[0]), flat(world.models[0]), rtol=0, atol=0)


def test_i6_contributions_that_are_all_refused_change_no_anchor() -> None:
    world = InTurn(2, SyncConfig(1, "fp32"))
    start = world.digests()
    for model in world.models:
        with torch.no_grad():
            model.exit.weight[0, 0] = math.nan
    for optimizer in world.optimizers:
        optimizer.loop.inner_steps += 1
    world.post()
    world.merge()
    assert world.digests() == start
    assert all(bool(anchors(optimizer).isfinite().all()) for optimizer in world.optimizers)
    assert [optimizer.loop.counters.rounds_failed for optimizer in world.optimizers] == [1, 1]


def test_a_worker_with_nan_parameters_is_refused_counted_and_healed_by_the_merge() -> None:
    world = InTurn(3, SyncConfig(1, "fp32"), SGD(lr=1.0))
    events: list[Any] = []
    world.optimizers[0].loop.on_round = events.append
    world.inner_step()
    with torch.no_grad():
        world.models[2].exit.weight[0, 0] = math.nan
    sound = (flat(world.models[0]).double() + flat(world.models[1]).double()) / 2
    world.post()
    world.merge()
    assert events[0].result.refused == {2: "the outer gradient is not finite"}
    for model in world.models:
        torch.testing.assert_close(flat(model).double(), sound, rtol=1e-6, atol=1e-7)
    assert len(set(world.digests())) == 1


@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_whose_anchor_diverged_takes_over_the_others_and_adds_nothing_of_it_to_the_mean(
    workers: int,
) -> None:
    """A bit that flipped in one worker's memory: seen by the digest after the next merge, healed one round later."""
    world = InTurn(workers, SyncConfig(2, "fp32"), SGD(lr=1.0))
    world.step(2)
    diverged = world.optimizers[-1]
    with torch.no_grad():
        diverged.loop.state.fragments[0].anchor[7] += 100.0
        world.models[-1].entrance.weight.view(-1)[7] += 100.0
    world.step(2)
    assert len(set(world.digests())) == 2
    world.step(2)
    assert diverged.loop.counters.rounds_failed == 1
    world.step(1)
    world.inner_step()
    others = torch.stack([flat(model).double() for model in world.models[:-1]]).mean(0)
    world.post()
    world.merge()
    assert len(set(world.digests())) == 1
    for model in world.models:
        torch.testing.assert_close(flat(model).double(), others, rtol=1e-5, atol=1e-6)


# The same with every worker a thread of its own: nothing depends on which is faster

FAULTS = {
    "H 1": (SyncConfig(1, "fp32"), [(1, 1), (0, 3)]),
    "plain": (SyncConfig(3), [(0, 0), (1, 2)]),
    "the last scheduled round": (SyncConfig(4), [(1, 2)]),
    "fragments": (SyncConfig(6, fragments=2), [(1, 1), (1, 2), (0, 5)]),
    "streaming": (SyncConfig(6, "int8", fragments=2, overlap_steps=4, mixing=0.5), [(1, 1), (0, 2), (1, 4)]),
}


def slow_to_merge(engine: Engine, sync: SyncConfig, slow: int) -> Story:
    """Training with one worker that takes its time before each merge."""
    if engine.worker == slow:
        original = OuterLoop._end_with_result

        def take_in(self: OuterLoop, posted: RoundInFlight, result: RoundResult) -> float | None:
            if self.engine is engine:
                time.sleep(0.01)
            return original(self, posted, result)

        OuterLoop._end_with_result = take_in  # type: ignore[method-assign]
        try:
            return train(engine, sync, 12)
        finally:
            OuterLoop._end_with_result = original  # type: ignore[method-assign]
    return train(engine, sync, 12)


@pytest.mark.parametrize(("sync", "fail_at"), FAULTS.values(), ids=FAULTS.keys())
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_i6_missed_rounds_give_the_same_trajectory_in_threads_as_in_turn(
    sync: SyncConfig, fail_at: list[tuple[int, int]], slow: int
) -> None:
    world = InTurn(3, sync, fail_at=fail_at)
    in_turn = []
    for _ in range(12):
        world.step()
        in_turn.append(world.digests())
    stories = in_threads(3, lambda engine: slow_to_merge(engine, sync, slow), fail_at=fail_at)
    assert [list(digests) for digests in zip(*(story.digests[:12] for story in stories), strict=True)] == in_turn
    assert len({story.digests[-1] for story in stories}) == 1
    assert all(story.final == stories[0].final for story in stories)


def weights_of(stories: list[Story], fragment: int) -> float:
    return sum(
        event.result.total_weight
        for event in stories[0].events
        if event.result is not None and event.key.fragment == fragment
    )


def test_i6_work_missed_in_the_last_scheduled_round_is_in_the_last_turn() -> None:
    """12 steps, H = 4: worker 1 misses the round after step 12, when worker 0 has nothing left to send."""
    stories = in_threads(2, lambda engine: train(engine, SyncConfig(4), 12), fail_at=[(1, 2)])
    assert weights_of(stories, 0) == 24.0
    assert len({story.digests[-1] for story in stories}) == 1


def test_i6_a_worker_that_misses_the_very_last_round_still_ends_with_the_others_parameters() -> None:
    stories = in_threads(2, lambda engine: train(engine, SyncConfig(5), 12), fail_at=[(1, 2)])
    assert stories[0].final == stories[1].final
    assert len({story.digests[-1] for story in stories}) == 1
