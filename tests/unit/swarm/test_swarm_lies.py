"""A member that lies: honest members end with equal means, and the liar is named where it can be proved."""

import asyncio
import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.header import pack as pack_header
from diloco.engines.rounds import Contribution, Report, RoundKey
from diloco.errors import EngineError
from diloco.swarm.audit import merkle
from diloco.swarm.audit.liars import has_signed_both
from diloco.swarm.audit.long_parts import Encoding, are_long, sign_contribution
from diloco.swarm.audit.witnesses import state_digest
from diloco.swarm.network.transport import CallRefused, Stream
from diloco.swarm.node import clock
from diloco.swarm.node.leader import LedRound
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.certificate import (
    Certificate,
    Notary,
    SignedRange,
    certify,
    directions_bytes,
    range_digests,
    reducers,
)
from diloco.swarm.protocol.messages import Proof, decode
from diloco.swarm.protocol.plan import Authority, Entry
from diloco.swarm.protocol.proofs import CertifiedPlan, LongParts, ShownPart, TwoPlans, TwoRanges
from diloco.swarm.protocol.wire import Malformed, encode
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar.snapshots import write
from diloco.swarm.simulator.lies import (
    NAN,
    accuses,
    certifies_two_plans,
    certify_alone,
    claims_the_end,
    gives_others_another_mean,
    serves_another_state,
)
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import NUMEL, SEEDS, MemorySwarm, MemoryWorker, plan, values
from diloco.swarm.trainer import PostedRound, PresentWorker, RoundOutcome, Snapshot


async def all_post(workers: list[MemoryWorker]) -> list[bytes]:
    """The means of a round that all must end."""
    results = await asyncio.gather(*(w.post(values(w.node.number, w.trainer.sequence, 5000)) for w in workers))
    assert [ended.failure for ended, _ in results] == [None] * len(workers), results
    return [mean for _, mean in results]


def banned(workers: list[MemoryWorker]) -> list[set[str]]:
    return [set(worker.node.permissions.bans()) for worker in workers]


def notary(name: str) -> Notary:
    return Notary("run", name, SEEDS[name])


# Certificates


def certified(voters: list[int], mean: bytes = b"mean" * 4) -> tuple[Any, Certificate | None]:
    """A plan of three workers whose mean has four parts, and what these voters make of it."""
    made = plan([0, 1, 2])
    names = [entry.peer for entry in made.entries]
    digests = range_digests(made, 4, mean)
    told = bytes(directions_bytes(made))
    ranges = tuple(notary(name).sign_range(made, one, told) for name, one in zip(names, digests, strict=True))
    votes = {names[index]: notary(names[index]).vote(made, 4, ranges) for index in voters}
    return made, certify(made, votes)


def test_a_certificate_takes_the_votes_of_most_workers_of_the_plan() -> None:
    made, certificate = certified([0, 2])
    assert certificate is not None and certified([1])[1] is None
    check = notary(made.entries[0].peer)
    check.check(made, certificate)
    check.check_mean(made, certificate, b"mean" * 4)
    with pytest.raises(Malformed, match="not the one that was voted for"):
        check.check_mean(made, certificate, b"mean" * 3 + b"lies")


def test_a_certificate_that_was_changed_or_is_of_another_plan_or_run_counts_for_nothing() -> None:
    made, certificate = certified([0, 2])
    assert certificate is not None
    one, two = certificate.signatures
    check = notary(one)
    swapped = dict(zip((one, two), reversed(certificate.signatures.values()), strict=True))
    other = structs.replace(certificate.ranges[0], digest=bytes(32))
    for forged in (
        structs.replace(certificate, signatures={one: certificate.signatures[one]}),
        structs.replace(certificate, signatures=swapped),
        structs.replace(certificate, ranges=(other, *certificate.ranges[1:])),
        structs.replace(certificate, num_parts=5),
        structs.replace(certificate, ranges=()),
    ):
        with pytest.raises(Malformed):
            check.check(made, forged)
    with pytest.raises(Malformed):
        check.check(structs.replace(made, roster=(0,)), certificate)
    with pytest.raises(Malformed):
        Notary("another run", one, SEEDS[one]).check(made, certificate)
    check.is_invited = lambda peer: peer != two
    with pytest.raises(Malformed, match="1 of 3"):
        check.check(made, certificate)


def test_a_plan_without_workers_is_malformed() -> None:
    """A certificate of it needs no vote, and nothing can be decided from it."""
    with pytest.raises(Malformed):
        decode(encode(plan([0])).replace(encode_entries(plan([0])), b"\x90"))


def encode_entries(made: Any) -> bytes:
    return msgspec.msgpack.encode(made.entries)


