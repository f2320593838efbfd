"""The rounds of `finish()`: every present worker is in their mean, and leftovers never move the anchor alone."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from diloco.core.config import FaultsConfig, SyncConfig
from diloco.core.merging import Claim, decide
from diloco.core.outer_optimizers import SGD, Nesterov, OuterOptimizer
from diloco.core.rates import LearningRateCurve
from diloco.engines.base import PendingRound
from diloco.engines.local import LocalEngine, LocalSwarm
from diloco.engines.rounds import Contribution, RoundKey
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from support.elastic import ElasticWorld
from support.in_turn import InTurn
from support.problem import Net, anchors, batch, train
from support.threads import in_threads

H = 4
IDLE = Claim(0.0, 0.0, work=0.0, full_weight=H, done=True)
LEFT = Claim(H, 1.0, full_weight=H, done=True)


# The decision


def share_of_last(*claims: Claim) -> float:
    """The factor of the last worker's outer gradient in the mean of these claims."""
    decision = decide(range(len(claims)), claims, None)
    assert decision.contributors[-1] == len(claims) - 1
    scale = decision.scales[-1] if decision.scales else 1.0
    return scale * decision.weights[-1] / sum(decision.weights)


def test_one_leftover_of_eight_counts_as_an_eighth() -> None:
    assert share_of_last(*[IDLE] * 7, LEFT) == pytest.approx(1 / 8)


def test_a_leftover_of_a_few_steps_counts_as_an_eighth_too() -> None:
    assert share_of_last(*[IDLE] * 7, replace(LEFT, weight=1, work=0.25)) == pytest.approx(1 / 8)


def test_a_worker_that_missed_two_rounds_weighs_as_much_as_its_work_beside_workers_with_a_few_steps() -> None:
    few = replace(LEFT, weight=1, work=0.25)
    assert share_of_last(*[few] * 7, replace(LEFT, weight=3 * H)) == pytest.approx(3 / 10)


def test_the_work_in_the_mean_is_counted_as_it_is() -> None:
    assert decide(range(2), [IDLE, replace(LEFT, weight=3.0)], None).total_weight == 3.0


def test_a_mean_of_equal_leftovers_is_the_plain_mean() -> None:
    decision = decide(range(3), [replace(LEFT, weight=1.0)] * 3, None)
    assert decision.scales == () and len(set(decision.weights)) == 1


def test_without_leftovers_there_is_no_mean() -> None:
    decision = decide(range(3), [IDLE] * 3, None)
    assert decision.contributors == () and decision.total_weight == 0


def test_workers_that_are_done_add_no_weight_while_another_one_trains() -> None:
    assert share_of_last(IDLE, IDLE, replace(LEFT, done=False)) == 1.0


def test_a_worker_of_a_swarm_cannot_move_the_anchor_alone_by_saying_that_it_still_trains() -> None:
    claims = [replace(claim, round_weight=float(H)) for claim in (IDLE, IDLE, IDLE, replace(LEFT, done=False))]
    assert share_of_last(*claims) == pytest.approx(1 / 4)


@pytest.mark.parametrize("lie", [1e9, float("inf"), float("nan"), -1.0])
def test_a_worker_of_a_swarm_cannot_keep_the_others_leftovers_out_by_a_heavy_round(lie: float) -> None:
    claims = [replace(claim, round_weight=float(H)) for claim in (IDLE, IDLE, replace(IDLE, full_weight=lie), LEFT)]
    assert share_of_last(*claims) in (pytest.approx(1 / 4), pytest.approx(1 / 3))


# Three workers of which one missed the last two rounds, by hand


def by_hand(anchor: Tensor, own: Tensor) -> Tensor:
    """Workers 0 and 1 are at the anchor and weigh H each; worker 2 has 2 H steps of its own, at θ_2.

    Δ = (H · 0 + H · 0 + 2H · (anchor − θ_2)) / 4H        anchor ← anchor − Δ
    """
    return anchor - 2 * H * (anchor - own) / (4 * H)


