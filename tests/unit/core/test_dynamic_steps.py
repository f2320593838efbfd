"""How many inner steps a worker takes in a round, from the speeds that all were told."""

import math

import pytest

from diloco.methods.dynamic_steps import MOST_TIMES_FASTER, num_steps, speed_share


def test_a_worker_three_times_slower_takes_a_third_of_the_steps() -> None:
    seconds = {0: 0.1, 1: 0.3, 2: 0.1}
    assert [num_steps(30, speed_share(seconds, worker)) for worker in seconds] == [30, 10, 30]


@pytest.mark.parametrize("slower", [1.0, 1.01, 1.019])
def test_speeds_that_differ_by_less_than_two_per_cent_count_as_equal(slower: float) -> None:
    assert num_steps(100, speed_share({0: 1.0, 1: slower}, 1)) == 100


def test_a_worker_takes_at_least_one_step_however_slow() -> None:
    assert num_steps(30, speed_share({0: 1e-6, 1: 1e6}, 1)) == 1


@pytest.mark.parametrize("unknown", [0.0, math.nan, math.inf, -1.0])
def test_a_speed_that_is_not_known_changes_no_number_of_steps(unknown: float) -> None:
    assert speed_share({0: unknown, 1: 0.2}, 0) == 1.0
    assert speed_share({0: unknown, 1: 0.2}, 1) == 1.0
    assert speed_share({}, 0) == 1.0


def test_a_member_of_a_swarm_that_claims_to_be_infinitely_fast_costs_the_others_a_bounded_part_of_their_steps() -> None:
    seconds = {0: 1.0, 1: 1.0, 2: 1e-9}
    assert speed_share(seconds, 0) < 1e-8
    assert speed_share(seconds, 0, trusted=False) == pytest.approx(1 / MOST_TIMES_FASTER)
    assert speed_share(seconds, 2, trusted=False) == 1.0
