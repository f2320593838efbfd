"""Where workers come and go: position and work are two things, missed rounds are made up for, leaving is lonely."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import SGD
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from diloco.outer.elastic import ElasticLoop, Missed
from diloco.outer.rounds import RoundEvent
from support.elastic import ElasticSwarm, ElasticWorld, Worker
from support.in_turn import InTurn
from support.problem import anchors, build, flat, loss_of, net

PLAIN = SyncConfig(6, "fp32")
FRAGMENTS = SyncConfig(6, "fp32", fragments=2)
STREAMING = SyncConfig(6, "int8", fragments=2, overlap_steps=4, mixing=0.5)
MEANS_ONLY = pytest.mark.parametrize("means_only", [False, True], ids=["state", "means only"])
SYNCS = pytest.mark.parametrize("sync", [PLAIN, FRAGMENTS, STREAMING], ids=["plain", "fragments", "streaming"])


def heard(world: ElasticWorld, number: int) -> list[Any]:
    events: list[Any] = []
    world.workers[number].loop.on_round = events.append
    return events


def parameters(world: ElasticWorld, number: int) -> list[torch.Tensor]:
    """Of each fragment, as one vector."""
    return [
        torch.cat([fragment.read(span).clone() for span in fragment.spans()])
        for fragment in world.workers[number].loop.state.fragments
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
        assert mine.loop.state.steps_taken == mine.loop.inner_steps == 15


def test_an_elastic_worker_that_is_alone_at_the_moment_sends_what_a_joiner_could_average_with() -> None:
    """A fixed world of one keeps no encoded vector for a lossless codec."""
    world = ElasticWorld(1, PLAIN)
    assert world.workers[0].loop.state.lanes[0].sending[0].vector.num_bytes > 0
    world.step(times=6)
    assert world.workers[0].loop.rounds == 1


@pytest.mark.parametrize("sync", [PLAIN, FRAGMENTS], ids=["plain", "fragments"])
def test_a_mean_that_is_not_finite_moves_no_anchor_and_loses_no_work(sync: SyncConfig) -> None:
    world = ElasticWorld(2, sync, SGD(lr=1.0))
    events, before = heard(world, 0), anchors(world.workers[0].optimizer)
    schedule = world.workers[0].loop.schedule
    world.inner_step(times=schedule.post_step(0))
    world.post()
    mean = world.swarm.rounds[0].mean
    assert mean is not None
    mean.fill_(255)  # NaN in fp32
    world.merge()
    for worker in world.workers.values():
        assert (worker.loop.counters.rounds_failed, worker.loop.rounds) == (1, 0)
        assert torch.equal(anchors(worker.optimizer), before)
    again = next(m for m in range(1, 9) if schedule.fragment_of(m) == schedule.fragment_of(0))
    world.step(times=schedule.post_step(again) - schedule.post_step(0))
    assert events[again].result.total_weight == 2 * schedule.post_step(again), "the work of both rounds"
    assert len(world.digests()) == 1 and torch.isfinite(anchors(world.workers[0].optimizer)).all()


def test_a_gradient_times_minus_900_counts_as_three_usual_ones() -> None:
    """With a max_norm_ratio of 1000 it counts as 900."""
    world = ElasticWorld(4, PLAIN)
    events, liar = heard(world, 0), world.workers[3]
    for _ in range(3):
        world.inner_step(times=6)
        with liar.optimizer.outer_parameters():
            anchor = [parameter.detach().clone() for parameter in liar.model.parameters()]
        with torch.no_grad():
            for parameter, start in zip(liar.model.parameters(), anchor, strict=True):
                parameter.copy_(start + 900.0 * (start - parameter))
        world.post()
        world.merge()
    assert [set(event.result.clipped) for event in events] == [{3}] * 3
    assert float(flat(world.workers[0].model).abs().max()) < 10.0


def test_a_state_with_a_mean_that_is_not_finite_is_not_taken_over() -> None:
    world = ElasticWorld(3, PLAIN, SGD(lr=1.0))
    world.swarm.means_only = True
    world.inner_step(times=6)
    world.swarm.leave_out(2, 0)
    world.post(0, 1)
    world.merge(0, 1)
    mean = world.swarm.rounds[0].mean
    assert mean is not None
    good = mean.clone()
    mean.fill_(255)
    before = anchors(world.workers[2].optimizer)
    world.post(2)
    world.merge(2)
    assert torch.equal(anchors(world.workers[2].optimizer), before)
    mean.copy_(good)
    world.step(times=6)
    assert len(world.digests()) == 1


# Called early


def test_a_worker_that_is_called_early_jumps_to_the_round_and_weighs_as_much_as_its_work() -> None:
    world = ElasticWorld(2, PLAIN, SGD(lr=1.0))
    events = heard(world, 1)
    world.inner_step(0, times=6)
    world.step(1, times=2)
    world.swarm.call(0)
    own = [flat(world.workers[number].model).double() for number in (0, 1)]
    world.post()
    slow = world.workers[1].loop
    assert (slow.inner_steps, slow.state.steps_taken) == (6, 2)
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
    assert (slow.inner_steps, slow.state.steps_taken) == (12, 7)


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


@pytest.mark.parametrize("sync", [PLAIN, FRAGMENTS, STREAMING, SyncConfig(6, "fp32", overlap_steps=4)])
def test_a_jump_brings_the_merges_that_belong_before_it(sync: SyncConfig) -> None:
    """The slow worker is called for every round of the fast one, at whatever it is doing."""
    world = ElasticWorld(2, sync)
    events = heard(world, 1)
    for step in range(1, 37):
        world.inner_step(0)
        world.post(0)
        world.swarm.call(world.workers[0].loop.state.sequence - 1)
        if step % 3 == 0:
            world.inner_step(1)
        world.post(1)
        world.merge()
    assert [event.key.sequence for event in events] == list(range(len(events))) and len(events) >= 5
    assert not [event for event in events if event.failure is not None or event.result.refused]
    world.finish()
    assert len(world.digests()) == 1
    assert torch.equal(flat(world.workers[0].model), flat(world.workers[1].model))
    assert world.workers[1].loop.state.steps_taken == 12


# Missing rounds


@SYNCS
@MEANS_ONLY
def test_i6_a_worker_that_missed_a_round_has_the_others_state_right_away_and_keeps_its_parameters(
    sync: SyncConfig, means_only: bool
) -> None:
    world = ElasticWorld(3, sync, drop=[(1, 0), (1, 1)])
    world.swarm.means_only = means_only
    told: list[tuple[str, int]] = []
    missing = world.workers[1].loop
    missing.on_resync = lambda reason, sequence: told.append((reason, sequence))
    for _ in range(14):
        world.inner_step()
        world.post()
        own = parameters(world, 1)
        missed = [p.key.fragment for p in missing.in_flight if p.key.sequence in (0, 1)]
        failed = missing.counters.rounds_failed
        world.merge(0, 2)
        world.merge(1)
        if missing.counters.rounds_failed > failed:
            assert all(torch.equal(parameters(world, 1)[index], own[index]) for index in missed)
            assert missing.sequence == world.workers[0].loop.state.sequence
    assert (missing.counters.rounds_failed, missing.counters.resyncs) == (2, 1 if sync.overlap_steps else 2)
    assert told[0] == ("round 0: it ended without worker 1", told[0][1]) and told[0][1] >= 1
    world.finish()
    assert len(world.digests()) == 1
    assert missing.rounds == world.workers[0].loop.rounds


@MEANS_ONLY
def test_who_was_absent_moves_along_with_the_others_for_the_steps_that_it_did_not_take(means_only: bool) -> None:
    """It posts round 0, and is frozen until they have ended four rounds: of 24 steps it took 6."""
    world = ElasticWorld(3, PLAIN, drop=[(1, 0)])
    world.swarm.means_only = means_only
    world.inner_step(times=6)
    world.post()
    own, before = flat(world.workers[1].model), anchors(world.workers[1].optimizer)
    world.merge(0, 2)
    for sequence in (1, 2, 3):
        world.inner_step(0, 2, times=6)
        world.post(0, 2)
        world.swarm.leave_out(1, sequence)
        world.merge(0, 2)
    world.merge(1)
    after = anchors(world.workers[0].optimizer)
    assert world.workers[1].loop.counters.resyncs == 1 and len(world.digests()) == 1
    torch.testing.assert_close(flat(world.workers[1].model), own + 0.75 * (after - before), rtol=1e-5, atol=1e-6)
    world.step(times=6)
    assert world.workers[1].loop.state.merged_at == [12]  # none of its work is lost


def test_i6_work_from_two_missed_rounds_of_two_fragments_is_in_later_means() -> None:
    world = ElasticWorld(2, FRAGMENTS, SGD(lr=1.0), drop=[(1, 0), (1, 1), (1, 2)])
    events = heard(world, 0)
    world.step(times=12)
    weights = {event.key.sequence: [member.weight for member in event.result.members] for event in events}
    assert [world.workers[0].loop.schedule.fragment_of(sequence) for sequence in range(6)] == [1, 2, 0, 1, 2, 0]
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


@MEANS_ONLY
@pytest.mark.parametrize("mixing", [0.0, 0.5])
def test_work_that_is_in_a_mean_already_does_not_come_again_with_the_work_of_a_missed_round(
    mixing: float, means_only: bool
) -> None:
    """Round 0 is missed while round 1, with this worker's work in it, is in flight: as good as merged in its time."""
    sync = SyncConfig(6, "fp32", fragments=2, overlap_steps=5, mixing=mixing)
    world = ElasticWorld(2, sync, SGD(lr=1.0), drop=[(1, 0)])
    world.swarm.means_only = means_only
    events = heard(world, 0)
    world.step(times=6)
    own, anchor = parameters(world, 1)[2], world.workers[1].loop.state.fragments[2].anchor.clone()
    assert [posted.key.sequence for posted in world.workers[1].loop.in_flight] == [0, 1, 2]
    world.inner_step(0, times=1)
    world.merge(0)
    world.workers[1].loop.inner_steps += 1
    world.merge(1)
    assert world.workers[1].loop.counters.resyncs == 1
    assert world.swarm.states_sent == (1 if means_only else 2)  # one when it joined; its own was sound all the time
    moved = world.workers[1].loop.state.fragments[2].anchor
    assert not torch.equal(moved, anchor)
    torch.testing.assert_close(parameters(world, 1)[2], own.lerp(moved, 1 - mixing), rtol=1e-6, atol=1e-7)
    world.step(times=11)
    world.finish()
    index = world.workers[0].loop.schedule.fragment_of(1)
    of_it = [event for event in events if event.key.fragment == index and event.result is not None]
    assert sum(event.result.members[1].weight for event in of_it) == 18.0
    assert len(world.digests()) == 1


