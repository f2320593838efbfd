"""Two sides of a split that have gone on as two runs: when they meet, the workers of one are in the other's rounds."""

import asyncio
import hashlib
from typing import Any

import pytest
from msgspec.structs import replace

from diloco.swarm.protocol.certificate import Agreed
from diloco.swarm.simulator.stories import founded, rounds, told, train
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import RoundOutcome


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
        sources = asking.node.states.search.sources(2 if missed else None)
        return [peer.status.number for peer in sources]

    assert {*told(story)[: len(first)]} == first


@pytest.mark.parametrize(("few", "many"), [(3, 6), (3, 1), (12, 3), (3, 20)])
def test_a_smaller_side_that_went_on_alone_tells_both_sides_how_many_of_its_rounds_are_lost(
    few: int, many: int
) -> None:
    """Two of five go on by themselves after `minority_seconds`; the other three are ahead of them, or behind."""

    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], list[list[int]], list[list[int]]]:
        workers = await founded(swarm, 5)
        await rounds(workers, 2)
        small, large = workers[:2], workers[2:]
        swarm.network.sides = [{worker.name for worker in small}, {worker.name for worker in large}]
        await asyncio.sleep(60.0)
        for worker in workers:
            worker.node.progress(tokens=100 * (1 + worker.node.number))
        await asyncio.gather(rounds(small, few), rounds(large, many))
        swarm.network.sides = []
        await asyncio.sleep(30.0)
        async with asyncio.timeout(900.0):
            await asyncio.gather(*(train(worker, 2 + max(few, many) + 6) for worker in workers))
        await asyncio.sleep(2.0)

        def told_of(side: list[MemoryWorker], kind: str) -> list[list[int]]:
            return [
                [fields["rounds"], fields["tokens"]]
                for worker in side
                for type_, fields in worker.trainer.events
                if type_ == kind
            ]

        return [w.trainer.means for w in workers], told_of(small, "diverged"), told_of(large, "rounds_lost")

    means, own, others = told(story, minority_seconds=30.0)
    assert all(one == means[0] for one in means)
    assert sorted(own) == [[few, 100], [few, 200]]
    assert sorted(others) == [[few, 100]] * 3 + [[few, 200]] * 3


def test_a_worker_that_only_missed_rounds_says_of_none_that_it_is_lost() -> None:
    async def story(swarm: MemorySwarm) -> tuple[bool, list[str]]:
        *others, away = workers = await founded(swarm, 4)
        await rounds(workers, 2)
        swarm.network.cut.add(away.name)
        await asyncio.sleep(20.0)
        await rounds(others, 12)
        swarm.network.cut.clear()
        await asyncio.sleep(10.0)
        await asyncio.gather(*(train(worker, 17) for worker in workers))
        kinds = [kind for worker in workers for kind, _ in worker.trainer.events]
        return away.trainer.means == others[0].trainer.means, kinds

    same, kinds = told(story)
    assert same and "diverged" not in kinds and "rounds_lost" not in kinds
