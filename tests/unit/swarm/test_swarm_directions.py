"""A member that points against the others: it is in no mean, and named; and an honest member is not."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from diloco.swarm.audit.transfer import AuditedTransfer
from diloco.swarm.node.leader import LedRound
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.certificate import compares_directions
from diloco.swarm.protocol.plan import POINTS_AGAINST, Entry, Plan
from diloco.swarm.simulator.lies import tells_directions, tells_that_all_point_against
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker
from diloco.swarm.trainer import RoundOutcome

NUMEL = 40_000
COMMON = torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))

Lie = Callable[[int, torch.Tensor], torch.Tensor]
"""What a worker contributes to a round instead of its honest work."""


def honest(number: int, sequence: int) -> torch.Tensor:
    return COMMON + 0.7 * torch.randn(NUMEL, generator=torch.Generator().manual_seed(100 * sequence + number))


def against(_: int, values: torch.Tensor) -> torch.Tensor:
    return -2.9 * values


Ended = list[dict[int, RoundOutcome]]


async def rounds(
    workers: Sequence[MemoryWorker], count: int, lies: dict[int, Lie], plans: list[Plan] | None = None, **options: Any
) -> tuple[Ended, list[dict[int, torch.Tensor]]]:
    """How each round ended for each worker, and its mean."""
    outcomes: Ended = []
    means = []
    options = {"ratio": 3.0, "seconds": 600.0} | options
    await asyncio.sleep(3.0)  # until all have heard of each other, and reduce parts
    for _ in range(count):
        sequence = max(worker.trainer.sequence for worker in workers)
        given = {worker.node.number: honest(worker.node.number, sequence) for worker in workers}
        given |= {number: lie(sequence, given[number]) for number, lie in lies.items() if number in given}
        posts = [worker.post(given[worker.node.number], sequence=sequence, **options) for worker in workers]
        results = await asyncio.gather(*posts)
        outcomes.append({w.node.number: ended for w, (ended, _) in zip(workers, results, strict=True)})
        means.append(
            {
                w.node.number: torch.frombuffer(bytearray(mean), dtype=torch.float32)[:NUMEL]
                for w, (_, mean) in zip(workers, results, strict=True)
            }
        )
        last = workers[-1].node.outcomes.quorum.last_plan
        assert last is not None
        if plans is not None:
            plans.append(last)
        await asyncio.sleep(5.0)
    return outcomes, means


def play(count: int, workers: int, lies: dict[int, Lie], **options: Any) -> tuple[Ended, Any, list[Plan]]:
    async def story(swarm: MemorySwarm) -> Any:
        plans: list[Plan] = []
        ended, means = await rounds(await founded(swarm, workers), count, lies, plans, **options)
        return ended, means, plans

    return told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("workers", "liars"), [(3, {2}), (3, {0}), (4, {1}), (5, {4}), (5, {0, 3}), (7, {1, 2, 6})])
@pytest.mark.parametrize("merge", ["mean", "clipped"])
def test_fewer_than_half_that_turn_their_work_around_are_in_no_mean_and_named(
    workers: int, liars: set[int], merge: str
) -> None:
    """Also where a liar leads. They are named in the very round, and the mean is that of the others."""
    ended, means, _ = play(3, workers, dict.fromkeys(liars, against), merge=merge)
    good = sorted(set(range(workers)) - liars)
    for sequence, outcomes in enumerate(ended):
        for outcome in outcomes.values():
            assert outcome.failure is None and not outcome.resync
            assert set(outcome.contributors) == set(good)
            assert outcome.refused == dict.fromkeys(liars, POINTS_AGAINST)
        wanted = torch.stack([honest(number, sequence) for number in good]).mean(0)
        for mean in means[sequence].values():
            assert float((mean - wanted).norm() / wanted.norm()) < (1e-5 if merge == "mean" else 0.1)


def test_two_that_send_the_same_are_found_too() -> None:
    def same(sequence: int, _: torch.Tensor) -> torch.Tensor:
        return -2.9 * honest(3, sequence)

    ended, _, _ = play(2, 5, {3: same, 4: same})
    assert all(set(outcome.contributors) == {0, 1, 2} for outcomes in ended for outcome in outcomes.values())


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_calm_round_takes_one_plan_and_has_the_bits_of_one_in_which_directions_are_not_compared(workers: int) -> None:
    compared, means, plans = play(3, workers, {})
    _, others, unbounded = play(3, workers, {}, ratio=None)
    assert [plan.authority.attempt for plan in plans] == [1, 1, 1] and not any(plan.opposed for plan in plans)
    assert compares_directions(plans[0]) == (workers > 2) and not compares_directions(unbounded[0])
    assert all(torch.equal(one[0], other[0]) for one, other in zip(means, others, strict=True))
    assert all(not outcome.refused for outcomes in compared for outcome in outcomes.values())


def test_a_sleeper_is_out_in_the_round_in_which_it_begins_and_counts_again_when_it_points_with_the_others() -> None:
    def sleeper(sequence: int, values: torch.Tensor) -> torch.Tensor:
        return -2.9 * values if 2 <= sequence < 4 else values

    ended, _, _ = play(6, 5, {4: sleeper})
    assert [4 in outcomes[0].contributors for outcomes in ended] == [True, True, False, False, True, True]


def test_one_that_is_adverse_in_some_rounds_is_out_in_these() -> None:
    def sometimes(sequence: int, values: torch.Tensor) -> torch.Tensor:
        return -2.9 * values if sequence % 2 else values

    ended, _, _ = play(6, 5, {4: sometimes})
    assert [4 in outcomes[0].contributors for outcomes in ended] == [True, False] * 3


def test_after_three_rounds_it_is_refused_without_a_second_transfer_and_tried_now_and_then() -> None:
    _, _, plans = play(12, 5, {4: against})
    assert all(plan.opposed == (4,) for plan in plans)
    assert [plan.authority.attempt for plan in plans] == [2, 2, 2, 1, 2, 1, 1, 1, 2, 1, 1, 1]


def test_other_data_are_no_offence_and_none_that_is_refused_is_banned() -> None:
    """Two kinds of data that pull apart a little, and one worker that is refused in every round."""
    apart = torch.randn(NUMEL, generator=torch.Generator().manual_seed(8))

    def other(sequence: int, _: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(999 + sequence))
        return noise - 0.15 * COMMON + 0.3 * apart

    ended, _, _ = play(3, 5, {4: other})
    assert all(len(outcome.contributors) == 5 for outcomes in ended for outcome in outcomes.values())

    async def story(swarm: MemorySwarm) -> Any:
        workers = await founded(swarm, 5)
        await rounds(workers, 8, {4: against})
        return [worker.node.permissions.bans() for worker in workers]

    assert told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5) == [{}] * 5


def test_a_leader_cannot_have_an_honest_contribution_refused_for_its_direction() -> None:
    async def story(swarm: MemorySwarm) -> list[int]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1, {})
        lying = workers[0].node.leader
        made = LedRound._opposed_numbers

        def refuse(led: LedRound, entries: tuple[Entry, ...]) -> tuple[int, ...]:
            return (3,) if led._leader is lying else made(led, entries)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedRound, "_opposed_numbers", refuse)
            ended, _ = await rounds(workers[1:], 1, {})
        return [number for outcome in ended[0].values() for number in outcome.refused]

    assert told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5) == []


def test_reducers_that_tell_two_workers_different_directions_are_proved_to_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its signature covers what it tells, and two different ones are a proof."""
    sent = Transfer._send_mean
    liar: list[str] = []

    async def different(self: Transfer, stream: Any) -> None:
        if self._transport.peer in liar and stream.peer > self._transport.peer:
            signatures = self._signatures
            await self._wait_until(lambda: self._reduced == len(self._mine), 5.0)
            right = signatures._signed[self._transport.peer]
            wrong = bytes(len(right.directions))
            signed = signatures._notary.sign_range(self.plan, right.digest, wrong)
            monkeypatch.setattr(signatures, "own", lambda _: wrong + signed.signature)
            await sent(self, stream)
            monkeypatch.delattr(signatures, "own")
            return
        await sent(self, stream)

    monkeypatch.setattr(Transfer, "_send_mean", different)

    async def story(swarm: MemorySwarm) -> Any:
        workers = await founded(swarm, 4)
        await rounds(workers, 1, {})
        names = sorted(worker.name for worker in workers)
        liar.append(names[1])
        good = [worker for worker in workers if worker.name != names[1]]
        await rounds(workers, 1, {})
        return [list(worker.node.permissions.bans()) for worker in good], names[1]

    bans, name = told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)
    assert [name] in bans