def test_what_ended_well_after_a_missed_round_is_merged_if_nobody_is_left_to_give_a_state() -> None:
    world = ElasticWorld(2, SyncConfig(6, "fp32", fragments=2, overlap_steps=5), SGD(lr=1.0), drop=[(1, 0)])
    world.step(times=6)
    world.leave(0)
    left = world.workers[1].loop
    assert (len(left.in_flight), left.rounds) == (3, 0)
    world.step()
    assert (len(left.in_flight), left.rounds, left.counters.rounds_failed, left.counters.resyncs) == (0, 2, 1, 0)
    assert world.swarm.providers[1]().numbers["sequence"] == 3
    for index in (left.schedule.fragment_of(1), left.schedule.fragment_of(2)):
        assert torch.equal(parameters(world, 1)[index], left.state.fragments[index].anchor)


def test_a_worker_that_nobody_answers_trains_on_without_posting_and_tries_again_at_the_next_post() -> None:
    world = ElasticWorld(2, PLAIN, SGD(lr=1.0), drop=[(1, 0)])
    events = heard(world, 0)
    world.swarm.unavailable = 2
    world.step(times=11)
    away = world.workers[1].loop
    assert (away.counters.resyncs, away.sequence, world.swarm.unavailable) == (0, 1, 1)
    assert world.swarm.providers[1]().numbers["sequence"] == 0  # old, but consistent
    world.inner_step()
    world.swarm.leave_out(1, 1)
    world.post()
    world.merge()
    assert (away.counters.resyncs, away.sequence, away.state.steps_taken, world.swarm.unavailable) == (0, 1, 12, 0)
    world.step(times=5)
    assert away.counters.resyncs == 0  # not tried after every step
    world.step()
    assert (away.counters.resyncs, away.sequence) == (1, 3)
    assert [member.weight for member in events[-1].result.members] == [6.0, 18.0]
    assert len(world.digests()) == 1