# "I have ended this round, here is its mean"


@pytest.mark.parametrize("number", [0, 3])
def test_a_mean_that_most_have_not_voted_for_is_not_taken_whatever_a_member_says(number: int) -> None:
    """The leader, or another worker: it claims that a round has ended, and gives NaN as the mean."""

    async def story(swarm: MemorySwarm) -> tuple[list[bytes], list[list[bytes]], list[set[str]], str]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        liar, honest = workers[number], [worker for worker in workers if worker.node.number != number]
        claims_the_end(swarm, liar)
        await asyncio.sleep(1.0)
        means = await all_post(honest)
        return means, [worker.trainer.means for worker in honest], banned(honest), liar.name

    means, kept, bans, liar = told(story)
    assert bans == [{liar}] * 3 if number == 0 else all(one <= {liar} for one in bans)  # a leader is asked by all
    assert len(set(means)) == 1 and all(one == kept[0] for one in kept)
    assert not any(NAN * 8 in mean for one in kept for mean in one)


def test_a_late_worker_takes_a_mean_only_if_its_bytes_are_those_that_were_voted_for() -> None:
    """One member gives another mean with the right certificate: the worker asks the next one, and notes the lie."""

    async def story(swarm: MemorySwarm) -> tuple[list[bytes], list[bytes], int | None]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        late, liar = workers[3], workers[0]
        swarm.network.cut.add(late.name)
        await asyncio.sleep(2.0)
        await rounds(workers[:3], 1)
        kept = liar.node.outcomes.recent.get(1)
        assert kept is not None
        liar.node.outcomes.recent._rounds[1] = type(kept)(kept.plan, NAN * (len(kept.mean) // 4), kept.certificate)
        liar.node.outcomes.recent.get(1)
        swarm.network.cut.discard(late.name)
        await asyncio.sleep(10.0)
        late.node.own.has_state = False
        sources = late.node.states.search.sources
        late.node.states.search.sources = lambda first: sorted(sources(first), key=lambda peer: peer.name != liar.name)  # type: ignore[method-assign]
        await late.catch_up()
        points = late.node.permissions._offence_points.get(liar.name)
        return late.trainer.means, workers[1].trainer.means, points

    late, others, points = told(story)
    assert late == others
    assert points


def test_a_member_that_claims_to_be_ahead_is_not_most_of_them_just_after_a_round() -> None:
    """The last beats of the honest ones tell of the round before; the liar's is of a later one."""

    async def story(swarm: MemorySwarm) -> tuple[bool, bool]:
        workers = await founded(swarm, 4)
        await rounds(workers, 3)
        members = workers[0].node.members
        for worker in workers[1:]:
            status = members.peers[worker.name].status
            status.contributed_round = status.ended_round = 1
        liar = members.peers[workers[3].name].status
        liar.contributed_round, liar.ended_round = 2, 9
        alone = members.most_ended(3)
        members.peers[workers[2].name].status.ended_round = 9
        return alone, members.most_ended(3)

    assert told(story) == (False, True)


# A reducer that gives different means


@pytest.mark.parametrize(("number", "victims"), [(0, 1), (0, 2), (3, 1)])
def test_a_reducer_that_gives_two_means_is_banned_by_all_with_a_proof(
    number: int, victims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader, or another worker, also if neither mean has most votes. The round ends for all honest ones alike."""

    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], list[set[str]], str]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        liar, honest = workers[number], [worker for worker in workers if worker.node.number != number]
        gives_others_another_mean(liar, {worker.name for worker in honest[-victims:]}, monkeypatch)
        lying = asyncio.create_task(liar.post(values(number, 1, 5000), seconds=5.0))
        await all_post(honest)
        await lying
        await asyncio.sleep(1.0)
        await all_post(honest)
        return [worker.trainer.means for worker in honest], banned(honest), liar.name

    means, bans, liar = told(story)
    assert len(means[0]) == 3 and all(one == means[0] for one in means)
    assert bans == [{liar}] * 3


def test_a_proof_is_two_means_of_one_plan_that_the_accused_has_signed() -> None:
    made = plan([0, 1, 2])
    accused, other = made.entries[1].peer, made.entries[2].peer

    def signed(name: str, digest: bytes) -> SignedRange:
        return notary(name).sign_range(made, digest)

    check = notary(other)
    one, two = signed(accused, bytes(32)), signed(accused, bytes([1] * 32))
    assert has_signed_both(check, TwoRanges(made.key, made.digest, accused, one, two))
    assert not has_signed_both(check, TwoRanges(made.key, made.digest, accused, one, one))
    assert not has_signed_both(check, TwoRanges(made.key, made.digest, accused, one, signed(other, bytes([1] * 32))))
    assert not has_signed_both(check, TwoRanges(made.key, bytes(32), accused, one, two))


def test_a_proof_that_proves_nothing_bans_its_sender_when_repeated_and_not_the_accused() -> None:
    async def story(swarm: MemorySwarm) -> tuple[set[str], str]:
        accuser, accused, judge = await founded(swarm, 3)
        made = plan([0, 1, 2])
        nothing = SignedRange(bytes(32), bytes(64)), SignedRange(bytes([1] * 32), bytes(64))
        lie = Proof(TwoRanges(made.key, made.digest, accused.name, *nothing))
        for _ in range(3):
            with pytest.raises(CallRefused):
                await accuser.node.outcomes.calls.ask(judge.name, lie)
        return banned([judge])[0], accuser.name

    bans, accuser = told(story)
    assert bans == {accuser}


# A leader that gets two plans certified


async def train(worker: MemoryWorker, until: float, counted: list[tuple[int, int, bytes]]) -> None:
    """As a trainer, until this time on the clock; what it counts: round, worker, mean."""
    trainer = worker.trainer
    while clock.now() < until:
        await asyncio.sleep(0.5)
        digest = hashlib.sha256(b"".join(trainer.means)).hexdigest()[:16]
        sequence = trainer.sequence
        ended, mean = await worker.post(values(worker.node.number, sequence), digest=digest, seconds=20.0)
        if ended.fatal:
            return
        if ended.failure is None and ended.total_weight > 0:
            counted.append((sequence, worker.node.number, mean))
        trainer.sequence = max(trainer.sequence, sequence + 1)
        if ended.resync:
            await worker.catch_up()


def led_twice(
    liars: int, halves: list[list[int]], attempts: tuple[int, int], patch: pytest.MonkeyPatch
) -> tuple[list[set[str]], set[str], int, list[list[bytes]], int]:
    """Bans of the honest ones, the liars, in how many rounds two means counted, the honest ones' means, rounds."""

    async def story(swarm: MemorySwarm) -> Any:
        workers = await founded(swarm, liars + sum(map(len, halves)))
        await rounds(workers, 1)
        honest, counted = workers[liars:], list[tuple[int, int, bytes]]()
        sides = [[workers[number] for number in half] for half in halves]
        certifies_two_plans(workers[0], workers[1:liars], sides, patch, attempts=attempts)
        end = clock.now() + 8.0
        await asyncio.gather(*(train(worker, end, counted) for worker in workers))
        mine = [one for one in counted if one[1] >= liars]
        ended = {sequence: {mean for other, _, mean in mine if other == sequence} for sequence, _, _ in mine}
        two = sum(len(means) > 1 for means in ended.values())
        names = {worker.name for worker in workers[:liars]}
        return banned(honest), names, two, [worker.trainer.means for worker in honest], len(ended)

    return told(story)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("liars", "halves"),
    [(1, [[1], [2]]), (1, [[1, 2], [3, 4]]), (2, [[2], [3, 4]])],
    ids=["one of three", "one of five", "two of five"],
)
@pytest.mark.parametrize("attempts", [(1, 1), (1, 2)], ids=["one authority", "two attempts"])
def test_a_leader_that_gets_two_plans_certified_is_banned_by_all_and_they_are_one_run_again(
    liars: int, halves: list[list[int]], attempts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps the halves apart, so that they meet in no plan; they compare how rounds have ended by their heartbeats.
    A helper that has voted for both is banned if both plans have one authority."""
    bans, names, two, means, ended = led_twice(liars, halves, attempts, monkeypatch)
    leader = sorted(names)[:1] if attempts == (1, 2) else sorted(names)
    assert two <= 2 and ended >= 6
    assert all(set(leader) <= one <= names for one in bans) and len(names) == liars
    assert all(one == means[0] for one in means)


def test_a_vote_for_two_plans_of_one_authority_is_a_proof_and_votes_in_two_attempts_are_none() -> None:
    async def story(swarm: MemorySwarm) -> list[list[str]]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        judge = workers[3].node.outcomes
        notaries = {worker.name: worker.node.outcomes.notary for worker in workers}
        last = judge.quorum.last_plan
        assert last is not None

        def ended(voters: list[int], attempt: int) -> CertifiedPlan:
            """A plan without a mean, of these workers; all of them vote."""
            entries = tuple(entry for entry in last.entries if entry.number in voters)
            made = structs.replace(last, authority=Authority(7, 0, attempt), entries=entries, max_norm_ratio=None)
            digests = [bytes([attempt]) * 32 for _ in reducers(made, 4)]
            ranges = tuple(
                notaries[peer].sign_range(made, digest) for peer, digest in zip(reducers(made, 4), digests, strict=True)
            )
            votes = {entry.peer: notaries[entry.peer].vote(made, 4, ranges) for entry in entries}
            certificate = certify(made, votes)
            assert certificate is not None
            return CertifiedPlan(made, certificate)

        def guilty(one: CertifiedPlan, other: CertifiedPlan) -> list[str]:
            return sorted(workers[3].auditor.liars._two_plans(TwoPlans(one, other, {})))

        names = [worker.name for worker in workers]
        both = guilty(ended([0, 1], 1), ended([1, 2], 1))
        attempts = guilty(ended([0, 1], 1), ended([1, 2], 2))
        led = guilty(ended([0, 1, 2], 1), ended([0, 1, 3], 2))
        in_its_name = guilty(ended([1, 2, 3], 1), ended([0, 1, 3], 2))
        forged = structs.replace(ended([1, 2], 1), certificate=ended([0, 1], 1).certificate)
        with pytest.raises(Malformed):
            guilty(ended([0, 1], 1), forged)
        return [both == [names[1]], attempts == [], led == [last.leader], in_its_name == []]

    assert told(story) == [True] * 4


# Wrong states for joiners


@pytest.mark.parametrize("options", [{}, {"ahead": 500}, {"swapped": True}])
def test_a_joiner_takes_no_state_that_other_members_do_not_have(options: dict[str, Any]) -> None:
    """The liar is asked first; the joiner names it, takes the state of another member, and is in the next round."""

    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], list[Any], str]:
        workers = list(await founded(swarm, 4))
        await rounds(workers, 2)
        liar = workers[1]
        serves_another_state(liar, **options)
        await asyncio.sleep(1.0)
        joiner = await swarm.start()
        states = joiner.node.states
        sources = states.search.sources
        states.search.sources = lambda first: sorted(sources(first), key=lambda peer: peer.name != liar.name)  # type: ignore[method-assign]
        await joiner.catch_up()
        liar.node.own.ended_round = 1
        await asyncio.sleep(1.0)
        await rounds([*workers, joiner], 1)
        refused = [fields["peer"] for type_, fields in joiner.trainer.events if type_ == "state_refused"]
        return [worker.trainer.means for worker in [*workers, joiner]], refused, liar.name

    means, refused, liar = told(story)
    assert len(means[0]) == 3 and all(one == means[0] for one in means)
    assert set(refused) == {liar}


def ask_first(worker: MemoryWorker, liars: list[MemoryWorker]) -> None:
    """It asks these for the state, and about the state of the others, before any other member."""
    states, names = worker.node.states, {liar.name for liar in liars}
    sources = states.search.sources
    states.search.sources = lambda first: sorted(sources(first), key=lambda peer: peer.name not in names)  # type: ignore[method-assign]
    witnesses = worker.auditor.witnesses
    of = witnesses.of
    witnesses.of = lambda name: sorted(of(name), key=lambda one: one not in names)  # type: ignore[method-assign]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("ahead", [0, 3])
def test_two_witnesses_of_five_cannot_confirm_a_forged_state(ahead: int, behind: bool) -> None:
    """To a joiner, or to a member that has missed too many rounds for their means."""

    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], list[Any], set[str]]:
        workers = list(await founded(swarm, 6 if behind else 5))
        await rounds(workers, 2)
        *honest, one, two = workers
        if behind:
            late = workers.pop(0)
            honest.pop(0)
            swarm.network.cut.add(late.name)
            await asyncio.sleep(20.0)
            await rounds(workers, 10)
            swarm.network.cut.discard(late.name)
        for liar in (one, two):
            serves_another_state(liar, ahead=ahead)
            liar.node._own_checks.run = lambda: None  # type: ignore[method-assign]
        await asyncio.sleep(15.0)
        if behind:
            late.node.own.has_state = False
        else:
            late = await swarm.start()
        ask_first(late, [one, two])
        await late.catch_up()
        refused = {fields["peer"] for type_, fields in late.trainer.events if type_ == "state_refused"}
        return [worker.trainer.means for worker in [*honest, late]], refused, {one.name, two.name}

    means, refused, liars = told(story)
    assert all(one == means[0] for one in means)
    assert refused and refused <= liars


def test_a_joiner_takes_no_mean_on_top_of_a_right_state_that_only_two_of_five_have_signed() -> None:
    async def story(swarm: MemorySwarm) -> list[list[bytes]]:
        workers = await founded(swarm, 5)
        await rounds(workers, 2)
        certify_alone(workers[3:])
        joiner = await swarm.start()
        ask_first(joiner, workers[3:])
        await joiner.catch_up()
        return [worker.trainer.means for worker in [*workers[:3], joiner]]

    means = told(story)
    assert len(means[0]) == 2 and all(one == means[0] for one in means)


def test_a_worker_ends_no_round_with_a_plan_of_itself_and_two_others_of_five() -> None:
    """Of this plan most workers have signed the mean; of the members that count they have not."""

    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 5)
        await rounds(workers, 1)
        victim, liars = workers[1], workers[3:]
        certify_alone(liars, asking=victim)
        own = asyncio.create_task(victim.post(values(1, 1)))
        await asyncio.sleep(0.2)
        for liar in liars:
            await victim.node.outcomes.resolve(victim.node.participant.rounds[1], liar.name)
        assert not victim.node.participant.rounds[1].ended
        posts = (worker.post(values(worker.node.number, 1)) for worker in workers if worker is not victim)
        return [outcome for outcome, _ in await asyncio.gather(own, *posts)]

    assert {one.contributors for one in told(story)} == {(0, 1, 2, 3, 4)}


def test_no_worker_follows_a_plan_without_most_members() -> None:
    """A leader that makes a plan of itself and each other worker gets none of them certified."""

    async def story(swarm: MemorySwarm) -> list[str]:
        workers = await founded(swarm, 5)
        await rounds(workers, 1)
        leader, victim = workers[0], workers[1]
        refused: list[str] = []
        lone = asyncio.create_task(victim.post(values(1, 1), seconds=3.0))
        await asyncio.sleep(0.2)
        posted = victim.node.participant.rounds[1]
        last = leader.node.outcomes.quorum.last_plan
        assert last is not None
        entries = tuple(Entry(e.peer, posted.contribution) for e in last.entries if e.peer == victim.name)
        made = structs.replace(last, key=posted.posted.key, authority=Authority(9, 0, 1), entries=entries, shares=(),
                               rounds=(), last_ended=0)  # fmt: skip
        try:
            await leader.node.outcomes.calls.ask(victim.name, made)
        except CallRefused as refusal:
            refused.append(str(refusal))
        await lone
        return refused

    [refusal] = told(story)
    assert "most of the members that count" in refusal


def test_a_member_that_is_behind_takes_no_later_state_of_the_only_one_left_without_a_certificate() -> None:
    """The honest ones have ended and left; the liar, which stays, says that it is three rounds ahead."""

    async def story(swarm: MemorySwarm) -> tuple[list[bytes], list[bytes], list[Any], str]:
        workers = await founded(swarm, 4)
        await rounds(workers, 2)
        late, liar = workers[2], workers[3]
        serves_another_state(liar, ahead=3)
        liar.node._own_checks.run = lambda: None  # type: ignore[method-assign]
        late.node.own.has_state = False
        for worker in workers[:2]:
            await worker.node.leave()
        await asyncio.sleep(2.0)
        before = list(late.trainer.means)
        await late.catch_up()
        refused = [fields["peer"] for type_, fields in late.trainer.events if type_ == "state_refused"]
        return before, late.trainer.means, refused, liar.name

    before, after, refused, liar = told(story)
    assert after == before and set(refused) == {liar}


def test_of_two_members_that_disagree_a_joiner_believes_neither_and_says_so() -> None:
    async def story(swarm: MemorySwarm) -> None:
        workers = await founded(swarm, 2)
        await rounds(workers, 2)
        serves_another_state(workers[1])
        joiner = await swarm.start()
        with pytest.raises(EngineError, match="do not agree"):
            await joiner.catch_up()

    told(story)


def test_a_state_digest_covers_what_members_have_alike_and_nothing_of_the_worker_that_serves_it() -> None:
    tensors = {"0.anchor": torch.ones(3), "0.momentum": torch.zeros(3), "start.buffer": torch.ones(2)}
    numbers = {"sequence": 4, "0.rounds": 4, "inner_steps": 40}

    def taken(tensors: dict[str, torch.Tensor], numbers: dict[str, int]) -> bytes:
        return state_digest(Snapshot(write(tensors), numbers, "layout", b"note"))

    known = taken(tensors, numbers)
    assert taken(tensors | {"start.buffer": torch.zeros(2)}, numbers | {"inner_steps": 41}) == known
    for wrong in ({"0.anchor": torch.zeros(3)}, {"0.momentum": torch.ones(3)}, {"1.anchor": torch.zeros(1)}):
        assert taken(tensors | wrong, numbers) != known
    for number in ("sequence", "0.rounds"):
        assert taken(tensors, numbers | {number: 5}) != known


@pytest.mark.parametrize("data", [b"", b"\2\0\0\0\0\0\0\0[]", b"\xff" * 64, b'\x13\0\0\0\0\0\0\0{"0.anchor": [1, 2]}'])
def test_a_state_that_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        state_digest(Snapshot(SharedMemory.copy_of(data), {"sequence": 0}, "layout", b""))


# False accusations


def accused(
    victims: list[int], patch: pytest.MonkeyPatch, liars: tuple[int, ...] = (3,), count: int = 10, **kind: Any
) -> tuple[list[set[int]], list[float], list[set[str]]]:
    """Rounds in which these of five workers accuse the first of the victims that is there: contributors, seconds, bans
    as the honest ones have them."""

    async def story(swarm: MemorySwarm) -> tuple[list[set[int]], list[float], list[set[str]]]:
        workers = await founded(swarm, 5)
        await rounds(workers, 1)
        for number in liars:
            accuses(workers[number], [workers[number] for number in victims], patch, **kind)
        honest = [worker for worker in workers if worker.node.number not in liars]
        seen, seconds = [], []
        for sequence in range(1, 1 + count):
            started = clock.now()
            posts = (w.post(values(w.node.number, sequence), sequence=sequence) for w in workers)
            results = await asyncio.gather(*posts)
            ended = [(one.contributors, mean) for one, mean in results if one.failure is None]
            assert len(ended) >= 3 and len(set(ended)) == 1
            seen.append(set(ended[0][0]))
            seconds.append(clock.now() - started)
            for worker in workers:  # as if it had fetched the state
                worker.node.own.has_state, worker.node.own.ended_round = True, sequence
        return seen, seconds, banned(honest)

    return told(story)  # type: ignore[no-any-return]


def test_one_accuser_alone_has_no_worker_banned_and_each_of_the_two_is_in_every_second_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contributors, seconds, bans = accused([1], monkeypatch)
    assert bans == [set()] * 4
    assert all({0, 2, 4} < there and len(there) == 4 for there in contributors)
    assert sum(1 in there for there in contributors) >= 4
    quick = [number for number, took in enumerate(seconds) if took < 1.0]
    assert quick == [1, 2, 3, 4, 5, 6, 8, 9]  # the first accusation, and round 8, which has both again


def test_a_worker_that_accuses_several_others_is_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    contributors, seconds, bans = accused([1, 2, 4], monkeypatch)
    assert contributors == [{0, 1, 2, 4}] * 10 and bans == [set()] * 4
    assert sum(took < 1.0 for took in seconds) >= 7


def test_two_accusers_have_no_worker_banned_and_rest_as_many_rounds_together_as_the_accused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contributors, seconds, bans = accused([1], monkeypatch, liars=(3, 4), count=24)
    assert bans == [set()] * 3
    assert all({0, 2} < there and there in ({0, 2, 3, 4}, {0, 1, 2}) for there in contributors)
    rests = sum(1 not in there for there in contributors)
    assert 24 * 0.5 <= rests <= 24 * 0.7 and 24 - rests == sum(3 not in there for there in contributors)
    assert sum(took < 1.0 for took in seconds) >= 20  # the first accusation, and every eighth round


@pytest.mark.parametrize("leader", [True, False])
def test_two_accusers_of_all_others_are_left_out_and_every_round_ends(
    leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims = [0, 1, 2] if leader else [1, 2]
    contributors, seconds, bans = accused(victims, monkeypatch, liars=(3, 4), count=16)
    assert bans == [set()] * 3
    assert sum({0, 1, 2} <= there for there in contributors) >= (16 if leader else 7)
    assert all(len(there & {0, 1, 2}) >= 1 and len(there) >= 3 for there in contributors)
    assert sum(took < 1.5 for took in seconds) >= 12


@pytest.mark.parametrize("withheld", ["parts", "mean", None])
def test_two_that_say_that_an_honest_worker_sends_nothing_do_not_have_it_left_out(
    withheld: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fewer than half say is a bad line between each of them and that worker."""
    contributors, seconds, bans = accused([1], monkeypatch, liars=(3, 4), count=12, lie=False, withheld=withheld)
    assert bans == [set()] * 3
    assert sum(1 in there for there in contributors) >= 11
    assert sum(took < 1.5 for took in seconds[3:]) >= 6


# What can be proved


def long_parts(poison: float, claimed: float) -> tuple[LongParts, Encoding, RoundKey]:
    """Part 1 of three has this value in it, and the header claims this norm."""
    name = next(iter(SEEDS))
    work = values(0)
    work[1500] = poison
    vector = EncodedVector(codec("fp32"), PartLayout(NUMEL))
    vector.encode(0, work)
    key = RoundKey(4, 0)
    header = pack_header(key, Contribution(vector, 1.0, claimed, "anchor", "same", 1000.0))
    data = vector.data.numpy().tobytes()
    width = len(data) // len(vector.data)
    leaves = merkle.leaves(memoryview(data), width)
    contribution = PresentWorker(0, header, b"", merkle.root(leaves))
    rows = range(2)
    narrowed = merkle.narrow(leaves[:2], rows, 1, len(leaves), merkle.prove(leaves, rows))
    assert narrowed == merkle.prove(leaves, range(1, 2))
    shown = ShownPart(1, data[width : 2 * width], narrowed)
    lie = LongParts(name, contribution, sign_contribution(notary(name), key, contribution), (shown,))
    return lie, Encoding("same", "fp32", vector.layout.part_elements, len(leaves)), key


def test_a_part_that_is_longer_than_the_signed_header_claims_is_a_proof_and_nothing_else_is() -> None:
    lie, encoding, _ = long_parts(1e6, 60.0)
    assert are_long(lie, encoding) and are_long(*long_parts(math.nan, 60.0)[:2])
    assert not are_long(*long_parts(1.0, 60.0)[:2])
    other = structs.replace(lie.parts[0], data=lie.parts[0].data[::-1])
    for wrong in (
        (other,),
        (structs.replace(lie.parts[0], part=0),),
        (structs.replace(lie.parts[0], data=lie.parts[0].data[:-4]),),
        lie.parts * 2,
        (),
    ):
        assert not are_long(structs.replace(lie, parts=wrong), encoding)


def test_every_member_bans_the_author_of_long_parts_and_the_sender_of_a_false_proof() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], str, str]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        liar, false, *others = workers
        lie, _, key = long_parts(1e6, 60.0)
        own = liar.node.outcomes.notary
        signed = structs.replace(lie, peer=liar.name, signature=sign_contribution(own, key, lie.contribution))
        await others[0].node.outcomes.calls.ask(others[1].name, Proof(signed))
        for _ in range(3):
            with pytest.raises(CallRefused):
                await false.node.outcomes.calls.ask(others[0].name, Proof(structs.replace(signed, peer=others[1].name)))
        await asyncio.sleep(1.0)
        return banned([*others, false]), liar.name, false.name

    bans, liar, false = told(story)
    assert bans == [{liar, false}, {liar}, {liar}]


def test_a_leader_that_changes_a_header_has_no_worker_banned() -> None:
    """It makes plans in which one worker claims NaN and another is left out; most others vote for them."""

    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], str]:
        workers = await founded(swarm, 5)
        await rounds(workers, 1)
        leader, victim, other = workers[0], workers[1], workers[2]
        attempt = LedRound._attempt

        async def lie(led: LedRound, honest: Any) -> Any:
            bad = [structs.replace(e.contribution, header=_nan(e.contribution.header)) for e in honest.entries]
            entries = tuple(Entry(e.peer, bad[e.number] if e.peer == victim.name else e.contribution)
                            for e in honest.entries if e.peer != other.name)  # fmt: skip
            led.plan = made = structs.replace(honest, entries=entries)
            return await attempt(led, made)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LedRound, "_attempt", lie)
            for sequence in range(1, 6):
                posts = (w.post(values(w.node.number, sequence), sequence=sequence, seconds=9.0) for w in workers)
                await asyncio.gather(*posts)
                for worker in workers:
                    worker.node.own.has_state = True
        return banned([victim, other, workers[3], workers[4]]), leader.name

    bans, leader = told(story)
    assert all(one <= {leader} for one in bans)


