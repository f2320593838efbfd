"""When fragments are posted: after exactly H steps, at their offsets, in one cyclic order on every worker."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.config import SyncConfig
from diloco.core.schedule import Schedule
from diloco.errors import ConfigError


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    H = draw(st.integers(1, 12))
    offsets = draw(st.lists(st.integers(0, H - 1), min_size=1, max_size=5))
    return Schedule(H, tuple(offsets), draw(st.integers(0, H - 1)))


@pytest.mark.parametrize("H", [1, 2, 5, 500])
def test_the_first_round_comes_after_exactly_h_steps_and_then_every_h(H: int) -> None:
    posts = [step for step in range(1, 3 * H + 1) if Schedule(H).posts_at(step)]
    assert posts == [H, 2 * H, 3 * H]


def test_h_1_posts_after_every_step() -> None:
    assert all(Schedule(1).posts_at(step) == (0,) for step in range(1, 10))


@given(schedules())
def test_every_fragment_is_posted_exactly_once_in_any_h_steps_and_at_its_own_offset(schedule: Schedule) -> None:
    H = schedule.num_inner_steps
    for start in range(1, 2 * H):
        posted = [p for step in range(start, start + H) for p in schedule.posts_at(step)]
        assert sorted(posted) == list(range(len(schedule.offsets)))
    for step in range(1, 2 * H + 1):
        assert all(step % H == schedule.offsets[p] for p in schedule.posts_at(step))


@given(schedules(), st.integers(0, 40))
def test_rotation_is_the_order_of_the_next_posts(schedule: Schedule, step: int) -> None:
    H = schedule.num_inner_steps
    upcoming = [p for later in range(step + 1, step + H + 1) for p in schedule.posts_at(later)]
    assert schedule.rotation(step) == tuple(upcoming)


@given(schedules(), st.integers(0, 40), st.integers(0, 40))
def test_posts_before_a_step_and_its_rotation_continue_one_cyclic_order(schedule: Schedule, a: int, b: int) -> None:
    """What makes an early end safe: the n-th round is of the same fragment wherever a worker stops."""

    def order(stop: int) -> list[int]:
        return [p for step in range(1, stop + 1) for p in schedule.posts_at(step)] + list(schedule.rotation(stop))

    first, second = order(a), order(b)
    shared = min(len(first), len(second))
    assert first[:shared] == second[:shared]


@given(schedules(), st.integers(0, 40))
def test_sequence_numbers_count_the_posts_in_the_order_in_which_steps_bring_them(schedule: Schedule, stop: int) -> None:
    posts = [(p, step) for step in range(1, stop + 1) for p in schedule.posts_at(step)]
    assert posts == [(schedule.fragment_of(m), schedule.post_step(m)) for m in range(len(posts))]
    assert schedule.posts_until(stop) == len(posts)
    assert schedule.post_step(len(posts)) > stop


@given(st.integers(1, 60), st.data())
def test_spread_gives_every_fragment_a_step_of_its_own(H: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, H))
    offsets = Schedule.spread(H, count).offsets
    assert len(set(offsets)) == count and offsets[0] == 0
    gaps = [b - a for a, b in zip(offsets, [*offsets[1:], H], strict=True)]
    assert max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("H", "offsets", "overlap", "named"),
    [
        (0, (0,), 0, "num_inner_steps"),
        (-3, (0,), 0, "num_inner_steps"),
        (5, (0,), 5, "overlap_steps"),
        (5, (0,), -1, "overlap_steps"),
        (1, (0,), 1, "overlap_steps"),
        (5, (5,), 0, "offsets"),
        (5, (-1,), 0, "offsets"),
        (5, (), 0, "offsets"),
    ],
)
def test_an_impossible_schedule_is_refused_by_name(H: int, offsets: tuple[int, ...], overlap: int, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Schedule(H, offsets, overlap)


def test_more_fragments_than_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 fragments do not fit into num_inner_steps = 3"):
        Schedule.spread(3, 4)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_inner_steps", 0),
        ("fragments", 0),
        ("overlap_steps", 500),
        ("overlap_steps", -1),
        ("mixing", 1.0),
        ("mixing", -0.1),
        ("mixing", float("nan")),
        ("max_norm_ratio", 1.0),
        ("timeout_seconds", 0.0),
        ("timeout_seconds", float("nan")),
    ],
)
def test_a_sync_option_out_of_range_is_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"sync\.{option} = "):
        SyncConfig(**{option: value})
