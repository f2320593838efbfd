"""Rounds that grow and outer numbers that change: functions of the position alone, the same for joiner and resume."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.config import FaultsConfig, OuterConfig, SyncConfig
from diloco.core.outer_optimizers import SGD, Adam, Nesterov, OuterOptimizer, outer_optimizer
from diloco.core.rates import Course, LearningRateCurve
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError
from diloco.methods.growing_rounds import GrowingRounds

RATES = LearningRateCurve(0.01, 100, warmup_steps=10, final_ratio=0.1)


@st.composite
def growing(draw: st.DrawFn) -> Schedule:
    H = draw(st.integers(1, 9))
    fragments = draw(st.integers(1, H))
    rates = LearningRateCurve(
        0.01, draw(st.integers(1, 120)), draw(st.integers(0, 20)), draw(st.sampled_from([0, 0.1]))
    )
    growth = GrowingRounds(draw(st.floats(0.001, 0.1)), rates)
    return Schedule(H, Schedule.spread(H, fragments).offsets, 0, draw(st.integers(0, 5)), growth)


def test_each_round_has_the_length_of_the_quadratic_rule_at_its_beginning() -> None:
    schedule = Schedule(4, growth=GrowingRounds(0.03, RATES))
    posts = [step for step in range(1, 101) if schedule.posts_at(step)]
    expected, start = [], 0
    while start < 100:
        rate = 0.01 * RATES.factor(max(start, 10))
        start += max(4, math.floor((0.03 / rate) ** 2))
        expected.append(start)
    assert posts == [step for step in expected if step <= 100]
    assert posts[1] - posts[0] == 9 and posts[-1] - posts[-2] > 20, "(0.03 / 0.01)² at the peak, then longer"


@given(growing())
def test_growing_turns_post_every_fragment_once_in_the_order_that_sequence_numbers_tell(schedule: Schedule) -> None:
    posts = [(step, p) for step in range(1, 150) for p in schedule.posts_at(step)]
    assert posts == [(schedule.post_step(n), schedule.fragment_of(n)) for n in range(len(posts))]
    fragments = len(schedule.offsets)
    for first in range(0, len(posts) - fragments + 1, fragments):
        assert sorted(p for _, p in posts[first : first + fragments]) == list(range(fragments))
    for step in range(150):
        done = schedule.posts_until(step)
        assert done == sum(at <= step for at, _ in posts)
        following = [p for at, p in posts if at > step][:fragments]
        assert list(schedule.rotation(step)[: len(following)]) == following
    ends = [schedule.post_step(n) for n in range(fragments - 1, len(posts), fragments)]
    assert [schedule.turns_until(end) for end in ends] == list(range(1, len(ends) + 1)), "fragment 0 ends each turn"


def test_a_rate_that_falls_to_zero_makes_the_last_round_no_longer_than_the_run() -> None:
    growth = GrowingRounds(0.05, LearningRateCurve(0.01, 100))
    assert growth.length(5, 100) == 100


def numbers(outer: OuterOptimizer, turns: int) -> list[tuple[float, float]]:
    found = [outer.at(turn) for turn in range(turns)]
    return [(round(one.lr, 3), round(getattr(one, "momentum", 0.0), 3)) for one in found]  # type: ignore[attr-defined]


def test_momentum_rises_the_rate_falls_and_the_last_round_is_a_plain_mean() -> None:
    outer = Nesterov(0.8, 0.9, course=Course(2, start_momentum=0.1, final_lr=0.2, plain_rounds=1, rounds=6))
    assert numbers(outer, 7) == [(0.8, 0.1), (0.8, 0.5), (0.8, 0.9), (0.65, 0.9), (0.35, 0.9), (1.0, 0.0), (1.0, 0.0)]
    assert outer.at(5) == SGD(1.0)


def test_without_a_course_the_optimizer_is_itself() -> None:
    outer = Nesterov()
    assert outer.at(3) is outer and Adam(course=Course(2, start_lr=0.1)).at(1) == Adam(lr=0.2)


def test_options_become_a_course_with_the_rounds_of_the_run() -> None:
    config = OuterConfig(lr=0.5, momentum=0.6, final_momentum=0.2, plain_rounds=2)
    assert OuterConfig(warmup_rounds=2, start_momentum=0.0).course() == {"start_momentum": 0.0, "warmup_rounds": 2}
    assert outer_optimizer(config, 9) == Nesterov(0.5, 0.6, course=Course(final_momentum=0.2, plain_rounds=2, rounds=9))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"warmup_rounds": 3}, "needs a number of rounds, and a number to begin with"),
        ({"start_lr": 0.3}, "needs a number of rounds, and a number to begin with"),
        (
            {"optimizer": "sgd", "final_momentum": 0.3},
            "final_momentum = 0.3 has no effect on the outer optimizer 'sgd'",
        ),
        ({"final_momentum": 1.0}, "outer.final_momentum = 1.0 .* must be at least 0 and below 1"),
        ({"final_lr": 0.0}, "outer.final_lr = 0.0 .* must be finite and above 0"),
        ({"plain_rounds": -1}, "outer.plain_rounds = -1 must be at least 0"),
    ],
)
def test_a_course_without_effect_or_out_of_range_is_refused(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        OuterConfig(**options)  # type: ignore[arg-type]


def test_an_end_needs_the_number_of_rounds_and_growth_a_number() -> None:
    with pytest.raises(ConfigError, match="needs the number of rounds"):
        Course(plain_rounds=1)
    with pytest.raises(ConfigError, match=r"sync\.growth = 0 must be finite and above 0"):
        SyncConfig(growth=0)
    with pytest.raises(ConfigError, match=r"faults\.drop = 1 must be at least 0 and below 1"):
        FaultsConfig(1)
    with pytest.raises(ConfigError, match=r"faults\.seed = 3 has no effect without faults\.drop"):
        FaultsConfig(seed=3)