def _nan(header: bytes) -> bytes:
    """The same header with a norm of NaN."""
    magic_key_weight = 4 + 8 + 8 + 8
    return header[:magic_key_weight] + struct.pack("<d", math.nan) + header[magic_key_weight + 8 :]


# A contribution that is not what its header claims


def test_a_lie_that_one_worker_finds_before_it_has_sent_its_own_parts_is_found_by_the_others_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It sends too late to a second reducer, which finds the lie all the same; the liar is banned."""

    async def story(swarm: MemorySwarm) -> list[RoundOutcome]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        honest, send = workers[1].name, Transfer._send

        async def send_late(transfer: Transfer, stream: Stream, data: memoryview) -> None:
            if transfer._transport.peer == honest:
                await asyncio.sleep(0.2)
            await send(transfer, stream, data)

        monkeypatch.setattr(Transfer, "_send", send_late)
        posts = [worker.post(values(worker.node.number, 1, 5000)) for worker in workers[:3]]
        ended = await asyncio.gather(*posts, workers[3].post(values(3, 1, 5000) * 1e6, claimed=1.0))
        return [outcome for outcome, _ in ended[:3]]

    assert [one.contributors for one in told(story, lost_seconds=5.0)] == [(0, 1, 2)] * 3


# Notes and reports


@pytest.mark.parametrize(
    "told_beside",
    [
        {"note": b'{"read": {"' + b"1" * 5000 + b'": [0, 0]}}'},
        {"note": b"{" * 16_000},
        {"report": Report(inner_steps=-7)},
    ],
)
@pytest.mark.parametrize("number", [0, 3])
def test_a_note_or_report_that_cannot_be_read_is_an_offence_of_its_author_alone(
    number: int, told_beside: dict[str, Any]
) -> None:
    """The leader too. Rounds end for the honest, whose trainers get no note of the liar; it is named and out."""

    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], list[set[str]], str]:
        workers = await founded(swarm, 5)
        liar, honest = workers[number], [worker for worker in workers if worker.node.number != number]
        ended: list[RoundOutcome] = []
        for _ in range(4):
            posts = [w.post(values(w.node.number, w.trainer.sequence)) for w in honest]
            lie = asyncio.create_task(liar.post(values(number), sequence=honest[0].trainer.sequence, **told_beside))
            ended += [outcome for outcome, _ in await asyncio.gather(*posts)]
            lie.cancel()
        return ended, banned(honest), liar.name

    ended, bans, liar = told(story)
    assert [outcome.failure for outcome in ended] == [None] * len(ended)
    assert all(number not in outcome.contributors for outcome in ended)
    assert "malformed" in ended[0].refused[number] or "report" in ended[0].refused[number]
    assert all(present.note == b"" for outcome in ended for present in outcome.present)
    assert bans == [{liar}] * 4


# Encoded parts whose scales, indices or values no encoder writes

SCALES = {"nan": math.nan, "infinite": math.inf, "huge": 1e38, "negative": -1e4}


def with_scales(posted: PostedRound, scale: float) -> PostedRound:
    """The last four bytes of every part are a scale of the block-wise codecs and of top-k's chunks."""
    width = posted.contribution.num_bytes // posted.num_parts
    data = bytearray(posted.contribution.view)
    for part in range(posted.num_parts):
        struct.pack_into("<f", data, (part + 1) * width - 4, scale)
    return structs.replace(posted, contribution=SharedMemory.copy_of(bytes(data)))


