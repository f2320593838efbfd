"""What the runs of an experiment say about a published claim.

A claim is one number for each seed, computed from the arms of that seed alone, and the range in which the number lies
if the claim holds. Arms of one seed begin with the same weights and see the same batches, so most of the noise is
common to them and cancels in differences. The verdict compares the 95 % confidence interval of the mean (Student's t
over the seeds) with the range:

    holds           the whole interval is inside
    does not hold   the whole interval is outside
    not resolved    the interval has a bound of the range inside, or there are fewer than three seeds,
                    or the scale is too small for its numbers to mean anything (smoke)

A report judges many claims, and some of them would seem to hold by chance: `correct` keeps a verdict only if it stands
after Benjamini and Hochberg's correction over all of them (at most 5 % of the verdicts that remain are expected to be
wrong). Where the paper gives a number (`expected`), two more columns say how ours lies to it: whether the sign is the
published one, and whether the published size lies in our interval.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

FEWEST_SEEDS = 3
FALSE_VERDICTS = 0.05
"""The share of wrong ones among the verdicts of a report that Benjamini and Hochberg's correction allows."""
_T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5 % quantile of Student's t with 1, 2, … degrees of freedom."""

Verdict = Literal["holds", "does not hold", "not resolved"]


@final
@dataclass(frozen=True)
class SeedResults:
    """The arms of one seed, by name: validation loss (nats a token) and other figures of the outer parameters."""

    losses: Mapping[str, float]
    figures: Mapping[str, Mapping[str, float]]

    def perplexity(self, arm: str) -> float:
        return math.exp(self.losses[arm])

    def change(self, arm: str, reference: str) -> float:
        """Return the relative change of perplexity from `reference` to `arm`: 0.02 is 2 % worse."""
        return math.expm1(self.losses[arm] - self.losses[reference])

    def window_kept(self, arm: str, one_worker: str, data_parallel: str) -> float:
        """Return 0 at the loss of one worker alone, 1 at that of data parallelism; NaN if these two are equal."""
        window = self.losses[one_worker] - self.losses[data_parallel]
        return (self.losses[one_worker] - self.losses[arm]) / window if window else math.nan

    def figure(self, arm: str, name: str) -> float:
        return self.figures[arm][name]


@final
@dataclass(frozen=True)
class PublishedClaim:
    """A published statement as a number with a range."""

    text: str
    published: str
    """The paper's measurement, in the same unit as `value` where it gives one."""
    value: Callable[[SeedResults], float]
    unit: Literal["%", ""] = "%"
    """%: the value is a part, such as a relative change of perplexity, and is shown as a percentage."""
    at_least: float = -math.inf
    at_most: float = math.inf
    expected: float | None = None
    """The published value as a number, in the same unit as `value`; None where the paper gives none."""

    @property
    def range_text(self) -> str:
        low, high = self.format(self.at_least), self.format(self.at_most)
        if math.isinf(self.at_least):
            return f"at most {high}"
        return f"at least {low}" if math.isinf(self.at_most) else f"{low} to {high}"

    def format(self, value: float) -> str:
        if not value:
            return "0"
        return f"{value:+.2%}" if self.unit == "%" else f"{value:.3f}"


