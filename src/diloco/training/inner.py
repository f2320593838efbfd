"""The inner optimizer of a run and its learning-rate schedule: AdamW, or Muon for matrices and AdamW for the rest.

Muon orthogonalises the momentum of a matrix (MuLoCo found it better than AdamW under DiLoCo at 150M). It is for hidden
matrices: those of the model's numbered blocks. Embeddings, the output matrix, norms and biases stay with AdamW. Muon's
updates are scaled to AdamW's size, so that one learning rate and weight decay serve both.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.errors import ConfigError
from diloco.training.config.run import InnerConfig, learning_rates

Group = dict[str, Any]

MUON_MOMENTUM = 0.95
"""The default of inner.momentum."""


def inner_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.Optimizer:
    """Return the configured optimizer; weight decay for matrices and embeddings, none for norms."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    hidden = {
        name: p for name, p in trainable.items() if config.optimizer == "muon" and is_hidden_matrix(name, p.shape)
    }
    rest = [p for name, p in trainable.items() if name not in hidden]
    groups: list[Group] = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw":
        return _adamw(groups, config)
    if not hidden:
        raise ConfigError(
            "inner.optimizer = muon is for the matrices of numbered blocks (layers.0, layers.1, …), and this model has "
            "none: use adamw"
        )
    muon = torch.optim.Muon(
        list(hidden.values()),
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=MUON_MOMENTUM if config.momentum is None else config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return BothOptimizers(muon, _adamw(groups, config)) if groups else muon


def is_hidden_matrix(name: str, shape: Sequence[int]) -> bool:
    """Return whether it is a matrix of a numbered block: what Muon steps."""
    return len(shape) == 2 and re.search(r"(?:^|\.)\d+\.", name) is not None


def _adamw(groups: list[Group], config: InnerConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


class BothOptimizers(torch.optim.Optimizer):
    """Two optimizers over different parameters as one: their groups, one after the other, and one state."""

    def __init__(self, first: torch.optim.Optimizer, second: torch.optim.Optimizer) -> None:
        self._both = (first, second)
        super().__init__([*first.param_groups, *second.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        """Let both optimizers use the groups and the state of this one, so that a schedule sets both."""
        first, second = self._both
        count = len(first.param_groups)
        first.param_groups = self.param_groups[:count]
        second.param_groups = self.param_groups[count:]
        first.state = second.state = self.state

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self._both:
            optimizer.step()
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_groups()


def learning_rate_schedule(inner: torch.optim.Optimizer, config: InnerConfig, steps: int) -> LambdaLR:
    """Return a linear warm-up, then a cosine down to `final_lr_ratio` at the last step."""
    return LambdaLR(inner, learning_rates(config, steps).factor)


def set_position(schedule: LambdaLR, step: int) -> None:
    """Set the learning rates of that step, also if the schedule has not been stepped to it."""
    if schedule.last_epoch == step:
        return
    schedule.last_epoch = step
    rates = [base * factor(step) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    schedule._last_lr = rates
