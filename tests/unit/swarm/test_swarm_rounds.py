"""Rounds of a swarm on a network in memory: what all members end with, also if one dies, freezes or lies."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import Merge
from diloco.core.fragments import PartLayout
from diloco.engines.note import Note, write_note
from diloco.engines.reduction import reduce_parts
from diloco.engines.rounds import Comparison
from diloco.swarm.node import recent_rounds
from diloco.swarm.node.transfer import Transfer, pack_comparison, unpack_comparison
from diloco.swarm.protocol.certificate import Certificate
from diloco.swarm.protocol.messages import Commit, Inquire
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.network import Fate, request_in
from diloco.swarm.simulator.workers import NUMEL, MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import RoundOutcome

NOTE = write_note(Note({3: (0, 7)}))

Story = Callable[[MemorySwarm, list[MemoryWorker]], Awaitable[Any]]


def told(workers: int, story: Story, **settings: Any) -> Any:
    """A swarm of so many workers that all have the state, and what happens to it."""

    async def run() -> Any:
        swarm = MemorySwarm(**{"lost_seconds": 0.5, "beat_seconds": 0.1, "patience": 50.0, **settings})
        for _ in range(workers):
            await (await swarm.start()).catch_up()
        await asyncio.sleep(0.3)
        try:
            async with asyncio.timeout(600):
                return await story(swarm, swarm.workers)
        finally:
            await swarm.close()

    return virtual_clock.run(run())


def mean_of(
    contributions: list[torch.Tensor], weights: list[float], name: str = "fp32", merge: Merge = "mean"
) -> bytes:
    """The very bytes that the reference engine ends with."""
    vectors = []
    for tensor in contributions:
        vectors.append(EncodedVector(codec(name), PartLayout(tensor.numel())))
        vectors[-1].encode(0, tensor)
    out = EncodedVector(codec(name), PartLayout(contributions[0].numel()))
    part = out.layout.part_elements
    reduce_parts(codec(name), [vector.data for vector in vectors], weights, part, out.data, merge=merge)
    return out.data.numpy().tobytes()


async def all_post(workers: list[MemoryWorker], sequence: int = 0, **options: Any) -> list[tuple[RoundOutcome, bytes]]:
    posts = (worker.post(values(worker.node.number, sequence), **options) for worker in workers)
    return list(await asyncio.gather(*posts))


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_all_members_get_the_bytes_of_the_reference_mean(name: str) -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
        for worker in workers:
            worker.codec = name
        terms = [{"weight": 1.0 + w.node.number, "round_weight": 4.0, "note": NOTE} for w in workers]
        posts = (w.post(values(w.node.number), **its) for w, its in zip(workers, terms, strict=True))
        return list(await asyncio.gather(*posts))

    results = told(4, story)
    wanted = mean_of([values(worker) for worker in range(4)], [1.0, 2.0, 3.0, 4.0], name)
    assert [mean for _, mean in results] == [wanted] * 4
    for ended, _ in results:
        assert (ended.failure, ended.contributors, ended.total_weight) == (None, (0, 1, 2, 3), 10.0)
        assert ended.roster == (0, 1, 2, 3) and [one.note for one in ended.present] == [NOTE] * 4
    assert {(ended.signatures, ended.mean_digest) for ended, _ in results} == {(4, results[0][0].mean_digest)}
    assert len(results[0][0].mean_digest) == 16


def test_a_range_is_reduced_in_chunks_so_that_means_leave_before_the_last_parts_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = []
    reduce_rows = Transfer._reduce_rows

    def note(self: Transfer, rows: range) -> Any:
        chunks.append((len(rows), len(self._mine)))
        return reduce_rows(self, rows)

    monkeypatch.setattr(Transfer, "_reduce_rows", note)

    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
        return list(await asyncio.gather(*(w.post(large[w.node.number]) for w in workers)))

    large = [torch.randn(1 << 20) for _ in range(2)]
    results = told(2, story)
    assert [mean for _, mean in results] == [mean_of(large, [1.0, 1.0])] * 2
    assert len(chunks) == 16 and all(8 * rows <= mine for rows, mine in chunks)


@pytest.mark.parametrize("operations", range(1, 241, 24))
@pytest.mark.parametrize("victim", [0, 2])
def test_a_worker_killed_at_any_moment_leaves_the_others_with_one_exact_mean(victim: int, operations: int) -> None:
    """Worker 0 leads. The mean is exactly that of the contributors it names, with the dead worker or without."""

    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
        tasks = [asyncio.create_task(worker.post(values(worker.node.number))) for worker in workers]

        def kill() -> None:
            swarm.network.kill(workers[victim].name)
            for task in [tasks[victim], *workers[victim].node._tasks]:
                task.cancel()

        swarm.network.after(operations, kill)
        return [await task for number, task in enumerate(tasks) if number != victim]

    results = told(4, story)
    ended = results[0][0]
    assert ended.failure is None and set(ended.contributors) >= {0, 1, 2, 3} - {victim}
    wanted = mean_of([values(worker) for worker in ended.contributors], [1.0] * len(ended.contributors))
    assert {mean for _, mean in results} == {wanted}
    assert {other.contributors for other, _ in results} == {ended.contributors}


@pytest.mark.parametrize("victim", [0, 3])
def test_a_worker_that_falls_silent_in_the_middle_is_left_out_and_catches_up_later(victim: int) -> None:
    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> list[bytes]:
        tasks = [asyncio.create_task(worker.post(values(worker.node.number))) for worker in workers]
        swarm.network.after(60, lambda: swarm.network.cut.add(workers[victim].name))
        others = [worker for number, worker in enumerate(workers) if number != victim]
        await asyncio.gather(*(task for number, task in enumerate(tasks) if number != victim))
        await all_post(others, 1)
        swarm.network.cut.clear()
        ended, _ = await tasks[victim]
        if ended.failure is not None:
            assert ended.resync
            await workers[victim].catch_up()
        if workers[victim].trainer.sequence < 2:  # its own round 0 counted, and it has only missed round 1
            ended, _ = await workers[victim].post(values(victim, 1))
            assert ended.resync
            await workers[victim].catch_up()
        await all_post(workers, 2)
        return [b"".join(worker.trainer.means) for worker in workers]

    means = told(4, story)
    assert len(set(means)) == 1 and means[0]


def test_a_cut_off_worker_does_not_step_alone_while_most_others_may_be_there() -> None:
    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> tuple[str | None, int]:
        swarm.network.cut.add(workers[1].name)
        task = asyncio.create_task(workers[1].post(values(1)))
        await all_post([workers[0], workers[2]])
        await asyncio.sleep(1.5)
        assert not task.done()
        swarm.network.cut.clear()
        ended, _ = await task
        return ended.failure, len(workers[1].trainer.means)

    failure, means = told(3, story)
    assert failure is not None and "without this worker" in failure and means == 0


def test_silent_workers_that_are_found_dead_are_waited_for_no_longer() -> None:
    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> tuple[bool, bool]:
        alone = workers[0].node.members
        swarm.network.cut.update(worker.name for worker in workers[1:])
        while alone.live():
            await asyncio.sleep(0.05)
        before = alone.may_go_on()
        for worker in workers[1:]:
            swarm.network.kill(worker.name)
        swarm.network.cut.clear()
        while not all(peer.gone for peer in alone.peers.values()):
            await asyncio.sleep(0.05)
        return before, alone.may_go_on()

    assert told(4, story) == (False, True)


def test_a_lone_survivor_of_kills_goes_on() -> None:
    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> RoundOutcome:
        for worker in workers[:2]:
            swarm.network.kill(worker.name)
            for task in worker.node._tasks:
                task.cancel()
        return (await workers[2].post(values(2)))[0]

    ended = told(3, story)
    assert (ended.failure, ended.contributors) == (None, (2,))


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_parts_that_are_not_what_was_claimed_are_found_out_and_their_sender_is_banned(poison: float) -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[list[tuple[RoundOutcome, bytes]]]:
        bad = values(1)
        bad[NUMEL // 2 :] = poison
        rounds = []
        for sequence in range(4):
            liar = asyncio.create_task(workers[1].post(bad, claimed=30.0, sequence=sequence))
            rounds.append(await all_post([workers[0], workers[2]], sequence))
            ended, _ = await liar
            assert ended.failure is not None
            await asyncio.sleep(0.1)
        return rounds

    rounds = told(3, story)
    for sequence, results in enumerate(rounds):
        wanted = mean_of([values(0, sequence), values(2, sequence)], [1.0, 1.0])
        assert [mean for _, mean in results] == [wanted, wanted]
    assert [results[0][0].roster for results in rounds] == [(0, 2)] * 4, "banned in the first round, with a proof"


@pytest.mark.parametrize(("missed", "count"), [(0, 4), (1, 4), (0, 3)])
@pytest.mark.parametrize("times", [5e3, 1e6], ids=["large", "absurd"])
def test_a_norm_out_of_bounds_is_an_offence_among_four_except_of_a_worker_that_missed_rounds(
    missed: int, count: int, times: float
) -> None:
    """Of three it is clipped, and no offence: the norms of two others do not tell which is wrong."""

    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> tuple[list[RoundOutcome], tuple[int, ...]]:
        ended = []
        for sequence in range(3):
            posts = [workers[i].post(values(i, sequence), sequence=sequence) for i in range(count) if i != 1]
            large = workers[1].post(times * values(1, sequence), weight=1.0 + missed, sequence=sequence)
            outcomes = await asyncio.gather(*posts, large)
            assert len({mean for _, mean in outcomes}) == 1
            ended.append(outcomes[0][0])
        return ended, workers[0].node.members.roster()

    ended, roster = told(count, story)
    refused = count == 4 and times == 1e6  # among four an absurd norm does not count at all
    assert [(set(one.clipped), set(one.refused)) for one in ended] == [(set(), {1}) if refused else ({1}, set())] * 3
    assert [1 in one.contributors for one in ended] == [not refused] * 3
    assert (1 in roster) == (bool(missed) or count == 3)


def test_four_workers_clip_their_mean_to_the_bits_of_the_reference_and_three_average_plainly() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[list[tuple[RoundOutcome, bytes]]]:
        posts = (worker.post(values(worker.node.number), merge="clipped") for worker in workers)
        four = list(await asyncio.gather(*posts))
        await workers[3].node.leave()
        await asyncio.sleep(0.3)
        posts = (worker.post(values(worker.node.number), merge="clipped", sequence=1) for worker in workers[:3])
        return [four, list(await asyncio.gather(*posts))]

    four, three = told(4, story)
    assert {mean for _, mean in four} == {mean_of([values(i) for i in range(4)], [1.0] * 4, merge="clipped")}
    assert {mean for _, mean in three} == {mean_of([values(i) for i in range(3)], [1.0] * 3)}
    assert [one.merge for one, _ in (*four, *three)] == ["clipped"] * 4 + ["mean"] * 3


@pytest.mark.parametrize("claimed", [None, 0, 1, 9])
def test_all_members_are_told_in_how_many_parts_a_contribution_was_replaced(
    claimed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 3 may lie about the two parts that it reduces, each time of worker 0; nine is more than it has."""
    reduce_rows = Transfer._reduce_rows

    def reduce(self: Transfer, rows: range) -> Any:
        mean, squares, told = reduce_rows(self, rows)
        if claimed is not None and self._transport.peer == self.plan.entries[-1].peer and len(self.plan.entries) == 4:
            told = replace(told, replaced=(claimed, *told.replaced[1:]))
        return mean, squares, told

    monkeypatch.setattr(Transfer, "_reduce_rows", reduce)

    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> tuple[list[RoundOutcome], set[str]]:
        results = await asyncio.gather(*(w.post(turned[w.node.number], merge="clipped", ratio=None) for w in workers))
        return [ended for ended, _ in results], set[str]().union(*(w.node.permissions.bans() for w in workers))

    turned = [(1.0 + 0.5 * values(i, numel=5000)) * (-1 if i == 2 else 1) for i in range(4)]
    ended, bans = told(4, story)
    assert not bans and all(one.failure is None for one in ended[:3])
    if claimed == 9:
        assert all(one.contributors == (0, 1, 2) for one in ended[:3])
    else:
        assert {one.comparison.replaced for one in ended} == {(claimed or 0, 0, 5, 0)}
        assert {(one.comparison.parts, one.merge) for one in ended} == {(5, "clipped")}


