"""EagerFragment updates are the published ones, written so that the anchor stays the same on all workers."""

import pytest
import torch

from diloco.core.fragments import Fragment
from diloco.core.outer_optimizers import SGD, Adam, Nesterov, OuterOptimizer, SGDMomentum
from diloco.core.outer_step import outer_step
from diloco.errors import ConfigError
from diloco.methods.eager import EagerFragment

K, ROUNDS, SIZE = 3, 6, 40


def inner_work(worker: int, number: int, theta: torch.Tensor) -> torch.Tensor:
    """What H inner steps do to the parameters: something that depends on where they begin."""
    generator = torch.Generator().manual_seed(10 * number + worker)
    return theta - 0.1 * theta - 0.3 * torch.randn(SIZE, generator=generator)


def published(outer: OuterOptimizer) -> list[torch.Tensor]:
    """Algorithm of arXiv 2502.12996 as it is written: every worker has outer parameters and a momentum of its own."""
    thetas = [torch.ones(SIZE) for _ in range(K)]
    states = [{name: torch.zeros(SIZE) for name in outer.state_names} for _ in range(K)]
    before = [torch.zeros(SIZE) for _ in range(K)]
    mean_before = torch.zeros(SIZE)
    for number in range(ROUNDS):
        deltas = [theta - inner_work(i, number, theta) for i, theta in enumerate(thetas)]
        for i in range(K):
            outer.update(thetas[i], mean_before + (deltas[i] - before[i]) / K, states[i], number + 1)
        before, mean_before = deltas, torch.stack(deltas).mean(0)
    return thetas


class Worker:
    def __init__(self, outer: OuterOptimizer, *, delayed: bool = False) -> None:
        self.tensor = torch.nn.Parameter(torch.ones(SIZE))
        self.fragment = Fragment(("w",), (self.tensor,), outer)
        self.eager = EagerFragment(self.fragment, delayed=delayed)

    def post(self, worker: int, number: int) -> torch.Tensor:
        with torch.no_grad():
            self.tensor.copy_(inner_work(worker, number, self.tensor))
        return torch.cat([delta.clone() for _, delta in self.eager.outer_gradient(K)])

    def merge(self, mean: torch.Tensor) -> None:
        outer_step(self.fragment, self.fragment.outer_opt, lambda span: mean[span.slice].clone(), mixing=1.0)


def ours(outer: OuterOptimizer, *, delayed: bool = False) -> list[Worker]:
    workers = [Worker(outer, delayed=delayed) for _ in range(K)]
    mean = None
    for number in range(ROUNDS):
        if mean is not None:
            for worker in workers:
                worker.merge(mean)
        mean = torch.stack([worker.post(i, number) for i, worker in enumerate(workers)]).mean(0)
    return workers


@pytest.mark.parametrize("outer", [Nesterov(), Nesterov(0.4, 0.5), SGD(), SGD(lr=0.5)])
def test_the_parameters_are_those_of_the_published_algorithm_and_anchors_are_equal(outer: OuterOptimizer) -> None:
    workers = ours(outer)
    for worker, expected in zip(workers, published(outer), strict=True):
        torch.testing.assert_close(worker.tensor.detach(), expected, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(worker.fragment.anchor, workers[0].fragment.anchor) for worker in workers)
    assert not torch.equal(workers[0].tensor, workers[1].tensor), "each is ahead of the anchor by its own share"


def test_the_naive_form_leaves_the_own_share_out() -> None:
    for worker in ours(Nesterov(), delayed=True):
        assert torch.equal(worker.tensor.detach(), worker.fragment.anchor)


@pytest.mark.parametrize("outer", [Nesterov(), SGD(), Nesterov(0.7, 0.0)])
def test_the_work_of_a_failed_round_is_in_the_next_outer_gradient(outer: OuterOptimizer) -> None:
    worker = Worker(outer)
    worker.merge(worker.post(0, 0))
    state = {name: buffer.clone() for name, buffer in worker.eager.state.items()}
    lost = worker.post(0, 1)
    assert worker.eager.take_back(K)
    for name, buffer in worker.eager.state.items():
        if outer != Nesterov(0.7, 0.0):  # without momentum there is nothing to restore
            torch.testing.assert_close(buffer, state[name], rtol=1e-4, atol=1e-5)
    fresh_from = worker.tensor.detach().clone()
    both = worker.post(0, 2)
    torch.testing.assert_close(both, lost + fresh_from - inner_work(0, 2, fresh_from), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("outer", [Adam(), SGDMomentum()])
def test_outer_optimizers_in_which_the_own_part_cannot_be_told_apart_are_refused(outer: OuterOptimizer) -> None:
    with pytest.raises(ConfigError, match=f"'{outer.name}'"):
        Worker(outer)
