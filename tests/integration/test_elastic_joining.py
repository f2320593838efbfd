"""Workers that join a swarm that trains: they get its state, its position and its next round."""

import threading
from dataclasses import replace

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import Nesterov
from diloco.engines.local import LocalSwarm
from diloco.engines.rounds import GlobalState
from diloco.errors import EngineError, RoundFailed
from support.elastic import ElasticWorld
from support.problem import anchors, build, flat

SYNCS = {
    "plain": SyncConfig(6, "fp32"),
    "fragments": SyncConfig(6, "fp32", fragments=2),
    "streaming": SyncConfig(6, "int8", fragments=2, overlap_steps=4, mixing=0.5),
}


@pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS.keys())
@pytest.mark.parametrize("taken_at", [None, 4, 7, 10], ids=lambda step: f"state of step {step}")
def test_a_joiner_has_the_others_anchors_and_position_and_is_in_the_next_rounds(
    sync: SyncConfig, taken_at: int | None
) -> None:
    """The state may be old when it arrives: the means of the rounds since come with it."""
    world = ElasticWorld(2, sync, Nesterov())
    for step in range(1, 15):
        if step == taken_at:
            world.swarm.freeze(0)
        world.step()
    joiner = world.join(2)
    others = world.workers[0].loop
    assert torch.equal(
        torch.cat([fragment.read(span) for fragment in joiner.loop.state.fragments for span in fragment.spans()]),
        anchors(joiner.optimizer),
    )
    assert joiner.loop.inner_steps == others.inner_steps == 14
    assert joiner.loop.state.steps_taken == 0 and joiner.loop.state.sequence == others.sequence
    world.step(times=6)
    assert (
        joiner.loop.counters.rounds_failed == joiner.loop.counters.resyncs == 0 and joiner.loop.state.steps_taken == 6
    )
    world.finish()
    assert len(world.digests()) == 1 and joiner.loop.rounds == others.rounds
    assert torch.equal(flat(joiner.model), flat(world.workers[0].model))


def test_a_joiners_first_contribution_weighs_what_it_did_since() -> None:
    world = ElasticWorld(2, SYNCS["plain"])
    events: list[object] = []
    world.workers[0].loop.on_round = events.append
    world.step(times=10)
    world.join(2)
    world.step(times=2)
    assert [member.weight for member in events[-1].result.members] == [6.0, 6.0, 2.0]  # type: ignore[attr-defined]
    assert events[-1].result.roster == (0, 1, 2)  # type: ignore[attr-defined]
    assert len(world.digests()) == 1


def test_a_joiner_takes_over_outer_momentum_and_not_only_anchors() -> None:
    world = ElasticWorld(1, SYNCS["plain"], Nesterov())
    world.step(times=12)
    joiner = world.join(1)
    mine, theirs = joiner.loop.state.fragments[0], world.workers[0].loop.state.fragments[0]
    assert theirs.state["momentum"].any() and torch.equal(mine.state["momentum"], theirs.state["momentum"])
    assert mine.rounds == theirs.rounds == 2


@pytest.mark.parametrize(
    ("position", "expected"), [(None, 14), (3, 12), (13, 13), (40, 17)], ids=["untold", "old", "good", "ahead"]
)
def test_the_position_of_a_joiner_is_between_the_last_round_and_the_next(position: int | None, expected: int) -> None:
    world = ElasticWorld(1, SYNCS["plain"])
    world.step(times=14)
    state_for = world.swarm.state_for
    world.swarm.state_for = lambda worker: replace(state_for(worker), position=position)  # type: ignore[method-assign]
    assert world.join(1).loop.inner_steps == expected


def test_a_joiner_after_the_end_of_the_run_is_at_its_end() -> None:
    world = ElasticWorld(1, SYNCS["plain"])
    world.workers[0].loop.end_at(8)
    world.step(times=8)
    world.finish()
    joiner = world.join(1).loop
    joiner.end_at(8)
    assert (joiner.inner_steps, joiner.state.steps_taken) == (8, 0)


def broken(state: GlobalState, what: str) -> GlobalState:
    if what == "tensor":
        return replace(state, tensors={**state.tensors, "0.anchor": torch.zeros(3)})
    if what == "number":
        return replace(state, numbers={**state.numbers, "0.rounds": -2})
    key, mean = state.means[0]
    return replace(state, means=((key, mean[:1]),))


