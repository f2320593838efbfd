"""DiLoCo's state dict, and evaluation on the outer parameters: all is as before, bit for bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from diloco.core.config import FaultsConfig, SyncConfig
from diloco.core.outer_optimizers import Adam, Nesterov
from diloco.core.rates import Course, LearningRateCurve
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from support.alone import made, made_digest, steps
from support.in_turn import InTurn
from support.problem import Net, anchors, flat, loss_of, net

# State dicts

COURSE = Course(2, start_momentum=0.1, final_lr=0.3, plain_rounds=1, rounds=5)
RATES = LearningRateCurve(0.01, 16)
RESUMED = {
    "nesterov": (SyncConfig(4), Nesterov()),
    "adam": (SyncConfig(3, "int8"), Adam()),
    "fragments": (SyncConfig(5, fragments=2, mixing=0.5), Nesterov()),
    "H 1": (SyncConfig(1, "fp32"), Nesterov()),
    "in flight": (SyncConfig(4, "fp16", overlap_steps=2), Nesterov()),
    "in flight, int8": (SyncConfig(5, "int8", fragments=2, overlap_steps=4, mixing=0.5), Adam()),
    "error feedback": (SyncConfig(3, "topk"), Nesterov()),
    "error feedback, in flight": (SyncConfig(5, "2bit", fragments=2, overlap_steps=4, mixing=0.5), Nesterov()),
    "delayed": (SyncConfig(3, outer_overlap="delayed"), Nesterov()),
    "second moments": (SyncConfig(2, second_moment_every=2), Nesterov()),
    "growing, a course": (SyncConfig(2, growth=0.016), Nesterov(course=COURSE)),
    "growing, a course, eager": (SyncConfig(2, growth=0.016, outer_overlap="eager"), Nesterov(course=COURSE)),
    "growing, a course, in flight": (SyncConfig(3, "topk", fragments=2, overlap_steps=2, growth=0.018), Adam()),
}
FAULTS = FaultsConfig(0.4, seed=3)


@pytest.mark.parametrize(("sync", "outer"), RESUMED.values(), ids=RESUMED.keys())
@pytest.mark.parametrize("at", [4, 7])
def test_i5_loading_a_state_dict_goes_on_bit_for_bit(sync: SyncConfig, outer: Nesterov | Adam, at: int) -> None:
    more = {} if sync.growth is None else {"learning_rates": RATES, "faults": FAULTS}
    whole = InTurn(2, sync, outer, more=more)
    whole.step(at)
    saved = [
        copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for model, optimizer in zip(whole.models, whole.optimizers, strict=True)
    ]
    resumed = InTurn(2, sync, outer, more=more)
    resumed.step(1)  # so that something must really be overwritten
    resumed.step_number = at
    for (model_state, optimizer_state), model, optimizer in zip(saved, resumed.models, resumed.optimizers, strict=True):
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    weights: dict[str, list[float]] = {"whole": [], "resumed": []}
    for name, world in (("whole", whole), ("resumed", resumed)):
        world.optimizers[0].loop.on_round = lambda event, name=name: weights[name].append(event.result.total_weight)
    for _ in range(9):
        whole.step()
        resumed.step()
        assert resumed.digests() == whole.digests()
    for a, b in zip(whole.models, resumed.models, strict=True):
        assert torch.equal(flat(a), flat(b))
    assert weights["resumed"] == weights["whole"]
    assert [o.loop.rounds for o in whole.optimizers] == [o.loop.rounds for o in resumed.optimizers]


def test_a_state_dict_survives_saving_without_pickle_of_anything_but_tensors(tmp_path: Any) -> None:
    model = net()
    optimizer = made(model, SyncConfig(2))
    steps(model, optimizer, 0, 5)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    loaded = torch.load(tmp_path / "state.pt", weights_only=True)
    other = net()
    again = made(other, SyncConfig(2))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(loaded)
    assert again.anchor_digest() == optimizer.anchor_digest()
    assert again.loop.inner_steps == 5 and again.loop.rounds == 2


def test_a_state_dict_is_a_copy_that_later_rounds_do_not_change() -> None:
    model = net()
    optimizer = made(model, SyncConfig(1))
    steps(model, optimizer, 0, 2)
    state = optimizer.state_dict()["diloco"]["tensors"]["outer.anchor.blocks.0.weight"]
    before = state.clone()
    steps(model, optimizer, 2, 4)
    assert torch.equal(state, before)


def test_a_state_dict_leaves_rounds_in_flight_unmerged() -> None:
    model = net()
    optimizer = made(model, SyncConfig(4, overlap_steps=2))
    steps(model, optimizer, 0, 4)
    saved = optimizer.state_dict()["diloco"]["numbers"]
    assert len(optimizer.loop.in_flight) == 1 and optimizer.loop.rounds == saved["merged"] == 0
    assert [posted["at_step"] for posted in saved["in_flight"]] == [4]
    steps(model, optimizer, 4, 6)
    assert len(optimizer.loop.in_flight) == 0 and optimizer.loop.rounds == 1


def test_i5_a_failed_round_in_flight_is_saved_as_failed() -> None:
    whole, resumed = (InTurn(2, SyncConfig(4, overlap_steps=2), fail_at=[(1, 0)]) for _ in range(2))
    whole.step(5)
    numbers = whole.optimizers[1].state_dict()["diloco"]["numbers"]
    assert "dropped on purpose" in numbers["in_flight"][0]["failure"]
    resumed.models[1].load_state_dict(whole.models[1].state_dict())
    resumed.optimizers[1].load_state_dict(copy.deepcopy(whole.optimizers[1].state_dict()))
    for world in (whole, resumed):
        world.optimizers[1].zero_grad()
        world.optimizers[1].inner_step()
        world.optimizers[1].loop.merge()
    assert [world.optimizers[1].loop.counters.rounds_failed for world in (whole, resumed)] == [1, 1]
    assert torch.equal(flat(whole.models[1]), flat(resumed.models[1]))


def test_a_state_dict_of_something_else_is_refused() -> None:
    optimizer = made(net(), SyncConfig(6))
    with pytest.raises(ConfigError, match=r"not from DiLoCo.*optimizer\.inner\.load_state_dict"):
        optimizer.load_state_dict(torch.optim.AdamW(net().parameters()).state_dict())
    for other in (made(net(), SyncConfig(6, fragments=2)), made(net(), SyncConfig(6), outer=Adam())):
        with pytest.raises(ConfigError, match="same model, fragments and outer optimizer"):
            optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("sync", [SyncConfig(4), SyncConfig(4, overlap_steps=2)], ids=["at once", "overlap"])
def test_another_workers_state_is_refused_in_mid_round_and_taken_after_a_round(sync: SyncConfig) -> None:
    run = InTurn(2, sync, Nesterov())
    run.step(5)
    with pytest.raises(
        ConfigError, match=r"state is worker 0's in the middle of a round.*this is worker 1.*each worker.s own"
    ):
        run.optimizers[1].load_state_dict(run.optimizers[0].state_dict())
    run.optimizers[1].load_state_dict(run.optimizers[1].state_dict())
    if sync.merges_at_once:
        run.step(3)
        run.optimizers[1].load_state_dict(run.optimizers[0].state_dict())


# Evaluation on the outer parameters

EVALUATED = {
    "plain": SyncConfig(3),
    "mixing": SyncConfig(3, mixing=0.5),
    "in flight": SyncConfig(4, fragments=2, overlap_steps=3, mixing=0.5),
    "eager": SyncConfig(3, outer_overlap="eager"),
}


@pytest.mark.parametrize("sync", EVALUATED.values(), ids=EVALUATED.keys())
def test_outer_parameters_are_the_anchor_and_afterwards_all_is_as_before(sync: SyncConfig) -> None:
    model = net()
    optimizer = made(model, sync)
    steps(model, optimizer, 0, 5)
    own, anchor, before = flat(model), anchors(optimizer), optimizer.anchor_digest()
    assert not torch.equal(own, by_name(model, optimizer))
    with optimizer.outer_parameters():
        assert torch.equal(
            torch.cat([t.reshape(-1) for f in optimizer.loop.state.fragments for t in f.tensors]), anchor
        )
        assert optimizer.anchor_digest() == before
    assert torch.equal(flat(model), own)
    assert torch.equal(anchors(optimizer), anchor)
    assert made_digest(optimizer) == before


def by_name(model: Net, optimizer: DiLoCo) -> torch.Tensor:
    """The anchors in the order of the model's parameters."""
    pieces = {}
    for fragment in optimizer.loop.state.fragments:
        sizes = [tensor.numel() for tensor in fragment.tensors]
        pieces |= dict(zip(fragment.names, fragment.anchor.split(sizes), strict=True))
    return torch.cat([pieces[name] for name, _ in model.named_parameters()])


