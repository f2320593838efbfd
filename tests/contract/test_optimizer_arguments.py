"""What DiLoCo is given: either it means something, or it is refused when DiLoCo is built, with the remedy."""

from typing import Any

import pytest
import torch
from torch import nn

import diloco
from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import OUTER_OPTIMIZERS, Nesterov
from diloco.errors import ConfigError


def parts() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1), diloco.alone()


def refused(match: str, *arguments: Any, **options: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        diloco.DiLoCo(*arguments, **options)


# H and sync


def test_h_alone_is_the_usual_case() -> None:
    optimizer = diloco.DiLoCo(*parts(), H=30)
    assert optimizer.loop.sync == SyncConfig(num_inner_steps=30)
    assert optimizer.loop.schedule.num_inner_steps == 30
    assert diloco.DiLoCo(*parts()).loop.sync == SyncConfig()


def test_h_beside_a_sync_that_says_the_same_is_accepted_and_another_refused() -> None:
    sync = SyncConfig(num_inner_steps=30, codec="int8")
    assert diloco.DiLoCo(*parts(), H=30, sync=sync).loop.sync is sync
    refused("H = 20, but sync.num_inner_steps = 30", *parts(), H=20, sync=sync)


@pytest.mark.parametrize("H", [0, -3, 2.5, "30", True])
def test_an_h_that_is_no_number_of_steps_is_refused(H: Any) -> None:
    refused("H is .*must be a whole number of inner steps", *parts(), H=H)


@pytest.mark.parametrize("sync", [30, {"num_inner_steps": 30}, "30", SyncConfig])
def test_a_sync_that_is_no_sync_config_is_refused(sync: Any) -> None:
    refused(r"sync is .*diloco.SyncConfig\(num_inner_steps=30\)", *parts(), sync=sync)


def test_a_number_as_sync_is_answered_with_h() -> None:
    refused("H=30", *parts(), sync=30)


def test_an_unknown_codec_is_refused_with_those_there_are() -> None:
    codec: Any = "int3"
    refused("codec 'int3' is unknown: choose one of fp32, fp16", *parts(), sync=SyncConfig(codec=codec))


# The outer optimizer


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_an_outer_optimizer_may_be_given_by_its_name(name: str) -> None:
    optimizer = diloco.DiLoCo(*parts(), outer=name)
    assert optimizer.loop.replica.groups[0].outer == OUTER_OPTIMIZERS[name]()
    assert diloco.DiLoCo(*parts()).loop.replica.groups[0].outer == Nesterov(0.7, 0.9)


@pytest.mark.parametrize("outer", ["SGD2", 0.7, diloco.SGD, SyncConfig()])
def test_anything_else_as_outer_optimizer_is_refused_with_the_choices(outer: Any) -> None:
    refused(r"outer is .*diloco.SGD\(lr=1.0\), or a name: nesterov, sgd, sgdm, adam", *parts(), outer=outer)


def test_an_outer_optimizer_of_torch_is_refused_with_the_reason() -> None:
    model, inner, engine = parts()
    outer: Any = torch.optim.SGD(model.parameters(), lr=0.7)
    refused("outer is of type torch.optim.sgd.SGD .*not the anchor", model, inner, engine, outer=outer)


# Model, optimizer, engine


def test_swapped_arguments_are_refused_with_their_order() -> None:
    model, inner, engine = parts()
    order = r"the order is DiLoCo\(model, optimizer, engine\)"
    refused(f"the model is of type torch.optim.adamw.AdamW.*{order}", inner, model, engine)
    refused(f"the optimizer is of type .*LocalEngine.*{order}", model, engine, inner)
    refused(f"the engine is of type .*AdamW.*{order}", model, inner, inner)
    refused(f"the optimizer is the class AdamW itself.*{order}", model, torch.optim.AdamW, engine)


@pytest.mark.parametrize(("engine", "said"), [(None, "None"), (diloco.connect, "function connect, which was not cal")])
def test_an_engine_that_is_none_is_refused_with_where_to_get_one(engine: Any, said: str) -> None:
    model, inner, _ = parts()
    refused(f"the engine is .*{said}.*diloco.connect", model, inner, engine)


def test_diloco_around_diloco_is_refused() -> None:
    model, inner, engine = parts()
    refused("a DiLoCo already", model, diloco.DiLoCo(model, inner, engine), diloco.alone())


def test_the_optimizer_of_another_model_is_refused() -> None:
    model, _, engine = parts()
    refused("has none of the model's parameters", model, parts()[1], engine)


def test_a_closed_engine_is_refused() -> None:
    model, inner, engine = parts()
    with engine as entered:
        assert entered is engine and not engine.closed
    assert engine.closed
    refused("the engine of worker 0 is closed", model, inner, engine)


def test_an_engine_is_closed_by_an_exception_too() -> None:
    engine = diloco.alone()
    with pytest.raises(KeyError), engine:
        raise KeyError
    assert engine.closed
