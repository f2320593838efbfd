"""What DiLoCo averages of a model: forgotten, foreign, frozen, tied parameters, buffers, dtypes."""

import pytest
import torch
from torch import nn

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD, Nesterov
from diloco.engines.local import LocalSwarm, alone
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from support.alone import made, made_digest, steps
from support.problem import anchors, flat, loss_of, net

# Which parameters


def test_a_trainable_parameter_that_the_inner_optimizer_does_not_have_is_refused_by_name() -> None:
    model = net()
    with pytest.raises(ConfigError, match=r"exit\.weight, exit\.bias.*requires_grad_\(False\)"):
        DiLoCo(model, torch.optim.SGD([*model.entrance.parameters(), *model.blocks.parameters()]), alone())


def test_a_parameter_that_only_the_inner_optimizer_has_is_refused() -> None:
    model = net()
    foreign = nn.Parameter(torch.zeros(3, 5))
    with pytest.raises(ConfigError, match=r"not in the model \(shapes \[\(3, 5\)\]\)"):
        DiLoCo(model, torch.optim.SGD([*model.parameters(), foreign]), alone())


def test_a_model_without_trainable_parameters_is_refused() -> None:
    model = net().requires_grad_(False)
    with pytest.raises(ConfigError, match="no trainable parameter"):
        DiLoCo(model, torch.optim.SGD(model.parameters()), alone())


def test_frozen_parameters_are_made_equal_and_then_left_alone() -> None:
    world = LocalSwarm(2).engines()
    models = [net(seed=engine.worker) for engine in world]
    for model in models:
        model.entrance.requires_grad_(False)
    for model, engine in zip(models, world, strict=True):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = DiLoCo(model, torch.optim.SGD(trainable, lr=0.1), engine)
        names = {name for fragment in optimizer.loop.state.fragments for name in fragment.names}
        assert not any(name.startswith("entrance") for name in names)
    assert torch.equal(models[0].entrance.weight, models[1].entrance.weight)
    assert torch.equal(models[1].entrance.weight, net(seed=0).entrance.weight)


def test_frozen_parameters_that_are_said_to_be_the_same_are_not_sent() -> None:
    world = LocalSwarm(2).engines()
    models = [net(seed=engine.worker) for engine in world]
    for model, engine in zip(models, world, strict=True):
        model.entrance.requires_grad_(False)
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        DiLoCo(model, torch.optim.SGD(trainable, lr=0.1), engine, send_frozen=False)
    assert torch.equal(models[1].entrance.weight, net(seed=1).entrance.weight)
    assert torch.equal(models[1].exit.weight, net(seed=0).exit.weight)


def test_a_parameter_that_is_unfrozen_later_is_refused_at_the_next_round() -> None:
    model = net()
    model.exit.bias.requires_grad_(False)
    optimizer = made(model, SyncConfig(2))
    model.exit.bias.requires_grad_(True)
    steps(model, optimizer, 0, 1)
    with pytest.raises(ConfigError, match=r"'exit\.bias' was frozen"):
        steps(model, optimizer, 1, 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entrance = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.again.weight = self.entrance.weight
        self.exit = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exit(self.again(self.entrance(x).tanh()).tanh())


def test_tied_weights_are_averaged_once_and_stay_tied() -> None:
    models = [Tied(), Tied()]
    optimizers = [
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine, sync=SyncConfig(1, "fp32"), outer=SGD())
        for model, engine in zip(models, LocalSwarm(2).engines(), strict=True)
    ]
    assert optimizers[0].loop.state.fragments[0].numel == 12 * 12 + 12 + 12 + 12 * 3 + 3
    for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        loss_of(model, worker, 0).backward()
        optimizer.inner_step()
    mean = (models[0].entrance.weight + models[1].entrance.weight) / 2
    for part in (DiLoCo.post, DiLoCo.merge):
        for optimizer in optimizers:
            part(optimizer)
    for model in models:
        assert model.again.weight is model.entrance.weight
        torch.testing.assert_close(model.entrance.weight, mean, rtol=1e-6, atol=1e-7)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entrance = nn.Linear(12, 6)
        self.norm = nn.BatchNorm1d(6)
        self.exit = nn.Linear(6, 3)
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.exit(self.norm(self.entrance(x)))


