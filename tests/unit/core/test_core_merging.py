"""Which contributions are in the mean, and the mean: the divisor is their weight."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.config import SyncConfig
from diloco.core.merging import (
    MAX_WEIGHT_ROUNDS,
    Claim,
    admit,
    bounded_weights,
    decide,
    diverged,
    norm_bounds,
    shares,
    short_norms,
    weighted_mean,
)


def reasons(*claims: Claim) -> list[str | None]:
    return admit(list(claims))


def clipped(*claims: Claim, ratio: float | None = 1000.0) -> dict[int, float]:
    """Worker -> the norm with which it counts, of those whose contribution is too long."""
    decided = decide(range(len(claims)), claims, ratio)
    scales = dict(zip(decided.contributors, decided.scales or (1.0,) * len(decided.contributors), strict=True))
    assert set(decided.clipped) == {worker for worker, scale in scales.items() if scale != 1}
    return {worker: scales[worker] * claims[worker].norm for worker in decided.clipped}


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_a_contribution_that_is_not_finite_is_refused_and_the_others_are_not(norm: float) -> None:
    first, second, third = reasons(Claim(1.0, 1.0), Claim(1.0, norm), Claim(1.0, 2.0))
    assert first is None and third is None
    assert second == "the outer gradient is not finite"


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0])
def test_a_weight_that_is_not_finite_or_below_zero_is_refused(weight: float) -> None:
    reason, fine = reasons(Claim(weight, 1.0), Claim(1.0, 1.0))
    assert reason is not None and "weight" in reason and fine is None


def test_among_four_a_norm_above_ten_times_the_bound_for_each_round_of_its_work_is_refused() -> None:
    claims = [Claim(1.0, 1.0), Claim(1.0, 1.0), Claim(1.0, 1.0), Claim(1.0, 40.0)]
    for missed, out in ((0, True), (1, False)):
        decided = decide(range(4), claims, 3.0, rounds=(1, 1, 1, 1 + missed))
        assert (3 in decided.contributors) is not out and decided.too_long == ({3} if out else set())
        assert set(decided.refused if out else decided.clipped) == {3}
        assert len(decided.weights) == len(decided.contributors) and bool(decided.scales) is not out
    for few, rounds in (
        (claims[1:], (1, 1, 1)),
        (claims, ()),
    ):  # three do not tell; without rounds absences are unknown
        assert not decide(range(len(few)), few, 3.0, rounds=rounds).refused


def test_an_absurd_norm_is_clipped_to_the_bound_with_the_numbers_in_the_reason() -> None:
    claims = [Claim(1.0, 1.0), Claim(1.0, 2.0), Claim(1.0, 8000.0)]
    assert clipped(*claims) == {2: 2000.0}
    assert decide(range(3), claims, 1000.0).clipped == {
        2: "norm 8e+03 is above the bound 2e+03 (sync.max_norm_ratio = 1000)"
    }
    assert clipped(Claim(1.0, 1.0), Claim(1.0, 2.0), Claim(1.0, 2000.0)) == {}


def test_of_two_workers_the_smaller_norm_is_the_reference() -> None:
    """The lower median: with the upper one, an exploded worker would be its own measure and the sound one fine too."""
    assert clipped(Claim(1.0, 2.0**90), Claim(1.0, 1.0)) == {0: 1000.0}
    assert clipped(Claim(1.0, 1.0), Claim(1.0, 2.0**90)) == {1: 1000.0}


def test_without_a_ratio_any_finite_norm_is_accepted() -> None:
    assert clipped(Claim(1.0, 1e30), Claim(1.0, 1.0), ratio=None) == {}


def test_a_worker_without_work_neither_offends_nor_sets_the_measure() -> None:
    idle = [Claim(0.0, 0.0), Claim(1.0, 5.0), Claim(0.0, 1e-9)]
    assert reasons(*idle) == [None, None, None] and clipped(*idle) == {}


def test_a_refused_norm_does_not_count_in_the_median() -> None:
    claims = [Claim(1.0, math.nan), Claim(1.0, 1.0), Claim(1.0, 900.0)]
    assert reasons(*claims) == ["the outer gradient is not finite", None, None] and clipped(*claims) == {}


def test_an_anchor_that_is_not_the_majoritys_is_refused_and_ties_go_to_the_first() -> None:
    a, b = Claim(1.0, 1.0, "aa"), Claim(1.0, 1.0, "bb")
    assert [reason is None for reason in reasons(b, a, a)] == [False, True, True]
    assert [reason is None for reason in reasons(b, a)] == [True, False]
    assert diverged(["bb", "aa", "aa"]) == (0,)
    assert diverged(["bb", "aa"]) == (1,)
    assert diverged(["aa", "aa"]) == ()


@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=6))
def test_the_decision_about_norms_does_not_depend_on_the_order_of_the_workers(norms: list[float]) -> None:
    claims = [Claim(1.0, norm) for norm in norms]
    assert norm_bounds(claims, 10.0) == norm_bounds(claims[::-1], 10.0)[::-1]


def test_equal_weights_give_exactly_the_plain_mean_whatever_the_weight() -> None:
    values = [torch.randn(4096, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    plain = (values[0] + values[1] + values[2]) / 3
    for weight in (1.0, 0.1, 3.0, 12345.678, 1e-30):
        assert torch.equal(weighted_mean(values, [weight] * 3, torch.empty(4096)), plain)


def test_the_divisor_is_the_weight_of_what_is_in_the_mean() -> None:
    values = [torch.full((8,), 1.0), torch.full((8,), 4.0)]
    assert torch.equal(weighted_mean(values, [2.0, 1.0], torch.empty(8)), torch.full((8,), 2.0))
    assert torch.equal(weighted_mean(values[1:], [1.0], torch.empty(8)), values[1])


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5), st.integers(0, 1000))
def test_the_weighted_mean_is_the_fp64_one_within_rounding(weights: list[float], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(64, generator=generator) for _ in weights]
    exact = sum(w * v.double() for w, v in zip(weights, values, strict=True)) / sum(weights)
    torch.testing.assert_close(weighted_mean(values, weights, torch.empty(64)).double(), exact, rtol=1e-5, atol=1e-6)


def test_the_values_may_be_one_scratch_memory_filled_anew() -> None:
    scratch = torch.empty(4)
    mean = weighted_mean((scratch.fill_(float(i)) for i in range(4)), [1.0] * 4, torch.empty(4))
    assert torch.equal(mean, torch.full((4,), 1.5))


def test_shares_of_no_weight_are_zero() -> None:
    assert shares([0.0, 0.0]) == [0.0, 0.0]
    assert shares([3.0, 3.0]) == [1.0, 1.0]


def test_by_default_a_gradient_times_minus_900_counts_with_three_times_the_usual_norm() -> None:
    ratio = SyncConfig().max_norm_ratio
    claims = [Claim(1.0, 1.0), Claim(1.0, 900.0), Claim(1.0, 2.0), Claim(1.0, 0.5)]
    assert clipped(*claims, ratio=ratio) == {1: pytest.approx(3.0)}
    assert decide(range(4), claims, ratio).contributors == (0, 1, 2, 3)


def test_a_contribution_that_is_too_long_is_scaled_and_its_weight_stays_in_the_divisor() -> None:
    values = [torch.full((8,), 1.0), torch.full((8,), -900.0)]
    mean = weighted_mean(values, [1.0, 2.0], torch.empty(8), [1.0, 2.0**-3])
    assert torch.equal(mean, torch.full((8,), (1.0 - 2 * 112.5) / 3))
    assert torch.equal(
        weighted_mean(values, [1.0, 2.0], torch.empty(8), [1.0, 1.0]), weighted_mean(values, [1.0, 2.0], torch.empty(8))
    )


def test_a_fast_worker_among_slow_ones_is_no_outlier() -> None:
    slow, fast = Claim(50.0, 1.0, round_weight=500.0), Claim(500.0, 8.0, round_weight=500.0)
    assert clipped(slow, slow, slow, fast, ratio=5.0) == {}
    liar = Claim(2500.0, 1e3, round_weight=500.0)  # claims much work to be allowed a large norm
    assert clipped(slow, slow, slow, liar, ratio=5.0) == {3: pytest.approx(50.0)}


def test_a_weight_counts_up_to_five_rounds_of_the_median_worker_or_as_many_as_it_is_known_to_have_missed() -> None:
    claims = [
        Claim(500.0, 1.0, round_weight=500.0),
        Claim(2000.0, 2.0, round_weight=500.0),
        Claim(5e4, 1.0, round_weight=1e4),
    ]
    assert decide(range(3), claims, 5.0).weights == (500.0, 2000.0, MAX_WEIGHT_ROUNDS * 500.0)
    assert decide(range(3), claims, 5.0, rounds=(1, 4, 1)).weights == (500.0, 2000.0, 500.0)
    assert decide(range(3), claims, 5.0, rounds=(5, 3, 2)).weights == (500.0, 1500.0, 1000.0)


def test_the_rounds_of_a_refused_worker_are_not_those_of_the_next_one() -> None:
    claims = [Claim(math.nan, 1.0, round_weight=1.0), *(Claim(5.0, 1.0, round_weight=1.0) for _ in range(2))]
    assert decide(range(3), claims, None, rounds=(5, 1, 3)).weights == (1.0, 3.0)


def test_a_weight_above_five_rounds_of_work_is_refused_also_if_its_rounds_are_said_to_weigh_as_much() -> None:
    honest = [Claim(500.0, 1.0, round_weight=500.0)] * 2
    assert reasons(*honest, Claim(2500.0, 1.0, round_weight=500.0)) == [None] * 3
    for liar in (Claim(2501.0, 1.0, round_weight=500.0), Claim(1e18, 1.0, round_weight=1e18)):
        assert [one is None for one in reasons(*honest, liar)] == [True, True, False]
    assert reasons(honest[0], Claim(1e18, 1.0, round_weight=1e18)) == [None] * 2, "of two, either may be wrong"


@pytest.mark.parametrize("round_weight", [math.nan, 0.0, -1.0, -math.inf])
def test_a_weight_of_a_round_that_makes_no_sense_is_refused(round_weight: float) -> None:
    assert reasons(Claim(1.0, 1.0), Claim(1.0, 1.0, round_weight=round_weight))[1] is not None


def test_a_fixed_membership_bounds_no_weight() -> None:
    claims = [Claim(1.0, 1.0), Claim(1e9, 1.0)]
    assert bounded_weights(claims) == [1.0, 1e9] and bounded_weights([]) == []


def test_a_large_weight_excuses_no_norm_where_weights_have_no_bound() -> None:
    """The weights of a fixed membership may be shard sizes, which say nothing about the steps behind a gradient."""
    honest, wild = Claim(1.0, 1.0), Claim(200.0, 900.0)
    assert clipped(honest, wild, ratio=5.0) == {1: pytest.approx(5.0)}
    assert clipped(honest, Claim(200.0, 4.9), ratio=5.0) == {}


def test_a_contribution_that_is_next_to_nothing_is_told_from_one_of_few_steps() -> None:
    full = Claim(30.0, 1.0, round_weight=30.0)
    few = Claim(1.0, 0.05, round_weight=30.0)
    nothing = Claim(30.0, 0.05, round_weight=30.0)
    assert short_norms([full, full, full, few, nothing]) == [4]
    assert short_norms([full, few, full, full]) == []
    assert short_norms([full, nothing]) == [], "of two none can be told from the other"