@pytest.mark.parametrize(("replaced", "parts"), [((0, 4, 0, 0), 3), ((0, 0, 0, 1), 0)])
def test_a_comparison_of_more_parts_than_a_reducer_has_is_malformed(replaced: tuple[int, ...], parts: int) -> None:
    told = Comparison((0.5,) * 10, replaced, parts)
    with pytest.raises(Malformed, match=f"of {parts} parts"):
        unpack_comparison(pack_comparison(told), 4, parts)
    assert unpack_comparison(pack_comparison(told), 4, 4) == replace(told, parts=4)
    with pytest.raises(Malformed, match="96 bytes instead of 60"):
        unpack_comparison(pack_comparison(told), 3, 4)


def test_an_honest_claim_of_nan_is_refused_and_its_sender_gets_the_mean() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
        bad = torch.full((NUMEL,), float("nan"))
        return list(await asyncio.gather(workers[0].post(values(0)), workers[1].post(bad), workers[2].post(values(2))))

    results = told(3, story)
    assert {mean for _, mean in results} == {mean_of([values(0), values(2)], [1.0, 1.0])}
    assert "not finite" in results[1][0].refused[1]


def test_a_worker_that_trains_something_else_is_told_so_for_good() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> tuple[RoundOutcome, RoundOutcome]:
        first = asyncio.create_task(workers[0].post(values(0)))
        await asyncio.sleep(0.1)
        other, _ = await workers[1].post(values(1), layout="another")
        await workers[1].node.leave()
        return other, (await first)[0]

    other, first = told(2, story)
    assert other.fatal and "trains something else" in str(other.failure)
    assert (first.failure, first.contributors) == (None, (0,))


