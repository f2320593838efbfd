"""I1 to I4 on the local engine, H = 1 and k = 1 included (docs/invariants.md)."""

import itertools

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD, Nesterov
from diloco.engines.base import Engine
from diloco.engines.header import HEADER_BYTES
from diloco.errors import ConfigError
from diloco.training.modes import DataParallel
from support.in_turn import InTurn
from support.problem import anchors, flat, loss_of, net, train
from support.threads import in_threads

VARIANTS = {
    "plain": SyncConfig(num_inner_steps=4),
    "every step": SyncConfig(num_inner_steps=1, codec="fp32"),
    "int8": SyncConfig(num_inner_steps=3, codec="int8"),
    "fragments": SyncConfig(num_inner_steps=4, codec="bf16", fragments=2),
    "overlap": SyncConfig(num_inner_steps=4, overlap_steps=3),
    "streaming": SyncConfig(num_inner_steps=5, codec="int8", fragments=4, overlap_steps=2, mixing=0.5),
    "sparse": SyncConfig(num_inner_steps=3, codec="topk", fragments=2, overlap_steps=1),
}
over_variants = pytest.mark.parametrize("sync", VARIANTS.values(), ids=VARIANTS.keys())
over_workers = pytest.mark.parametrize("workers", [1, 2, 3])


# I1


@over_variants
@over_workers
def test_i1_after_every_merge_all_workers_hold_bit_identical_anchors(workers: int, sync: SyncConfig) -> None:
    world = InTurn(workers, sync)
    seen = set()
    for _ in range(11):
        world.step()
        first, *others = [anchors(optimizer) for optimizer in world.optimizers]
        assert all(torch.equal(first, other) for other in others)
        assert len(set(world.digests())) == 1
        seen.add(world.digests()[0])
    assert len(seen) > 1  # and the anchors do move


@over_variants
@over_workers
def test_i1_at_the_end_all_workers_hold_bit_identical_parameters(workers: int, sync: SyncConfig) -> None:
    stories = in_threads(workers, lambda engine: train(engine, sync, 11))
    assert len({story.digests[-1] for story in stories}) == 1
    assert all(story.final == stories[0].final for story in stories)
    assert all(story.member_digests == (story.digests[-1],) * workers for story in stories)


@over_workers
def test_i1_all_workers_start_from_the_parameters_of_worker_0_whatever_their_seeds(workers: int) -> None:
    world = InTurn(workers, SyncConfig())
    assert all(torch.equal(flat(model), flat(net(seed=0))) for model in world.models)
    assert not torch.equal(flat(net(seed=0)), flat(net(seed=1)))


# I2


@pytest.mark.parametrize("fragments", [1, 2, 4])
def test_i2_every_element_is_averaged_exactly_once_within_a_rotation(fragments: int) -> None:
    """Workers hold small whole numbers, whose mean is exact: an element missed or taken twice would show."""
    H, workers = 6, 2
    world = InTurn(workers, SyncConfig(H, "fp32", fragments), SGD(lr=1.0), sgd=True)
    for optimizer in world.optimizers:
        optimizer.param_groups[0]["lr"] = 0.0
        for fragment in optimizer.loop.state.fragments:
            fragment.anchor.zero_()
        optimizer.loop.replica.digests[:] = ["same"] * len(optimizer.loop.state.fragments)
    count = flat(world.models[0]).numel()
    own = [torch.arange(count).remainder(1009) * 2.0, torch.arange(count).remainder(997) * 4.0]
    for model, values in zip(world.models, own, strict=True):
        torch.nn.utils.vector_to_parameters(values.clone(), model.parameters())
    world.step(H)
    for model in world.models:
        assert torch.equal(flat(model), (own[0] + own[1]) / 2)
    for optimizer in world.optimizers:
        assert [fragment.rounds for fragment in optimizer.loop.state.fragments] == [1] * len(
            optimizer.loop.state.fragments
        )
        parts = sum(fragment.layout.num_parts for fragment in optimizer.loop.state.fragments)
        assert optimizer.loop.counters.bytes_sent == parts * 4096 + HEADER_BYTES * len(optimizer.loop.state.fragments)


