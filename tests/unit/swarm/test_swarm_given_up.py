"""Rounds that a worker gave up, and leaders that not all follow: rounds go on, and all are in them."""

import asyncio
import hashlib

import pytest

from diloco.swarm.protocol.messages import Commit, Waiting
from diloco.swarm.protocol.status import Status
from diloco.swarm.simulator.lies import accuses
from diloco.swarm.simulator.network import Fate, request_in
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, values
from diloco.swarm.trainer import RoundOutcome


async def post(worker: MemoryWorker, sequence: int, seconds: float) -> RoundOutcome:
    digest = hashlib.sha256(b"".join(worker.trainer.means)).hexdigest()[:16]
    work = values(worker.node.number, sequence)
    return (await worker.post(work, digest=digest, sequence=sequence, seconds=seconds))[0]


def test_workers_fetch_a_round_that_one_has_ended_with_most_votes_and_they_gave_up() -> None:
    """Worker 0 is cut off. Worker 1 counts the mean that it and worker 2 have voted for, and falls silent before worker
    2 hears of it. All meet again in a later round, which worker 0 leads."""

    async def story(swarm: MemorySwarm) -> tuple[list[MemoryWorker], bytes]:
        workers, network = await founded(swarm, 3), swarm.network
        await rounds(workers, 2)

        def cut_at_commit(caller: str, _: str, request: bytes) -> Fate:
            if not isinstance(request_in(request), Commit):
                return "arrives"
            network.cut.add(caller)
            return "lost"

        network.cut.add(workers[0].name)
        network.fate = cut_at_commit
        failures = [one.failure for one in await asyncio.gather(*(post(worker, 2, 5.0) for worker in workers))]
        assert [failure is None for failure in failures] == [False, True, False]
        network.cut.clear()
        network.fate = lambda *_: "arrives"
        await asyncio.sleep(10.0)
        outcomes = await asyncio.gather(*(post(worker, 4, 30.0) for worker in workers))
        for worker, outcome in zip(workers, outcomes, strict=True):
            if outcome.resync:
                await worker.catch_up()
        return workers, workers[1].trainer.means[2]

    workers, counted = told(story, patience=0.5)
    assert [worker.trainer.means[2:3] for worker in workers] == [[counted]] * 3


def test_a_leader_that_most_follow_goes_on_against_the_word_of_one_that_they_passed_over() -> None:
    """Worker 0 makes no plan, and says that it leads whenever another one asks to."""

    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        idle, *others = await founded(swarm, 4)
        await rounds([idle, *others], 1)
        idle.node.leader.answer_ready = lambda *_: Waiting()  # type: ignore[method-assign]
        idle.node.participant.leaders.usurped = lambda *_: idle.name  # type: ignore[method-assign]
        for worker in others:
            worker.node.members.attendance.pass_over(idle.name, worker.node.members.now())
        return list(await asyncio.gather(*(post(worker, 1, 30.0) for worker in others)))

    outcomes = told(story, patience=0.5)
    assert [(one.failure, one.contributors) for one in outcomes] == [(None, (1, 2, 3))] * 3


def test_a_worker_is_in_the_rounds_that_it_has_posted_and_in_no_later_one() -> None:
    """Else a worker that is ahead takes the others' wait for a leader that lets its own round wait."""
    status = Status(ended_round=14, waiting_round=15, next_round=16)  # it has posted two
    assert [status.is_in(sequence) for sequence in range(14, 18)] == [False, True, True, False]
    later = Status(ended_round=14, waiting_round=17, next_round=17)
    assert [later.gave_up(sequence) for sequence in range(14, 19)] == [False, True, True, False, False]


@pytest.mark.parametrize("ahead", [True, False])
def test_a_round_is_given_up_if_too_few_are_left_in_it_and_another_worker_is_in_a_later_one(
    monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """Worker 3 accuses worker 1, so that a plan of three of the four has two. If worker 2 is only silent it may come
    back, and the word of a leader that too few are left ends no round."""

    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        accuses(workers[3], [workers[1]], monkeypatch)
        later = asyncio.create_task(post(workers[2], 2, 100.0))
        if not ahead:
            later.cancel()
            swarm.network.cut.add(workers[2].name)
        outcomes = await asyncio.gather(*(post(workers[number], 1, 20.0) for number in (0, 1, 3)))
        if ahead:
            outcomes = await asyncio.gather(later, *(post(workers[number], 2, 20.0) for number in (0, 1, 3)))
        return list(outcomes)

    outcomes = told(story, patience=0.5)
    if ahead:
        ended = [one.contributors for one in outcomes if one.failure is None]
        assert len(ended) == 3 and {2} < set(ended[0]) and set(ended) == {ended[0]}
    else:
        assert {one.failure for one in outcomes} == {"round 1: no result within 20 s"}
