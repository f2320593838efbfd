"""Rounds that grow as the learning rate falls: the quadratic synchronization rule (QSR, arXiv 2310.14423).

    H = max(H_base, ⌊(α / η)²⌋)      η: the inner learning rate at the beginning of the round

While the learning rate is high, workers drift apart quickly and average often; later they average rarely. During the
warm-up, where η is small for another reason, H is that of the peak, as in the paper.

All of it is a function of the step, so that workers that join or resume know every round that was and will be.
"""

import math
from dataclasses import dataclass

from diloco.core.rates import LearningRateCurve
from diloco.errors import ConfigError


@dataclass(frozen=True)
class GrowingRounds:
    """The lengths of rounds by the rule above, at most the whole run."""

    alpha: float
    rates: LearningRateCurve

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ConfigError(f"sync.growth = {self.alpha} must be finite and above 0")

    def length(self, base: int, step: int) -> int:
        """Return H of a round that begins after inner step `step`."""
        rate = self.rates.peak * self.rates.factor(max(step, self.rates.warmup_steps))
        most = max(base, self.rates.total_steps)
        grown = (self.alpha / rate) ** 2 if rate > 0 else math.inf
        return max(base, math.floor(min(grown, most)))