def test_i2_the_fragments_hold_every_parameter_of_the_model_once() -> None:
    for fragments in (1, 2, 4):
        (optimizer,) = InTurn(1, SyncConfig(6, fragments=fragments)).optimizers
        held = [tensor for fragment in optimizer.loop.state.fragments for tensor in fragment.tensors]
        inside = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert sorted(map(id, held)) == sorted(map(id, inside))


def test_i2_a_number_of_fragments_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError, match="at most 4 fragments"):
        InTurn(1, SyncConfig(9, fragments=5))
    with pytest.raises(ConfigError, match="3 fragments do not fit into num_inner_steps = 2"):
        InTurn(1, SyncConfig(2, fragments=2))


# I3


@pytest.mark.parametrize(("workers", "H"), list(itertools.product([1, 2, 3], [1, 4])))
def test_i3_outer_sgd_with_lr_1_is_parameter_averaging(workers: int, H: int) -> None:
    world = InTurn(workers, SyncConfig(H, "fp32"), SGD(lr=1.0))
    for _ in range(3):
        for _ in range(H):
            world.inner_step()
            world_means = torch.stack([flat(model).double() for model in world.models]).mean(0)
            world.post()
            world.merge()
        for model, optimizer in zip(world.models, world.optimizers, strict=True):
            torch.testing.assert_close(flat(model).double(), world_means, rtol=1e-6, atol=1e-7)
            assert torch.equal(anchors(optimizer), flat(model))


def test_i3_the_mean_is_weighted_by_the_workers_weights() -> None:
    world = InTurn(3, SyncConfig(2, "fp32"), SGD(lr=1.0), weights=[1.0, 2.0, 5.0])
    world.step()
    world.inner_step()
    own = [flat(model).double() for model in world.models]
    world.post()
    world.merge()
    expected = (own[0] + 2 * own[1] + 5 * own[2]) / 8
    torch.testing.assert_close(flat(world.models[0]).double(), expected, rtol=1e-6, atol=1e-7)


# I4


def big_batch(workers: int, steps: int) -> torch.Tensor:
    """One model, every step on all workers' batches at once: what data-parallel SGD means."""
    model = net(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss_of(model, worker, step) for worker in range(workers)) / workers).backward()
        optimizer.step()
    return flat(model)


def data_parallel(engine: Engine, steps: int) -> tuple[torch.Tensor, str]:
    model = net(seed=engine.worker)
    optimizer = DataParallel(model, torch.optim.SGD(model.parameters(), lr=0.1), engine, sync=SyncConfig(1, "fp32"))
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, engine.worker, step).backward()
        optimizer.average_gradients()
        optimizer.step()
    optimizer.finish()
    return flat(model), optimizer.anchor_digest()


@over_workers
def test_i4_one_inner_step_with_inner_sgd_is_data_parallel_sgd_and_big_batch_sgd(workers: int) -> None:
    world = InTurn(workers, SyncConfig(1, "fp32"), SGD(lr=1.0), sgd=True)
    world.step(6)
    expected = big_batch(workers, 6)
    torch.testing.assert_close(flat(world.models[0]), expected, rtol=1e-5, atol=1e-6)
    results = in_threads(workers, lambda engine: data_parallel(engine, 6))
    assert len({digest for _, digest in results}) == 1
    for parameters, _ in results:
        torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-6)


def test_i4_would_fail_with_momentum_or_more_inner_steps() -> None:
    """The equality above is not vacuous."""
    for sync, outer in ((SyncConfig(1, "fp32"), Nesterov()), (SyncConfig(2, "fp32"), SGD(lr=1.0))):
        world = InTurn(2, sync, outer, sgd=True)
        world.step(6)
        assert not torch.allclose(flat(world.models[0]), big_batch(2, 6), rtol=1e-3, atol=1e-3)


def test_data_parallel_averages_gradients_wherever_the_loop_has_put_them() -> None:
    def step(engine: Engine) -> torch.Tensor:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DataParallel(model, inner, engine, sync=SyncConfig(1, "fp32"))
        inner.zero_grad()  # not the optimizer's own, which would put them into its flat vector
        loss_of(model, engine.worker, 0).backward()
        optimizer.average_gradients()
        optimizer.step()
        return flat(model)

    one, other = in_threads(2, step)
    assert torch.equal(one, other)
    torch.testing.assert_close(one, big_batch(2, 1), rtol=1e-5, atol=1e-6)
