"""An early end: whichever worker stops, and when, all end after the same round with the same anchor; none hangs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.config import SyncConfig
from support.problem import Story, train
from support.threads import in_threads

STEPS = 12
FRAGMENTS_OF = {1: 1, 2: 3, 4: 5}  # what is outside the blocks is one more


@st.composite
def syncs(draw: st.DrawFn) -> SyncConfig:
    fragments = draw(st.sampled_from([1, 1, 2, 4]))
    H = draw(st.integers(FRAGMENTS_OF[fragments] if fragments > 1 else 1, 7))
    overlap = draw(st.integers(0, H - 1))
    return SyncConfig(H, draw(st.sampled_from(["fp32", "int8"])), fragments, overlap, draw(st.sampled_from([0.0, 0.5])))


stops_of_workers = st.lists(st.one_of(st.none(), st.integers(0, STEPS - 1)), min_size=1, max_size=3)


def ends(sync: SyncConfig, stops: list[int | None], fail_at: list[tuple[int, int]] | None = None) -> list[Story]:
    """What each worker saw when worker i ends early after stops[i] steps (None: never)."""
    stories = in_threads(
        len(stops), lambda engine: train(engine, sync, STEPS, stop_after=stops[engine.worker]), fail_at=fail_at or ()
    )
    assert len({story.digests[-1] for story in stories}) == 1
    assert all(story.final == stories[0].final for story in stories)
    for story in stories:
        assert story.member_digests == (story.digests[-1],) * len(stops)
    return stories


def work_counted(stories: list[Story], fragment: int) -> float:
    return sum(
        event.result.total_weight
        for event in stories[0].events
        if event.result is not None and event.key.fragment == fragment
    )


@settings(max_examples=40)
@given(syncs(), stops_of_workers)
def test_all_end_with_the_same_anchor_wherever_workers_stop(sync: SyncConfig, stops: list[int | None]) -> None:
    stories = ends(sync, stops)
    keys = [[event.key for event in story.events] for story in stories]
    assert all(key == keys[0] for key in keys)
    if not sync.overlap_steps:  # with overlap, steps taken between a fragment's last post and the end are not sent
        for fragment in range(FRAGMENTS_OF[sync.fragments]):
            assert work_counted(stories, fragment) == sum(story.steps for story in stories)


@pytest.mark.parametrize(
    "sync",
    [
        SyncConfig(1, "fp32"),
        SyncConfig(4),
        SyncConfig(6, fragments=2),
        SyncConfig(6, "int8", 2, 3, 0.5),
        SyncConfig(5, overlap_steps=4),
    ],
    ids=["every step", "plain", "fragments", "streaming", "overlap"],
)
@pytest.mark.parametrize(
    "stops", [[3, None], [None, 5], [7, 8], [8, 7, None], [0, None, None], [4, 4], [None, 11], [12 - 1, 11, 11]]
)
def test_a_stop_at_any_place_ends_everyone(sync: SyncConfig, stops: list[int | None]) -> None:
    stories = ends(sync, stops)
    first = min(stop for stop in stops if stop is not None)
    turn = sync.num_inner_steps + sync.overlap_steps
    assert all(story.steps <= first + turn for story in stories)


@pytest.mark.parametrize("H", [3, 4])
def test_an_early_end_at_the_very_last_step_meets_those_who_have_nothing_left(H: int) -> None:
    """Ctrl-C during the last step: one worker asks for the end, the others are at theirs."""
    sync = SyncConfig(H)

    def work(worker: int, steps: int) -> int | None:
        return steps if worker == 0 else None

    stories = in_threads(2, lambda e: train(e, sync, 12 + (e.worker == 0), stop_after=work(e.worker, 12)))
    assert len({story.digests[-1] for story in stories}) == 1
    assert work_counted(stories, 0) == 24.0


@pytest.mark.parametrize("lost", [0, 1, 2])
@pytest.mark.parametrize("sync", [SyncConfig(3), SyncConfig(6, fragments=2)], ids=["plain", "fragments"])
def test_a_stop_is_heard_even_if_the_round_that_says_so_fails_for_a_worker(sync: SyncConfig, lost: int) -> None:
    """Worker 0 stops after 4 steps, so that its word comes with the next round; some worker misses that round."""
    said_in = 1 if sync.fragments == 1 else 2
    stories = ends(sync, [4, None, None], fail_at=[(lost, said_in)])
    assert all(story.steps <= 4 + sync.num_inner_steps for story in stories)


def test_a_normal_end_sends_no_more_than_headers_when_all_work_is_merged() -> None:
    exact, more = (in_threads(2, lambda e, n=n: train(e, SyncConfig(4), n)) for n in (12, 13))
    assert [event.result.total_weight for event in exact[0].events if event.result] == [8.0, 8.0, 8.0, 0.0]
    assert [event.result.total_weight for event in more[0].events if event.result] == [8.0, 8.0, 8.0, 2.0]
    assert more[0].bytes_sent - exact[0].bytes_sent > 20_000
