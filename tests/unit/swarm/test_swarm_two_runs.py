"""Two sides of a split that have gone on as two runs: when they meet, the workers of one are in the other's rounds."""

import asyncio
import hashlib
from typing import Any

import pytest
from msgspec.structs import replace

from diloco.engines.swarm.node.proofs.certificate import Agreed
from diloco.engines.swarm.node.trainer import RoundOutcome
from support.swarm.memory import MemorySwarm, MemoryWorker, plan, values
from support.swarm.stories import founded, rounds, told


async def post(worker: MemoryWorker, sequence: int) -> RoundOutcome:
    digest = hashlib.sha256(b"".join(worker.trainer.means)).hexdigest()[:16]
    work = values(worker.node.number, sequence)
    return (await worker.post(work, digest=digest, sequence=sequence, seconds=600.0))[0]


def vote(worker: MemoryWorker, sequence: int, *, last_ended: int) -> None:
    """This worker has voted in a round, when `last_ended` was the last round that had ended for it."""
    quorum = worker.node.outcomes.quorum
    assert quorum.agreed is not None
    quorum.agreed = Agreed(plan([0, 1, 2], last_ended), quorum.agreed.certificate)
    quorum.record_vote(replace(plan([0, 1, 2], sequence), majority=True))


def test_a_worker_that_takes_over_another_runs_state_is_in_its_rounds_at_once() -> None:
    """It is in round 51 of its own run, and the others are in round 3. It need not wait for that to end, and is
    not bound by its votes in rounds of the same numbers."""

    async def story(swarm: MemorySwarm) -> tuple[RoundOutcome, float, list[RoundOutcome]]:
        *others, ahead = workers = await founded(swarm, 4)
        await rounds(workers, 3)
        for sequence in range(3, 50):
            vote(ahead, sequence + 1, last_ended=sequence)
        ahead.node.own.ended_round = 50
        started = asyncio.get_running_loop().time()
        alone = await post(ahead, 51)
        waited = asyncio.get_running_loop().time() - started
        await ahead.catch_up()
        assert ahead.trainer.sequence == 3
        return alone, waited, list(await asyncio.gather(*(post(worker, 3) for worker in [*others, ahead])))

    alone, waited, joint = told(story)
    assert alone.resync and waited < 30
    assert [(one.failure, one.contributors) for one in joint] == [(None, (0, 1, 2, 3))] * 4


@pytest.mark.parametrize(("last_ended", "bound"), [(2, True), (3, False)])
def test_a_vote_binds_a_worker_as_long_as_its_state_has_the_round_before_the_vote(last_ended: int, bound: bool) -> None:
    """It has voted in round 5 and takes over the state after round 2."""

    async def story(swarm: MemorySwarm) -> list[str | None]:
        one, *others = await founded(swarm, 3)
        await rounds([one, *others], 3)
        vote(one, 5, last_ended=last_ended)
        one.node.own.has_state, one.node.outcomes.recent.next_to_merge = False, None
        await one.catch_up()
        assert one.trainer.sequence == 3
        return [(await post(one, 4)).failure] if bound else [(await asyncio.gather(*map(post4, (one, *others))))[0]]

    async def post4(worker: MemoryWorker) -> str | None:
        return (await post(worker, 4)).failure

    failure = "round 4: this worker has voted in it before, and given it up"
    assert told(story) == [failure if bound else None]


@pytest.mark.parametrize(("missed", "first"), [(True, {0, 1, 2}), (False, {3, 4})])
def test_a_worker_that_missed_a_round_asks_most_others_for_it_before_two_that_are_far_ahead(
    missed: bool, first: set[int]
) -> None:
    """One that has no state asks those that are furthest."""

    async def story(swarm: MemorySwarm) -> Any:
        *_, asking = workers = await founded(swarm, 6)
        await rounds(workers, 2)
        for peer in asking.node.members.peers.values():
            peer.status.ended_round = 90 if peer.status.number in (3, 4) else 2
        asking.node.outcomes.recent.next_to_merge = 2 if missed else None
        return [peer.status.number for peer in asking.node.states._sources()]

    assert {*told(story)[: len(first)]} == first
