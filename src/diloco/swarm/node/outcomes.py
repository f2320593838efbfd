"""The ends of this worker's rounds, and what a late worker gets.

A round that this worker was in ends with its mean (`succeed`). Members keep the last rounds (recent_rounds.py): a
worker that missed the end of a round asks one of them for the outcome (`resolve`). If its contribution is in the plan,
it fetches the mean and the round has succeeded for it too. If not, and most others have ended the round, the round has
failed for this worker (I6) and it must fetch their state. A single worker that went on alone is not followed.

No mean counts without a certificate (protocol/certificate.py): that most workers of its plan have voted for its digest.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from diloco.swarm import timing
from diloco.swarm.network.limits import LruCache
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.audit import Audit
from diloco.swarm.node.calls import Calls
from diloco.swarm.node.frames import DataFrames, write_frame
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.recent_rounds import RecentRounds
from diloco.swarm.node.round import OwnRound
from diloco.swarm.protocol.certificate import Agreed, Certificate, Notary
from diloco.swarm.protocol.merged_rounds import MergedRounds
from diloco.swarm.protocol.messages import (
    END_BYTES,
    AskEnds,
    AskLastPlan,
    AskOutcome,
    Done,
    Ends,
    OpenMean,
    Outcome,
    RoundsLost,
)
from diloco.swarm.protocol.missed_rounds import MissedRounds
from diloco.swarm.protocol.plan import MAX_WORKERS, Plan
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.wire import Malformed, encode

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20


class Outcomes:
    def __init__(self, heartbeats: Heartbeats, calls: Calls, notary: Notary, quorum: Quorum, audit: Audit) -> None:
        self.heartbeats = heartbeats
        self.members = heartbeats.members
        self.calls = calls
        self.notary = notary
        self.quorum = quorum
        self.audit = audit
        self.recent = RecentRounds(Path(self.members.settings.folder))
        self.heartbeats.ended_plan = self._ended_plan
        self.heartbeats.on_other_end = self._compare_ends
        self._told_lost: LruCache[float] = LruCache(MAX_WORKERS)
        """Member -> when it last told of lost rounds."""
        self._comparing: set[str] = set()
        """Members that are asked how a round has ended, which they have ended with another plan."""
        self.missed = MissedRounds()
        self.on_end: Callable[[Agreed], None] = lambda _: None
        self.merged = MergedRounds()
        self._stall_seconds = self.members.settings.stall_seconds

    def has_ended(self, sequence: int) -> bool:
        return sequence in self.recent or sequence <= self.members.status.ended_round

    # Two ends of a round

    def _ended_plan(self, sequence: int) -> bytes:
        """Return the beginning of the digest of the plan that this round has ended with, for heartbeats."""
        kept = self.recent.get(sequence)
        return b"" if kept is None else kept.plan.digest[:END_BYTES]

    def _compare_ends(self, peer: str, sequence: int) -> None:
        """A member's heartbeat says that it has ended this round with another plan: ask how. This is how workers that a
        leader keeps apart, so that they meet in no plan, find that out."""
        if peer not in self._comparing:
            self._comparing.add(peer)
            self.members.faults.start(self._ask_for_end(peer, sequence), "comparing the ends of a round")

    async def _ask_for_end(self, peer: str, sequence: int) -> None:
        try:
            await self.ask(peer, sequence)
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("round %d: %s does not show its end: %s", sequence, peer, problem)
        finally:
            self._comparing.discard(peer)

    # The end of a round

    def commit(self, round_: OwnRound, plan: bytes, certificate: Certificate) -> bool:
        """End the round, if this worker has the mean that most workers of the plan have voted for."""
        if round_.plan is None or round_.vote is None or round_.plan.digest != plan:
            return False
        try:
            self.notary.check(round_.plan, certificate)
        except Malformed as problem:
            logger.warning("a commit without a valid certificate: %s", problem)
            return False
        if not self.quorum.has_most_votes(Agreed(round_.plan, certificate)):
            logger.info("round %d: most members that count have not voted for it", round_.sequence)
            return False
        if certificate.mean != round_.vote.mean:
            self.audit.compare_means(round_.plan, (round_.vote, certificate))
            return False
        round_.certify(certificate)
        self.succeed(round_, round_.plan)
        return True

    def succeed(self, round_: OwnRound, plan: Plan) -> None:
        """The mean of this plan counts: it has a certificate."""
        assert round_.certificate is not None
        round_.stop_transfer()
        status = self.members.status
        decision = plan.decision
        if plan.has_mean:
            self.recent.add_copy(plan, round_.posted.mean, round_.certificate)
        else:
            self.recent.add(plan, b"", round_.certificate)
        self.quorum.record_end(Agreed(plan, round_.certificate))
        # A contribution that points against the others' is not in the mean, and its worker does not carry it on.
        self.missed.record(plan.key.fragment, [*(entry.peer for entry in plan.contributors), *plan.opposed_peers])
        contributed = round_.number in decision.contributors
        status.count(round_.sequence, contributed=contributed)
        if contributed:
            self.members.counted_tokens = status.tokens
        refused = round_.number in decision.refused and round_.number not in plan.opposed
        if decision.resync and refused:  # this worker's anchor differs
            self.record_divergence()
        else:
            self.merged.record(plan, status.tokens)
        if status.has_state:  # else the trainer lacks an earlier round, and cannot merge this one yet
            self.recent.next_to_merge = round_.sequence + 1
        agreed = Agreed(plan, round_.certificate)
        self.on_end(agreed)
        kept = self.recent.get(round_.sequence)
        round_.audit.end(agreed, None if kept is None else kept.mean, self.recent.copied)
        round_.succeed(plan)
        self.members.changed()

    def record_divergence(self) -> None:
        """This worker's state is not the others': it takes over theirs, from a snapshot."""
        self.members.status.lose_state()
        self.recent.next_to_merge = None

    async def ask_ends(self, peer: str) -> dict[int, bytes]:
        """Ask `peer` how the rounds that this worker has counted have ended for it: round -> the beginning of the
        plan's digest, as far as it knows. Raises Unreachable, CallRefused or Malformed."""
        first = self.merged.first
        if first is None:
            return {}
        answer = await self.calls.ask(peer, AskEnds(first))
        if not isinstance(answer, Ends):
            raise Malformed(f"{type(answer).__name__} instead of Ends")
        ends = {first + index: answer.plan(index) for index in range(len(answer.plans) // END_BYTES)}
        return {number: plan for number, plan in ends.items() if plan}

    def take_over(self, ends: dict[int, bytes], plans: Sequence[Plan], sequence: int) -> None:
        """This worker has taken over a state before round `sequence`, with these ends of rounds in it, and these plans
        at last. Tell its own user, and the other members, of the rounds that it had counted and that are not in it."""
        status = self.members.status
        lost = self.merged.take_over(ends, plans, sequence, status.tokens)
        if lost is not None:
            event: dict[str, object] = {"number": status.number, "rounds": lost.rounds, "tokens": lost.tokens}
            self.members.on_event("diverged", event)
            for peer in self.members.live():
                self.members.faults.start(self._tell_lost(peer.name, lost), "telling of lost rounds")

    async def _tell_lost(self, peer: str, message: RoundsLost) -> None:
        try:
            await self.calls.ask(peer, message)
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("%s was not told of lost rounds: %s", peer, problem)

    def answer_lost(self, peer: str, message: RoundsLost) -> Done:
        """Emit an event, once a minute for a member at most: any member can say that it has lost rounds."""
        if clock.now() - (self._told_lost.get(peer) or -timing.LOST_ROUNDS_TOLD_EVERY) >= timing.LOST_ROUNDS_TOLD_EVERY:
            self._told_lost.put(peer, clock.now())
            self.members.emit_about("rounds_lost", peer, rounds=message.rounds, tokens=message.tokens)
        return Done()

    def answer_ends(self, request: AskEnds) -> Ends:
        return self.merged.ends_from(request.first)

    def record_missed(self, sequence: int) -> None:
        """A round has ended that this worker has not posted: it no longer has the state."""
        self.members.status.miss(sequence)
        self.members.changed()

    async def resolve(self, round_: OwnRound, peer: str) -> None:
        """`peer` has ended this round: with this worker in it, or without."""
        agreed: Agreed | None = None
        try:
            agreed = await self.ask(peer, round_.sequence)
            if agreed is not None and self.quorum.has_most_votes(agreed) and round_.is_in(agreed.plan, self.members.me):
                async with round_.fetching:
                    if not round_.ended and not round_.has_mean_of(agreed):
                        await self._fetch_own_mean(round_, agreed, peer)
                    if not round_.ended:  # its deadline may have passed meanwhile
                        round_.certify(agreed.certificate)
                        self.succeed(round_, agreed.plan)
                return
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("round %d: %s does not give its outcome: %s", round_.sequence, peer, problem)
            if isinstance(problem, Unreachable):
                self.heartbeats.suspect(peer, problem)
                await asyncio.sleep(timing.POLL_SECONDS)
                return
        decided = agreed is not None and self.quorum.rules_out_others(agreed)
        if not round_.ended and (decided or self.members.most_ended(round_.sequence)):
            self.members.status.lose_state()
            if agreed is not None and round_.has_another_anchor(agreed.plan):
                self.record_divergence()
            round_.fail("the others ended it without this worker", resync=True)

    async def _fetch_own_mean(self, round_: OwnRound, agreed: Agreed, peer: str) -> None:
        posted = round_.posted
        round_.stop_transfer()
        round_.drop_mean()
        data = await self.fetch_mean(agreed, peer)
        if len(data) != posted.mean.num_bytes:
            raise Malformed(f"a mean of {len(data)} bytes instead of {posted.mean.num_bytes}")
        if not round_.ended:
            posted.mean.view[:] = data
            round_.bytes_received += len(data)

    # Asking others

    async def ask(self, peer: str, sequence: int) -> Agreed | None:
        """Ask for the plan that a round has ended with; None if it has not ended, or is too old. Raises Malformed,
        too."""
        return await self._ask(peer, AskOutcome(sequence))

    async def ask_last(self, peer: str, sequence: int) -> Agreed | None:
        """Ask for the last round that has ended for `peer`, which has given this worker the state before round
        `sequence`: by it this worker knows which members count. Raises Malformed, too."""
        agreed = await self._ask(peer, AskLastPlan())
        self.quorum.check_last_end(agreed, sequence)
        return agreed

    async def _ask(self, peer: str, request: AskOutcome | AskLastPlan) -> Agreed | None:
        answer = await self.calls.ask(peer, request)
        if not isinstance(answer, Outcome):
            raise Malformed(f"{type(answer).__name__} instead of Outcome")
        if answer.plan is None:
            return None
        for signer, credential in answer.credentials.items():
            self.members.permissions.remember(signer, credential)
        try:
            right = not isinstance(request, AskOutcome) or answer.plan.key.sequence == request.sequence
            if not right or answer.certificate is None:
                raise Malformed("another round, or one without a certificate")
            self.notary.check(answer.plan, answer.certificate)
        except Malformed as lie:
            self.audit.record_offence(peer, str(lie))
            raise
        agreed = Agreed(answer.plan, answer.certificate)
        own = self.recent.get(answer.plan.key.sequence)
        if own is not None and (own.plan.digest, own.certificate.mean) != (agreed.plan.digest, agreed.certificate.mean):
            self.audit.compare_ends(Agreed(own.plan, own.certificate), agreed)
        return agreed

    async def fetch_mean(self, agreed: Agreed, peer: str, moved: Callable[[], None] = lambda: None) -> bytes:
        """Fetch the encoded mean of an ended round; `moved` is called for each piece. Raises Unreachable or
        Malformed."""
        sequence = agreed.plan.key.sequence
        stream = await self.calls.transport.open_stream(peer, self._stall_seconds)
        try:
            await write_frame(stream, encode(OpenMean(sequence)), self._stall_seconds)
            size = int.from_bytes(await stream.read(8, self._stall_seconds), "little")
            if size > self.recent.max_mean_bytes:
                raise Malformed(f"a mean of {size} bytes")
            data = bytearray(size)
            frames = DataFrames(stream, self._stall_seconds, self._stall_seconds)
            view = memoryview(data)
            received = 0
            while received < size:
                received += await frames.read_into(view[received:])
                moved()
            await stream.write(b"\1", self._stall_seconds)
        finally:
            stream.close()
        check = self.notary.check_mean
        try:
            await asyncio.get_running_loop().run_in_executor(None, check, agreed.plan, agreed.certificate, data)
        except Malformed as lie:
            self.audit.record_offence(peer, str(lie))
            raise
        return bytes(data)

    # Answering others

    def answer(self, peer: str, request: AskOutcome) -> Outcome:
        self.recent.touch(peer)
        ended = self.recent.get(request.sequence)
        return Outcome() if ended is None else self._outcome(ended.plan, ended.certificate)

    def answer_last(self) -> Outcome:
        last = self.quorum.agreed
        return Outcome() if last is None else self._outcome(last.plan, last.certificate)

    def _outcome(self, plan: Plan, certificate: Certificate) -> Outcome:
        known = {peer: self.members.permissions.credential_of(peer) for peer in certificate.signatures}
        credentials = {peer: credential for peer, credential in known.items() if credential is not None}
        return Outcome(plan, certificate, credentials)

    async def serve_mean(self, stream: Stream, request: OpenMean) -> None:
        await self.recent.copied()
        ended = self.recent.get(request.sequence)
        if ended is None:
            return
        await stream.write(len(ended.mean).to_bytes(8, "little"), self._stall_seconds)
        view = memoryview(ended.mean)
        for first in range(0, len(view), _CHUNK_BYTES):
            await write_frame(stream, view[first : first + _CHUNK_BYTES], self._stall_seconds)
            self.recent.touch(stream.peer)
        await stream.read(1, self._stall_seconds)  # the receiver confirms; closing earlier may lose bytes in transit