def test_a_worker_that_diverged_takes_the_parameters_too_and_says_so() -> None:
    world = ElasticWorld(3, PLAIN, SGD(lr=1.0))
    told: list[int] = []
    diverged = world.workers[2]
    diverged.loop.on_resync = lambda _, sequence: told.append(sequence)
    world.step(times=6)
    with torch.no_grad():
        diverged.loop.state.fragments[0].anchor[7] += 100.0
        diverged.model.entrance.weight.view(-1)[7] += 100.0
    diverged.loop.state.lanes[0].take_digests()
    diverged.loop.state._replica.update_digests()
    world.step(times=5)
    world.inner_step()
    world.post()
    world.merge()
    assert (diverged.loop.counters.rounds_failed, diverged.loop.counters.resyncs, told) == (1, 1, [2])
    assert len(world.digests()) == 1
    assert torch.equal(flat(diverged.model), anchors(diverged.optimizer))
    assert world.swarm.providers[2]().numbers["sequence"] == 2
    events = heard(world, 0)
    world.step(times=6)
    assert [member.weight for member in events[0].result.members] == [6.0, 6.0, 6.0]
    assert len(world.digests()) == 1


def test_a_worker_that_went_on_alone_takes_the_others_state_though_it_is_behind_its_own() -> None:
    """Its position stays; it then takes a step for each of their rounds until they are where it is."""
    world, alone = ElasticWorld(2, PLAIN), ElasticWorld(1, PLAIN)
    world.step(times=6)
    alone.step(times=30)
    diverged = alone.workers[0]
    engine = world.swarm.engine(7)
    diverged.loop.engine = diverged.loop.replica.engine = diverged.loop.state.lanes[0].engine = engine
    engine.serve_state(alone.swarm.providers[0])
    assert isinstance(diverged.loop, ElasticLoop)
    diverged.loop.missed = Missed("it went on alone")
    world.workers[7] = replace(diverged, number=7)
    world.step(7, times=5)
    assert diverged.loop.counters.resyncs == 0
    world.inner_step(7)
    world.post(7)
    assert (diverged.loop.counters.resyncs, diverged.loop.inner_steps, diverged.loop.state.sequence) == (1, 36, 2)
    assert len(diverged.loop.in_flight) == 1
    world.step(0, 1, times=5)
    world.inner_step(0, 1)
    world.post(0, 1)
    world.merge()
    assert len(world.digests()) == 1 and diverged.loop.rounds == 2
    world.inner_step(7)
    world.post(7)
    assert diverged.loop.state.sequence == 3