OUTER: dict[str, OuterOptimizer] = {"a plain mean": SGD(1.0), "nesterov": Nesterov(0.7, 0.9)}
over_outer = pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)


def finish_all(optimizers: list[DiLoCo]) -> None:
    threads = [threading.Thread(target=optimizer.finish, daemon=True) for optimizer in optimizers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


@over_outer
def test_three_workers_of_which_one_missed_the_last_two_rounds_end_where_the_formula_says(
    outer: OuterOptimizer,
) -> None:
    world = InTurn(3, SyncConfig(H, "fp32", max_norm_ratio=None), outer, fail_at=[(2, 3), (2, 4)])
    world.step(5 * H)
    first, last = world.optimizers[0], world.optimizers[2]
    assert last.loop.counters.rounds_failed == 2
    expected = by_hand(anchors(first), parameters_of(last))
    finish_all(world.optimizers)
    torch.testing.assert_close(anchors(last), expected, rtol=1e-5, atol=1e-6)
    assert len(set(world.digests())) == 1


@over_outer
def test_in_a_swarm_three_workers_of_which_one_missed_the_last_two_rounds_end_there_too(outer: OuterOptimizer) -> None:
    world = ElasticWorld(3, SyncConfig(H, "fp32", max_norm_ratio=None), outer, drop=[(2, 3), (2, 4)])
    world.step(times=5 * H)
    first, last = world.workers[0].optimizer, world.workers[2].optimizer
    expected = by_hand(anchors(first), parameters_of(last))
    world.finish()
    torch.testing.assert_close(anchors(last), expected, rtol=1e-5, atol=1e-6)
    assert len(world.digests()) == 1


def leftovers_by_hand(anchor: Tensor, own: list[Tensor]) -> Tensor:
    """The learning rate falls to 0. Workers 0 and 1 have one step left, and weigh H each. Worker 2 missed two rounds,
    and has 2 H + 1 steps of its own, the first of them at much higher rates: its norm is over 30 times the others'.

    Δ = (H (anchor − θ_0) + H (anchor − θ_1) + (2 H + 1) (anchor − θ_2)) / (4 H + 1)        anchor ← anchor − Δ
    """
    weights = (H, H, 2 * H + 1)
    delta = sum(weight * (anchor - theta) for weight, theta in zip(weights, own, strict=True))
    return anchor - torch.as_tensor(delta) / sum(weights)


FALLING = LearningRateCurve(0.1, 3 * H + 1, final_ratio=0.0)


def fall(optimizers: Iterable[DiLoCo], step: int) -> None:
    for optimizer in optimizers:
        optimizer.loop.rates = FALLING
        for group in optimizer.loop._inner.param_groups:
            group["lr"] = FALLING.peak * FALLING.factor(step)


def test_leftovers_of_a_worker_that_missed_rounds_count_in_full_where_the_rate_has_fallen_to_0() -> None:
    world = InTurn(3, SyncConfig(H, "fp32", max_norm_ratio=3.0), SGD(1.0), fail_at=[(2, 1), (2, 2)], sgd=True)
    for step in range(3 * H + 1):
        fall(world.optimizers, step)
        world.step()
    thetas = [parameters_of(optimizer) for optimizer in world.optimizers]
    assert world.optimizers[2].loop.counters.rounds_failed == 2
    first = anchors(world.optimizers[0])
    norms = [float((first - theta).norm()) for theta in thetas]
    assert norms[2] > 30 * max(norms[:2])
    finish_all(world.optimizers)
    torch.testing.assert_close(anchors(world.optimizers[0]), leftovers_by_hand(first, thetas), rtol=1e-5, atol=1e-6)
    assert len(set(world.digests())) == 1


@pytest.mark.parametrize("missed", [True, False])
def test_in_a_swarm_they_do_if_the_others_have_counted_the_missed_rounds(missed: bool) -> None:
    """The claims of four workers as above. One that missed nothing cannot have worked at a higher rate."""
    few = replace(LEFT, weight=1.0, norm=0.001, work=0.002, round_weight=float(H))
    late = replace(few, weight=2.0 * H + 1, norm=0.4, work=1.0)
    decision = decide(range(4), [few, few, few, late], 3.0, rounds=[1, 1, 1, 3 if missed else 1])
    if missed:
        assert decision.contributors == (0, 1, 2, 3) and not decision.clipped and not decision.scales
        assert decision.weights == (H, H, H, 2 * H + 1)
    else:
        assert set(decision.refused) == {3} and decision.too_long == {3}


def test_a_late_worker_with_work_that_no_rate_explains_is_still_scaled_down() -> None:
    few = replace(LEFT, weight=1.0, norm=0.001, work=0.002, round_weight=float(H))
    late = replace(few, weight=2.0 * H, norm=6.0, work=1.0)
    decision = decide(range(4), [few, few, few, late], 3.0, rounds=[1, 1, 1, 3])
    assert set(decision.clipped) == {3} and decision.scales[3] == pytest.approx(0.25)


def test_a_slow_worker_of_a_swarm_that_is_called_into_the_last_turn_is_in_it_as_one_of_those_that_are_done() -> None:
    """The run ends at 2 H + 1. Worker 1, at 2 H, missed the last round; worker 0 has one step left."""
    world = ElasticWorld(2, SyncConfig(H, "fp32", max_norm_ratio=None), SGD(1.0), drop=[(1, 1)])
    for worker in world.workers.values():
        worker.loop.end_at(2 * H + 1)
    world.step(times=2 * H)
    world.step(0)
    fast, slow = world.workers[0].optimizer, world.workers[1].optimizer
    thetas = [parameters_of(fast), parameters_of(slow)]
    ending = threading.Thread(target=fast.finish, daemon=True)
    ending.start()
    world.swarm.call(2)
    world.post(1)
    world.merge(1)
    slow.finish()
    ending.join(60)
    assert slow.loop.state.steps_taken == 2 * H and slow.position == 2 * H + 1
    torch.testing.assert_close(anchors(fast), (thetas[0] + thetas[1]) / 2, rtol=1e-5, atol=1e-6)
    assert len(world.digests()) == 1


def test_with_a_plain_mean_the_work_of_a_missed_last_round_counts_once_as_if_it_had_arrived() -> None:
    """7 of 8 workers: mean of 7, then 7/8 of it and 1/8 of the eighth worker's parameters: the mean of all eight."""
    sync = SyncConfig(H, "fp32", max_norm_ratio=None)
    calm, late = InTurn(8, sync, SGD(1.0)), InTurn(8, sync, SGD(1.0), fail_at=[(5, 2)])
    calm.step(3 * H)
    late.step(3 * H)
    finish_all(late.optimizers)
    torch.testing.assert_close(anchors(late.optimizers[0]), anchors(calm.optimizers[0]), rtol=1e-5, atol=1e-6)


def parameters_of(optimizer: DiLoCo) -> Tensor:
    """θ_i in the order of the anchors."""
    fragments = optimizer.loop.state.fragments
    return torch.cat([fragment.read(span).clone() for fragment in fragments for span in fragment.spans()])


# Fragments, overlap, eager updates: what arrives in the rounds of finish() and where the anchors go


@dataclass(frozen=True)
class Posted:
    key: RoundKey
    worker: int
    delta: Tensor
    steps: float


class Watched(LocalEngine):
    """Keeps what is posted by workers that are done."""

    def __init__(self, swarm: LocalSwarm, worker: int, posted: list[Posted]) -> None:
        super().__init__(swarm, worker)
        self.posted = posted

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        if contribution.report.done and key.fragment >= 0:
            vector = contribution.vector
            delta = vector.decode(0, vector.shape[0]).clone()[: vector.layout.numel]
            self.posted.append(Posted(key, self.worker, delta, contribution.weight))
        return super().start_round(key, contribution, deadline_seconds)


SYNCS = {
    "plain": SyncConfig(H, "fp32", max_norm_ratio=None),
    "fragments": SyncConfig(H, "fp32", fragments=2, max_norm_ratio=None),
    "overlap": SyncConfig(H, "fp32", overlap_steps=2, mixing=0.5, max_norm_ratio=None),
    "streaming": SyncConfig(H, "fp32", fragments=2, overlap_steps=1, max_norm_ratio=None),
    "eager": SyncConfig(H, "fp32", outer_overlap="eager", max_norm_ratio=None),
    "delayed": SyncConfig(H, "fp32", outer_overlap="delayed", max_norm_ratio=None),
}


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
@pytest.mark.parametrize("more_steps", [0, 1])
def test_every_worker_is_in_the_mean_of_each_round_of_finish_with_at_least_a_full_round(
    sync: SyncConfig, more_steps: int
) -> None:
    """Outer SGD(1.0): after each of these rounds the anchor is anchor − Σ max(s_i, H) Δ_i / Σ max(s_i, H)."""
    swarm = LocalSwarm(3)
    posted: list[Posted] = []
    faults = FaultsConfig(0.5, seed=4)
    engines = [Watched(swarm, worker, posted) for worker in range(3)]
    world = InTurn(3, sync, SGD(1.0), more={"faults": faults}, engines=engines)
    world.step(5 * H + more_steps)
    optimizers = world.optimizers
    moves: list[tuple[RoundKey, Tensor]] = []
    loop = optimizers[0].loop
    before: dict[int, Tensor] = {}

    def note_anchors() -> None:
        for index in range(loop.state.num_fragments):
            [(_, fragment)] = loop.state.fragments_of(index)
            before[index] = fragment.anchor.clone()

    def note_move(event: RoundEvent) -> None:
        key = event.key
        [(_, fragment)] = loop.state.fragments_of(key.fragment)
        moves.append((key, before[key.fragment] - fragment.anchor))
        note_anchors()

    note_anchors()
    optimizers[0].on_round = note_move
    dropped = [optimizer.loop.counters.rounds_dropped for optimizer in optimizers]
    finish_all(optimizers)
    moves_of_finish = [(key, move) for key, move in moves if key in {one.key for one in posted}]
    assert moves_of_finish
    for key, move in moves_of_finish:
        here = [one for one in posted if one.key == key]
        assert len(here) == 3
        if not any(one.steps for one in here):
            assert not move.any(), "no worker has anything left: no outer step"
            continue
        weights = [max(one.steps, H) for one in here]
        terms = [weight * one.delta for weight, one in zip(weights, here, strict=True) if one.steps]
        torch.testing.assert_close(move, sum(terms) / sum(weights), rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
    assert [optimizer.loop.counters.rounds_dropped for optimizer in optimizers] == dropped, (
        "faults.drop ends with the steps"
    )


# The end of a run with dropped rounds


def loss_at(model: Net) -> float:
    with torch.no_grad():
        return sum(float((model(x) - y).square().mean()) for x, y in (batch(9, step) for step in range(40))) / 40


@pytest.mark.parametrize("seed", range(4))
def test_the_last_evaluation_lies_on_the_trend_where_half_of_the_rounds_are_dropped(seed: int) -> None:
    """After `finish` the loss is within the spread of the three evaluations before it."""
    faults, sync = FaultsConfig(0.5, seed=seed), SyncConfig(8, "fp32", max_norm_ratio=None)
    world = InTurn(4, sync, Nesterov(0.7, 0.9), more={"faults": faults})
    losses = []
    for _ in range(12):
        world.step(8)
        with world.optimizers[0].outer_parameters():
            losses.append(loss_at(world.models[0]))
    finish_all(world.optimizers)
    before = losses[-3:]
    assert loss_at(world.models[0]) < max(before) + (max(before) - min(before))


def test_a_run_whose_workers_have_nothing_left_takes_no_further_step() -> None:
    for story in in_threads(3, lambda engine: train(engine, SyncConfig(H), 2 * H)):
        assert story.digests[-2] == story.digests[-1]
