"""Wrong means: contributions are bound before a round, every mean is checked after it, and the liar is named."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diloco.codecs.registry import codec
from diloco.core.merges import clipped_mean
from diloco.swarm.audit import mean_check, merkle, own_contributions, projections
from diloco.swarm.audit.mean_check import PARTS_AT_ONCE, MeanCheck
from diloco.swarm.audit.transfer import AuditedTransfer
from diloco.swarm.network.transport import CallRefused, Stream
from diloco.swarm.node import clock
from diloco.swarm.node import transfer as transfer_module
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.messages import AskPart, NotHere, Part
from diloco.swarm.protocol.wire import Malformed, PeerMessage
from diloco.swarm.simulator.lies import reduces_wrongly
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import RoundOutcome

NUMEL = 20_000


async def some_rounds(workers: list[MemoryWorker], count: int) -> list[Any]:
    """Each worker's contributors and mean, round by round; the check of each is awaited."""
    seen = []
    for _ in range(count):
        sequence = max(worker.trainer.sequence for worker in workers)
        posts = (w.post(values(w.node.number, sequence, NUMEL), sequence=sequence, seconds=20.0) for w in workers)
        seen.append(await asyncio.gather(*posts))
        await asyncio.sleep(3.0)
        for worker in workers:
            worker.node.own.has_state = True
    return seen


def banned(workers: list[MemoryWorker]) -> list[set[str]]:
    return [set(worker.node.permissions.bans()) for worker in workers]


def shows(worker: MemoryWorker, answer: PeerMessage) -> None:
    async def show(_: str, __: AskPart) -> PeerMessage:
        return answer

    worker.auditor.mean_check.show = show  # type: ignore[method-assign]


# The tree


