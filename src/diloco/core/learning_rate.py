"""The inner learning rate over a run, as a function of the step alone: all workers know what it was and will be."""

import math
from dataclasses import dataclass


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
