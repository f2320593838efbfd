"""How rates change over a run: the inner learning rate as a function of the step alone, the outer learning rate and
momentum as a function of the round's turn alone. So all workers know what they were and will be.

Outer momentum that begins low and rises does not remember the first outer gradients, which point apart (Pier, arXiv
2511.17849, warms it up); an outer rate that falls calms the end. The last rounds may be plain means of the workers'
parameters, which leave no overshooting step as the last one.
"""

import math
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
        """Return the learning rate of inner step number `step`, counted from 0, as a share of the peak."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return self.final_ratio + (1 - self.final_ratio) * cosine


@dataclass(frozen=True)
class Course:
    """The outer rate and momentum of the first and the last rounds; between them the outer optimizer's own hold."""

    warmup_rounds: int = 0
    """Rounds over which the numbers rise, linearly, from the first ones to the optimizer's own."""
    start_lr: float | None = None
    start_momentum: float | None = None
    final_lr: float | None = None
    """A cosine leads from the optimizer's own number, after the warm-up, to this one at the last round."""
    final_momentum: float | None = None
    plain_rounds: int = 0
    """The last rounds are plain means: SGD with a learning rate of 1."""
    rounds: int | None = None
    """The rounds of each fragment in the whole run; needed for whatever belongs to its end."""

    def __post_init__(self) -> None:
        ends = self.final_lr is not None or self.final_momentum is not None or self.plain_rounds > 0
        if ends and self.rounds is None:
            raise ConfigError("a course with final_lr, final_momentum or plain_rounds needs the number of rounds")

    def is_plain(self, turn: int) -> bool:
        return self.rounds is not None and turn >= self.rounds - self.plain_rounds and self.plain_rounds > 0

    def number(self, name: str, own: float, turn: int) -> float:
        """Return the learning rate or the momentum (`name`) of a turn; `own` is the optimizer's number."""
        start = getattr(self, f"start_{name}")
        final = getattr(self, f"final_{name}")
        if turn < self.warmup_rounds:
            return own if start is None else start + (own - start) * turn / self.warmup_rounds
        if final is None or self.rounds is None:
            return own
        progress = (turn - self.warmup_rounds) / max(1, self.rounds - 1 - self.warmup_rounds)
        return float(final + (own - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