# The end


def test_a_worker_that_stops_leaves_alone_with_the_anchor_and_the_others_go_on() -> None:
    world = ElasticWorld(3, STREAMING)
    world.step(times=8)
    leaver = world.workers[1]
    seen: list[bool] = []
    assert leaver.loop.in_flight
    leaver.optimizer.finish(
        early=True, before_confirming=lambda: seen.append(torch.equal(flat(leaver.model), flat(leaver.model)))
    )
    assert seen == [True] and not leaver.loop.in_flight
    assert torch.equal(
        torch.cat([fragment.read(span) for fragment in leaver.loop.state.fragments for span in fragment.spans()]),
        anchors(leaver.optimizer),
    )
    world.leave(1)
    world.step(times=10)
    assert not any(worker.loop.stopping for worker in world.workers.values())
    world.finish()
    assert len(world.digests()) == 1 and world.workers[0].loop.counters.rounds_failed == 0


@SYNCS
def test_all_end_with_the_same_parameters_where_the_run_ends_also_who_is_called_there(sync: SyncConfig) -> None:
    """14 steps: the fast worker is in its last turn when the slow one, at step 11, is called."""
    world = ElasticWorld(2, sync)
    for worker in world.workers.values():
        worker.loop.end_at(14)
    world.step(times=11)
    fast, slow = world.workers[0].loop, world.workers[1].loop
    ending = threading.Thread(target=world.workers[0].optimizer.finish, daemon=True)
    scheduled = fast.schedule.posts_until(14)
    for _ in range(3):
        world.inner_step(0)
        world.post(0)
        if fast.in_flight:
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
    assert fast.inner_steps == slow.inner_steps == 14 and slow.state.steps_taken < 14
    assert fast.sequence == slow.sequence and fast.counters.rounds_failed == slow.counters.rounds_failed == 0
    assert len(world.digests()) == 1
    assert torch.equal(flat(world.workers[0].model), flat(world.workers[1].model))