def test_a_worker_with_another_anchor_is_refused_and_told_to_resynchronise() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[RoundOutcome]:
        posts = (w.post(values(w.node.number), digest="other" if w.node.number == 1 else "same") for w in workers)
        ended = [one for one, _ in await asyncio.gather(*posts)]
        await workers[1].catch_up()
        assert workers[1].trainer.means == workers[0].trainer.means
        return ended

    first, diverged, _ = told(3, story)
    assert diverged.resync and not first.resync and set(first.refused) == {1} and first.contributors == (0, 2)


def test_slow_workers_are_called_and_a_round_that_is_late_all_the_same_ends_without_them() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> tuple[list[int], RoundOutcome, RoundOutcome]:
        ended, _ = await workers[0].post(values(0))
        late, _ = await workers[1].post(values(1))
        return workers[1].trainer.calls, ended, late

    calls, ended, late = told(2, story, patience=0.0)
    assert 0 in calls
    assert ended.contributors == (0,) and ended.roster == (0, 1)
    assert late.failure is not None and late.resync


def test_a_round_without_any_work_has_no_mean_and_is_no_failure() -> None:
    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
        return await all_post(workers, weight=0.0)

    for ended, _ in told(2, story):
        assert (ended.failure, ended.total_weight, ended.contributors, ended.bytes_sent) == (None, 0.0, (), 0)


