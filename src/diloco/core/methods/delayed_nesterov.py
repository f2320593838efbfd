"""Delayed Nesterov: the outer step of asynchronous workers (Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3).

Each outer gradient g moves the anchor θ when it arrives, whichever worker sent it. Momentum that followed every arrival
would add up stale gradients; so gradients are gathered, and the momentum m moves with every N-th arrival only:

    a ← a + g
    every N-th arrival:   m ← β m + a / N
                          θ ← θ − ε ((1 − c N + c) β m + g / N)
                          a ← 0
    otherwise:            θ ← θ − ε (c β m + g / N)

c spreads the momentum's part over the N arrivals: 0, the default, adds all of it at once. With N = 1 this is Nesterov
at every arrival, and for a single worker DiLoCo itself. Usually N is the number of workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.errors import ConfigError


@dataclass(frozen=True)
class DelayedNesterov(OuterOptimizer):
    """ε = `lr`, β = `momentum`, N = `period`, c = `spread`. `round_number` counts the arrivals."""

    name = "delayed nesterov"
    state_names = ("momentum", "gathered", "global")
    """"global": where the anchor itself is saved; a worker's own is where it began its steps."""
    lr: float = 0.7
    momentum: float = 0.9
    period: int = 1
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise ConfigError(f"lr = {self.lr} must be above 0, momentum = {self.momentum} at least 0 and below 1")
        if self.period < 1 or not 0 <= self.spread <= 1 / self.period:
            raise ConfigError(
                f"period = {self.period} must be at least 1, and spread = {self.spread} from 0 to 1 / period"
            )

    def held_by(self, worker: int) -> OuterOptimizer:
        """Worker 0 holds the anchor and its momentum; the others take over what it answers."""
        return self if worker == 0 else SGD(lr=1.0)

    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        m, a, N = state["momentum"], state["gathered"], self.period
        a.add_(delta)
        factor = self.spread
        if round_number % N == 0:
            m.mul_(self.momentum).add_(a, alpha=1.0 / N)
            a.zero_()
            factor = 1.0 - self.spread * N + self.spread
        if N > 1:
            delta.div_(N)
        if factor:
            delta.add_(m, alpha=factor * self.momentum)
        theta.sub_(delta, alpha=self.lr)