def test_a_failed_last_round_or_confirmation_is_counted_and_no_error() -> None:
    world = ElasticWorld(2, SyncConfig(6, "fp32", timeout_seconds=0.01))
    world.workers[0].loop.end_at(7)
    world.step(times=7)
    world.finish(0)
    assert (
        world.workers[0].loop.counters.rounds_failed == 2
    )  # the last turn and the confirmation: worker 1 took no part
    assert torch.equal(flat(world.workers[0].model), anchors(world.workers[0].optimizer))


def ended(counts: Sequence[int], sync: SyncConfig) -> list[tuple[list[str], list[RoundEvent], int]]:
    """Loops with so many steps each, which then finish and leave: digests after each round, rounds, the confirmed."""
    world = ElasticWorld(len(counts), sync)
    told: list[Any] = [None] * len(counts)

    def work(worker: Worker) -> None:
        optimizer, digests, events = worker.optimizer, list[str](), list[RoundEvent]()

        def on_round(event: RoundEvent) -> None:
            events.append(event)
            digests.append(optimizer.anchor_digest())

        optimizer.on_round = on_round
        with worker.loop.engine as engine:
            for step in range(counts[worker.number]):
                optimizer.zero_grad()
                loss_of(worker.model, worker.number, step).backward()
                optimizer.step()
            optimizer.finish()
            own = flat(worker.model)
            with optimizer.outer_parameters():
                assert torch.equal(flat(worker.model), own)
            confirmed = sum(member.anchor_digest == optimizer.anchor_digest() for member in engine.members())
        told[worker.number] = (digests, events, confirmed)

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in world.workers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    assert all(one is not None for one in told)
    return told


@SYNCS
@pytest.mark.parametrize("gap", [1, 5, 6, 18])
def test_a_loop_with_fewer_steps_leaves_with_its_work_in_the_mean_and_the_others_go_on(
    sync: SyncConfig, gap: int
) -> None:
    """No end is agreed on (`end_at`), as in a loop of one's own."""
    counts = (11, 11 + gap)  # a post of the longer one lies between them
    (short, short_events, _), (long, long_events, confirmed) = ended(counts, sync)
    assert all(event.failure is None for event in short_events + long_events)
    assert long[: len(short)] == short  # it has the swarm's anchors of the moment at which it left
    assert confirmed == (2 if len(short) == len(long) else 1)  # one turn may take both to the end; else one is left
    if not sync.overlap_steps:
        for fragment in {event.key.fragment for event in long_events}:
            work = [event.result.total_weight for event in long_events if event.key.fragment == fragment]
            assert sum(work) == sum(counts)


@SYNCS
def test_loops_with_as_many_steps_each_confirm_the_end_to_each_other(sync: SyncConfig) -> None:
    (_, _, first), (_, _, second) = ended((14, 14), sync)
    assert (first, second) == (2, 2)


# What is told, and saved


def test_notes_go_with_every_post_and_with_the_state_and_are_in_no_saved_number() -> None:
    world = ElasticWorld(2, SyncConfig(6, "fp32", overlap_steps=3))
    for number, worker in world.workers.items():
        worker.loop.note = lambda number=number: b"I am %d" % number  # type: ignore[misc]
    events = heard(world, 0)
    world.step(times=9)
    assert [member.note for member in events[0].result.members] == [b"I am 0", b"I am 1"]
    assert "note" not in events[0].result.members[0].as_json()
    assert world.join(2).loop.arrived_note == b"I am 0"
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
    assert (again.loop.inner_steps, again.loop.state.steps_taken, again.loop.state.sequence) == (6, 2, 1)
    assert again.loop.state.merged_at == [2] and again.loop.state.unmerged == 1
    del saved["diloco"]["numbers"]["jumped"]
    with pytest.raises(ConfigError, match="earlier version"):
        again.load_state_dict(saved)