def test_a_new_leader_has_the_patience_of_the_one_before_it() -> None:
    """It has led no round yet, and may have been here for days."""

    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[float]:
        for worker in workers:
            worker.node.leader._patience._started -= 86_400.0
        for sequence in range(3):
            await all_post(workers, sequence)
        return [worker.node.leader.patience_seconds for worker in workers]

    assert max(told(3, story)) < 60.0


def test_joiners_that_outnumber_the_others_follow_a_round_that_ended_without_them() -> None:
    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> tuple[list[str | None], tuple[int, ...]]:
        await all_post(workers, 0)
        old, joiners = list(workers), []
        for _ in range(3):
            joiners.append(await swarm.start())
            await joiners[-1].catch_up()
            joiners[-1].node.own.has_state = False  # no other knows it yet: the round does not wait for it
        await asyncio.sleep(0.3)
        await all_post(old, 1)
        for joiner in joiners:
            joiner.node.own.has_state = True
        late = await all_post(joiners, 1, seconds=8.0)
        for joiner in joiners:
            await joiner.catch_up()
        await asyncio.sleep(0.3)
        ended, _ = (await all_post([*old, *joiners], 2))[0]
        return [one.failure for one, _ in late], ended.contributors

    failures, contributors = told(2, story, lost_seconds=2.0)
    assert all(failure is not None and "without this worker" in failure for failure in failures)
    assert contributors == (0, 1, 2, 3, 4)


