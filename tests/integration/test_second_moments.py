"""AdamW's second moment, averaged in every n-th round."""

import copy

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.engines.header import HEADER_BYTES
from diloco.engines.local import LocalSwarm, alone
from diloco.errors import ConfigError
from diloco.methods.second_moments import MomentsSending, SecondMoments
from diloco.optimizer import DiLoCo
from diloco.training.config.run import InnerConfig
from diloco.training.inner import inner_optimizer
from support.elastic import ElasticWorld
from support.in_turn import InTurn
from support.methods import method_of
from support.problem import flat, net, train
from support.threads import in_threads

H, EVERY = 2, 3
SYNC = SyncConfig(H, "fp32", second_moment_every=EVERY)


def moments(optimizer: DiLoCo) -> torch.Tensor:
    states = optimizer.inner.state
    return torch.cat([states[p]["exp_avg_sq"].reshape(-1) for g in optimizer.param_groups for p in g["params"]])


def test_every_third_round_makes_the_second_moments_their_mean_and_no_other_does() -> None:
    world = InTurn(3, SYNC)
    for round_ in range(1, 2 * EVERY + 1):
        world.step(H - 1)
        world.inner_step()
        own = [moments(optimizer).clone() for optimizer in world.optimizers]
        world.post()
        world.merge()
        mean = torch.stack(own).mean(0)
        for before, optimizer in zip(own, world.optimizers, strict=True):
            if round_ % EVERY:
                assert torch.equal(moments(optimizer), before)
            else:
                torch.testing.assert_close(moments(optimizer), mean, rtol=1e-5, atol=0)
                assert torch.equal(moments(optimizer), moments(world.optimizers[0]))


def test_outer_gradients_and_anchors_are_those_of_a_run_without_it_until_moments_are_averaged() -> None:
    with_it, without = InTurn(2, SYNC), InTurn(2, SyncConfig(H, "fp32"))
    with_it.step(EVERY * H)
    without.step(EVERY * H)
    assert torch.equal(flat(with_it.models[0]), flat(without.models[0]))
    with_it.step(H)
    without.step(H)
    assert not torch.equal(flat(with_it.models[0]), flat(without.models[0]))
    assert len(set(with_it.digests())) == 1


def test_the_bytes_are_one_more_model_in_a_round_that_averages_moments_and_headers_in_the_others() -> None:
    spent = [[o.bytes_sent for o in world.optimizers] for world in _worlds(SYNC, SyncConfig(H, "fp32"), EVERY * H)]
    numel = flat(net()).numel()
    more = spent[0][0] - spent[1][0]
    assert more - EVERY * HEADER_BYTES == pytest.approx(4 * numel, rel=0.1), "two workers send each element once"


def _worlds(one: SyncConfig, other: SyncConfig, steps: int) -> list[InTurn]:
    worlds = [InTurn(2, one), InTurn(2, other)]
    for world in worlds:
        world.step(steps)
    return worlds


@pytest.mark.parametrize("codec", ["fp16", "int4", "topk"])
def test_small_moments_survive_every_codec(codec: str) -> None:
    world = InTurn(2, SyncConfig(1, codec, second_moment_every=1))  # type: ignore[arg-type]
    world.inner_step()
    for optimizer in world.optimizers:
        for state in optimizer.inner.state.values():
            state["exp_avg_sq"].view(-1)[::2] *= 1e-12
    expected = torch.stack([moments(optimizer) for optimizer in world.optimizers]).mean(0)
    world.post()
    world.merge()
    torch.testing.assert_close(moments(world.optimizers[0]), expected, rtol=1e-2, atol=0)


def test_workers_with_different_numbers_of_steps_average_bias_corrected_moments() -> None:
    def one(steps: int) -> tuple[MomentsSending, torch.optim.Optimizer]:
        model = torch.nn.Linear(3, 1, bias=False)
        inner = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.5), weight_decay=0.0)
        for _ in range(steps):
            model.weight.grad = torch.full((1, 3), 2.0)
            inner.step()
        return MomentsSending(inner, dict(model.named_parameters()), 1, "fp32"), inner

    (young, _), (old, inner) = one(1), one(9)
    norm, error = young.encode(0, None)
    assert norm == pytest.approx(4.0 * 3**0.5) and error is None, "v / (1 - β₂^t) of equal gradients is their square"
    before = copy.deepcopy(next(iter(inner.state.values()))["exp_avg_sq"])
    old.merge(young.vector, 0.0, 0, plain=False)
    torch.testing.assert_close(next(iter(inner.state.values()))["exp_avg_sq"], before)


def test_a_joiner_takes_part_and_a_worker_alone_is_as_without_it() -> None:
    world = ElasticWorld(2, SYNC)
    world.step(times=2 * H)
    world.join(2)
    world.step(times=EVERY * H)
    assert len(world.digests()) == 1
    world.finish()
    assert len({tuple(flat(worker.model).tolist()) for worker in world.workers.values()}) == 1
    plain = train(alone(), SyncConfig(H, "fp32"), 9)
    assert train(alone(), SYNC, 9).final == plain.final


def test_workers_with_different_numbers_of_steps_end_equal() -> None:
    stories = in_threads(3, lambda engine: train(engine, SYNC, 9 + 2 * engine.worker))
    assert all(story.final == stories[0].final for story in stories)


def test_with_muon_the_moments_of_adamw_are_averaged_and_without_an_adam_it_is_refused() -> None:
    model = net()
    inner = inner_optimizer(model, InnerConfig(optimizer="muon"))
    engines = LocalSwarm(2).engines()
    optimizer = DiLoCo(model, inner, engines[0], sync=SYNC)
    moments = method_of(optimizer.loop, SecondMoments)
    assert moments is not None and 0 < moments.moments.layout.numel < flat(model).numel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="AdamW's second moment, and SGD has none"):
        DiLoCo(model, sgd, alone(), sync=SYNC)
    with pytest.raises(ConfigError, match="comes late would undo the steps since"):
        SyncConfig(4, overlap_steps=1, second_moment_every=2)
    with pytest.raises(ConfigError, match="comes late would undo the steps since"):
        SyncConfig(4, outer_overlap="eager", second_moment_every=2)


def test_steps_that_are_in_a_round_are_not_counted_as_unfinished() -> None:
    world = InTurn(2, SYNC)
    world.step(2 * H + 1)
    assert [optimizer.unfinished.steps for optimizer in world.optimizers] == [1, 1]
    for optimizer in world.optimizers:
        optimizer.unfinished.silence()