def test_a_swarm_has_no_use_for_restoring_and_says_so() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="restoring = True has no effect in a swarm"):
        DiLoCo(model, inner, ElasticSwarm().engine(0), sync=PLAIN, restoring=True)


# Any story


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([PLAIN, FRAGMENTS, STREAMING]),
    st.booleans(),
    st.lists(st.tuples(st.sampled_from("ssssscdjl"), st.integers(0, 5)), min_size=10, max_size=60),
)
def test_whatever_happens_all_members_end_with_the_same_anchors(
    sync: SyncConfig, means_only: bool, story: list[tuple[str, int]]
) -> None:
    """Steps at any pace, early calls, lost contributions, joins and leaves, in any order."""
    world = ElasticWorld(2, sync)
    world.swarm.means_only = means_only
    swarm, joined = world.swarm, 2
    for what, who in story:
        numbers = sorted(world.workers)
        number = numbers[who % len(numbers)]
        outer = world.workers[number].loop
        if what == "s":
            _step_if_it_need_not_wait(world, number)
        elif what == "c":
            swarm.call(_round_in_progress(world))
        elif what == "d":
            swarm.drop = swarm.drop | {(number, outer.sequence)}
        elif what == "j" and len(numbers) < 4:
            world.join(joined)
            joined += 1
        elif what == "l" and number and len(numbers) > 1:
            world.leave(number)
    _to_the_end(world)
    assert len(world.digests()) == 1
    assert len({tuple(flat(worker.model).tolist()) for worker in world.workers.values()}) == 1


def _to_the_end(world: ElasticWorld) -> None:
    """Nothing more is lost; workers that hold up a round are called."""
    world.swarm.drop = frozenset()
    last = max(worker.loop.inner_steps for worker in world.workers.values()) + 1
    for worker in world.workers.values():
        worker.loop.end_at(last)
    for _ in range(10 * last):
        world.swarm.call(_round_in_progress(world))
        for number, worker in world.workers.items():
            if worker.loop.inner_steps < last:
                _step_if_it_need_not_wait(world, number)
    assert all(worker.loop.inner_steps == last for worker in world.workers.values()), "they wait for each other"
    world.finish()


def _round_in_progress(world: ElasticWorld) -> int:
    """The first round that a worker has posted and that has not ended, if any."""
    open_ = [sequence for sequence, round_ in world.swarm.rounds.items() if round_.headers and round_.decision is None]
    return min(open_, default=-1)


def _step_if_it_need_not_wait(world: ElasticWorld, number: int) -> None:
    """In one thread no worker can wait for another: what is in flight must have ended."""
    outer = world.workers[number].loop

    def ended() -> bool:
        return all(world.swarm.rounds[posted.key.sequence].decision is not None for posted in outer.in_flight)

    if ended():
        world.merge(number)
        if outer.ends_at is None or outer.inner_steps < outer.ends_at:
            world.inner_step(number)
            world.post(number)
        if ended():
            world.merge(number)


# What `diloco status` shows of a loop of one's own


def test_a_loop_of_ones_own_tells_its_position_and_what_else_it_is_told() -> None:
    world = ElasticWorld(1, SyncConfig(4))
    optimizer, engine = world.workers[0].optimizer, world.workers[0].loop.engine
    told: list[dict[str, float]] = []
    engine.progress = lambda **values: told.append(values)
    world.step(times=2)
    optimizer.tell(loss=2.5, tokens=640)
    world.step(times=3)
    assert [one["inner_steps"] for one in told] == [1, 2, 3, 4, 5]
    assert [one["tokens"] for one in told] == [0, 0, 640, 640, 640]
    assert math.isnan(told[1]["loss"]) and told[2]["loss"] == 2.5
    assert told[0]["step_seconds"] == 0 and all(one["step_seconds"] > 0 for one in told[1:])
    with pytest.raises(ConfigError, match="tokens = -1 must be at least 0"):
        optimizer.tell(tokens=-1)
