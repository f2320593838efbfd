"""Verdicts: what the seeds must show for a claim to hold."""

import math

import pytest

from diloco.lab.claims import Claim, Measured, judge

BELOW = Claim("a is below b", "–", lambda m: m.change("a", "b"), at_most=0.0)


def _seeds(*losses: float) -> list[Measured]:
    """b has loss 3 in each seed."""
    return [Measured({"a": loss, "b": 3.0}, {}) for loss in losses]


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ((2.90, 2.91, 2.89), "holds"),
        ((3.10, 3.11, 3.09), "does not hold"),
        ((2.99, 3.02, 2.98), "not resolved"),
        ((2.90, 2.91), "not resolved"),  # two seeds never make a verdict, however clear
        ((2.90, 2.91, math.inf), "not resolved"),
    ],
)
def test_the_verdict_follows_the_interval_over_at_least_three_seeds(losses: tuple[float, ...], verdict: str) -> None:
    assert judge(BELOW, _seeds(*losses)).verdict == verdict


def test_common_noise_of_a_seed_cancels() -> None:
    seeds = [Measured({"a": 2.99 + noise, "b": 3.0 + noise}, {}) for noise in (0.0, 0.5, -0.4)]
    judgement = judge(BELOW, seeds)
    assert judgement.verdict == "holds"
    assert judgement.mean == pytest.approx(math.expm1(-0.01))


def test_a_seed_whose_arms_are_not_finished_does_not_count() -> None:
    seeds = [*_seeds(2.9, 2.91), Measured({"a": 2.9}, {})]
    judgement = judge(BELOW, seeds)
    assert (len(judgement.values), judgement.verdict) == (2, "not resolved")


def test_a_claim_with_two_bounds_fails_on_either_side() -> None:
    close = Claim("a is within 1 % of b", "–", lambda m: m.change("a", "b"), at_least=-0.01, at_most=0.01)
    assert judge(close, _seeds(3.0, 3.001, 2.999)).verdict == "holds"
    assert judge(close, _seeds(2.9, 2.901, 2.899)).verdict == "does not hold"