def test_a_round_without_work_ends_well_after_one_in_which_a_contribution_was_refused() -> None:
    """As the confirmation at the end of a run."""

    async def story(swarm: MemorySwarm) -> Ended:
        workers = await founded(swarm, 4)
        await rounds(workers, 4, {3: against})
        ended, _ = await rounds(workers, 1, {3: against}, weight=0.0)
        return ended

    ended = told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)
    assert all(one.failure is None and one.total_weight == 0 and not one.refused for one in ended[0].values())


# Next to nothing


@pytest.mark.parametrize("workers", [3, 5])
def test_a_contribution_that_is_next_to_nothing_is_not_in_the_mean_and_named(workers: int) -> None:
    ended, means, _ = play(2, workers, {1: lambda _, values: 1e-3 * values})
    good = [number for number in range(workers) if number != 1]
    for sequence, outcomes in enumerate(ended):
        for outcome in outcomes.values():
            assert outcome.failure is None and set(outcome.contributors) == set(good)
            assert set(outcome.refused) == {1} and "below a tenth" in outcome.refused[1]
        wanted = torch.stack([honest(number, sequence) for number in good]).mean(0)
        assert torch.allclose(means[sequence][0], wanted, atol=1e-5)


def test_a_worker_that_claims_a_longer_contribution_than_its_own_is_banned_after_three() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], str]:
        workers = await founded(swarm, 5)
        liar, numel = workers[2], 20_000
        for sequence in range(4):
            posts = []
            for worker in workers:
                generator = torch.Generator().manual_seed(100 * sequence + worker.node.number)
                values = torch.randn(numel, generator=generator)
                lie = {"claimed": float(values.norm())} if worker is liar else {}
                given = 1e-3 * values if worker is liar else values
                posts.append(worker.post(given, sequence=sequence, ratio=3.0, seconds=60.0, **lie))
            await asyncio.gather(*posts)
            await asyncio.sleep(10.0)
        return [set(w.node.permissions.bans()) for w in workers if w is not liar], liar.name

    bans, liar = told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)
    assert bans == [{liar}] * 4