@final
@dataclass(frozen=True)
class Judgement:
    """The verdict of the seeds on a claim, with the values behind it."""

    claim: PublishedClaim
    values: tuple[float, ...]
    verdict: Verdict
    reason: str = ""
    """Why no interval was compared; empty if one was."""

    @property
    def verdict_text(self) -> str:
        if self.verdict != "not resolved":
            return self.verdict
        return f"not resolved ({self.reason})" if self.reason else "not resolved at this scale"

    @property
    def interval(self) -> tuple[float, float]:
        """Return the 95 % confidence interval of the mean; infinite on both sides with fewer than two values."""
        half = half_width(self.values)
        return (-math.inf, math.inf) if math.isinf(half) else (self.mean - half, self.mean + half)

    @property
    def sign_text(self) -> str:
        """Say whether the whole interval lies on the published side of 0, on the other side, or on both."""
        expected = self.claim.expected
        if not expected or len(self.values) < FEWEST_SEEDS:
            return "–"
        low, high = self.interval
        if low <= 0 <= high:
            return "open"
        return "as published" if (self.mean > 0) == (expected > 0) else "opposite"

    @property
    def size_text(self) -> str:
        """Say whether our interval holds the published value, or our effect is larger, smaller or opposite."""
        expected = self.claim.expected
        if expected is None or len(self.values) < FEWEST_SEEDS:
            return "–"
        low, high = self.interval
        if low <= expected <= high:
            return "compatible"
        if expected and (self.mean > 0) != (expected > 0):
            return "apart"
        return "larger" if abs(self.mean) > abs(expected) else "smaller"

    @property
    def p_value(self) -> float:
        """Return the probability of so clear a verdict by chance: a one-sided t-test against the nearer bound."""
        from scipy.stats import t  # the extra `lab` brings it; a report draws with that extra anyway

        error = statistics.stdev(self.values) / math.sqrt(len(self.values))
        room_below = self.mean - self.claim.at_least
        room_above = self.claim.at_most - self.mean
        room = min(room_below, room_above)
        distance = room if self.verdict == "holds" else -room
        if not error:
            return 0.0 if distance >= 0 else 1.0
        return float(t.sf(distance / error, len(self.values) - 1))

    @property
    def mean(self) -> float:
        return statistics.mean(self.values) if self.values else math.nan

    @property
    def measured_text(self) -> str:
        if not self.values:
            return "–"
        spread = half_width(self.values)
        text = self.claim.format(self.mean)
        return text if math.isinf(spread) else f"{text} ± {self.claim.format(spread).lstrip('+')}"


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of the mean; infinite for one value."""
    if len(values) < 2:
        return math.inf
    return _T_95[min(len(values) - 1, len(_T_95)) - 1] * statistics.stdev(values) / math.sqrt(len(values))


def correct(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Keep the verdicts that stand after Benjamini and Hochberg's correction over all claims with enough seeds.

    Several experiments may ask the same of the same arms: that is one claim.
    """
    tested = distinct(
        [judgement for judgement in judgements if judgement.verdict != "not resolved" or not judgement.reason]
    )
    values = sorted(judgement.p_value for judgement in tested if judgement.verdict != "not resolved")
    largest = 0.0
    for rank, value in enumerate(values, start=1):
        if value <= FALSE_VERDICTS * rank / len(tested):
            largest = value
    reason = f"not after the correction over {len(tested)} claims"
    return [
        replace(judgement, verdict="not resolved", reason=reason)
        if judgement.verdict != "not resolved" and judgement.p_value > largest
        else judgement
        for judgement in judgements
    ]


def distinct(judgements: Sequence[Judgement]) -> list[Judgement]:
    """Drop judgements of the same values and bounds as an earlier one, or of both with the opposite sign."""
    first_by_numbers: dict[tuple[object, ...], Judgement] = {}
    for judgement in judgements:
        bounds = (judgement.claim.at_least, judgement.claim.at_most)
        mirrored_bounds = (-judgement.claim.at_most, -judgement.claim.at_least)
        both_signs = ((judgement.values, bounds), (tuple(-value for value in judgement.values), mirrored_bounds))
        first_by_numbers.setdefault(min(both_signs), judgement)
    return list(first_by_numbers.values())


def judge(claim: PublishedClaim, seeds: Sequence[SeedResults], *, smoke: bool = False) -> Judgement:
    """Judge a claim by the seeds in which all its arms are finished. `smoke`: their numbers mean nothing."""
    values = []
    for seed in seeds:
        try:
            values.append(claim.value(seed))
        except KeyError:  # an arm of this seed is not finished
            continue
        except OverflowError:  # raised by exp: an arm diverged
            values.append(math.inf)
    measured = tuple(values)
    if smoke:
        return Judgement(claim, measured, "not resolved", "a smoke test's numbers mean nothing")
    if any(not math.isfinite(value) for value in measured):
        return Judgement(claim, measured, "not resolved", "an arm diverged")
    if len(measured) < FEWEST_SEEDS:
        seeds_text = f"{len(measured)} of the {FEWEST_SEEDS} seeds that a verdict needs"
        return Judgement(claim, measured, "not resolved", seeds_text)
    mean = statistics.mean(measured)
    half = half_width(measured)
    low, high = mean - half, mean + half
    if claim.at_least <= low and high <= claim.at_most:
        return Judgement(claim, measured, "holds")
    if high < claim.at_least or claim.at_most < low:
        return Judgement(claim, measured, "does not hold")
    return Judgement(claim, measured, "not resolved")