def test_a_state_of_something_else_is_refused() -> None:
    world = ElasticWorld(1, SYNCS["plain"])
    state_for = world.swarm.state_for
    world.swarm.state_for = lambda worker: replace(  # type: ignore[method-assign]
        state_for(worker), layout_digest="theirs"
    )
    with pytest.raises(EngineError, match=r"train something else than worker 1 \(layout theirs against"):
        world.join(1)


@pytest.mark.parametrize(("what", "named"), [("tensor", "'0.anchor'"), ("number", "'0.rounds'"), ("mean", "round 0")])
def test_a_state_that_does_not_fit_is_refused_before_anything_changes(what: str, named: str) -> None:
    world = ElasticWorld(2, SYNCS["plain"], drop=[(1, 0)])
    state_for = world.swarm.state_for
    world.swarm.state_for = lambda worker: broken(state_for(worker), what)  # type: ignore[method-assign,arg-type]
    world.swarm.freeze(0)
    before = world.workers[1].optimizer.anchor_digest()
    world.step(times=6)
    away = world.workers[1]
    assert (away.loop.counters.resyncs, away.loop.state.sequence) == (0, 1)
    assert away.optimizer.anchor_digest() == before
    world.swarm.freeze(1)  # its state is that before round 0, which the mean of round 0 follows
    with pytest.raises(EngineError, match=f"no worker gave its state.*{named}"):
        world.join(2)


def test_means_that_a_worker_has_already_are_passed_over_where_only_means_come() -> None:
    world = ElasticWorld(2, SYNCS["plain"], drop=[(1, 1)])
    world.swarm.means_only = True
    state_for = world.swarm.state_for

    def with_an_old_one(worker: int) -> GlobalState | None:
        state, first = state_for(worker), world.swarm.rounds[0]
        assert state is not None and first.mean is not None
        return replace(state, means=((first.key, first.mean), *state.means))

    world.step(times=6)
    world.swarm.state_for = with_an_old_one  # type: ignore[method-assign]
    world.step(times=6)
    assert world.workers[1].loop.counters.resyncs == 1 and world.workers[1].loop.rounds == 2
    assert len(world.digests()) == 1


def test_live_tensors_of_a_fixed_membership_are_not_served_during_an_evaluation() -> None:
    swarm = LocalSwarm(1)
    _, optimizer = build(swarm.engines()[0], SYNCS["plain"])
    states: list[GlobalState] = []
    thread = threading.Thread(target=lambda: states.append(swarm.providers[0]()), daemon=True)
    with optimizer.outer_parameters():
        thread.start()
        thread.join(0.05)
        assert not states
    thread.join(100.0)
    assert states


def test_nothing_is_served_before_a_worker_has_a_state_nor_while_its_anchors_are_nobodys() -> None:
    world = ElasticWorld(2, SYNCS["fragments"], drop=[(1, 0)])
    seen: list[str] = []

    def peek(worker: int) -> GlobalState | None:
        try:
            world.swarm.providers[worker]()
        except RoundFailed as failure:
            seen.append(failure.reason)
        return state_for(worker)

    state_for, world.swarm.state_for = world.swarm.state_for, peek  # type: ignore[method-assign]
    world.join(2)
    assert len(seen) == 1 and "not the others'" in seen[0]
    assert world.swarm.providers[2]().numbers["sequence"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_joiner_gets_the_anchor_while_the_source_evaluates_it_and_need_not_wait(dtype: torch.dtype) -> None:
    world = ElasticWorld(1, SYNCS["fragments"])
    source = world.workers[0]
    world.step(times=8)
    anchor, own = anchors(source.optimizer), flat(source.model)
    assert not torch.equal(anchor, own)
    states: list[GlobalState] = []
    with source.optimizer.outer_parameters():
        thread = threading.Thread(target=lambda: states.append(world.swarm.providers[0]()), daemon=True)
        thread.start()
        thread.join(100.0)
        assert not thread.is_alive(), "the joiner waits for the evaluation"
    assert torch.equal(torch.cat([states[0].tensors[f"{index}.anchor"] for index in range(3)]), anchor)
    assert torch.equal(flat(source.model), own)
    states[0].tensors["0.anchor"].zero_()
    assert torch.equal(anchors(source.optimizer), anchor), "what is served is a copy"
