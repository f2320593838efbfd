"""Which members count: liars and joiners leave no honest worker without a majority."""

import asyncio
import hashlib
import math

import pytest
from msgspec.structs import replace

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol.certificate import Agreed, Certificate
from diloco.swarm.protocol.membership import Membership, Peer
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.status import OwnStatus, Status
from diloco.swarm.settings import Settings
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import RoundOutcome

_NUMEL = 16 * 1024
"""Every worker has parts to reduce, and can accuse."""


async def post(worker: MemoryWorker, lies: bool = False) -> RoundOutcome:
    digest = hashlib.sha256(b"".join(worker.trainer.means)).hexdigest()[:16]
    work = values(worker.node.number, worker.trainer.sequence, _NUMEL)
    return (await worker.post(work, claimed=math.nan if lies else None, digest=digest, seconds=30.0))[0]


def test_two_liars_that_join_while_an_honest_worker_is_away_do_not_stop_the_rounds() -> None:
    """Worker 2 is cut off. Two liars join, and are in no mean. Then worker 2 is back, and has missed a round."""

    async def story(swarm: MemorySwarm) -> list[tuple[str | None, tuple[int, ...]]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 2)
        absent = workers[2]
        swarm.network.cut.add(absent.name)
        liars = [await swarm.start(), await swarm.start()]
        for liar in liars:
            await liar.catch_up()
        lying = [asyncio.create_task(post(liar, lies=True)) for liar in liars]
        first = await asyncio.gather(*(post(worker) for worker in workers[:2]))
        assert [one.contributors for one in first] == [(0, 1)] * 2
        await asyncio.gather(*lying)
        swarm.network.cut.clear()
        await asyncio.sleep(5.0)
        for one in (absent, *liars):
            one.node.own.has_state = False
            await one.catch_up()
        lying = [asyncio.create_task(post(liar, lies=True)) for liar in liars]
        ended = await asyncio.gather(*(post(worker) for worker in workers[:3]))
        await asyncio.gather(*lying)
        return [(one.failure, one.contributors) for one in ended]

    assert told(story, patience=0.5) == [(None, (0, 1, 2))] * 3


def test_no_worker_follows_a_leader_that_does_not_know_the_last_round() -> None:
    """A side that gave the round up would make a majority of the members before it, with this worker."""

    async def story(swarm: MemorySwarm) -> None:
        workers = await founded(swarm, 3)
        await rounds(workers, 2)
        quorum = workers[1].node.outcomes.quorum
        assert quorum.last_plan is not None and quorum.last_ended == 1 and quorum.last_plan.last_ended == 0
        quorum.check_plan(replace(quorum.last_plan, last_ended=1))
        with pytest.raises(CallRefused, match="round 1 has ended, and the plan's leader does not know that"):
            quorum.check_plan(replace(quorum.last_plan, last_ended=0))

    told(story)


def test_the_answer_of_a_member_that_was_expelled_meanwhile_is_dropped() -> None:
    async def story(swarm: MemorySwarm) -> bool:
        one, other = await founded(swarm, 2)
        heartbeats, members = one.node.heartbeats, one.node.members
        peer: Peer = members.peers[other.name]
        ask = heartbeats._call

        async def expel(*call: object) -> bytes:
            answer = await ask(*call)  # type: ignore[arg-type]
            members.peers.pop(other.name)
            return answer

        heartbeats._call = expel  # type: ignore[method-assign, assignment]
        await heartbeats._beat(peer)
        return other.name in members.peers

    assert told(story) is False


def test_five_members_count_as_the_worked_example_of_the_quorum_says() -> None:
    """The example is at the head of protocol/quorum.py."""
    now = [10.0]
    own = OwnStatus(0, has_state=True, next_round=8, waiting_round=8, ended_round=7, contributed_round=7)
    members = Membership(NAMES[0], Settings("", ""), own, lambda: now[0])
    for number, name in enumerate(NAMES[1:5], 1):
        peer = members.peers[name] = Peer(name, b"", ())
        last = 6 if number == 4 else 7
        status = Status(number, has_state=True, next_round=8, waiting_round=8, ended_round=7, contributed_round=last)
        members.hear(peer, status, hello=True)
    one, two, three, four = members.peers.values()

    def names(*numbers: int) -> set[str]:
        return {NAMES[number] for number in numbers}

    def end_of(sequence: int, workers: list[int], voters: list[int]) -> Agreed:
        made = replace(plan(workers, sequence), majority=True, counted=(4,))
        return Agreed(made, Certificate(1, (), {NAMES[voter]: bytes(64) for voter in voters}))

    quorum = Quorum(members)
    quorum.record_end(end_of(7, [0, 1, 2, 3], [0, 1, 2]))
    assert quorum.counting_members() == names(0, 1, 2, 3, 4)
    assert quorum.is_majority(names(0, 1, 2)) and not quorum.is_majority(names(0, 4))
    three.lose(now[0], gone=False)
    assert quorum.counting_members() == names(0, 1, 2, 3, 4) and quorum.sees_majority()
    two.lose(now[0], gone=False)
    one.lose(now[0], gone=False)
    assert not quorum.sees_majority()
    one.stay_away(now[0], gone=True)
    three.stay_away(now[0], gone=True)
    assert quorum.counting_members() == names(0, 2, 4) and quorum.sees_majority()
    four.status = replace(four.status, next_round=9, waiting_round=9)
    assert quorum.can_still_end(8)
    end = end_of(8, [2, 4], [2, 4])
    assert quorum.has_most_votes(end) and quorum.rules_out_others(end)
    members.hear(two, replace(two.status, next_round=9, waiting_round=9), hello=True)
    assert not quorum.can_still_end(8)
