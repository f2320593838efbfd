"""Where workers come and go: position and work are two things, missed rounds are made up for, leaving is lonely."""

import threading
from typing import Any

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from worlds.elastic import ElasticSwarm, ElasticWorld
from worlds.in_turn import InTurn
from worlds.problem import anchors, build, flat, net

PLAIN = SyncConfig(6, "fp32")
FRAGMENTS = SyncConfig(6, "fp32", fragments=2)
STREAMING = SyncConfig(6, "int8", fragments=2, overlap_steps=4, mixing=0.5)
SYNCS = pytest.mark.parametrize("sync", [PLAIN, FRAGMENTS, STREAMING], ids=["plain", "fragments", "streaming"])


def heard(world: ElasticWorld, number: int) -> list[Any]:
    events: list[Any] = []
    world.workers[number].outer.on_round = events.append
    return events


def parameters(world: ElasticWorld, number: int) -> list[torch.Tensor]:
    """Of each fragment, as one vector."""
    return [
        torch.cat([fragment.read(span).clone() for span in fragment.spans()])
        for fragment in world.workers[number].outer.fragments
    ]


# A calm run


@SYNCS
def test_a_calm_elastic_run_is_the_local_engines_bit_for_bit(sync: SyncConfig) -> None:
    local, elastic = InTurn(3, sync), ElasticWorld(3, sync)
    for _ in range(15):
        local.step()
        elastic.step()
        assert [worker.optimizer.anchor_digest() for worker in elastic.workers.values()] == local.digests()
    for mine, theirs in zip(elastic.workers.values(), local.models, strict=True):
        assert torch.equal(flat(mine.model), flat(theirs))
        assert mine.outer.steps_taken == mine.outer.inner_steps == 15


def test_an_elastic_worker_that_is_alone_at_the_moment_sends_what_a_joiner_could_average_with() -> None:
    """A fixed world of one keeps no encoded vector for a lossless codec."""
    world = ElasticWorld(1, PLAIN)
    assert world.workers[0].outer.state.lanes[0].vectors[0].num_bytes > 0
    world.step(times=6)
    assert world.workers[0].outer.rounds == 1


# Called early


def test_a_worker_that_is_called_early_jumps_to_the_round_and_weighs_as_much_as_its_work() -> None:
    world = ElasticWorld(2, PLAIN, SGD(lr=1.0))
    events = heard(world, 1)
    world.inner_step(0, times=6)
    world.step(1, times=2)
    world.swarm.call(0)
    own = [flat(world.workers[number].model).double() for number in (0, 1)]
    world.post()
    slow = world.workers[1].outer
    assert (slow.inner_steps, slow.steps_taken) == (6, 2)
    world.merge()
    assert events[0].result.total_weight == 8.0
    for worker in world.workers.values():
        torch.testing.assert_close(
            anchors(worker.optimizer).double(), (6 * own[0] + 2 * own[1]) / 8, rtol=1e-6, atol=1e-7
        )
    assert len(world.digests()) == 1
    world.inner_step(times=5)
    world.inner_step(0)
    world.swarm.call(1)
    world.post()
    world.merge()
    assert [member.weight for member in events[1].result.members] == [6.0, 5.0]  # of its own work since, not of H
    assert (slow.inner_steps, slow.steps_taken) == (12, 7)


def test_a_worker_without_work_that_is_called_adds_nothing_and_follows() -> None:
    world = ElasticWorld(2, PLAIN, SGD(lr=1.0))
    events = heard(world, 1)
    world.step(0, times=5)
    world.inner_step(0)
    world.swarm.call(0)
    own = flat(world.workers[0].model).double()
    world.post()
    world.merge()
    assert events[0].result.contributors == (0,)
    assert len(world.digests()) == 1
    torch.testing.assert_close(flat(world.workers[1].model).double(), own, rtol=1e-6, atol=1e-7)


@SYNCS
def test_a_jump_brings_the_merges_that_belong_before_it(sync: SyncConfig) -> None:
    """The slow worker is called for every round of the fast one, at whatever it is doing."""
    world = ElasticWorld(2, sync)
    events = heard(world, 1)
    for step in range(1, 37):
        world.inner_step(0)
        world.post(0)
        world.swarm.call(world.workers[0].outer.sequence - 1)
        if step % 3 == 0:
            world.inner_step(1)
        world.post(1)
        world.merge()
    assert [event.key.sequence for event in events] == list(range(len(events))) and len(events) >= 5
    assert not [event for event in events if event.failure is not None]
    world.finish()
    assert len(world.digests()) == 1
    assert torch.equal(flat(world.workers[0].model), flat(world.workers[1].model))
    assert world.workers[1].outer.steps_taken == 12


# Missing rounds


