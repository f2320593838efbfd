"""DiLoCo is a torch.optim.Optimizer: groups, schedulers, hooks, scaler and closures as torch has them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook

import diloco
from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD
from diloco.engines.base import Engine
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from support.alone import made, steps
from support.problem import anchors, build, flat, loss_of, net
from support.threads import in_threads

# Groups, hooks, closures


def test_param_groups_state_and_defaults_are_the_inner_optimizers_own() -> None:
    model = net()
    inner = torch.optim.AdamW(
        [
            {"params": model.blocks.parameters(), "lr": 0.5},
            {"params": [*model.entrance.parameters(), *model.exit.parameters()]},
        ]
    )
    optimizer = DiLoCo(model, inner, alone())
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    optimizer.param_groups[0]["lr"] = 0.25
    assert inner.param_groups[0]["lr"] == 0.25
    assert "lr: 0.25" in repr(optimizer)


def test_the_package_offers_it_under_its_own_name() -> None:
    assert diloco.DiLoCo is DiLoCo and diloco.SyncConfig is SyncConfig and diloco.alone is alone


def test_a_parameter_group_added_later_is_refused() -> None:
    optimizer = made(net())
    with pytest.raises(ConfigError, match="cannot be added after DiLoCo was built"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def test_zero_grad_clears_the_models_gradients() -> None:
    model = net()
    optimizer = made(model)
    loss_of(model, 0, 0).backward()
    optimizer.zero_grad(set_to_none=False)
    assert not any(bool(parameter.grad.any()) for parameter in model.parameters() if parameter.grad is not None)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_step_hooks_run_once_a_step_on_both_optimizers() -> None:
    model = net()
    optimizer = made(model, SyncConfig(2))
    calls: list[str] = []
    for name, of in (("outer", optimizer), ("inner", optimizer.inner)):
        of.register_step_pre_hook(lambda *_, name=name: calls.append(f"{name} before"))
        of.register_step_post_hook(lambda *_, name=name: calls.append(f"{name} after"))
    steps(model, optimizer, 0, 3)
    assert calls == ["outer before", "inner before", "inner after", "outer after"] * 3


def test_torchs_wrapper_is_around_a_step_only_where_hooks_or_the_profiler_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    optimizer = made(model, SyncConfig(2))
    entered: list[str] = []
    record = torch.autograd.profiler.record_function

    def counted(name: str) -> Any:
        entered.append(name)
        return record(name)

    monkeypatch.setattr(torch.autograd.profiler, "record_function", counted)
    steps(model, optimizer, 0, 1)
    assert "Optimizer.step#DiLoCo.step" not in entered
    hook = register_optimizer_step_post_hook(lambda of, *_: entered.append(f"after {type(of).__name__}"))
    steps(model, optimizer, 1, 2)
    hook.remove()
    assert "after DiLoCo" in entered
    assert entered.count("Optimizer.step#DiLoCo.step") == 1
    with torch.profiler.profile() as seen:
        steps(model, optimizer, 2, 3)
    assert any("DiLoCo.step" in one.key for one in seen.key_averages())


def test_a_closure_is_evaluated_by_the_inner_optimizer_and_its_loss_returned() -> None:
    model, reference = net(), net()
    optimizer = DiLoCo(model, torch.optim.LBFGS(model.parameters(), max_iter=3), alone(), sync=SyncConfig(5))
    plain = torch.optim.LBFGS(reference.parameters(), max_iter=3)

    def closure_of(model: nn.Module, of: torch.optim.Optimizer) -> Callable[[], Any]:
        def closure() -> torch.Tensor:
            of.zero_grad()
            loss = loss_of(model, 0, 0)
            loss.backward()
            return loss.detach()

        return closure

    first = optimizer.step(closure_of(model, optimizer))
    assert float(first) == float(plain.step(closure_of(reference, plain)))
    assert torch.equal(flat(model), flat(reference))
    assert optimizer.loop.inner_steps == 1


def test_between_rounds_it_is_the_inner_optimizer_bit_for_bit() -> None:
    model, reference = net(), net()
    optimizer = made(model, SyncConfig(100))
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    steps(model, optimizer, 0, 7)
    steps(reference, plain, 0, 7)
    assert torch.equal(flat(model), flat(reference))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_a_weight_that_is_not_finite_and_positive_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match="weight = "):
        made(net(), weight=weight)


# Learning-rate schedulers

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=12),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, gamma=0.9),
    "warm-up then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 9)], milestones=[3]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("on", ["inner", "DiLoCo"])
def test_any_scheduler_works_on_the_inner_optimizer_and_on_diloco_itself(kind: str, on: str) -> None:
    model, reference = net(), net()
    optimizer, plain = made(model, SyncConfig(100)), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    ours = SCHEDULERS[kind](optimizer if on == "DiLoCo" else optimizer.inner)
    torchs = SCHEDULERS[kind](plain)
    for step in range(9):
        for trained, by, scheduler in ((model, optimizer, ours), (reference, plain, torchs)):
            steps(trained, by, step, step + 1)
            scheduler.step(1.0) if kind == "plateau" else scheduler.step()
        assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert torch.equal(flat(model), flat(reference))


# Gradient scaler


def test_the_scaler_gives_the_same_steps_as_without_it() -> None:
    model, reference = net(), net()
    optimizer, plain = made(model, SyncConfig(100)), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, step)).backward()
        scaler.step(optimizer)
        scaler.update()
    steps(reference, plain, 0, 5)
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-6, atol=1e-7)
    assert optimizer.skipped_steps == 0 and optimizer.loop.inner_steps == 5


def test_unscaling_and_clipping_before_the_step_is_respected() -> None:
    model, reference = net(), net()
    optimizer, plain = made(model, SyncConfig(100)), torch.optim.AdamW(reference.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0, step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        loss_of(reference, 0, step).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        plain.step()
    torch.testing.assert_close(flat(model), flat(reference), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("unscale", [False, True])
def test_an_infinite_gradient_skips_that_workers_step_and_all_stay_in_the_same_round(unscale: bool) -> None:
    sync = SyncConfig(3, "fp32")

    def work(engine: Engine) -> tuple[str, int, int, float, bool]:
        model, optimizer = build(engine, sync, outer=SGD())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        kept = True
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, engine.worker, step)).backward()
            odd = engine.worker == 1 and step == 1
            before = flat(model)
            if odd:
                assert model.exit.weight.grad is not None
                model.exit.weight.grad[0, 0] = math.inf
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            if odd:
                kept = torch.equal(flat(model), before)
        optimizer.finish()
        return optimizer.anchor_digest(), optimizer.loop.inner_steps, optimizer.skipped_steps, scaler.get_scale(), kept

    first, second = in_threads(2, work)
    assert first[0] == second[0]
    assert (first[1:], second[1:]) == ((6, 0, 1024.0, True), (6, 1, 512.0, True))


# The end


def test_finish_leaves_the_outer_parameters_in_the_model_and_runs_the_callback_with_them() -> None:
    model = net()
    optimizer = made(model, SyncConfig(4, overlap_steps=2, mixing=0.5))
    steps(model, optimizer, 0, 6)
    seen: list[torch.Tensor] = []
    optimizer.finish(before_confirming=lambda: seen.append(flat(model)))
    assert torch.equal(seen[0], anchors(optimizer))
    assert torch.equal(flat(model), anchors(optimizer))
    assert len(optimizer.loop.in_flight) == 0


def test_the_first_round_comes_after_exactly_h_steps_of_the_optimizer() -> None:
    model = net()
    optimizer = made(model, SyncConfig(5))
    rounds = []
    for step in range(11):
        steps(model, optimizer, step, step + 1)
        rounds.append(optimizer.loop.rounds)
    assert rounds == [0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2]
