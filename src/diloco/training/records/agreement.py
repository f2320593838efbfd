"""How well each worker's outer gradients agree with the others', over the rounds: a warning, never a verdict.

Of each contributor the cosine of its outer gradient with the sum of the others' (`leave_one_out`), smoothed.
One that is below the median by four times the median deviation is named. A worker with other data may be honest and
disagree; a liar at an honest norm shows here first.
"""

import logging
from collections.abc import Iterable
from statistics import median

from diloco.core.merging import leave_one_out
from diloco.engines.rounds import RoundResult

logger = logging.getLogger(__name__)

FEWEST, DEVIATIONS = 4, 4.0
_KEEP = 0.8
_LEAST_DEVIATION = 0.01
_ROUNDS = 3  # before a worker is judged


class Agreement:
    def __init__(self) -> None:
        self._smoothed: dict[int, float] = {}
        self._rounds: dict[int, int] = {}
        self._named: set[int] = set()

    def hear(self, result: RoundResult | None) -> dict[int, float]:
        """The cosines of this round; warns of a worker once, when it begins to disagree."""
        if result is None:
            return {}
        cosines = leave_one_out(result.contributors, result.products)
        for worker, cosine in cosines.items():
            before = self._smoothed.get(worker, cosine)
            self._smoothed[worker] = _KEEP * before + (1 - _KEEP) * cosine
            self._rounds[worker] = self._rounds.get(worker, 0) + 1
        low = self._low(cosines.keys())
        for worker in sorted(low - self._named):
            logger.warning(
                "the outer gradients of worker %d point elsewhere than the others' (cosine %.2f, smoothed): other "
                "data, a fault, or not honest. sync.merge = clipped bounds what one worker can do",
                worker,
                self._smoothed[worker],
            )
        self._named = low
        return cosines

    def _low(self, present: Iterable[int]) -> set[int]:
        judged = {worker: self._smoothed[worker] for worker in present if self._rounds[worker] >= _ROUNDS}
        if len(judged) < FEWEST:
            return set()
        middle = median(judged.values())
        deviation = max(_LEAST_DEVIATION, median(abs(value - middle) for value in judged.values()))
        return {worker for worker, value in judged.items() if value < middle - DEVIATIONS * deviation}

    @property
    def named(self) -> list[int]:
        """The workers that disagree now."""
        return sorted(self._named)