def test_a_worker_that_missed_rounds_does_not_wait_for_members_that_have_left() -> None:
    """Its round fails at once and asks for a resync, which finds that this worker's state is the latest there is."""

    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> tuple[RoundOutcome, RoundOutcome]:
        last = workers[1]
        last.node.members.status.has_state = False  # the others ended a round without it
        await workers[0].node.leave()
        await asyncio.sleep(1.0)
        missed, _ = await last.post(values(1), seconds=500.0)
        await last.catch_up()
        alone, _ = await last.post(values(1, 1), sequence=1, seconds=500.0)
        return missed, alone

    missed, alone = told(2, story)
    assert missed.failure == "round 0: no live member has the state of the run" and missed.resync
    assert missed.seconds < 1.0  # of the virtual clock: it did not wait for the deadline
    assert (alone.failure, alone.contributors) == (None, (1,))


def test_a_leader_gives_up_a_round_that_others_have_ended_so_that_the_next_one_can_begin() -> None:
    """Worker 0 begins to lead round 0, which the others end without it; then it fetches their state."""

    async def story(_: MemorySwarm, workers: list[MemoryWorker]) -> list[tuple[RoundOutcome, bytes]]:
        leader = workers[0]
        early = asyncio.create_task(leader.post(values(0), seconds=2.0))
        await asyncio.sleep(1.0)
        assert leader.node.leader.phases() == {0: "gathering"}
        for worker in workers:  # as after a round 0 of the others, and the fetched state
            status = worker.node.members.status
            status.ended_round, status.next_round, worker.trainer.sequence = 0, 1, 1
        failed, _ = await early
        assert failed.failure == "round 0: the others ended it without this worker"
        leader.node.members.status.has_state = True
        await asyncio.sleep(1.0)  # the others hear that it leads again
        return await all_post(workers, sequence=1, seconds=60.0)

    for outcome, _ in told(3, story, timeout_seconds=600.0):
        assert (outcome.failure, outcome.contributors) == (None, (0, 1, 2))


def test_a_leader_asks_about_the_next_round_beside_the_one_that_is_under_way() -> None:
    """On a link with latency its answers are there when the earlier round has ended, and it is not asked again."""

    async def story(swarm: MemorySwarm, workers: list[MemoryWorker]) -> tuple[list[Any], list[tuple[str, int]]]:
        asked: list[tuple[str, int]] = []

        def note(_: str, __: str, request: bytes) -> Fate:
            message = request_in(request)
            if isinstance(message, Inquire | Commit):
                asked.append((type(message).__name__, message.sequence))
            return "arrives"

        swarm.network.fate, swarm.network.delay = note, lambda: 0.05
        posts = [w.post(values(w.node.number, n), sequence=n, fragment=n) for n in (0, 1) for w in workers]
        return list(await asyncio.gather(*posts)), asked

    ended, asked = told(3, story, patience=1000.0)
    assert asked.count(("Inquire", 1)) == 2  # each other member once
    assert asked.index(("Inquire", 1)) < asked.index(("Commit", 0)) < asked.index(("Commit", 1))
    for number, (outcome, mean) in enumerate(ended):
        assert (outcome.failure, outcome.contributors) == (None, (0, 1, 2))
        assert mean == mean_of([values(worker, number // 3) for worker in range(3)], [1.0] * 3)


def test_a_kept_mean_is_a_copy_that_the_next_post_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next round may use the same shared memory."""
    released, copy = threading.Event(), recent_rounds._copy

    def slow(*given: Any) -> None:
        assert released.wait(60)
        copy(*given)

    monkeypatch.setattr(recent_rounds, "_copy", slow)

    async def story() -> None:
        recent, memory = recent_rounds.RecentRounds(), SharedMemory.copy_of(b"mean")
        recent.add_copy(plan([0, 1]), memory, Certificate(1, (), {}))
        waiting = asyncio.create_task(recent.copied())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        released.set()
        await waiting
        memory.view[:] = b"next"
        kept = recent.get(plan([0, 1]).key.sequence)
        assert kept is not None and bytes(kept.mean) == b"mean"

    asyncio.run(story())
