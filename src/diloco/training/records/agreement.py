"""How well each worker's outer gradients agree with the others', over the rounds: a warning, never a verdict.

What is averaged over some rounds is the cosine of a worker's outer gradient with the sum of the others'
(`leave_one_out`), less the round's median. A worker disagrees whose average is below the median of all by more than
each of these:

    4 median deviations        it is apart from workers that differ from each other, as with other data
    6 standard errors          it is no chance: few workers may be close together, and cosines of small models vary
    half of the median cosine  the others agree with each other at least twice as well as with it

A worker with other data may be honest and disagree; a liar at an honest norm shows here first.
"""

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from diloco.core.merging import leave_one_out
from diloco.engines.rounds import RoundResult

logger = logging.getLogger(__name__)

FEWEST = 4
"""With fewer workers there is no majority of which one could be apart."""
DEVIATIONS = 4.0
"""Median deviations below the median, at least."""
ERRORS = 6.0
"""Standard errors below the median, at least."""
SHARE = 0.5
"""The part of the median cosine below the median, at least."""
_LATEST = 0.2  # the weight of the latest round in an average
_LATEST_NOISE = 0.05  # and in the average of a variance
_LEAST_DEVIATION = 0.01
_ROUNDS = 5  # before a worker is judged


@dataclass
class _Gap:
    """Cosine less the round's median, of one worker: its average, and how much single rounds vary."""

    rounds: int = 0
    average: float = 0.0
    error: float = 0.0
    """The variance of the average, as a share of that of one round."""
    variance: float = 0.0
    """The variance of one round's gap."""

    def add(self, gap: float) -> None:
        surprise = gap - self.average
        if self.rounds:
            square = surprise**2 / (1 + self.error)
            self.variance += max(_LATEST_NOISE, 1 / self.rounds) * (square - self.variance)
        self.rounds += 1
        weight = max(_LATEST, 1 / self.rounds)
        self.average += weight * surprise
        self.error = (1 - weight) ** 2 * self.error + weight**2


class Agreement:
    """The agreement of each worker's outer gradients with the others', over the rounds so far."""

    def __init__(self) -> None:
        self._gaps: dict[int, _Gap] = {}
        self._level = math.nan  # the median cosine, averaged
        self._disagreeing: set[int] = set()

    def compare(self, result: RoundResult | None) -> dict[int, float]:
        """Return each contributor's cosine in this round; warn of a worker once, when it begins to disagree."""
        if result is None:
            return {}
        cosines = leave_one_out(result.contributors, result.comparison.products)
        if not cosines:
            return {}
        middle = median(cosines.values())
        self._level = middle if math.isnan(self._level) else self._level + _LATEST * (middle - self._level)
        for worker, cosine in cosines.items():
            self._gaps.setdefault(worker, _Gap()).add(cosine - middle)
        low = self._low(cosines.keys())
        for worker in sorted(low - self._disagreeing):
            logger.warning(
                "the outer gradients of worker %d point elsewhere than the others' (cosine %.2f, the others' %.2f): "
                "other data, a fault, or not honest. sync.merge = clipped bounds what one worker can do",
                worker,
                self._level + self._gaps[worker].average,
                self._level,
            )
        self._disagreeing = low
        return cosines

    def _low(self, present: Iterable[int]) -> set[int]:
        judged = {worker: gap for worker in present if (gap := self._gaps[worker]).rounds >= _ROUNDS}
        if len(judged) < FEWEST:
            return set()
        middle = median(gap.average for gap in judged.values())
        deviation = median(abs(gap.average - middle) for gap in judged.values())
        apart = max(DEVIATIONS * max(_LEAST_DEVIATION, deviation), SHARE * self._level)
        noise = median(gap.variance for gap in judged.values())
        return {
            worker
            for worker, gap in judged.items()
            if middle - gap.average > max(apart, ERRORS * math.sqrt(noise * gap.error))
        }

    @property
    def disagreeing(self) -> list[int]:
        """The workers that disagree now."""
        return sorted(self._disagreeing)
