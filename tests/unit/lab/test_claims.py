"""Verdicts: what the seeds must show for a claim to hold."""

import math

import pytest

from diloco.lab.claims import Judgement, PublishedClaim, SeedResults, correct, distinct, judge

BELOW = PublishedClaim("a is below b", "–", lambda m: m.change("a", "b"), at_most=0.0)


def _seeds(*losses: float) -> list[SeedResults]:
    """b has loss 3 in each seed."""
    return [SeedResults({"a": loss, "b": 3.0}, {}) for loss in losses]


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
    seeds = [SeedResults({"a": 2.99 + noise, "b": 3.0 + noise}, {}) for noise in (0.0, 0.5, -0.4)]
    judgement = judge(BELOW, seeds)
    assert judgement.verdict == "holds"
    assert judgement.mean == pytest.approx(math.expm1(-0.01))


def test_a_seed_whose_arms_are_not_finished_does_not_count() -> None:
    seeds = [*_seeds(2.9, 2.91), SeedResults({"a": 2.9}, {})]
    judgement = judge(BELOW, seeds)
    assert (len(judgement.values), judgement.verdict) == (2, "not resolved")


def test_a_claim_with_two_bounds_fails_on_either_side() -> None:
    close = PublishedClaim("a is within 1 % of b", "–", lambda m: m.change("a", "b"), at_least=-0.01, at_most=0.01)
    assert judge(close, _seeds(3.0, 3.001, 2.999)).verdict == "holds"
    assert judge(close, _seeds(2.9, 2.901, 2.899)).verdict == "does not hold"


@pytest.mark.parametrize(
    ("expected", "losses", "sign", "size"),
    [
        (-0.05, (2.94, 2.95, 2.96), "as published", "compatible"),
        (-0.30, (2.94, 2.95, 2.96), "as published", "smaller"),
        (-0.02, (2.94, 2.95, 2.96), "as published", "larger"),
        (0.02, (2.94, 2.95, 2.96), "opposite", "apart"),
        (0.02, (2.90, 3.00, 3.10), "open", "compatible"),
        (None, (2.94, 2.95, 2.96), "–", "–"),
        (-0.05, (2.94, 2.95), "–", "–"),
    ],
)
def test_sign_and_size_are_compared_with_the_published_number(
    expected: float | None, losses: tuple[float, ...], sign: str, size: str
) -> None:
    claim = PublishedClaim("a is below b", "–", lambda m: m.change("a", "b"), at_most=0.0, expected=expected)
    judgement = judge(claim, _seeds(*losses))
    assert (judgement.sign_text, judgement.size_text) == (sign, size)


def test_a_verdict_that_stands_alone_may_fall_among_many_open_claims() -> None:
    clear = judge(BELOW, _seeds(2.90, 2.9001, 2.8999))
    close = judge(BELOW, _seeds(2.99, 2.992, 2.988))
    still_open = [judge(BELOW, _seeds(2.99, 3.02 + 0.0001 * number, 2.98)) for number in range(40)]
    assert (clear.verdict, close.verdict) == ("holds", "holds")
    assert clear.p_value < 0.05 / 42 < 2 * 0.05 / 42 < close.p_value
    assert [judgement.verdict for judgement in correct([clear, close])] == ["holds", "holds"]
    corrected = correct([clear, close, *still_open])
    assert [judgement.verdict for judgement in corrected[:2]] == ["holds", "not resolved"]
    assert "42 claims" in corrected[1].verdict_text


def test_a_claim_that_two_experiments_make_counts_once() -> None:
    gain = PublishedClaim("a is below b, as a gain", "–", lambda m: -m.change("a", "b"), at_least=0.0)
    once, turned = judge(BELOW, _seeds(2.99, 2.992, 2.988)), judge(gain, _seeds(2.99, 2.992, 2.988))
    other = judge(BELOW, _seeds(2.90, 2.9001, 2.8999))
    assert distinct([once, turned, other, once]) == [once, other]
    still_open = [judge(BELOW, _seeds(2.99, 3.02, 2.98)) for _ in range(40)]
    assert [judgement.verdict for judgement in correct([once, turned, other, *still_open])[:3]] == ["holds"] * 3


def test_the_correction_leaves_claims_without_seeds_out_of_the_count() -> None:
    missing = [Judgement(BELOW, (), "not resolved", "0 of the 3 seeds that a verdict needs")] * 1000
    close = judge(BELOW, _seeds(2.99, 2.992, 2.988))
    assert correct([close, *missing])[0].verdict == "holds"


def test_a_loss_too_large_for_a_perplexity_is_a_diverged_arm() -> None:
    judgement = judge(BELOW, _seeds(1000.0, 1000.0, 1000.0))
    assert judgement.verdict == "not resolved" and "diverged" in judgement.reason