def test_a_kept_tree_gives_the_same_roots_and_proofs_without_a_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    for total in (1, 2, 3, 5, 64, 67):
        leaves = merkle.leaves(memoryview(chance.randbytes(4 * total)), 4)
        tree = merkle.Tree(leaves)
        some = [range(first, total - first // 2) for first in range(total)]
        wanted = [(rows, merkle.prove(leaves, rows)) for rows in some if rows]
        root = merkle.root(leaves)
        with monkeypatch.context() as patch:
            patch.delattr(merkle, "_node")
            assert merkle.root(tree) == root
            assert all(merkle.prove(tree, rows) == proof for rows, proof in wanted)
    assert merkle.root(merkle.Tree([])) == merkle.root([])


def test_a_member_that_asks_for_parts_without_end_costs_no_hash_and_gets_a_bounded_number_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, int, bool]:
        first, second, third = workers = await founded(swarm, 3)
        await some_rounds(workers, 1)
        check = first.auditor.mean_check
        [plan_] = (bytes.fromhex(name) for name in list(check._rounds))
        monkeypatch.delattr(merkle, "_node")
        shown, refused = 0, 0
        for _ in range(1000):
            try:
                shown += isinstance(await check.show(second.name, AskPart(plan_, 0)), Part)
            except CallRefused as busy:
                refused += busy.code == "busy"
        return shown, refused, isinstance(await check.show(third.name, AskPart(plan_, 0)), Part)

    shown, refused, other = told(story)
    assert shown == PARTS_AT_ONCE and refused == 1000 - shown and other


def test_parts_with_their_proof_give_the_root_and_any_other_part_place_or_proof_does_not() -> None:
    chance = random.Random(0)
    for total in (1, 2, 3, 7, 64, 65):
        data = memoryview(chance.randbytes(4 * total))
        tree = merkle.leaves(data, 4)
        for _ in range(10):
            first = chance.randrange(total)
            rows = range(first, chance.randrange(first + 1, total + 1))
            proof, found = merkle.prove(tree, rows), tree[rows.start : rows.stop]
            root = merkle.root(tree)
            assert merkle.root_from(found, rows, total, proof) == root
            assert len(proof) <= 2 * 32 * total.bit_length()
            wrong = merkle.leaves(memoryview(b"else"), 4) + found[1:]
            assert merkle.root_from(wrong, rows, total, proof) != root
            for bad in (proof[:-1], proof + bytes(32), proof[32:]):
                if bad != proof:
                    with pytest.raises(Malformed):
                        merkle.root_from(found, rows, total, bad)


# Projections


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8", "int4", "e3m0"])
def test_the_numbers_of_a_right_mean_fit_and_those_of_a_flipped_one_do_not(name: str) -> None:
    """Over several means; a part of a wrong one may fit by chance, a range of parts does not."""
    used, parts, part = codec(name), 16, 1024
    weights = (1.0, 2.0, 0.5)

    plan: Any = SimpleNamespace(
        contributors=tuple(SimpleNamespace(peer=str(index)) for index in range(3)),
        decision=SimpleNamespace(weights=weights, scales=(), total_weight=sum(weights)),
        longest=300.0,
        ranges=lambda _: {"0": range(5), "1": range(5, 11), "2": range(11, 16)},
    )
    for seed in range(8):
        torch.manual_seed(seed)
        found, decoded = {}, []
        sign = projections.signs(bytes([seed] * 32), part)
        for index in range(3):
            encoded = torch.empty(parts, used.part_bytes(part), dtype=torch.uint8)
            used.encode(torch.randn(parts, part), encoded)
            decoded.append(torch.empty(parts, part))
            used.decode(encoded, decoded[-1])
            found[str(index)] = projections.project(used, encoded.view(-1).numpy().data, parts, sign)
        mean = sum(w * v for w, v in zip(weights, decoded, strict=True)) / sum(weights)
        assert isinstance(mean, torch.Tensor)
        for factor, fits in ((1.0, True), (-1.0, False), (0.0, False)):
            out = torch.empty(parts, used.for_means.part_bytes(part), dtype=torch.uint8)
            used.for_means.encode(factor * mean, out)
            data = out.view(-1).numpy().data
            numbers, error, _ = projections.project_mean(used.for_means, data, parts, sign)
            wanted = projections.expected(plan, found)
            assert (projections.suspects(plan, wanted, numbers, error) == []) == fits, (name, factor)


def clipped_means(
    count: int, signal: float, turned: int | None, seed: int, name: str = "fp16"
) -> tuple[Any, dict[str, Any], torch.Tensor, torch.Tensor]:
    """A plan of 16 parts and as many workers, the numbers of their contributions, the signs, and their clipped mean."""
    used, parts, part = codec(name), 16, 1024
    torch.manual_seed(seed)
    common = torch.randn(parts, part)
    plan: Any = SimpleNamespace(
        contributors=tuple(SimpleNamespace(peer=str(index)) for index in range(count)),
        decision=SimpleNamespace(weights=(1.0,) * count, scales=(), total_weight=count, merge="clipped"),
        longest=300.0,
        ranges=lambda _: {str(i): range(16 * i // count, 16 * (i + 1) // count) for i in range(count)},
    )
    sign = projections.signs(bytes([seed % 256] * 32), part, projections.CLIPPED_NUMBERS)
    found, decoded = {}, []
    for index in range(count):
        encoded = torch.empty(parts, used.part_bytes(part), dtype=torch.uint8)
        used.encode((signal * common + torch.randn(parts, part)) * (-1 if index == turned else 1), encoded)
        decoded.append(torch.empty(parts, part))
        used.decode(encoded, decoded[-1])
        found[str(index)] = projections.project(used, encoded.view(-1).numpy().data, parts, sign)
    mean = torch.empty(parts, part)
    clipped_mean(decoded, [1.0] * count, mean, ())
    return plan, found, sign, mean


def clipped_parts(plan: Any, found: dict[str, Any], sign: torch.Tensor, mean: torch.Tensor) -> list[int]:
    used = codec("fp16")
    out = torch.empty(len(mean), used.for_means.part_bytes(mean.shape[1]), dtype=torch.uint8)
    used.for_means.encode(mean, out)
    made = projections.project_mean(used.for_means, out.view(-1).numpy().data, len(mean), sign)
    return projections.clipped_suspects(plan, found, *made)


@pytest.mark.parametrize("count", [4, 5, 8])
@pytest.mark.parametrize("signal", [0.2, 1.0])
@pytest.mark.parametrize("turned", [None, 1])
def test_a_clipped_mean_that_is_wrong_is_suspected_as_often_as_computed(
    count: int, signal: float, turned: int | None
) -> None:
    """One part, the range of one reducer, or a right mean; also where a contribution counts as the others' mean."""
    missed_part = missed_range = alarms = 0
    rounds = 40
    for seed in range(rounds):
        plan, found, sign, mean = clipped_means(count, signal, turned, seed)
        alarms += bool(clipped_parts(plan, found, sign, mean))
        wrong = mean.clone()
        wrong[3] *= -1
        missed_part += 3 not in clipped_parts(plan, found, sign, wrong)
        wrong = mean.clone()
        rows = plan.ranges(16)["2"]
        wrong[rows.start : rows.stop] *= -1
        missed_range += not set(rows).intersection(clipped_parts(plan, found, sign, wrong))
    assert missed_range == 0
    assert missed_part <= 4  # of 40; computed with t = 0.6: 0.014 each
    assert alarms <= 4, "a right part is opened now and then"


def test_the_probability_that_a_wrong_part_of_a_clipped_mean_is_missed_is_that_of_the_numbers() -> None:
    chance = np.random.default_rng(0)
    for wrong_by, threshold in ((2.0, 0.6), (1.0, 0.5), (2.0, 1.5)):
        numbers = chance.normal(0.0, wrong_by, (200_000, projections.CLIPPED_NUMBERS))
        missed = float(np.mean(np.sqrt(np.mean(numbers**2, axis=1)) < threshold))
        assert missed == pytest.approx(projections.miss_probability(wrong_by, threshold), abs=0.003)
    assert projections.miss_probability(2.0, 0.6) < 0.015
    assert projections.miss_probability(2.0, 1.0) ** 2 < 0.01, "of two rounds, where a part is wrong by twice t"


# Rounds


@pytest.mark.parametrize("seed", range(6))
def test_a_reducer_of_clipped_means_is_banned_within_two_rounds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It turns its range around from its second round on; no random part is opened here, only what is suspected."""

    def contribution(number: int, sequence: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10_000 * seed + 100 * sequence + number)
        common = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
        return 0.5 * common + torch.randn(NUMEL, generator=generator)

    async def story(swarm: MemorySwarm) -> tuple[list[list[set[str]]], str]:
        workers = await founded(swarm, 5)
        liar = workers[seed % 5]
        good = [worker for worker in workers if worker is not liar]
        bans = []
        for sequence in range(3):
            if sequence == 1:
                reduces_wrongly(liar, lambda decoded: -decoded, monkeypatch)
            posts = [
                w.post(contribution(w.node.number, sequence), sequence=sequence, merge="clipped", seconds=20.0)
                for w in workers
            ]
            await asyncio.gather(*posts)
            await asyncio.sleep(3.0)
            bans.append(banned(good))
        return bans, liar.name

    bans, liar = told(story)
    assert bans[0] == [set()] * 4
    assert bans[2] == [{liar}] * 4


@pytest.mark.parametrize("name", ["fp32", "e3m0"])
def test_honest_rounds_open_no_part_and_name_no_worker(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    async def note(_: MeanCheck, __: Any, part: int) -> None:
        opened.append(part)

    monkeypatch.setattr(MeanCheck, "_open", note)

    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], list[int]]:
        workers = await founded(swarm, 4)
        for worker in workers:
            worker.codec = name
        await some_rounds(workers, 2)
        return banned(workers), [len(worker.auditor.mean_check._rounds) for worker in workers]

    bans, checked = told(story)
    assert bans == [set()] * 4 and checked == [2] * 4 and opened == []


def test_a_check_leaves_the_trainer_the_time_that_the_transfer_took(monkeypatch: pytest.MonkeyPatch) -> None:
    told_at, compared_at = list[float](), list[float]()
    tell, wait, run = MeanCheck._tell, MeanCheck._wait_for_numbers, Transfer.run

    async def note_tell(check: MeanCheck, *arguments: Any) -> None:
        told_at.append(clock.now())
        await tell(check, *arguments)

    async def note_wait(check: MeanCheck, round_: Any) -> list[str]:
        compared_at.append(clock.now())
        return await wait(check, round_)

    async def run_long(transfer: Transfer) -> None:
        await asyncio.sleep(0.3)
        await run(transfer)

    monkeypatch.setattr(MeanCheck, "_tell", note_tell)
    monkeypatch.setattr(MeanCheck, "_wait_for_numbers", note_wait)
    monkeypatch.setattr(Transfer, "run", run_long)

    async def story(swarm: MemorySwarm) -> float:
        workers = await founded(swarm, 2)
        await asyncio.gather(*(worker.post(values(i, 0, NUMEL)) for i, worker in enumerate(workers)))
        ended = clock.now()
        await asyncio.sleep(3.0)
        return ended

    ended = told(story)
    assert len(told_at) == len(compared_at) == 2
    assert all(one >= ended + 0.25 for one in told_at + compared_at)


@pytest.mark.parametrize(("name", "number", "hidden"), [("int4", 0, False), ("int8", 2, True)])
def test_a_reducer_that_gives_all_the_same_wrong_mean_is_named_by_every_honest_worker(
    name: str, number: int, hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it tells no numbers and shows no part. The honest ones have equal means throughout."""

    async def story(swarm: MemorySwarm) -> tuple[list[Any], list[set[str]], str]:
        workers = await founded(swarm, 5)
        for worker in workers:
            worker.codec = name
        liar, honest = workers[number], [worker for worker in workers if worker.node.number != number]
        await some_rounds(workers, 1)
        reduces_wrongly(liar, torch.neg, monkeypatch)
        if hidden:
            liar.auditor.mean_check.begin = lambda *_: None  # type: ignore[method-assign]
        seen = []
        for sequence in range(1, 5 if hidden else 3):
            lying = asyncio.create_task(liar.post(values(number, sequence, NUMEL), sequence=sequence, seconds=6.0))
            seen += await some_rounds(honest, 1)
            await lying
            liar.node.own.has_state = True
            await asyncio.sleep(10.0)
        return seen, banned(honest), liar.name

    seen, bans, liar = told(story)
    assert [len({mean for _, mean in results}) for results in seen] == [1] * len(seen)
    assert bans == [{liar}] * 4
    assert number in seen[0][0][0].contributors and number not in seen[-1][0][0].contributors


def test_a_worker_that_sends_other_parts_than_it_is_bound_to_is_left_out_before_any_mean_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same norm, the other sign. It has signed nothing of what it sent, so that none can prove it to others: it
    rests, since all have a quarrel with it, and is not banned."""
    send = Transfer._send

    async def story(swarm: MemorySwarm) -> tuple[list[Any], list[set[str]]]:
        workers = await founded(swarm, 4)
        liar, honest = workers[3], workers[:3]

        async def flipped(transfer: Transfer, stream: Stream, data: memoryview) -> None:
            other = -np.frombuffer(data, np.float32) if transfer._transport.peer == liar.name else None
            await send(transfer, stream, data if other is None else memoryview(other.tobytes()))

        monkeypatch.setattr(Transfer, "_send", flipped)
        seen = []
        for _ in range(3):
            lying = asyncio.create_task(
                liar.post(values(3, 0, NUMEL), sequence=honest[0].trainer.sequence, seconds=9.0)
            )
            seen += await some_rounds(honest, 1)
            await lying
            liar.node.own.has_state = True
        return seen, banned(honest)

    seen, bans = told(story)
    for results in seen:
        assert {ended.contributors for ended, _ in results} == {(0, 1, 2)} and len({mean for _, mean in results}) == 1
    assert bans == [set()] * 3


def test_a_worker_that_tells_wrong_numbers_has_no_reducer_banned_and_is_banned_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tell = MeanCheck._tell

    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], str]:
        workers = await founded(swarm, 4)
        liar = workers[1]

        async def lie(check: MeanCheck, round_: Any, numbers: Any) -> None:
            await tell(check, round_, numbers + 500 if check._me == liar.name else numbers)

        monkeypatch.setattr(MeanCheck, "_tell", lie)
        await some_rounds(workers, 4)
        return banned([workers[0], workers[2], workers[3]]), liar.name

    bans, liar = told(story)
    assert bans == [{liar}] * 3


@pytest.mark.parametrize("restarted", [False, True])
def test_not_to_show_a_part_is_an_offence_unless_the_worker_was_restarted_since(restarted: bool) -> None:
    async def story(swarm: MemorySwarm) -> list[str]:
        first, second, *_ = workers = await founded(swarm, 3)
        await some_rounds(workers, 1)
        check, offences = first.auditor.mean_check, list[str]()
        check._liars.record_unproved = lambda peer, _: offences.append(peer)  # type: ignore[method-assign]
        shows(second, NotHere())
        [round_] = (check._rounds.get(name) for name in list(check._rounds))
        assert round_ is not None
        if restarted:
            round_.processes[second.name] = "an earlier one"
        assert await check._shown_part(round_, second.name, b"", 0) is None
        return ["second" for peer in offences if peer == second.name]

    assert told(story) == ([] if restarted else ["second"])


def test_a_large_contribution_can_be_shown_though_the_trainer_writes_the_next_one_into_its_memory_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker 1 tells no numbers, so that the others open parts of its range, and ask all workers for them."""
    monkeypatch.setattr(own_contributions, "_MOST_BYTES", 0)
    opened: list[bool] = []
    differs = mean_check._differs

    def note(*given: Any) -> bool:
        opened.append(differs(*given))
        return opened[-1]

    monkeypatch.setattr(mean_check, "_differs", note)

    async def story(swarm: MemorySwarm) -> list[str]:
        workers, offences = await founded(swarm, 3), list[str]()

        async def post(worker: MemoryWorker) -> None:
            posted = worker.posting(values(worker.node.number, 0, NUMEL))
            assert (await worker.node.post(posted)).failure is None
            posted.contribution.view[:] = bytes(posted.contribution.num_bytes)

        async def tell(*_: Any) -> None:
            return

        for worker in workers:
            check = worker.auditor.mean_check
            check._liars.record_unproved = lambda _, reason: offences.append(reason)  # type: ignore[method-assign]
        workers[1].auditor.mean_check._tell = tell  # type: ignore[method-assign]
        await asyncio.gather(*(post(worker) for worker in workers))
        await asyncio.sleep(30.0)
        return offences

    assert told(story) == [] and opened == [False, False]


@pytest.mark.parametrize(("later", "offence"), [(2, True), (3, False)])
def test_not_to_show_a_part_is_an_offence_as_long_as_a_contribution_must_be_kept(
    later: int, offence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here three are kept; the worker that asks has slept since."""

    async def story(swarm: MemorySwarm) -> tuple[list[str], bool]:
        *others, asleep = workers = await founded(swarm, 4)
        await some_rounds(workers, 1)
        check, offences = asleep.auditor.mean_check, list[str]()
        [round_] = (check._rounds.get(name) for name in list(check._rounds))
        assert round_ is not None
        monkeypatch.setattr(own_contributions, "_MOST_BYTES", 3 * round_.posted.contribution.num_bytes)
        check._liars.record_unproved = lambda peer, _: offences.append(peer)  # type: ignore[method-assign]
        swarm.network.cut.add(asleep.name)
        await some_rounds(others, later)
        swarm.network.cut.clear()
        await asyncio.sleep(3.0)
        request = AskPart(round_.agreed.plan.digest, 0)
        shown = isinstance(await others[0].auditor.mean_check.show("peer", request), Part)
        shows(others[0], NotHere())
        assert await check._shown_part(round_, others[0].name, b"", 0) is None
        return offences, shown

    offences, shown = told(story)
    assert shown == offence and bool(offences) == offence


def test_a_large_contribution_does_not_take_the_place_of_small_ones_that_are_owed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(swarm: MemorySwarm) -> list[bool]:
        [worker] = await founded(swarm, 1)
        kept = own_contributions.OwnContributions()
        small, large = (worker.posting(values(0, 0, numel)).contribution.num_bytes for numel in (NUMEL, 8 * NUMEL))
        monkeypatch.setattr(own_contributions, "_MOST_BYTES", 4 * small)
        assert large > 4 * small
        for sequence, numel in enumerate((NUMEL, NUMEL, NUMEL, 8 * NUMEL, NUMEL)):
            posted = worker.posting(values(0, sequence, numel), sequence=sequence)
            kept.keep(plan([0], sequence), posted, await own_contributions.hash_parts(posted))
        return [await kept.find(plan([0], n).digest) is not None for n in range(5)]

    assert told(story) == [False, True, True, True, True]


def test_a_worker_that_is_bound_to_a_part_of_another_size_is_named_and_the_check_does_not_fail() -> None:
    """Its header has the root of a tree over such parts: proof and root fit, and nothing can be added up again."""

    async def story(swarm: MemorySwarm) -> tuple[list[str], bool]:
        first, second, *_ = workers = await founded(swarm, 3)
        await some_rounds(workers, 1)
        check, offences = first.auditor.mean_check, list[str]()
        check._liars.record_unproved = lambda peer, _: offences.append(peer)  # type: ignore[method-assign]
        [round_] = (check._rounds.get(name) for name in list(check._rounds))
        assert round_ is not None
        odd = [b"three"] + [b"more"] * (round_.posted.num_parts - 1)
        tree = [merkle.leaves(memoryview(part), len(part))[0] for part in odd]
        shown = Part(odd[0], merkle.prove(tree, range(1)))
        shows(second, shown)
        part = await check._shown_part(round_, second.name, merkle.root(tree), 0)
        return offences, part is None and second.name in offences

    offences, named = told(story)
    assert named and len(offences) == 1


@pytest.mark.parametrize("where", ["the copy of the mean", "the numbers"])
def test_a_check_that_fails_for_a_fault_of_its_own_is_told_and_stops_nothing(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = MeanCheck.begin

    async def fail(*_: object) -> Any:
        raise ZeroDivisionError("no numbers")

    if where == "the numbers":
        monkeypatch.setattr(MeanCheck, "_compare", fail)
    else:
        monkeypatch.setattr(MeanCheck, "begin", lambda *given: begin(*given[:-1], fail))

    async def story(swarm: MemorySwarm) -> list[list[Any]]:
        workers = await founded(swarm, 3)
        await some_rounds(workers, 2)
        await asyncio.sleep(1.0)
        return [[one for one in worker.trainer.events if one[0] == "check_failed"] for worker in workers]

    wanted = [("check_failed", {"round": n, "reason": "ZeroDivisionError: no numbers"}) for n in (0, 1)]
    assert told(story) == [wanted] * 3


def test_the_size_of_a_batch_changes_neither_the_mean_nor_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    squared_norm = AuditedTransfer._squared_norm

    def mean_and_norms(elements: int) -> tuple[bytes, list[float]]:
        norms: list[float] = []

        def note(audit: AuditedTransfer, data: memoryview) -> float:
            norms.append(squared_norm(audit, data))
            return norms[-1]

        monkeypatch.setattr(AuditedTransfer, "_squared_norm", note)
        monkeypatch.setattr(transfer_module, "BATCH_ELEMENTS", elements)
        monkeypatch.setattr(transfer_module, "_CHUNKS", 2)

        async def story(swarm: MemorySwarm) -> list[tuple[RoundOutcome, bytes]]:
            workers = await founded(swarm, 2)
            return await asyncio.gather(*(w.post(values(i, 0, 8 * NUMEL)) for i, w in enumerate(workers)))

        (_, mean), (_, other) = told(story)
        assert mean == other and norms
        return mean, norms

    (mean, norms), (same_mean, same_norms) = mean_and_norms(1), mean_and_norms(1 << 19)
    assert mean == same_mean and norms == pytest.approx(same_norms, rel=1e-5)