async def post_changed(workers: list[MemoryWorker], change: Callable[[PostedRound], PostedRound]) -> list[RoundOutcome]:
    """A round to which the last worker posts other bytes than its header claims. The outcomes of the honest ones."""
    *honest, liar = workers
    lie = asyncio.create_task(liar.node.post(change(liar.posting(values(4, 1, 5000)))))
    results = await asyncio.gather(*(w.post(values(w.node.number, 1, 5000)) for w in honest))
    lie.cancel()
    assert len({mean for _, mean in results}) == 1
    return [outcome for outcome, _ in results]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "2bit", "topk"])
def test_scales_out_of_range_count_for_nothing_and_ban_their_author(name: str, scale: str) -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], list[set[str]], str]:
        workers = await founded(swarm, 5)
        for worker in workers:
            worker.codec = name
        ended = await post_changed(workers, lambda posted: with_scales(posted, SCALES[scale]))
        await asyncio.sleep(1.0)
        return ended, banned(workers[:4]), workers[4].name

    ended, bans, liar = told(story)
    assert [outcome.failure for outcome in ended] == [None] * 4
    assert all(outcome.contributors == (0, 1, 2, 3) for outcome in ended)
    assert bans == [{liar}] * 4


@pytest.mark.parametrize("codes", [0x00, 0xFF, 0x80])
@pytest.mark.parametrize("name", ["int8", "int4", "topk"])
def test_codes_and_indices_that_no_encoder_writes_are_read_the_same_by_all_and_ban_no_honest_worker(
    name: str, codes: int
) -> None:
    """All codes of a part the same: int4's and int8's lowest, which no encoder uses, or top-k's indices all alike."""

    def change(posted: PostedRound) -> PostedRound:
        data = bytearray(posted.contribution.view)
        length = len(data) // posted.num_parts // 8
        data[:length] = bytes([codes]) * length
        return structs.replace(posted, contribution=SharedMemory.copy_of(bytes(data)))

    async def story(swarm: MemorySwarm) -> tuple[list[RoundOutcome], list[set[str]], str]:
        workers = await founded(swarm, 5)
        for worker in workers:
            worker.codec = name
        ended = await post_changed(workers, change)
        await asyncio.sleep(5.0)  # the mean is checked
        return ended, banned(workers[:4]), workers[4].name

    ended, bans, liar = told(story)
    assert [outcome.failure for outcome in ended] == [None] * 4
    assert all(one <= {liar} for one in bans)
