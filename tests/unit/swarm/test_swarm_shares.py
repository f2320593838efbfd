"""How the reduction of a round is shared out: two workers that cannot reach each other, and slow lines."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from diloco.swarm.network.transport import Stream, Unreachable
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.shares import Shares
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, plan

FEW_SECONDS = 6.0
"""More than it takes to find out that a worker is silent, less than a transfer may stall."""
PAIR = (1, 3)


async def posted(workers: list[MemoryWorker], seconds: float) -> Plan:
    """A round that all must end within this time, and with the work of all."""
    sequence = workers[0].trainer.sequence
    async with asyncio.timeout(seconds):
        await rounds(workers, 1)
    ended = workers[0].node.outcomes.recent.get(sequence)
    assert ended is not None and ended.plan.decision.contributors == tuple(range(len(workers)))
    return ended.plan


def reducers(made: Plan) -> set[int]:
    ranges = made.ranges(100)
    return {entry.number for entry in made.entries if len(ranges[entry.peer])}


def test_two_workers_that_cannot_reach_each_other_are_both_in_every_round() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[Plan], Plan, list[list[bytes]]]:
        workers = await founded(swarm, 4)
        await posted(workers, FEW_SECONDS)
        swarm.network.pairs = [{workers[index].name for index in PAIR}]
        await posted(workers, FEW_SECONDS)  # found out in the middle of it
        apart = [await posted(workers, FEW_SECONDS) for _ in range(5)]
        swarm.network.pairs = []
        await asyncio.sleep(20.0)
        return apart, await posted(workers, FEW_SECONDS), [worker.trainer.means for worker in workers]

    apart, healed, means = told(story)
    assert all(reducers(made) == {0, 2} for made in apart)
    assert reducers(healed) == {0, 1, 2, 3}
    assert all(one == means[0] for one in means)


def test_a_pair_whose_transfer_failed_is_remembered_and_tried_again_later() -> None:
    """Their beats arrive, so that only a transfer shows it."""

    async def story(swarm: MemorySwarm) -> list[Plan]:
        workers = await founded(swarm, 4)
        for index, other in (PAIR, PAIR[::-1]):
            transport, open_stream = workers[index].node.transport, workers[index].node.transport.open_stream

            async def refuse(
                peer: str, seconds: float, there: str = workers[other].name, open_stream: Any = open_stream
            ) -> Stream:
                if peer == there:
                    raise Unreachable("a firewall")
                return await open_stream(peer, seconds)  # type: ignore[no-any-return]

            transport.open_stream = refuse  # type: ignore[method-assign]
        plans = [await posted(workers, FEW_SECONDS) for _ in range(3)]
        await asyncio.sleep(100.0)
        return [*plans, await posted(workers, FEW_SECONDS), await posted(workers, FEW_SECONDS)]

    attempts = [made.authority.attempt for made in told(story)]
    assert attempts[0] > 1 and attempts[3] > 1, "first found, and found again after a while"
    assert attempts[1] == attempts[2] == attempts[4] == 1


@pytest.mark.parametrize(
    ("rates", "shares"),
    [
        ([None] * 4, ()),
        ([100.0, 101.0, 80.0, 60.0], ()),
        ([100.0, 100.0, None, 40.0], (4, 4, 4, 2)),
        ([100.0, 100.0, 100.0, 1.0], (4, 4, 4, 0)),
        ([1.0, 100.0], (0, 4)),
        ([1.0, None], ()),
    ],
)
def test_a_slow_line_has_a_smaller_share(rates: list[float | None], shares: tuple[int, ...]) -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, ...]:
        node = (await founded(swarm, 1))[0].node
        measured = {NAMES[index]: rate for index, rate in enumerate(rates) if rate is not None}
        made = plan(list(range(len(rates))))
        node.participant.transfers.record(plan([0]), 1.0, measured)
        return Shares(node.members, node.participant.transfers).make(made)

    assert told(story) == shares


def test_only_contributors_have_shares_so_that_a_refused_one_is_never_the_last_to_reduce() -> None:
    """Else the parts would be divided among workers that cannot exchange them, and no report would tell."""

    async def story(swarm: MemorySwarm) -> tuple[tuple[int, ...], set[str]]:
        node = (await founded(swarm, 1))[0].node
        shares = Shares(node.members, node.participant.transfers)
        shares.record_failure(NAMES[0], NAMES[1])
        made = structs.replace(plan([0, 1, 2]), opposed=(2,))
        assert [entry.number for entry in made.contributors] == [0, 1]
        return shares.make(made), made.reducers

    assert told(story) == ((), {NAMES[0], NAMES[1]})


def test_where_no_contributor_can_reduce_those_in_most_bad_pairs_are_left_out() -> None:
    async def story(swarm: MemorySwarm) -> tuple[set[str], set[str]]:
        node = (await founded(swarm, 1))[0].node
        shares = Shares(node.members, node.participant.transfers)
        made = plan([0, 1, 2, 3, 4])
        for bad in (3, 4):
            for other in (0, 1):
                shares.record_failure(NAMES[bad], NAMES[other])
        before = shares.cut_off(made)
        shares.record_failure(NAMES[3], NAMES[2])
        return before, shares.cut_off(made)

    before, after = told(story)
    assert before == set(), "worker 2 can reduce"
    assert after == {NAMES[3]}, "without it worker 2 can reduce again"


def test_the_parts_are_divided_by_the_shares_of_those_that_contribute() -> None:
    def divided(made: Plan) -> list[int]:
        ranges = [made.ranges(12)[entry.peer] for entry in made.contributors]
        assert [part for one in ranges for part in one] == list(range(12))
        return [len(one) for one in ranges]

    def shared(*shares: int) -> Plan:
        made = plan([0, 1, 2])
        return Plan(made.key, made.authority, made.leader, made.entries, made.roster, False, 1000.0, shares=shares)

    assert divided(shared()) == [4, 4, 4] == divided(shared(4, 4, 4))
    assert divided(shared(4, 0, 2)) == [8, 0, 4]
    for wrong in ((1, 2), (0, 0, 0)):
        with pytest.raises(Malformed, match="shares"):
            shared(*wrong)