# Reducers that tell false directions


@pytest.mark.parametrize("workers", [3, 4])
def test_a_reducer_that_hides_its_own_direction_by_false_ones_of_others_is_banned(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that the others point against each other. Most tell the truth, so that it is refused at once all the
    same; and each worker of whose pair it has told something false bans it."""

    async def story(swarm: MemorySwarm) -> tuple[Ended, list[set[str]], str]:
        members = await founded(swarm, workers)
        liar = members[-1]
        tells_directions(liar, lambda _, right: [-1.0 for _ in right], monkeypatch)
        ended, _ = await rounds(members, 2, {workers - 1: against})
        return ended, [set(w.node.permissions.bans()) for w in members[:-1]], liar.name

    ended, bans, liar = told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)
    assert bans == [{liar}] * (workers - 1)
    assert all(set(outcomes[0].contributors) == set(range(workers - 1)) for outcomes in ended)


@pytest.mark.parametrize("workers", [5, 7])
def test_fewer_than_half_that_tell_false_directions_have_no_honest_worker_refused_and_are_banned(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say together that worker 0 points against all others, and contribute honestly, so that they are in the
    majority with which it is compared."""
    liars = range(workers // 2 + 1, workers)

    async def story(swarm: MemorySwarm) -> tuple[Ended, list[set[str]], set[str]]:
        members = await founded(swarm, workers)

        for liar in liars:
            tells_that_all_point_against(members[0], members[liar], monkeypatch)
        ended, _ = await rounds(members, 2, {})
        bans = [set(w.node.permissions.bans()) for w in members[: liars.start]]
        return ended, bans, {members[liar].name for liar in liars}

    ended, bans, names = told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)
    for outcomes in ended:
        for worker in range(liars.start):
            assert outcomes[worker].failure is None and not outcomes[worker].refused
    assert bans[0] == names, "it knows its own pairs"


def test_one_of_three_has_no_other_one_refused_by_a_false_direction_and_is_banned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two at a right angle; the third points with one of them and against the other, and says that these two are
    opposites."""
    apart = torch.randn(NUMEL, generator=torch.Generator().manual_seed(3))
    noise = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(50 + place)) for place in range(3)]
    kinds: dict[int, Lie] = {
        0: lambda *_: 0.5 * COMMON + apart + 0.1 * noise[0],
        1: lambda *_: COMMON - 0.5 * apart + 0.1 * noise[1],
        2: lambda *_: 0.2 * COMMON - apart + 0.1 * noise[2],
    }

    async def story(swarm: MemorySwarm) -> tuple[Ended, list[set[str]], str]:
        members = await founded(swarm, 3)
        liar = members[2]

        def change(audit: AuditedTransfer, right: list[float]) -> list[float]:
            return [-1.0, *right[1:]]

        tells_directions(liar, change, monkeypatch)
        ended, _ = await rounds(members, 1, kinds)
        return ended, [set(w.node.permissions.bans()) for w in members[:2]], liar.name

    ended, bans, liar = told(story, lost_seconds=5.0, beat_seconds=1.0, patience=0.5)
    assert not ended[0][1].refused
    assert bans == [{liar}] * 2
