"""OuterOpt of Algorithm 1, line 14: turns a mean outer gradient into a new anchor.

Each class is a frozen set of numbers. Its state (momentum and the like) belongs to a fragment and is passed in, so that
one fragment's step cannot move another's parameters. Every update is elementwise and in place: it may be given the
whole fragment or any part of it. To add one: a class here, a line in OUTER_OPTIMIZERS, a row in docs/configuration.md.

The paper (Figure 6) finds Nesterov best; SGD with lr 1 is federated averaging, Adam is FedOpt and needs ε = 0.1.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from diloco.core.config import OuterConfig, check_course, check_outer_number
from diloco.core.rates import Course


@dataclass(frozen=True)
class OuterOptimizer(ABC):
    """θ ← OuterOpt(θ, Δ), in place, on any slice of a fragment."""

    name: ClassVar[str]
    state_names: ClassVar[tuple[str, ...]]
    """One flat fp32 buffer of the fragment's size for each name, zero at the start."""
    course: Course | None = field(default=None, kw_only=True)
    """How lr and momentum change over the run; None: not at all."""

    @abstractmethod
    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        """Move `theta` by one step along `delta`, which may be overwritten; `round_number` counts from 1."""

    def __post_init__(self) -> None:
        for number in fields(self):
            if number.name != "course":
                check_outer_number(number.name, getattr(self, number.name), self.name)
        if self.course is not None:
            check_course(self.course, self.name)

    def at(self, turn: int) -> "OuterOptimizer":
        """Return the optimizer of the rounds of a turn (core/schedule.py), with fixed numbers; turns are counted from
        0."""
        if self.course is None:
            return self
        if self.course.is_plain(turn):
            return SGD(lr=1.0)
        names = [number.name for number in fields(self) if number.name in ("lr", "momentum")]
        numbers = {name: self.course.number(name, getattr(self, name), turn) for name in names}
        return replace(self, **numbers, course=None)


@dataclass(frozen=True)
class Nesterov(OuterOptimizer):
    """b ← μ b + Δ;  θ ← θ − η (Δ + μ b). The paper's default: η = 0.7, μ = 0.9."""

    name = "nesterov"
    state_names = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.9

    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        del round_number
        b = state["momentum"]
        if self.momentum > 0 and _fits_fused(theta, delta, b) and _fused_rounds_alike():
            _fused_nesterov(theta, delta, b, self.lr, self.momentum)  # the same bits, in one pass over memory
            return
        b.mul_(self.momentum).add_(delta)
        theta.sub_(delta.add_(b, alpha=self.momentum), alpha=self.lr)


_WHOLE = 64  # of a multiple of so many elements torch's fused step leaves none to scalar code, which rounds otherwise


def _fits_fused(*tensors: Tensor) -> bool:
    return all(t.is_cpu and t.dtype == torch.float32 and t.is_contiguous() and not t.numel() % _WHOLE for t in tensors)


def _fused_nesterov(theta: Tensor, delta: Tensor, b: Tensor, lr: float, momentum: float) -> None:
    torch._fused_sgd_(
        [theta],
        [delta],
        [b],
        weight_decay=0.0,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=True,
        maximize=False,
        is_first_step=False,
    )


@cache
def _fused_rounds_alike() -> bool:
    """Whether torch's fused step gives the bits of the separate ones here: that is up to its compiler and the CPU."""
    if not hasattr(torch, "_fused_sgd_"):
        return False
    lr, momentum = 0.7, 0.9
    count = torch.arange(4096, dtype=torch.float32, device="cpu")
    theta, delta, b = (torch.sin(count * factor) for factor in (1.0, 2.0, 3.0))
    fused_theta = theta.clone()
    fused_b = b.clone()
    _fused_nesterov(fused_theta, delta.clone(), fused_b, lr, momentum)
    b.mul_(momentum).add_(delta)
    theta.sub_(delta.add_(b, alpha=momentum), alpha=lr)
    return torch.equal(fused_theta, theta) and torch.equal(fused_b, b)


@dataclass(frozen=True)
class SGD(OuterOptimizer):
    """θ ← θ − η Δ. With η = 1 this is federated averaging: the mean of the workers' parameters."""

    name = "sgd"
    state_names = ()
    lr: float = 1.0

    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        del state, round_number
        theta.sub_(delta, alpha=self.lr)


@dataclass(frozen=True)
class SGDMomentum(OuterOptimizer):
    """b ← μ b + Δ;  θ ← θ − η b. Heavy ball, the paper's SGDM."""

    name = "sgdm"
    state_names = ("momentum",)
    lr: float = 0.7
    momentum: float = 0.9

    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        del round_number
        b = state["momentum"]
        b.mul_(self.momentum).add_(delta)
        theta.sub_(b, alpha=self.lr)


@dataclass(frozen=True)
class Adam(OuterOptimizer):
    """FedOpt: bias-corrected Adam on Δ. The paper found it unstable below ε = 0.1 (§3.1, Outer Optimizers)."""

    name = "adam"
    state_names = ("first_moment", "second_moment")
    lr: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 0.1

    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        m, v = state["first_moment"], state["second_moment"]
        m.lerp_(delta, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(delta, delta, value=1 - self.beta2)
        m_scale = 1 - self.beta1**round_number
        v_scale = 1 - self.beta2**round_number
        denominator = v.div(v_scale).sqrt_().add_(self.epsilon)
        theta.addcdiv_(m, denominator, value=-self.lr / m_scale)


OUTER_OPTIMIZERS: dict[str, type[OuterOptimizer]] = {
    "nesterov": Nesterov,
    "sgd": SGD,
    "sgdm": SGDMomentum,
    "adam": Adam,
}


def used_numbers(config: OuterConfig) -> dict[str, float]:
    """Return the optimizer's own numbers, whether they were given or are its defaults."""
    numbers: dict[str, Any] = config.given()
    outer = OUTER_OPTIMIZERS[config.optimizer](**numbers)
    return {number.name: getattr(outer, number.name) for number in fields(outer) if number.name != "course"}


def outer_optimizer(config: OuterConfig, rounds: int | None = None) -> OuterOptimizer:
    """Build the optimizer that a configuration names. `rounds`: of each fragment in the whole run, if that is known."""
    course = Course(**config.course(), rounds=rounds) if config.course() else None
    return OUTER_OPTIMIZERS[config.optimizer](**config.given(), course=course)