def normed(outer: Nesterov | None = None) -> tuple[list[Normed], list[DiLoCo]]:
    models = [Normed(), Normed()]
    with torch.no_grad():
        models[1].norm.running_mean += 5
        models[1].norm.num_batches_tracked += 3
        models[1].table += 9
    optimizers = [
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine, sync=SyncConfig(2, "fp32"), outer=outer)
        for model, engine in zip(models, LocalSwarm(2).engines(), strict=True)
    ]
    return models, optimizers


def test_running_statistics_are_averaged_plainly_and_other_buffers_only_equal_at_the_start() -> None:
    models, optimizers = normed(Nesterov())
    assert models[1].norm.num_batches_tracked.item() == 0
    assert models[1].table.tolist() == [9.0, 9.0]
    assert torch.equal(models[0].norm.running_mean, models[1].norm.running_mean)
    for step in range(4):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, worker, step).backward()
            optimizer.inner_step()
        statistics = [(model.norm.running_mean.clone(), model.norm.running_var.clone()) for model in models]
        for part in (DiLoCo.post, DiLoCo.merge):
            for optimizer in optimizers:
                part(optimizer)
    for model in models:
        for got, first, second in zip((model.norm.running_mean, model.norm.running_var), *statistics, strict=True):
            torch.testing.assert_close(got, (first + second) / 2, rtol=1e-6, atol=1e-7)  # no momentum, no lr
        assert model.norm.num_batches_tracked.item() == 4


def test_a_round_of_a_model_with_running_statistics_is_one_round() -> None:
    """The buffers are a fragment of their own, which the user does not see."""
    models, optimizers = normed()
    told: list[int] = []
    optimizers[0].on_round = lambda event: told.append(event.key.fragment)
    for step in range(4):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, worker, step).backward()
            optimizer.inner_step()
        for part in (DiLoCo.post, DiLoCo.merge):
            for optimizer in optimizers:
                part(optimizer)
    assert [optimizer.rounds for optimizer in optimizers] == [2, 2]
    assert told == [0, 0]
    assert optimizers[0].loop.rounds == 4
    deltas = optimizers[0].loop.compared[1]
    assert optimizers[0].similarity is not None and len(deltas) == 3
    assert optimizers[0].loop.replica.groups[1].auxiliary


def test_statistics_of_any_size_are_averaged_and_no_outlier() -> None:
    """A worker whose inputs have another scale is honest: the bound on norms is for gradients."""
    models, optimizers = normed()
    for step in range(2):
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, worker, step).backward()
            optimizer.inner_step()
    with torch.no_grad():
        models[1].norm.running_var += 1e4
    mean = (models[0].norm.running_var + models[1].norm.running_var) / 2
    for part in (DiLoCo.post, DiLoCo.merge):
        for optimizer in optimizers:
            part(optimizer)
    for model, optimizer in zip(models, optimizers, strict=True):
        assert optimizer.loop.counters.contributions_refused == 0
        torch.testing.assert_close(model.norm.running_var, mean)


def test_an_evaluation_in_training_mode_leaves_the_averaged_statistics_alone() -> None:
    models, optimizers = normed()
    before = [anchors(optimizer) for optimizer in optimizers]
    own = models[0].norm.running_mean.clone()
    with optimizers[0].outer_parameters():
        models[0](torch.randn(8, 12))
    assert torch.equal(anchors(optimizers[0]), before[0])
    assert torch.equal(models[0].norm.running_mean, own)


def test_parameters_in_bf16_end_up_as_the_rounded_anchor() -> None:
    """No matrix product in bf16: the gradients are given."""
    model = nn.Linear(5, 3).to(torch.bfloat16)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.125), alone(), sync=SyncConfig(2, "fp32"))
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        with optimizer.outer_parameters():
            shown = flat(model)
        anchor = anchors(optimizer)
        assert torch.equal(shown, anchor.to(torch.bfloat16).float())
    assert optimizer.loop.state.fragments[0].anchor.dtype == torch.float32
    assert optimizer.anchor_digest() == made_digest(optimizer)
