"""Each outer optimizer is the paper's formula, which is torch's optimizer of that name on the outer gradient."""

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Literal

import pytest
import torch

from diloco.core.config import OUTER_NUMBERS, OuterConfig
from diloco.core.outer_optimizers import (
    OUTER_OPTIMIZERS,
    SGD,
    Adam,
    Nesterov,
    OuterOptimizer,
    SGDMomentum,
    outer_optimizer,
)
from diloco.errors import ConfigError

TorchOptimizer = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
PAIRS: dict[str, tuple[OuterOptimizer, TorchOptimizer]] = {
    "nesterov": (
        Nesterov(lr=0.7, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True),
    ),
    "sgd": (SGD(lr=0.5), lambda p: torch.optim.SGD(p, lr=0.5)),
    "sgdm": (SGDMomentum(lr=0.3, momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
    "adam": (Adam(), lambda p: torch.optim.Adam(p, lr=0.3, betas=(0.9, 0.99), eps=0.1)),
}


def state_for(optimizer: OuterOptimizer, numel: int) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(numel) for name in optimizer.state_names}


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_every_registered_optimizer_equals_torchs_on_the_outer_gradient(name: str) -> None:
    ours, torchs = PAIRS[name]
    generator = torch.Generator().manual_seed(0)
    theta = torch.randn(1000, generator=generator)
    reference = theta.clone().requires_grad_()
    optimizer, state = torchs([reference]), state_for(ours, 1000)
    for round_number in range(1, 8):
        delta = torch.randn(1000, generator=generator)
        reference.grad = delta.clone()
        optimizer.step()
        ours.update(theta, delta, state, round_number)
        torch.testing.assert_close(theta, reference.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.3, 0.0)])
@pytest.mark.parametrize("size", [64, 65, 1 << 16, (1 << 16) + 64])
def test_nesterov_in_one_pass_gives_the_bits_of_the_separate_operations(size: int, lr: float, momentum: float) -> None:
    generator = torch.Generator().manual_seed(size)
    theta, delta, b = (torch.randn(size, generator=generator) for _ in range(3))
    delta[:4] = torch.tensor([0.0, -0.0, 1e-42, 1e38])
    moved, kept = theta.clone(), b.clone()
    Nesterov(lr=lr, momentum=momentum).update(moved, delta.clone(), {"momentum": kept}, 1)
    b.mul_(momentum).add_(delta)
    theta.sub_(delta.add_(b, alpha=momentum), alpha=lr)
    assert torch.equal(moved.view(torch.int32), theta.view(torch.int32))
    assert torch.equal(kept.view(torch.int32), b.view(torch.int32))


def test_nesterov_is_the_papers_formula_with_the_papers_numbers() -> None:
    theta, b, momentum = 1.0, 0.0, 0.9
    tensor, state = torch.tensor([theta]), state_for(Nesterov(), 1)
    for round_number, delta in enumerate([0.5, -0.25, 1.0], start=1):
        b = momentum * b + delta
        theta = theta - 0.7 * (delta + momentum * b)
        Nesterov().update(tensor, torch.tensor([delta]), state, round_number)
        assert tensor.item() == pytest.approx(theta, rel=1e-6)
        assert state["momentum"].item() == pytest.approx(b, rel=1e-6)


@pytest.mark.parametrize("name", OUTER_OPTIMIZERS)
def test_an_update_in_slices_is_bit_for_bit_the_update_of_the_whole(name: str) -> None:
    ours, _ = PAIRS[name]
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(1003, generator=generator)
    sliced, state_whole, state_sliced = whole.clone(), state_for(ours, 1003), state_for(ours, 1003)
    for round_number in range(1, 4):
        delta = torch.randn(1003, generator=generator)
        ours.update(whole, delta.clone(), state_whole, round_number)  # an update may overwrite its delta
        for part in (slice(0, 7), slice(7, 500), slice(500, 1003)):
            state = {key: buffer[part] for key, buffer in state_sliced.items()}
            ours.update(sliced[part], delta[part], state, round_number)
    assert torch.equal(whole, sliced)
    assert all(torch.equal(state_whole[key], state_sliced[key]) for key in state_whole)


@pytest.mark.parametrize("value", [0.0, -0.1, math.nan, math.inf])
@pytest.mark.parametrize("kind", OUTER_OPTIMIZERS.values())
def test_a_learning_rate_that_is_not_finite_and_positive_is_refused(kind: type[SGD], value: float) -> None:
    with pytest.raises(ConfigError, match=r"outer\.lr"):
        kind(lr=value)


@pytest.mark.parametrize("value", [1.0, 1.5, -0.1, math.nan, math.inf])
def test_a_decay_outside_zero_to_one_is_refused(value: float) -> None:
    for build in (
        lambda: Nesterov(momentum=value),
        lambda: SGDMomentum(momentum=value),
        lambda: Adam(beta1=value),
        lambda: Adam(beta2=value),
    ):
        with pytest.raises(ConfigError, match="below 1"):
            build()


def test_adams_epsilon_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"outer\.epsilon"):
        Adam(epsilon=0.0)


def test_a_configuration_gives_the_optimizer_it_names_with_the_papers_defaults() -> None:
    assert outer_optimizer(OuterConfig()) == Nesterov(lr=0.7, momentum=0.9)
    assert outer_optimizer(OuterConfig("adam", epsilon=0.2)) == Adam(epsilon=0.2)
    assert outer_optimizer(OuterConfig("sgd")) == SGD(lr=1.0)


@pytest.mark.parametrize(
    ("optimizer", "option"), [("sgd", "momentum"), ("nesterov", "beta1"), ("sgdm", "epsilon"), ("adam", "momentum")]
)
def test_an_option_without_effect_is_refused(
    optimizer: Literal["sgd", "nesterov", "sgdm", "adam"], option: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"outer\.{option} = 0\.5 has no effect on the outer optimizer '{optimizer}'"
    ):
        OuterConfig(optimizer, **{option: 0.5})


def test_the_options_that_a_configuration_allows_and_their_defaults_are_those_of_the_optimizers() -> None:
    assert {
        name: {field.name: field.default for field in fields(kind) if field.name != "course"}
        for name, kind in OUTER_OPTIMIZERS.items()
    } == OUTER_NUMBERS