@SYNCS
def test_i6_a_worker_that_missed_a_round_has_the_others_state_right_away_and_keeps_its_parameters(
    sync: SyncConfig,
) -> None:
    world = ElasticWorld(3, sync, drop=[(1, 0), (1, 1)])
    told: list[tuple[str, int]] = []
    missing = world.workers[1].outer
    missing.on_resync = lambda reason, sequence: told.append((reason, sequence))
    for _ in range(14):
        world.inner_step()
        world.post()
        own = parameters(world, 1)
        missed = [p.key.fragment for p in missing._posted if p.key.sequence in (0, 1)]
        failed = missing.rounds_failed
        world.merge(0, 2)
        world.merge(1)
        if missing.rounds_failed > failed:
            assert all(torch.equal(parameters(world, 1)[index], own[index]) for index in missed)
            assert missing.sequence == world.workers[0].outer.sequence
    assert (missing.rounds_failed, missing.resyncs) == (2, 1 if sync.overlap_steps else 2)
    assert told[0] == ("round 0: it ended without worker 1", told[0][1]) and told[0][1] >= 1
    world.finish()
    assert len(world.digests()) == 1
    assert missing.rounds == world.workers[0].outer.rounds


def test_i6_work_from_two_missed_rounds_of_two_fragments_is_in_later_means() -> None:
    world = ElasticWorld(2, FRAGMENTS, SGD(lr=1.0), drop=[(1, 0), (1, 1), (1, 2)])
    events = heard(world, 0)
    world.step(times=12)
    weights = {event.key.sequence: [member.weight for member in event.result.members] for event in events}
    assert [world.workers[0].outer.schedule.fragment_of(sequence) for sequence in range(6)] == [1, 2, 0, 1, 2, 0]
    assert weights[0] == [2.0, 2.0] and weights[3] == [6.0, 8.0]  # of fragment 1: two steps were missed, and are here
    assert weights[4] == [6.0, 10.0] and weights[5] == [6.0, 12.0]
    assert len(world.digests()) == 1


def test_i6_the_mean_after_a_missed_round_is_the_weighted_one_taken_from_the_others_anchor() -> None:
    world = ElasticWorld(2, PLAIN, SGD(lr=1.0), drop=[(1, 0)])
    world.step(times=11)
    world.inner_step()
    anchor = anchors(world.workers[0].optimizer).double()
    assert torch.equal(anchors(world.workers[1].optimizer).double(), anchor)
    own = [flat(world.workers[number].model).double() for number in (0, 1)]
    world.post()
    world.merge()
    torch.testing.assert_close(
        anchors(world.workers[0].optimizer).double(), (6 * own[0] + 12 * own[1]) / 18, rtol=1e-6, atol=1e-7
    )
    assert len(world.digests()) == 1


def test_work_that_is_in_a_mean_already_does_not_come_again_with_the_work_of_a_missed_round() -> None:
    """Round 0 is missed while round 1, with this worker's work in it, is in flight."""
    sync = SyncConfig(6, "fp32", fragments=2, overlap_steps=5)
    world = ElasticWorld(2, sync, SGD(lr=1.0), drop=[(1, 0)])
    events = heard(world, 0)
    world.step(times=18)
    world.finish()
    index = world.workers[0].outer.schedule.fragment_of(1)
    of_it = [event for event in events if event.key.fragment == index and event.result is not None]
    assert sum(event.result.members[1].weight for event in of_it) == 18.0
    assert len(world.digests()) == 1


def test_a_worker_that_nobody_answers_trains_on_without_posting_and_tries_again_at_the_next_post() -> None:
    world = ElasticWorld(2, PLAIN, SGD(lr=1.0), drop=[(1, 0)])
    events = heard(world, 0)
    world.swarm.unavailable = 2
    world.step(times=11)
    away = world.workers[1].outer
    assert (away.resyncs, away.sequence, world.swarm.unavailable) == (0, 1, 1)
    assert away.state.copied_state(away.state.lanes[0], bytes).numbers["sequence"] == 0  # old, but consistent
    world.inner_step()
    world.swarm.leave_out(1, 1)
    world.post()
    world.merge()
    assert (away.resyncs, away.sequence, away.steps_taken, world.swarm.unavailable) == (0, 1, 12, 0)
    world.step(times=5)
    assert away.resyncs == 0  # not tried after every step
    world.step()
    assert (away.resyncs, away.sequence) == (1, 3)
    assert [member.weight for member in events[-1].result.members] == [6.0, 18.0]
    assert len(world.digests()) == 1


def test_a_worker_that_went_astray_takes_the_parameters_too_and_says_so() -> None:
    world = ElasticWorld(3, PLAIN, SGD(lr=1.0))
    told: list[int] = []
    stray = world.workers[2]
    stray.outer.on_resync = lambda _, sequence: told.append(sequence)
    world.step(times=6)
    with torch.no_grad():
        stray.outer.fragments[0].anchor[7] += 100.0
        stray.model.entrance.weight.view(-1)[7] += 100.0
    stray.outer.state.lanes[0].take_digests()
    stray.outer.state.gather_digests([0])
    world.step(times=5)
    world.inner_step()
    world.post()
    world.merge()
    assert (stray.outer.rounds_failed, stray.outer.resyncs, told) == (1, 1, [2])
    assert len(world.digests()) == 1
    assert torch.equal(flat(stray.model), anchors(stray.optimizer))
    world.step(times=6)
    assert len(world.digests()) == 1