def test_evaluations_do_not_change_the_trajectory() -> None:
    sync = SyncConfig(4, fragments=2, overlap_steps=2, mixing=0.5)
    models = [net(), net()]
    optimizers = [made(model, sync) for model in models]
    for step in range(10):
        for model, optimizer in zip(models, optimizers, strict=True):
            steps(model, optimizer, step, step + 1)
        with optimizers[0].outer_parameters(), torch.no_grad():
            loss_of(models[0], 5, step)
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert optimizers[0].anchor_digest() == optimizers[1].anchor_digest()


def raises_inside(optimizer: DiLoCo) -> None:
    with optimizer.outer_parameters():
        raise KeyError("of the user's")


def test_an_exception_inside_the_evaluation_restores_all_the_same() -> None:
    model = net()
    optimizer = made(model, SyncConfig(3, mixing=0.5))
    steps(model, optimizer, 0, 4)
    own, anchor = flat(model), anchors(optimizer)
    with pytest.raises(KeyError):
        raises_inside(optimizer)
    assert torch.equal(flat(model), own) and torch.equal(anchors(optimizer), anchor)
    steps(model, optimizer, 4, 8)
    optimizer.finish()


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda o: o.step(),
        lambda o: o.inner_step(),
        lambda o: o.post(),
        lambda o: o.merge(),
        lambda o: o.finish(),
        lambda o: o.state_dict(),
        lambda o: o.load_state_dict({"diloco": {}}),
        raises_inside,
    ],
    ids=["step", "inner_step", "post", "merge", "finish", "state_dict", "load_state_dict", "a second evaluation"],
)
def test_nothing_that_reads_or_moves_the_anchor_is_allowed_inside_the_evaluation(
    forbidden: Callable[[DiLoCo], object],
) -> None:
    model = net()
    optimizer = made(model, SyncConfig(4, overlap_steps=3))
    steps(model, optimizer, 0, 7 - 1)
    with optimizer.outer_parameters(), pytest.raises(ConfigError, match="inside outer_parameters"):
        forbidden(optimizer)
