"""Rounds that grow as the learning rate falls: the quadratic synchronization rule (QSR, arXiv 2310.14423).

    H = max(H_base, ⌊(α / η)²⌋)      η: the inner learning rate at the beginning of the round

While the learning rate is high, workers drift apart quickly and average often; later they average rarely. During the
warm-up, where η is small for another reason, H is that of the peak, as in the paper.

All of it is a function of the step, so that workers that join or resume know every round that was and will be.
"""

import math
from bisect import bisect_right
from dataclasses import dataclass

from diloco.errors import ConfigError


@dataclass(frozen=True)
class LearningRateCurve:
    """The inner learning rate of each step: a linear warm-up to the peak, then a cosine down to a share of it."""

    peak: float
    total_steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.0

    def factor(self, step: int) -> float:
        """The learning rate of inner step number `step`, counted from 0, as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_ratio + (1 - self.final_ratio) * cosine


@dataclass(frozen=True)
class GrowingRounds:
    """The length of each round by the rule above, at most the whole run."""

    alpha: float
    rates: LearningRateCurve

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"sync.growth = {self.alpha} must be finite and above 0")

    def length(self, base: int, step: int) -> int:
        """H of a round that begins after inner step `step`."""
        rate = self.rates.peak * self.rates.factor(max(step, self.rates.warmup_steps))
        most = max(base, self.rates.total_steps)
        grown = (self.alpha / rate) ** 2 if rate > 0 else math.inf
        return max(base, math.floor(min(grown, most)))


class Turns:
    """The turns through all fragments: turn n begins after step `start(n)`, counted from the end of a warm start."""

    def __init__(self, base: int, growth: GrowingRounds, warm_start: int) -> None:
        self._base, self._growth, self._warm_start = base, growth, warm_start
        self._starts = [0]

    def start(self, turn: int) -> int:
        while len(self._starts) <= turn:
            self._add()
        return self._starts[turn]

    def at(self, step: int) -> int:
        """The turn that inner step `step` + 1 belongs to."""
        while self._starts[-1] <= step:
            self._add()
        return bisect_right(self._starts, step) - 1

    def _add(self) -> None:
        last = self._starts[-1]
        self._starts.append(last + self._growth.length(self._base, self._warm_start + last))
