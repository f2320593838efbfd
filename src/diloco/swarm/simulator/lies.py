"""Ways in which a worker of a swarm in memory lies. Each changes what one worker does, and leaves all others alone."""

import asyncio
import struct
from collections.abc import Callable, Mapping
from itertools import combinations
from types import TracebackType
from typing import Any, Protocol

import torch
from msgspec import structs

from diloco.engines.rounds import RoundKey
from diloco.swarm.audit import directions
from diloco.swarm.audit.auditor import AuditedRound
from diloco.swarm.audit.transfer import AuditedTransfer
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node.audit import Lie
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.leader import LedRound
from diloco.swarm.node.round import OwnRound
from diloco.swarm.node.transfer import Transfer, TransferFailed, comparison_bytes
from diloco.swarm.protocol import leading, messages
from diloco.swarm.protocol.certificate import (
    Certificate,
    RangeDigest,
    certify,
    directions_bytes,
    range_digests,
    reducers,
)
from diloco.swarm.protocol.plan import Entry, Plan
from diloco.swarm.protocol.troubles import Quarrels
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, values
from diloco.swarm.trainer import PresentWorker

NAN = bytes.fromhex("0000c07f")


class Patcher(Protocol):
    """An object that replaces an attribute for a while: `Patches`, or pytest's MonkeyPatch."""

    def setattr(self, target: Any, name: str, value: Any, /) -> None: ...


