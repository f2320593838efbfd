"""Messages of a round that are lost: it ends within seconds all the same, with one mean."""

import asyncio

import pytest

from diloco.swarm.protocol.messages import Commit, Complete, Inquire, LedBy, Ready, Superseded, decode
from diloco.swarm.protocol.plan import Authority, Plan
from diloco.swarm.protocol.wire import PeerMessage
from diloco.swarm.simulator.network import Fate, request_in
from diloco.swarm.simulator.stories import founded, rounds, stop, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, values
from diloco.swarm.trainer import RoundOutcome


async def all_post(workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
    posts = (worker.post(values(worker.node.number, worker.trainer.sequence), seconds=600.0) for worker in workers)
    return list(await asyncio.gather(*posts))


@pytest.mark.parametrize("fate", ["lost", "answer lost"])
@pytest.mark.parametrize("kind", [Ready, Plan, Complete, Commit])
def test_a_message_of_a_round_that_is_lost_is_sent_again(kind: type, fate: Fate) -> None:
    async def story(swarm: MemorySwarm) -> list[tuple[RoundOutcome, bytes]]:
        workers, lost = await founded(swarm, 3), 0

        def lose_two(caller: str, peer: str, request: bytes) -> Fate:
            nonlocal lost
            lost += isinstance(request_in(request), kind)
            return fate if isinstance(request_in(request), kind) and lost <= 2 else "arrives"

        swarm.network.fate = lose_two
        return await all_post(workers)

    results = told(story, timeout_seconds=600.0)
    assert len({mean for _, mean in results}) == 1
    for ended, _ in results:
        assert ended.failure is None and ended.contributors == (0, 1, 2) and ended.seconds < 10.0


def test_a_round_ends_without_the_word_of_a_worker_that_takes_too_long() -> None:
    """It is in the mean, and fetches it."""

    async def story(swarm: MemorySwarm) -> list[tuple[RoundOutcome, bytes]]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        mute = workers[3].name
        swarm.network.fate = lambda caller, _, request: (
            "lost" if caller == mute and isinstance(request_in(request), Complete) else "arrives"
        )
        return await all_post(workers)

    results = told(story, timeout_seconds=600.0)
    assert len({mean for _, mean in results}) == 1
    for ended, _ in results:
        assert ended.failure is None and ended.contributors == (0, 1, 2, 3) and ended.seconds < 10.0


@pytest.mark.parametrize("heard", [0, 1])
def test_a_new_leader_commits_the_plan_of_the_one_before_it(heard: int) -> None:
    """The leader dies when all have its mean, and one or no other worker has heard that it counts."""

    async def story(swarm: MemorySwarm) -> tuple[list[tuple[RoundOutcome, bytes]], list[str]]:
        workers = await founded(swarm, 4)
        commits, answers = 0, list[str]()

        def fate(caller: str, _: str, request: bytes) -> Fate:
            nonlocal commits
            if caller != workers[0].name or not isinstance(request_in(request), Commit):
                return "arrives"
            commits += 1
            if commits == 1 + heard:
                stop(swarm, workers[0])
            return "lost" if commits > heard else "arrives"

        for worker in workers[1:]:

            async def told_so(peer: str, data: bytes, worker: MemoryWorker = worker, answer=worker.node._on_call):  # type: ignore[no-untyped-def]
                said = await answer(peer, data)
                if isinstance(request_in(data), Commit) and peer != workers[0].name:
                    answers.append(type(decode(said)).__name__)
                return said

            worker.node.transport.on_call = told_so  # type: ignore[attr-defined]
        swarm.network.fate = fate
        first = asyncio.create_task(workers[0].post(values(0)))
        results = await all_post(workers[1:])
        first.cancel()
        return results, answers

    results, answers = told(story, timeout_seconds=600.0)
    assert len({mean for _, mean in results}) == 1
    for ended, _ in results:
        assert ended.failure is None and ended.contributors == (0, 1, 2, 3) and ended.seconds < 10.0
    assert set(answers) <= {"Done"} and (heard or answers)


def test_a_leader_that_begins_again_is_not_told_that_it_leads_but_which_authority_to_exceed() -> None:
    """Else it steps down for itself, for ever."""

    async def story(swarm: MemorySwarm) -> list[PeerMessage]:
        workers = await founded(swarm, 3)
        post = asyncio.create_task(workers[1].post(values(1)))
        await asyncio.sleep(0.1)
        asked, leader = workers[1].node.participant, workers[0].name
        asked.rounds[0].authority, asked.rounds[0].leader = Authority(4, 0, 2), leader
        said = [asked.answer_inquiry(leader, Inquire(0, Authority(1, 0)))]
        said.append(asked.answer_inquiry(workers[2].name, Inquire(0, Authority(1, -2))))
        post.cancel()
        return said

    assert told(story) == [Superseded(Authority(4, 0, 2)), LedBy(NAMES[0])]
