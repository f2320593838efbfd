"""The outer step of asynchronous workers, against the published equations and its special cases."""

import pytest
import torch

from diloco.core.outer_optimizers import Nesterov
from diloco.errors import ConfigError
from diloco.methods.asynchronous import DelayedNesterov


def states(numel: int = 5) -> dict[str, torch.Tensor]:
    return {"momentum": torch.zeros(numel), "gathered": torch.zeros(numel)}


def gradients(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("spread", [0.0, 0.1, 1 / 3])
def test_it_is_the_published_update(spread: float) -> None:
    N, eps, beta = 3, 0.7, 0.9
    theta, state = torch.ones(5), states()
    expected, m, gathered = torch.ones(5).double(), torch.zeros(5).double(), torch.zeros(5).double()
    for number, g in enumerate(gradients(8), 1):
        DelayedNesterov(eps, beta, N, spread).update(theta, g.clone(), state, number)
        gathered += g
        if number % N == 0:
            m = beta * m + gathered / N
            expected -= eps * ((1 - spread * N + spread) * beta * m + g / N)
            gathered.zero_()
        else:
            expected -= eps * (spread * beta * m + g / N)
        torch.testing.assert_close(theta.double(), expected, rtol=1e-5, atol=1e-6)


def test_with_a_period_of_one_it_is_nesterov_bit_for_bit() -> None:
    one, other, state, momentum = torch.ones(5), torch.ones(5), states(), {"momentum": torch.zeros(5)}
    for number, g in enumerate(gradients(6), 1):
        DelayedNesterov(0.7, 0.9, 1).update(one, g.clone(), state, number)
        Nesterov(0.7, 0.9).update(other, g.clone(), momentum, number)
        assert torch.equal(one, other)


def test_without_momentum_n_arrivals_together_are_their_mean() -> None:
    theta, state, given = torch.zeros(5), states(), gradients(4)
    for number, g in enumerate(given, 1):
        DelayedNesterov(1.0, 0.0, 4).update(theta, g.clone(), state, number)
    torch.testing.assert_close(theta, -torch.stack(given).mean(0))


@pytest.mark.parametrize("wrong", [{"period": 0}, {"lr": 0.0}, {"momentum": 1.0}, {"period": 4, "spread": 0.3}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        DelayedNesterov(**wrong)  # type: ignore[arg-type]
