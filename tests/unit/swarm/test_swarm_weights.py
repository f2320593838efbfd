"""What a contribution weighs in a swarm: the work of one round, of more only for a worker that has missed rounds."""

import asyncio
from typing import Any

import pytest
from msgspec import structs

from diloco.core.merging import MAX_WEIGHT_ROUNDS
from diloco.engines.header import pack, unpack
from diloco.engines.rounds import Contribution, RoundKey
from diloco.swarm.protocol.missed_rounds import MissedRounds
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import RoundOutcome

ROUND = 10.0


async def all_post(workers: list[MemoryWorker], sequence: int, **weights: float) -> list[RoundOutcome]:
    """`weights`: worker_N of the workers that claim another one than that of a round."""
    posts = []
    for worker in workers:
        number = worker.node.number
        weight = weights.get(f"worker_{number}", ROUND)
        posts.append(worker.post(values(number, sequence), sequence=sequence, weight=weight, round_weight=ROUND))
    ended = [one for one, _ in await asyncio.gather(*posts)]
    assert {one.failure for one in ended} == {None}
    return ended


def totals(outcomes: list[RoundOutcome]) -> set[float]:
    return {one.total_weight for one in outcomes}


def test_a_member_of_the_last_round_counts_as_one_round_of_work_whatever_it_claims() -> None:
    async def story(swarm: MemorySwarm) -> list[set[float]]:
        workers = await founded(swarm, 4)
        return [totals(await all_post(workers, sequence, worker_3=5 * ROUND)) for sequence in range(4)]

    assert told(story) == [{4 * ROUND}] * 4


def test_a_worker_that_missed_two_rounds_counts_as_three_and_then_as_one_again() -> None:
    async def story(swarm: MemorySwarm) -> list[set[float]]:
        workers = await founded(swarm, 4)
        await all_post(workers, 0)
        swarm.network.cut.add(workers[3].name)
        for sequence in (1, 2):
            await all_post(workers[:3], sequence)
        swarm.network.cut.discard(workers[3].name)
        await asyncio.sleep(2.0)
        workers[3].node.own.has_state = False
        await workers[3].catch_up()
        await asyncio.sleep(0.3)
        return [totals(await all_post(workers, sequence, worker_3=3 * ROUND)) for sequence in (3, 4)]

    assert told(story) == [{6 * ROUND}, {4 * ROUND}]


@pytest.mark.parametrize(("claim", "total"), [(2 * ROUND, 5 * ROUND), (5 * ROUND, 4 * ROUND)])
def test_a_leader_that_missed_a_round_counts_as_two_and_a_false_claim_lets_all_count_as_one(
    claim: float, total: float
) -> None:
    async def story(swarm: MemorySwarm) -> list[set[float]]:
        workers = await founded(swarm, 4)
        await all_post(workers, 0)
        swarm.network.cut.add(workers[0].name)
        await asyncio.sleep(10.0)
        await all_post(workers[1:], 1)
        swarm.network.cut.discard(workers[0].name)
        await asyncio.sleep(5.0)
        workers[0].node.own.has_state = False
        await workers[0].catch_up()
        await asyncio.sleep(0.3)
        return [totals(await all_post(workers, 2, worker_0=claim)), totals(await all_post(workers, 3, worker_0=claim))]

    assert told(story) == [{total}, {4 * ROUND}]


def test_a_weight_of_ten_to_the_eighteen_is_refused_by_all_and_its_sender_banned() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], list[set[str]]]:
        workers = await founded(swarm, 4)
        ended = []
        for sequence in range(3):
            liar = workers[3].post(values(3), sequence=sequence, weight=1e18, round_weight=1e18)
            lie = asyncio.create_task(liar)
            ended += await all_post(workers[:3], sequence)
            await lie
        return ended, [set(worker.node.permissions.bans()) for worker in workers[:3]]

    ended, bans = told(story)
    assert {one.contributors for one in ended} == {(0, 1, 2)} and bans == [{NAMES[3]}] * 3
    assert all("round_weight 1e+18" in one.refused[3] for one in ended)


def test_a_leader_cannot_let_itself_count_as_five_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 4)
        await all_post(workers, 0)
        missed = workers[0].node.outcomes.missed
        monkeypatch.setattr(missed, "rounds_of", lambda _, peers: tuple(5 if p == NAMES[0] else 1 for p in peers))
        return await all_post(workers, 1, worker_0=5 * ROUND)

    assert totals(told(story)) == {4 * ROUND}


def test_a_leader_that_has_seen_fewer_rounds_than_the_others_leads_on() -> None:
    """It takes a round for failed that has ended for the others: they refuse its plan, and it makes another one."""

    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 3)
        await all_post(workers, 0)
        workers[0].node.outcomes.missed.record(0, ())
        return await all_post(workers, 1)

    ended = told(story)
    assert totals(ended) == {3 * ROUND} and {one.contributors for one in ended} == {(0, 1, 2)}


def test_rounds_of_work_are_counted_by_fragment_and_rounds_that_failed_count_for_all() -> None:
    seen, both = MissedRounds(), plan([0, 1]).entries
    assert seen.rounds_of(0, both) == (), "what is not known is one round"
    seen.record(0, NAMES[:2])
    seen.record(1, NAMES[:1])
    assert seen.rounds_of(0, both) == () and seen.rounds_of(1, both) == (1, 2)
    seen.record(0, ())
    assert seen.rounds_of(0, both) == (2, 2)
    for _ in range(9):
        seen.record(0, NAMES[1:2])
    assert seen.rounds_of(0, both) == (MAX_WEIGHT_ROUNDS, 1)
    seen.forget()
    assert seen.rounds_of(0, both) == ()


@pytest.mark.parametrize(("rounds", "excess"), [((), None), ((1, 1), None), ((1, 2), NAMES[1]), ((5, 1), None)])
def test_a_plan_is_compared_with_the_rounds_that_a_worker_has_seen(rounds: tuple[int, ...], excess: str | None) -> None:
    seen, made = MissedRounds(), plan([0, 1])
    seen.record(0, [NAMES[1]])  # how long worker 0 has been away is not known here
    made = structs.replace(made, rounds=rounds)
    assert seen.find_excess(made) == excess


def test_an_honest_worker_claims_at_most_five_rounds_of_work() -> None:
    """It trained on through twenty failed rounds, say: a larger claim would be an offence."""
    honest: Any = Contribution(None, 20 * ROUND, 1.0, "anchor", "same", round_weight=ROUND)  # type: ignore[arg-type]
    assert unpack(0, pack(RoundKey(0, 0), honest)).claim.weight == MAX_WEIGHT_ROUNDS * ROUND
    fixed: Any = Contribution(None, 20 * ROUND, 1.0, "anchor", "same")  # type: ignore[arg-type]
    assert unpack(0, pack(RoundKey(0, 0), fixed)).claim.weight == 20 * ROUND
