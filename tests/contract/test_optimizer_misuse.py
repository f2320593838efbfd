"""What a loop may do around DiLoCo after it was built, and what is refused because it would not be averaged."""

import copy

import pytest
import torch
from torch import nn

import diloco
from diloco.engines.rounds import GlobalState
from diloco.errors import ConfigError, EngineError


def built(model: nn.Module, H: int = 2) -> diloco.DiLoCo:
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = diloco.SyncConfig(num_inner_steps=H)
    return diloco.DiLoCo(model, inner, diloco.alone(), sync=sync, outer=diloco.SGD(lr=1.0))


def steps(model: nn.Module, optimizer: diloco.DiLoCo, count: int) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()


def test_freezing_the_model_inside_an_evaluation_leaves_anchor_and_parameters_as_they_were() -> None:
    model = nn.Linear(4, 3)
    optimizer = built(model, H=10)
    steps(model, optimizer, 3)
    anchor, own = optimizer.loop.state.fragments[0].anchor.clone(), model.weight.detach().clone()
    with optimizer.outer_parameters():
        model.requires_grad_(False)
    model.requires_grad_(True)
    assert torch.equal(optimizer.loop.state.fragments[0].anchor, anchor)
    assert torch.equal(model.weight, own)


def test_training_on_after_finish_keeps_that_work_at_the_next_finish() -> None:
    model = nn.Linear(4, 3)
    optimizer = built(model, H=10)
    steps(model, optimizer, 3)
    optimizer.finish()
    before = model.weight.detach().clone()
    steps(model, optimizer, 5)
    optimizer.finish()
    torch.testing.assert_close(model.weight.detach(), before - 0.5, rtol=0, atol=1e-3)


def test_another_memory_order_after_building_is_refused() -> None:
    model = nn.Conv2d(3, 4, 3)
    optimizer = built(model)
    model.to(memory_format=torch.channels_last)
    with pytest.raises(ConfigError, match="'weight' was changed after DiLoCo was built"):
        steps(model, optimizer, 2)


def test_another_memory_order_of_one_fragment_leaves_all_others_as_they_were_at_an_evaluation() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = diloco.SyncConfig(num_inner_steps=10, fragments=2)
    optimizer = diloco.DiLoCo(model, inner, diloco.alone(), sync=sync, outer=diloco.SGD(lr=1.0))
    steps(model, optimizer, 3)
    model[1].weight.data = model[1].weight.detach().t().contiguous().t()
    own = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ConfigError, match=r"'1\.weight' was changed"), optimizer.outer_parameters():
        pass
    assert all(torch.equal(parameter, before) for parameter, before in zip(model.parameters(), own, strict=True))


def test_parameters_given_to_the_inner_optimizer_after_building_are_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = built(model)
    optimizer.inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="after DiLoCo was built"):
        steps(model, optimizer, 2)


def test_a_copy_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"state_dict\(\)"):
        copy.deepcopy(built(nn.Linear(2, 2)))


def test_evaluations_prepared_together_are_refused_inside_each_other() -> None:
    model = nn.Linear(3, 2)
    optimizer = built(model)
    first, second = optimizer.outer_parameters(), optimizer.outer_parameters()
    with first, pytest.raises(ConfigError, match="inside outer_parameters"), second:
        pass
    steps(model, optimizer, 1)


def test_restoring_on_one_worker_only_is_an_error_that_says_so() -> None:
    model = nn.Linear(3, 2)
    inner, sync = torch.optim.SGD(model.parameters(), lr=0.1), diloco.SyncConfig(2)
    layout = (
        diloco.DiLoCo(model, inner, diloco.LocalSwarm(2).engines()[0], sync=sync).loop.replica.lanes[0].layout_digest
    )
    restoring, fresh = diloco.LocalSwarm(2).engines()
    restoring.serve_state(lambda: GlobalState({}, {"merged": 0, "inner_steps": 0, "sequence": 0}, layout))
    with pytest.raises(EngineError, match="the same `restoring` on every worker"):
        diloco.DiLoCo(model, inner, fresh, sync=sync)


def test_parameters_given_to_the_inner_optimizer_after_a_state_was_loaded_are_refused_too() -> None:
    """Loading a state gives an optimizer of torch a new list of groups."""
    model = nn.Linear(4, 3)
    optimizer = built(model)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.inner.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ConfigError, match="after DiLoCo was built"):
        steps(model, optimizer, 2)