class Patches:
    """Replaces attributes until its context ends, and then gives them their old values."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Patches":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._before:
            target, name, value = self._before.pop()
            setattr(target, name, value)

    def setattr(self, target: Any, name: str, value: Any, /) -> None:
        self._before.append((target, name, getattr(target, name)))
        setattr(target, name, value)


def claims_the_end(swarm: MemorySwarm, liar: MemoryWorker) -> None:
    """It says that the rounds of others have ended, with a mean of NaN and votes that it has made for all of them."""
    node = liar.node
    honest = node._answer

    def posted(sequence: int) -> dict[str, Any]:
        rounds = {worker.name: worker.node.participant.rounds.get(sequence) for worker in swarm.workers}
        return {name: round_ for name, round_ in rounds.items() if round_ is not None}

    def forge(sequence: int) -> messages.Outcome:
        last = node.outcomes.quorum.last_plan
        rounds = posted(sequence)
        if last is None or not rounds:
            return messages.Outcome()
        entries = sorted(
            (Entry(name, round_.contribution) for name, round_ in rounds.items()), key=lambda entry: entry.number
        )
        posted_round = next(iter(rounds.values())).posted
        parts = posted_round.num_parts
        made: Plan = structs.replace(last, key=posted_round.key, entries=tuple(entries), majority=True, shares=())
        data = NAN * (posted_round.mean.num_bytes // 4)
        own = node.outcomes.notary
        told = bytes(directions_bytes(made))
        ranges = tuple(own.sign_range(made, digest, told) for digest in range_digests(made, parts, data))
        vote = own.vote(made, parts, ranges)
        signatures = dict.fromkeys((entry.peer for entry in made.entries), vote.signature)
        return messages.Outcome(made, Certificate(parts, ranges, signatures))

    async def answer(peer: str, request: Any) -> Any:
        if peer != liar.name:
            node.own.ended_round = max(node.own.ended_round, 1000)
            if isinstance(request, messages.Ready | messages.Inquire):
                return messages.Ended()
            if isinstance(request, messages.AskOutcome):
                return forge(request.sequence)
        return await honest(peer, request)

    async def serve(stream: Stream, request: messages.OpenMean) -> None:
        size = next((round_.posted.mean.num_bytes for round_ in posted(request.sequence).values()), 0)
        await stream.write(size.to_bytes(8, "little"), 1.0)
        await write_frame(stream, NAN * (size // 4), 1.0)

    node._answer = answer  # type: ignore[method-assign]
    node.outcomes.serve_mean = serve  # type: ignore[method-assign]


def certify_alone(liars: list[MemoryWorker], asking: MemoryWorker | None = None) -> None:
    """Together they say how the next round has ended: with a mean of NaN, and a plan of themselves and of `asking`, of
    whose workers most have signed it."""
    names = {liar.name for liar in liars}
    size = 0

    def forge(liar: MemoryWorker, sequence: int) -> messages.Outcome:
        nonlocal size
        node = liar.node
        kept = node.outcomes.recent.get(node.own.ended_round)
        last = node.outcomes.quorum.last_plan
        if kept is None or last is None or not last.key.sequence < sequence <= last.key.sequence + 2:
            return messages.Outcome()
        key = RoundKey(sequence, last.key.fragment)
        entries = []
        for entry in last.entries:
            if entry.peer in names:
                parsed = entry.parsed
                header = entry.contribution.header.replace(parsed.key.sequence.to_bytes(8, "little"),
                                                           sequence.to_bytes(8, "little"), 1)  # fmt: skip
                entries.append(Entry(entry.peer, structs.replace(entry.contribution, header=header)))
            elif asking is not None and entry.peer == asking.name:
                entries.append(Entry(entry.peer, asking.node.participant.rounds[sequence].contribution))
        if not entries:
            return messages.Outcome()
        size = len(kept.mean)
        shares = tuple(int(entry.peer in names) for entry in entries)
        made: Plan = structs.replace(last, key=key, entries=tuple(entries), majority=True, shares=shares, rounds=())
        parts = kept.certificate.num_parts
        data = NAN * (size // 4)
        notaries = {member.name: member.node.outcomes.notary for member in liars}
        digests = zip(reducers(made, parts), range_digests(made, parts, data), strict=True)
        told = bytes(directions_bytes(made))
        ranges = tuple(notaries[peer].sign_range(made, digest, told) for peer, digest in digests)
        votes = {name: notary.vote(made, parts, ranges) for name, notary in notaries.items()}
        certificate = certify(made, votes)
        credentials = {member.name: member.node.permissions.credential for member in liars}
        return messages.Outcome(made, certificate, credentials)

    def begin(liar: MemoryWorker) -> None:
        node = liar.node
        honest = liar.node._answer

        async def answer(peer: str, request: Any) -> Any:
            new = isinstance(request, messages.AskOutcome) and not node.outcomes.has_ended(request.sequence)
            if new and peer not in names:
                return forge(liar, request.sequence)
            return await honest(peer, request)

        serve_mean = node.outcomes.serve_mean

        async def serve(stream: Stream, request: messages.OpenMean) -> None:
            if node.outcomes.has_ended(request.sequence):
                await serve_mean(stream, request)
                return
            await stream.write(size.to_bytes(8, "little"), 1.0)
            await write_frame(stream, NAN * (size // 4), 1.0)

        node._answer = answer  # type: ignore[method-assign]
        node.outcomes.serve_mean = serve  # type: ignore[method-assign]

    for liar in liars:
        begin(liar)


def gives_others_another_mean(liar: MemoryWorker, to: set[str], patch: Patcher) -> None:
    """The liar reduces, sends some workers other bytes than the rest, and signs both."""
    honest = Transfer._send_mean

    async def send(transfer: Transfer, stream: Stream) -> None:
        if transfer._transport.peer != liar.name or stream.peer not in to or not len(transfer._mine):
            await honest(transfer, stream)
            return
        await transfer._wait_until(lambda: transfer._reduced == len(transfer._mine), 5.0)
        wrong = memoryview(bytes(len(transfer._mean(transfer._mine))))
        digest = RangeDigest(transfer._mean_width)
        digest.add(wrong)
        await write_frame(stream, wrong, 1.0)
        await write_frame(stream, bytes(comparison_bytes(len(transfer.plan.contributors))), 1.0)
        told = bytes(directions_bytes(transfer.plan))
        signed = liar.node.outcomes.notary.sign_range(transfer.plan, digest.digest(), told)
        await write_frame(stream, told + signed.signature, 1.0)

    patch.setattr(Transfer, "_send_mean", send)


def certifies_two_plans(
    leader: MemoryWorker,
    helpers: list[MemoryWorker],
    halves: list[list[MemoryWorker]],
    patch: Patcher,
    *,
    attempts: tuple[int, int] = (1, 1),
) -> None:
    """In each round it leads, it makes a plan for each half, in which it and its helpers are too; they vote in both.

    `attempts`: of the authorities of the two plans.
    """
    liars = [leader, *helpers]
    honest = LedRound._conclude
    answer = leader.node._answer
    votes: dict[str, Any] = {}

    async def listen(peer: str, request: Any) -> Any:
        if isinstance(request, messages.Complete) and peer != leader.name:
            votes[peer] = request.vote
            return messages.Done()
        return await answer(peer, request)

    async def vote(liar: MemoryWorker, made: Plan, round_: OwnRound) -> Any:
        node = liar.node
        notary = node.outcomes.notary
        assert isinstance(round_.audit, AuditedRound)
        audit = AuditedTransfer(made, round_.posted, round_.audit.leaves, notary, liar.name)
        transfer = Transfer(made, round_.posted, node.transport, 2.0, notary, audit, 2.0)
        try:
            async with asyncio.timeout(5.0):
                await transfer.run()
            return transfer.vote
        finally:
            transfer.close()

    async def end(led: LedRound, made: Plan, half: list[MemoryWorker]) -> tuple[Plan, Certificate] | None:
        mine = [(liar, liar.node.participant.rounds[led.key.sequence]) for liar in liars]
        votes.clear()
        calls = leader.node.outcomes.calls
        for worker in half:
            if made.entry(worker.name) is not None:
                await calls.ask(worker.name, made)
        theirs = await asyncio.gather(*(vote(liar, made, round_) for liar, round_ in mine))
        await asyncio.sleep(0.2)
        all_votes = dict(votes) | {liar.name: own_vote for (liar, _), own_vote in zip(mine, theirs, strict=True)}
        certificate = certify(made, all_votes)
        if certificate is None:
            return None
        for worker in half:
            await calls.ask(worker.name, messages.Commit(led.key.sequence, led.authority, made.digest, certificate))
        return made, certificate

    async def conclude(led: LedRound) -> None:
        present = [worker for half in halves for worker in half if worker.name in led.ready]
        banned = leader.node.permissions.bans()
        if led._members.me != leader.name or not all(liar.name in led.ready for liar in liars) or not present or banned:
            await honest(led)
            return
        terms = led._gathered.settle(led._own_terms())
        assert terms is not None
        ends = []
        for half, attempt in zip(halves, attempts, strict=True):
            names = {worker.name for worker in [*liars, *half]}
            entries = tuple(
                sorted((entry for entry in led.ready.values() if entry.peer in names), key=lambda entry: entry.number)
            )
            shares = tuple(int(entry.peer not in {liar.name for liar in liars}) for entry in entries)
            if any(shares):
                led.authority = led.authority._replace(attempt=attempt)
                made = Plan(
                    RoundKey(led.key.sequence, terms.fragment), led.authority, leader.name, entries,
                    tuple(entry.number for entry in entries), True, terms.max_norm_ratio, terms.merge, shares,
                    (), tuple(entry.number for entry in entries), led._quorum.last_ended,
                )  # fmt: skip
                try:
                    ends.append(await end(led, made, half))
                except (CallRefused, Unreachable, TimeoutError, TransferFailed, Lie):
                    continue
        for liar in liars:
            own = liar.node.participant.rounds.get(led.key.sequence)
            for made, certificate in [ended for ended in ends if ended is not None][:1]:
                if own is not None and not own.ended:
                    own.certificate = certificate
                    liar.node.outcomes.succeed(own, made)

    leader.node._answer = listen  # type: ignore[method-assign]
    leader.node.outcomes.calls._answer_own = listen
    patch.setattr(LedRound, "_conclude", conclude)


def reduces_wrongly(liar: MemoryWorker, wrong: Callable[[torch.Tensor], Any], patch: Patcher) -> None:
    """It gives all others the same wrong mean of its range, signs it, and votes for it."""
    honest = Transfer._reduce_rows

    def reduce(transfer: Transfer, rows: range) -> Any:
        if transfer._transport.peer != liar.name:
            return honest(transfer, rows)
        add = transfer._signatures.add
        transfer._signatures.add = lambda *_: None  # type: ignore[method-assign]
        mean, squares, comparison = honest(transfer, rows)
        transfer._signatures.add = add  # type: ignore[method-assign]
        decoded = torch.empty(len(rows), transfer.posted.part_elements)
        transfer._means.decode(mean, decoded)
        transfer._means.encode(wrong(decoded), mean)
        add(liar.name, mean.view(-1).numpy().data)
        return mean, squares, comparison

    patch.setattr(Transfer, "_reduce_rows", reduce)


def accuses(
    liar: MemoryWorker,
    victims: list[MemoryWorker],
    patch: Patcher,
    *,
    lie: bool = True,
    withheld: messages.Withheld | None = None,
) -> None:
    """In every plan it says that the first victim there lies, or cannot be reached, or withholds something."""
    honest = Transfer.run

    async def run(transfer: Transfer) -> None:
        present = [victim.name for victim in victims if transfer.plan.entry(victim.name) is not None]
        if transfer._transport.peer == liar.name and present:
            reason = "its parts have the norm 900, it claimed 1"
            raise Lie(present[0], reason) if lie else TransferFailed(present[0], reason, withheld=withheld)
        await honest(transfer)

    patch.setattr(Transfer, "run", run)


def withholds(liar: MemoryWorker, method: str, patch: Patcher) -> None:
    """It opens streams and answers, and sends nothing: `_send` its parts, `_send_mean` the mean of its range."""
    honest = getattr(Transfer, method)

    async def nothing(transfer: Transfer, stream: Stream, *data: Any) -> None:
        if transfer._transport.peer != liar.name:
            await honest(transfer, stream, *data)
            return
        while method == "_send_mean":
            await write_frame(stream, b"", 1.0)
            await asyncio.sleep(0.2)

    patch.setattr(Transfer, method, nothing)


def serves_another_state(liar: MemoryWorker, *, ahead: int = 0, swapped: bool = False) -> None:
    """It serves a state of NaN, of the right round or of a later one; `swapped`: it says that it is another."""
    trainer = liar.trainer
    honest = trainer.snapshot

    async def snapshot() -> Any:
        means = trainer.means
        sequence = trainer.sequence
        trainer.means = [NAN * 3072 for _ in means]
        trainer.sequence = sequence + ahead
        try:
            return await honest()
        finally:
            trainer.means = means
            trainer.sequence = sequence

    trainer.snapshot = snapshot  # type: ignore[method-assign]
    liar.node.own.ended_round += ahead
    if swapped:
        digest = liar.auditor.witnesses.digest

        async def another(_: Any, *, own: bool) -> bytes:
            made = await honest()
            assert made is not None
            return await digest(made, own=own)

        liar.auditor.witnesses.digest = another  # type: ignore[assignment, method-assign]


def brings_a_second_key(liar: MemoryWorker, patch: Patcher, second: str = NAMES[-1]) -> None:
    """In each round that it leads, its plans have another key of its own invitation too, as a worker without work."""
    honest_choose: Callable[..., list[Entry]] = vars(leading)["choose"]  # or of another liar
    members = liar.node.members
    honest_is_live = members.is_live

    def choose(candidates: list[Entry], sequence: int, quarrels: Quarrels, *more: Any) -> list[Entry]:
        chosen = honest_choose(candidates, sequence, quarrels, *more)
        own = next((entry for entry in chosen if entry.peer == liar.name), None)
        if quarrels is not liar.node.leader.quarrels or own is None:
            return chosen
        parsed = own.parsed
        posting = liar.posting(values(9), weight=0.0, sequence=sequence, digest=parsed.claim.anchor_digest,
                               layout=parsed.layout_digest)  # fmt: skip
        return [*chosen, Entry(second, PresentWorker(99, posting.header, b"", bytes(32)))]

    patch.setattr(leading, "choose", choose)
    patch.setattr(members, "is_live", lambda name: name == second or honest_is_live(name))


def tells_directions(
    liar: MemoryWorker, change: Callable[[AuditedTransfer, list[float]], list[float]], patch: Patcher
) -> None:
    """The liar reduces, and signs other cosines than those of its parts, the same for all."""
    honest_compare = AuditedTransfer.compare_directions

    def compare(self: AuditedTransfer, parts: Mapping[str, memoryview]) -> bytes:
        right = honest_compare(self, parts)
        if self.me != liar.name or not right:
            return right
        made = change(self, directions.unpack(right))
        return struct.pack(f"<{len(made)}h", *(round(32767 * value) for value in made))

    patch.setattr(AuditedTransfer, "compare_directions", compare)


def tells_that_all_point_against(victim: MemoryWorker, liar: MemoryWorker, patch: Patcher) -> None:
    """It says that the contribution of the victim points against all others."""

    def change(audit: AuditedTransfer, _: list[float]) -> list[float]:
        names = [entry.peer for entry in audit.plan.contributors]
        return [-1.0 if victim.name in pair else 1.0 for pair in combinations(names, 2)]

    tells_directions(liar, change, patch)
