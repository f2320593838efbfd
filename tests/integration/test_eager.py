"""Eager updates in whole runs: a round travels during the next H steps, and nothing else changes."""

from dataclasses import replace

import pytest

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import Adam
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.outer.rounds import RoundEvent
from support.elastic import ElasticWorld
from support.problem import build, train
from support.threads import in_threads

H = 4
EAGER = SyncConfig(H, "fp32", outer_overlap="eager")
DELAYED = replace(EAGER, outer_overlap="delayed")


@pytest.mark.parametrize("sync", [EAGER, DELAYED, replace(EAGER, fragments=2), replace(EAGER, codec="int8")])
def test_workers_end_with_equal_parameters_and_every_step_in_a_mean(sync: SyncConfig) -> None:
    steps = 5 * H + 2
    stories = in_threads(3, lambda engine: train(engine, sync, steps))
    for story in stories:
        assert story.final == stories[0].final
        assert story.digests == stories[0].digests
        first = [event for event in story.events if event.key.fragment == 0]
        assert sum(event.result.total_weight for event in first if event.result) == 3 * steps


def test_a_round_is_merged_when_the_next_one_is_posted() -> None:
    (story, _) = in_threads(2, lambda engine: train(engine, EAGER, 3 * H))
    posted = [event for event in story.events if event.result and event.result.total_weight]
    assert [event.inner_step for event in posted] == [2 * H, 3 * H, 3 * H]
    assert story.digests[H] == story.digests[0], "the anchor has not moved with the first round yet"


def test_the_naive_delayed_form_goes_another_way() -> None:
    eager, delayed = (in_threads(2, lambda engine, s=s: train(engine, s, 4 * H))[0] for s in (EAGER, DELAYED))
    assert eager.losses[:H] == delayed.losses[:H]
    assert eager.losses[H] < delayed.losses[H], "the naive form has thrown its first H steps away for now"


def test_a_worker_alone_has_its_own_share_at_once() -> None:
    """k = 1: the share of the round on its way is all of it, so the parameters are those of DiLoCo without overlap."""
    eager, plain = (train(alone(), sync, 3 * H) for sync in (EAGER, SyncConfig(H, "fp32")))
    assert eager.losses == pytest.approx(plain.losses, rel=1e-4)
    assert eager.final == pytest.approx(plain.final, rel=1e-3, abs=1e-5)


def test_no_work_is_lost_with_a_round() -> None:
    stories = in_threads(2, lambda engine: train(engine, EAGER, 4 * H), fail_at={(1, 1)})
    weights = [event.result.total_weight for event in stories[0].events if event.result]
    assert weights == [2 * H, H, 3 * H, 2 * H, 0, 0], "the third round has what the second lacks"
    assert stories[0].final == stories[1].final


@pytest.mark.parametrize("codec", ["fp32", "2bit", "topk"])
def test_a_joiner_begins_at_the_anchor_and_all_stay_equal(codec: str) -> None:
    world = ElasticWorld(2, replace(EAGER, codec=codec))
    world.step(times=2 * H + 1)
    world.join(2)
    world.step(times=2 * H)
    assert len(world.digests()) == 1
    assert not any(worker.loop.counters.rounds_failed for worker in world.workers.values())


def test_a_worker_of_a_swarm_that_missed_a_round_keeps_its_work() -> None:
    world = ElasticWorld(2, EAGER, drop={(1, 1)})
    events: list[RoundEvent] = []
    world.workers[0].loop.on_round = events.append
    world.step(times=5 * H)
    assert len(world.digests()) == 1
    assert world.workers[1].loop.counters.resyncs == 1
    weights = [event.result.total_weight for event in events if event.result]
    assert weights == [2 * H, H, 3 * H, 2 * H], "the third round has what the second lacks"


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"overlap_steps": 2}, "sync.overlap_steps = 2"),
        ({"mixing": 0.5}, "sync.mixing = 0.5"),
        ({"prune": 0.5}, "sync.prune = 0.5"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(more: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        replace(EAGER, **more)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'adam'"):
        build(alone(), EAGER, outer=Adam())
