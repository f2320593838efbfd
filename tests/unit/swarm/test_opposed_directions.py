"""Which contributions point against the others."""

import random
from itertools import combinations

import pytest
import torch
from torch import Tensor

from diloco.swarm.audit.directions import opposed, pair_cosines

NUMEL = 20_000


def honest(count: int, signal: float, seed: int = 0) -> list[Tensor]:
    """Contributions with a common direction; two of them have about the cosine signal² / (1 + signal²)."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(NUMEL, generator=generator)
    return [signal * common + torch.randn(NUMEL, generator=generator) for _ in range(count)]


def judged(values: list[Tensor], lies: dict[int, list[float]] | None = None) -> set[int]:
    """Each of the workers reduces one of as many ranges; `lies`: what a teller says instead."""
    ranges = [torch.chunk(value, len(values)) for value in values]
    told = {teller: pair_cosines([one[teller] for one in ranges]) for teller in range(len(values))}
    return set(opposed([float(value.norm()) for value in values], told | (lies or {})))


def against(values: list[Tensor], *liars: int) -> list[Tensor]:
    return [-2.9 * value if place in liars else value for place, value in enumerate(values)]


@pytest.mark.parametrize("signal", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("count", [4, 5, 8])
def test_a_contribution_that_is_turned_around_is_found(count: int, signal: float) -> None:
    for seed in range(5):
        assert judged(against(honest(count, signal, seed), 1)) == {1}
        assert judged(honest(count, signal, seed)) == set()


def test_fewer_than_half_that_are_turned_around_are_found_and_no_other() -> None:
    assert judged(against(honest(5, 1.0), 0, 3)) == {0, 3}
    assert judged(against(honest(7, 1.0), 0, 3, 4)) == {0, 3, 4}
    same = honest(5, 1.0)
    same[3] = same[4] = -2.9 * same[4]
    assert judged(same) == {3, 4}


def test_of_three_one_is_found_where_the_two_others_agree() -> None:
    assert judged(against(honest(3, 3.0), 2)) == {2}
    assert judged([*honest(3, 3.0)[:2], -honest(3, 3.0)[2]]) == {2}
    assert judged(against(honest(3, 0.5), 2)) == {2}, "they agree by 0.2, and it is longer than twice the median"
    assert judged([*honest(3, 0.5)[:2], -honest(3, 0.5)[2]]) == set(), "an honest one with other data may do so"


def test_half_that_are_turned_around_are_not_told_from_the_others() -> None:
    assert judged(against(honest(4, 1.0), 0, 1)) == set()
    assert judged(against(honest(2, 1.0), 0)) == set()


def test_workers_with_different_data_are_not_found_though_some_point_against_the_sum() -> None:
    """Two kinds of data that pull apart: three and two workers, as at the end of training."""
    generator = torch.Generator().manual_seed(1)
    apart = torch.randn(NUMEL, generator=generator)
    for strength in (0.1, 0.2, 0.3):
        noise = [torch.randn(NUMEL, generator=generator) for _ in range(5)]
        kinds = [1.0, 0.2, -0.1, 0.6, -1.2]
        values = [one + strength * kind * apart for one, kind in zip(noise, kinds, strict=True)]
        assert judged(values) == set()
    assert judged([torch.randn(NUMEL, generator=generator) for _ in range(5)]) == set()


def test_a_teller_changes_nothing_of_its_own_contribution_nor_of_others_alone() -> None:
    values = against(honest(5, 1.0), 4)
    pairs = list(combinations(range(5), 2))
    assert judged(values, {4: [1.0 for _ in pairs]}) == {4}
    assert judged(honest(5, 1.0), {4: [-1.0 for _ in pairs]}) == set()
    assert judged(honest(4, 1.0), {3: [-1.0 for _ in combinations(range(4), 2)]}) == set()


@pytest.mark.parametrize("count", range(3, 10))
def test_fewer_than_half_that_lie_neither_hide_nor_have_another_one_refused(count: int) -> None:
    """Those that lie together tell other cosines, and turn their work around or not."""
    chance, pairs = random.Random(count), list(combinations(range(count), 2))
    for liars in (set(range((count - 1) // 2)), set(range(count - (count - 1) // 2, count))):
        right = judged(against(honest(count, 3.0), *liars))
        assert right == liars
        framed = min(set(range(count)) - liars)
        for lie in (
            [-1.0 for _ in pairs],
            [1.0 if liars & set(pair) else -1.0 for pair in pairs],
            [-1.0 if framed in pair else 1.0 for pair in pairs],
            [chance.uniform(-1, 1) for _ in pairs],
        ):
            told = dict.fromkeys(liars, lie)
            assert judged(against(honest(count, 3.0), *liars), told) == liars
            assert judged(honest(count, 3.0), told) == set()


def test_where_half_or_fewer_tell_no_word_counts_of_its_own_pairs() -> None:
    values = against(honest(5, 1.0), 4)
    right = pair_cosines(values)
    norms = [float(value.norm()) for value in values]
    false = [1.0 if 4 in pair else cosine for pair, cosine in zip(combinations(range(5), 2), right, strict=True)]
    assert set(opposed(norms, {3: right, 4: false})) == {4}


def test_nothing_is_found_where_all_are_zero_or_one_has_no_length() -> None:
    assert judged([torch.zeros(NUMEL)] * 5) == set()
    assert judged([*honest(4, 1.0), torch.zeros(NUMEL)]) == set()