# The end


def test_a_worker_that_stops_leaves_alone_with_the_anchor_and_the_others_go_on() -> None:
    world = ElasticWorld(3, STREAMING)
    world.step(times=8)
    leaver = world.workers[1]
    seen: list[bool] = []
    assert leaver.outer.in_flight
    leaver.optimizer.finish(
        early=True, before_confirming=lambda: seen.append(torch.equal(flat(leaver.model), flat(leaver.model)))
    )
    assert seen == [True] and not leaver.outer.in_flight
    assert torch.equal(
        torch.cat([fragment.read(span) for fragment in leaver.outer.fragments for span in fragment.spans()]),
        anchors(leaver.optimizer),
    )
    world.leave(1)
    world.step(times=10)
    assert not any(worker.outer.stopping for worker in world.workers.values())
    world.finish()
    assert len(world.digests()) == 1 and world.workers[0].outer.rounds_failed == 0


@SYNCS
def test_all_end_with_the_same_parameters_where_the_run_ends_also_who_is_called_there(sync: SyncConfig) -> None:
    """14 steps: the fast worker is in its last turn when the slow one, at step 11, is called."""
    world = ElasticWorld(2, sync)
    for worker in world.workers.values():
        worker.outer.end_at(14)
    world.step(times=11)
    fast, slow = world.workers[0].outer, world.workers[1].outer
    ending = threading.Thread(target=world.workers[0].optimizer.finish, daemon=True)
    scheduled = fast.schedule.posts_until(14)
    for _ in range(3):
        world.inner_step(0)
        world.post(0)
        if fast._posted:
            world.swarm.call(fast.sequence - 1)
            world.post(1)
        world.merge()
    assert fast.sequence == scheduled
    ending.start()
    for sequence in range(scheduled, scheduled + fast.state.num_fragments):
        world.swarm.call(sequence)
        if slow.inner_steps < 14:
            world.step(1)
    world.workers[1].optimizer.finish()
    ending.join(20.0)
    assert not ending.is_alive()
    assert fast.inner_steps == slow.inner_steps == 14 and slow.steps_taken < 14
    assert fast.sequence == slow.sequence and fast.rounds_failed == slow.rounds_failed == 0
    assert len(world.digests()) == 1
    assert torch.equal(flat(world.workers[0].model), flat(world.workers[1].model))


def test_a_failed_last_round_or_confirmation_is_counted_and_no_error() -> None:
    world = ElasticWorld(2, SyncConfig(6, "fp32", timeout_seconds=0.01))
    world.step(times=7)
    world.finish(0)
    assert world.workers[0].outer.rounds_failed == 2  # the last turn and the confirmation: worker 1 took no part
    assert torch.equal(flat(world.workers[0].model), anchors(world.workers[0].optimizer))


# What is told, and saved


def test_notes_go_with_every_post_and_with_the_state_and_are_in_no_saved_number() -> None:
    world = ElasticWorld(2, SyncConfig(6, "fp32", overlap_steps=3))
    for number, worker in world.workers.items():
        worker.outer.note = lambda number=number: b"I am %d" % number  # type: ignore[misc]
    events = heard(world, 0)
    world.step(times=9)
    assert [member.note for member in events[0].result.members] == [b"I am 0", b"I am 1"]
    assert "note" not in events[0].result.members[0].told()
    assert world.join(2).outer.arrived_note == b"I am 0"
    world.inner_step(0, 1, times=3)
    world.post(0, 1)
    world.swarm.leave_out(2, 1)
    saved = world.workers[0].optimizer.state_dict()["diloco"]["numbers"]
    assert [member["worker"] for member in saved["in_flight"][0]["result"]["members"]] == [0, 1]
    assert saved["in_flight"][0]["result"]["roster"] == [0, 1, 2]


def test_position_and_work_are_saved_apart_and_an_older_state_is_refused_by_name() -> None:
    world = ElasticWorld(2, PLAIN)
    world.inner_step(0, times=6)
    world.inner_step(1, times=2)
    world.swarm.call(0)
    world.post()
    world.merge()
    slow = world.workers[1]
    saved, weights = slow.optimizer.state_dict(), slow.model.state_dict()
    model, again = build(ElasticSwarm().engine(0), PLAIN)
    model.load_state_dict(weights)
    again.load_state_dict(saved)
    assert (again.outer.inner_steps, again.outer.steps_taken, again.outer.sequence) == (6, 2, 1)
    assert again.outer.state.merged_at == [2] and again.outer.state.unmerged == 1
    del saved["diloco"]["numbers"]["jumped"]
    with pytest.raises(ConfigError, match="earlier version"):
        again.load_state_dict(saved)


def test_a_worker_of_several_ranks_is_refused() -> None:
    class Two(WorkerRanks):
        rank, count = 0, 2

    engine = ElasticSwarm().engine(0)
    engine.ranks = Two.__new__(Two)
    model = net()
    with pytest.raises(ConfigError, match="2 ranks"):
        DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine)
