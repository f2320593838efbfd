"""Workers with different numbers of steps: `finish()` brings them together, and the work of all is in the mean."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.config import SyncConfig
from diloco.core.merging import Claim, admit, decide
from diloco.core.outer_optimizers import SGD
from diloco.engines.base import Engine
from diloco.engines.local import LocalEngine, LocalSwarm
from diloco.engines.rounds import Contribution
from diloco.errors import EngineError
from diloco.outer.fixed import FixedLoop
from support.problem import Story, build, flat, loss_of, train
from support.processes import in_processes
from support.threads import in_threads

H = 6
SYNCS = {
    "plain": SyncConfig(H),
    "fragments": SyncConfig(H, fragments=2),
    "overlap": SyncConfig(H, overlap_steps=4),
    "streaming": SyncConfig(H, "int8", fragments=2, overlap_steps=3, mixing=0.5),
    "eager": SyncConfig(H, "int4", outer_overlap="eager"),
}
GAPS = {"1": 1, "H - 1": H - 1, "H": H, "3 H": 3 * H}
over_syncs = pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
over_gaps = pytest.mark.parametrize("gap", GAPS.values(), ids=GAPS)


def ended_together(sync: SyncConfig, counts: list[int], **options: object) -> list[Story]:
    """What each worker saw that took counts[i] steps; all must have ended with the same parameters."""
    stories = in_threads(len(counts), lambda engine: train(engine, sync, counts[engine.worker]), **options)
    assert_same_end(stories)
    assert [story.steps for story in stories] == counts
    return stories


def assert_same_end(stories: list[Story]) -> None:
    assert len({story.digests[-1] for story in stories}) == 1
    assert all(story.final == stories[0].final for story in stories)
    for story in stories:
        assert story.member_digests == (story.digests[-1],) * len(stories)


def work_in_means(story: Story, fragment: int) -> float:
    events = [event for event in story.events if event.key.fragment == fragment]
    return sum(event.result.total_weight for event in events if event.result is not None)


@over_syncs
@over_gaps
@pytest.mark.parametrize("shorter", [0, 1])
def test_all_end_with_the_same_parameters_and_all_work_is_in_the_means(
    sync: SyncConfig, gap: int, shorter: int
) -> None:
    counts = [2 * H - 1 + gap] * 2
    counts[shorter] -= gap
    stories = ended_together(sync, counts)
    assert [e.key for e in stories[0].events] == [e.key for e in stories[1].events]
    if not sync.overlap_steps:  # with overlap, steps taken between a fragment's last post and the end are not sent
        for fragment in {event.key.fragment for event in stories[0].events}:
            assert work_in_means(stories[0], fragment) == sum(counts)


@settings(max_examples=20)
@given(st.sampled_from(list(SYNCS.values())), st.lists(st.integers(0, 4 * H), min_size=2, max_size=3))
def test_any_counts_end_together(sync: SyncConfig, counts: list[int]) -> None:
    ended_together(sync, counts)


@settings(max_examples=20)
@given(
    st.sampled_from(list(SYNCS.values())),
    st.lists(st.tuples(st.integers(0, 3 * H), st.one_of(st.none(), st.integers(0, 3 * H))), min_size=2, max_size=3),
)
def test_any_counts_with_early_ends_among_them_end_together(
    sync: SyncConfig, plans: list[tuple[int, int | None]]
) -> None:
    """Worker i has plans[i][0] steps, and calls finish(early=True) after plans[i][1] of them, if so many."""

    def work(engine: Engine) -> Story:
        steps, stop = plans[engine.worker]
        return train(engine, sync, steps, stop_after=stop)

    assert_same_end(in_threads(len(plans), work))


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("stop", [0, 2, H + 1])
def test_with_eager_updates_the_steps_after_which_the_others_hear_of_an_early_end_are_in_a_mean(
    stop: int, fragments: int
) -> None:
    """They hear of it when they post again, H steps later."""
    sync = replace(SYNCS["eager"], fragments=fragments)
    stories = in_threads(2, lambda engine: train(engine, sync, 50, stop_after=stop if engine.worker == 0 else None))
    assert_same_end(stories)
    for fragment in {event.key.fragment for event in stories[0].events}:
        assert work_in_means(stories[0], fragment) == sum(story.steps for story in stories)


@pytest.mark.parametrize("lost", [(0, 2), (1, 2), (0, 3), (1, 3)])
def test_a_round_that_a_worker_misses_while_the_others_are_done_changes_nothing_of_that(lost: tuple[int, int]) -> None:
    """8 and 20 steps, H = 6: worker 0 is done in round 1 already."""
    ended_together(SYNCS["plain"], [8, 20], fail_at=[lost])


def test_the_mean_after_one_worker_is_done_is_the_others_outer_gradient_alone() -> None:
    stories = ended_together(SyncConfig(H, "fp32"), [H, 3 * H])
    assert [result.contributors for result in stories[0].results] == [(0, 1), (1,), (1,), ()]


def test_with_plain_averaging_the_end_is_the_mean_of_the_workers_parameters() -> None:
    """One round only, at the end: with 2 and 3 steps of 100 left each worker counts as one full round."""

    def work(engine: Engine) -> tuple[torch.Tensor, torch.Tensor]:
        model, optimizer = build(engine, SyncConfig(100, "fp32"), outer=SGD(1.0))
        steps(model, optimizer, engine.worker, 2 + engine.worker)
        own = flat(model)
        optimizer.finish()
        return own, flat(model)

    (two, end), (three, _) = in_threads(2, work)
    torch.testing.assert_close(end, (two + three) / 2)


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, worker: int, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        loss_of(model, worker, step).backward()
        optimizer.step()


@pytest.mark.parametrize("counts", [[3, 20], [20, 4], [9, 10, 3]])
def test_workers_that_have_all_taken_the_warm_start_may_end_apart(counts: list[int]) -> None:
    ended_together(replace(SYNCS["fragments"], warm_start=3), counts)


# What a loop sees, and decides


@over_syncs
def test_a_loop_that_leaves_when_another_worker_is_done_ends_within_a_turn(sync: SyncConfig) -> None:
    def work(engine: Engine) -> tuple[int, str]:
        model, optimizer = build(engine, sync)
        taken = 0
        while taken < (5 if engine.worker == 0 else 100) and not optimizer.others_done:
            steps(model, optimizer, engine.worker, 1)
            taken += 1
        assert optimizer.others_done == (engine.worker == 1)
        optimizer.finish()
        assert not optimizer.others_done
        return taken, optimizer.anchor_digest()

    (short, first), (long, second) = in_threads(2, work)
    assert first == second and short == 5
    assert long <= 5 + H + (H if sync.outer_overlap == "eager" else sync.overlap_steps)


@over_syncs
@over_gaps
def test_after_finish_all_are_at_the_same_position_and_train_on_together(sync: SyncConfig, gap: int) -> None:
    def work(engine: Engine) -> tuple[int, int, str, int, str]:
        model, optimizer = build(engine, sync)
        steps(model, optimizer, engine.worker, H + 1 + gap * engine.worker)
        optimizer.finish()
        first = optimizer.position, optimizer.loop.state.steps_taken, optimizer.anchor_digest()
        steps(model, optimizer, engine.worker, 2 * H + 1 - engine.worker)
        optimizer.finish()
        return *first, optimizer.position, optimizer.anchor_digest()

    first, second = in_threads(2, work)
    assert first[0] == second[0] == H + 1 + gap
    assert (first[1], second[1]) == (H + 1, H + 1 + gap)
    assert first[2] == second[2] and first[3:] == second[3:]
    assert first[3] == 3 * H + 2 + gap


def test_a_state_saved_after_finish_lets_all_go_on_together() -> None:
    def first_run(engine: Engine) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer = build(engine, SYNCS["fragments"])
        steps(model, optimizer, engine.worker, H + 1 + 2 * engine.worker)
        optimizer.finish()
        return model.state_dict(), optimizer.state_dict()

    saved = in_threads(2, first_run)

    def second_run(engine: Engine) -> tuple[int, int, str]:
        model, optimizer = build(engine, SYNCS["fragments"])
        of_model, of_optimizer = saved[engine.worker]
        model.load_state_dict(of_model)
        optimizer.load_state_dict(of_optimizer)
        steps(model, optimizer, engine.worker, 2 * H)
        optimizer.finish()
        return optimizer.position, optimizer.failures, optimizer.anchor_digest()

    first, second = in_threads(2, second_run)
    assert first == second and first[:2] == (H + 3 + 2 * H, 0)


def test_after_an_early_end_all_may_train_on_together_too() -> None:
    def work(engine: Engine) -> tuple[int, str]:
        model, optimizer = build(engine, SYNCS["fragments"])
        taken = 0
        while taken < (4 if engine.worker == 0 else 50) and not optimizer.stopping:
            steps(model, optimizer, engine.worker, 1)
            taken += 1
        optimizer.finish(early=engine.worker == 0)
        steps(model, optimizer, engine.worker, 2 * H)
        optimizer.finish()
        return optimizer.position, optimizer.anchor_digest()

    first, second = in_threads(2, work)
    assert first == second


# Waiting


def test_a_worker_that_is_done_waits_for_the_others_steps_longer_than_for_a_transfer() -> None:
    """Twice the time of H steps at its own pace so far, above sync.timeout_seconds."""
    patience: list[float] = []

    class Watched(LocalEngine):
        def start_round(self, key, contribution: Contribution, deadline_seconds):  # type: ignore[no-untyped-def]
            patience.append(contribution.patience_seconds)
            return super().start_round(key, contribution, deadline_seconds)

    model, optimizer = build(Watched(LocalSwarm(1), 0), SyncConfig(4))
    assert isinstance(optimizer.loop, FixedLoop)
    optimizer.loop._began = (optimizer.loop._began[0] - 100.0, 0)  # the five steps took a little more than 100 s
    steps(model, optimizer, 0, 5)
    optimizer.finish()
    assert patience[0] == 0.0
    assert all(160.0 < seconds < 320.0 for seconds in patience[1:])
    assert optimizer.loop.patience_seconds == 0.0


def test_a_worker_that_is_done_says_so_when_the_others_have_died() -> None:
    def work(engine: Engine) -> None:
        model, optimizer = build(engine, SyncConfig(4, timeout_seconds=0.05))
        optimizer.unfinished.silence()
        steps(model, optimizer, engine.worker, 1)
        if engine.worker == 0:
            optimizer.finish()

    with pytest.raises(EngineError) as caught:
        in_threads(2, work)
    for part in (r"worker 0 had taken its 1 steps and waited for the others in finish()", "nothing from workers [1]"):
        assert part in str(caught.value)
    assert "sync.timeout_seconds" in str(caught.value)


def test_a_contribution_without_work_is_not_refused_for_its_norm_and_moves_no_limit() -> None:
    claims = [Claim(6.0, 1.0), Claim(0.0, 1e6), Claim(6.0, 1.2), Claim(0.0, 0.0)]
    assert admit(claims) == [None] * 4 and not decide(range(4), claims, 5.0).clipped
    assert set(decide(range(5), [*claims, Claim(6.0, 7.0)], 5.0).clipped) == {4}


@pytest.mark.parametrize("shards", [(1.0, 1.0), (1000.0, 1.0)], ids=["equal weights", "weights that are shard sizes"])
def test_many_steps_beside_a_few_are_not_clipped_but_an_outlier_is(shards: tuple[float, float]) -> None:
    few, many = Claim(shards[0] * 1, 0.1, work=1 / 30), Claim(shards[1] * 30, 2.0, work=1.0)
    cases = ([few, many], [replace(few, norm=11.0), many], [few, replace(many, norm=16.0)])
    assert [set(decide(range(2), claims, 5.0).clipped) for claims in cases] == [set(), {0}, {1}]


# Real processes (workers of several ranks: torch_distributed/test_ranks.py)


def one_of_two(engine: Engine, sync: SyncConfig, counts: list[int]) -> Story:
    story = train(engine, sync, counts[engine.worker])
    return story.without_mean()


@pytest.mark.slow
def test_over_gloo_counts_apart_end_as_with_the_local_engine_bit_for_bit() -> None:
    sync, counts = SYNCS["streaming"], [2 * H - 1, 5 * H]
    there = in_processes(2, one_of_two, sync, counts)
    assert_same_end(there)
    here = in_threads(2, lambda engine: train(engine, sync, counts[engine.worker]).without_mean())
    assert [replace(story, bytes_sent=0) for story in there] == [replace(story, bytes_sent=0) for story in here]
