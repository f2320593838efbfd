"""One worker's part in its rounds: it posts, follows the leader's plan, and ends with the whole mean or with none.

    post      the header goes to the leader (Ready), and to the next leader if that one is lost
    plan      its workers exchange parts (transfer.py); each tells the leader when it has the whole mean (Complete)
    commit    the mean counts, since all live workers in the plan have it
    late      others have ended the round: outcomes.py

A message of a leader counts only if no higher authority (plan.py) has sent one in this round.
"""

import asyncio
import logging

from msgspec import structs

from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.audit import Lie
from diloco.swarm.node.joining import settle_number
from diloco.swarm.node.outcomes import Outcomes
from diloco.swarm.node.round import OwnRound
from diloco.swarm.node.transfer import Transfer, TransferFailed
from diloco.swarm.protocol.certificate import SignedRange, Vote
from diloco.swarm.protocol.following import RoundFollower, StartTransfer, UnknownSeat
from diloco.swarm.protocol.messages import (
    Commit,
    Complete,
    Done,
    Ended,
    Inquire,
    OpenParts,
    Opposed,
    Ready,
    Trouble,
    Waiting,
)
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.refusals import OUT_OF_THE_RUN
from diloco.swarm.protocol.terms import own_terms
from diloco.swarm.protocol.transfer_times import TransferTimes
from diloco.swarm.protocol.wire import Malformed, PeerMessage
from diloco.swarm.trainer import PostedRound, RoundOutcome

logger = logging.getLogger(__name__)


class Participant:
    def __init__(self, outcomes: Outcomes) -> None:
        self.outcomes = outcomes
        self.audit = outcomes.audit
        self.calls = outcomes.calls
        self.heartbeats = outcomes.heartbeats
        self.members = outcomes.members
        self.settings = self.members.settings
        self.transfers = TransferTimes()
        self.layout: str | None = None
        """The layout of what this worker trains, once it has posted."""
        self.rounds: dict[int, OwnRound] = {}
        """Rounds that this worker has posted and that have not ended, by sequence."""
        self.follower = RoundFollower(
            self.members, outcomes.quorum, outcomes.missed, self.transfers, self.rounds, outcomes.has_ended,
            self.members.permissions.has_seat,
        )  # fmt: skip
        self.leaders = self.follower.leaders

    # Posting

    async def post(self, posted: PostedRound) -> RoundOutcome:
        """Returns when the round has ended, or its deadline is over."""
        await self.outcomes.recent.copied()  # a mean may be kept in the memory of this round
        status = self.members.status
        audit = await self.audit.post(posted)
        round_ = OwnRound(
            posted,
            status.number,
            clock.now(),
            authority=self.follower.take_promise(posted.key.sequence),
            root=audit.root,
            audit=audit,
        )
        self.rounds[posted.key.sequence] = round_
        self.layout = own_terms(posted).layout
        status.post(round_.sequence, min(self.rounds))
        if round_.sequence <= self.outcomes.quorum.last_voted:
            round_.fail("this worker has voted in it before, and given it up")
        try:
            async with asyncio.timeout(posted.deadline_seconds):
                while not round_.ended:
                    if self.members.excluded is not None:
                        round_.fail(self.members.excluded, fatal=True)
                        break
                    await self._look_back(round_)
                    if (reason := self.follower.why_give_up(round_)) is not None:
                        round_.fail(reason)
                    await self._announce(round_)
                    await self._watch(round_)
                    self._pass_over(self.follower.watch_leader(round_), round_)
        except TimeoutError:
            if ahead := self.members.first_ahead(round_.sequence):
                await self.outcomes.resolve(round_, ahead)
            if not round_.ended:
                self._pass_over(self.follower.pass_over_at_deadline(round_), round_)
            round_.fail(f"no result within {posted.deadline_seconds:g} s")
        finally:
            round_.stop_transfer()
            self.rounds.pop(round_.sequence, None)
            status.leave_round(min(self.rounds, default=-1))
        await self.audit.copied()
        if round_.certificate is None:
            self.outcomes.missed.record(posted.key.fragment, ())
        status.spend(round_.sequence)
        return round_.outcome.result()

    async def _announce(self, round_: OwnRound) -> None:
        """Send the header to the leader."""
        if round_.ended:
            return
        leader = round_.leader or self.members.leader()
        round_.turn_to(None)
        if leader is None:
            # This worker missed rounds, and all members that have the state are gone: only a resync can settle it.
            round_.fail("no live member has the state of the run", resync=True)
            return
        try:
            answer = await self.calls.ask(leader, Ready(round_.contribution, *round_.limits))
        except Unreachable as problem:
            self.heartbeats.suspect(leader, problem)
        except CallRefused as reason:
            if reason.code in OUT_OF_THE_RUN and leader in self.members.peers:  # it counts when most say so
                self.members.record_rejected(self.members.peers[leader], str(reason), reason.code)
            elif reason.code == "model":
                self._record_other_model(round_, str(reason))
            elif reason.code == "few":
                if (too_few := self.follower.why_too_few(round_, leader)) is not None:
                    round_.fail(too_few)
                return
            elif reason.code == "number" and await settle_number(self.heartbeats):
                round_.take_number(self.members.status.number)
            logger.info("round %d: %s refuses this worker's header: %s", round_.sequence, leader, reason)
            self.heartbeats.beat_soon(leader)
            round_.record_refused()
            await asyncio.wait(
                {round_.outcome}, timeout=min(timing.MOST_BACK_OFF_SECONDS, timing.POLL_SECONDS * 2**round_.refusals)
            )
        except Malformed as problem:
            logger.info("round %d: %s", round_.sequence, problem)
        else:
            if isinstance(answer, Waiting):
                round_.record_accepted(leader)
                return
            if isinstance(answer, Ended):
                await self.outcomes.resolve(round_, leader)
                self._pass_over(self.leaders.record_ended(leader, round_), round_)
            else:  # NotLeader
                round_.record_denied(leader)
                self.heartbeats.beat_soon(leader)
        await self.members.wait_for_change(timing.POLL_SECONDS)

    def _record_other_model(self, round_: OwnRound, reason: str) -> None:
        """The leader says that this worker trains another model. If the last round had this one's, the leader errs."""
        last = self.outcomes.quorum.last_plan
        if last is None or self.layout not in {entry.parsed.layout_digest for entry in last.entries}:
            round_.fail(reason, fatal=True)

    async def _watch(self, round_: OwnRound) -> None:
        """Wait until the round has ended, its leader is lost or another, or it is time to ask the leader again."""
        leader = round_.leader
        others_ended: float | None = None
        ask_again = clock.now() + timing.ASK_AGAIN_SECONDS
        while not round_.ended and leader is not None and round_.leader == leader and clock.now() < ask_again:
            await asyncio.wait({round_.outcome}, timeout=timing.POLL_SECONDS)
            self.follower.leave_lost_leader(round_)
            self._pass_over(self.follower.watch_leader(round_), round_)
            if (ahead := self.members.first_ahead(round_.sequence)) is not None and not round_.ended:
                others_ended = others_ended or clock.now()
                if clock.now() - others_ended > timing.COMMIT_SHARE * self.settings.lost_seconds:
                    await self.outcomes.resolve(round_, ahead)

    def _pass_over(self, leader: str | None, round_: OwnRound) -> None:
        """Emit an event if `leader` is passed over now; None: no leader is."""
        if leader is not None:
            self.members.emit_about("leader_passed_over", leader, round=round_.sequence)
            self.members.changed()

    async def _look_back(self, round_: OwnRound) -> None:
        """Fail this round if one before it, which this worker gave up, has ended with the votes of most: it lacks that
        one's mean."""
        ended = {peer.name: peer.status.ended_round for peer in self.members.live()}
        for peer, sequence in ended.items():
            if not self.follower.may_have_missed(round_, sequence):
                continue
            try:
                agreed = await self.outcomes.ask(peer, sequence)
            except (Unreachable, CallRefused, Malformed) as problem:
                logger.info("round %d: %s does not give its outcome: %s", sequence, peer, problem)
                continue
            if agreed is not None and self.outcomes.quorum.rules_out_others(agreed):
                self.members.status.lose_state()
                round_.fail(f"round {sequence} has ended, which this worker gave up", resync=True)

    # Messages of leaders

    def answer_plan(self, sender: str, plan: Plan) -> PeerMessage:
        try:
            decision = self.follower.hear_plan(sender, plan)
        except UnknownSeat as unknown:
            self.heartbeats.beat_soon(plan.leader)
            if unknown.trouble is not None:
                telling = self._tell_leader(self.rounds[plan.key.sequence], plan, unknown.trouble)
                self.members.faults.start(telling, "telling of a worker without a seat")
            raise
        if isinstance(decision, StartTransfer):
            self._start_transfer(self.rounds[plan.key.sequence], decision)
            return Done()
        return decision

    def _start_transfer(self, round_: OwnRound, decision: StartTransfer) -> None:
        plan = decision.plan
        round_.stop_transfer()
        if plan.has_mean:
            round_.transfer = Transfer(
                plan,
                round_.posted,
                self.calls.transport,
                self.settings.stall_seconds,
                self.outcomes.notary,
                round_.audit.follow(plan),
                decision.parts_seconds,
            )
        round_.task = self.members.faults.start(self._follow(round_, plan), "following a plan")
        round_.planned.set()

    def answer_commit(self, sender: str, commit: Commit) -> PeerMessage:
        refusal = self.follower.refusal(sender, commit.sequence, commit.authority)
        if refusal is not None:
            return Done() if isinstance(refusal, Ended) else refusal
        round_ = self.rounds[commit.sequence]
        if not self.outcomes.commit(round_, commit.plan, commit.certificate):
            # A new leader has found that another worker has ended the round, or this worker has another mean.
            self.members.faults.start(self.outcomes.resolve(round_, sender), "fetching the end of a round")
        return Done()

    def answer_inquiry(self, sender: str, inquire: Inquire) -> PeerMessage:
        """A new leader asks for the state of a round. From here on leaders of lower authority are refused."""
        return self.follower.hear_inquiry(sender, inquire)

    async def _follow(self, round_: OwnRound, plan: Plan) -> None:
        """Exchange parts as the plan says, and tell the leader how that went."""
        message: PeerMessage
        try:
            if round_.transfer is not None:
                started = clock.now()
                await round_.transfer.run()
                self.transfers.record(plan, clock.now() - started, round_.transfer.rates)
            if not round_.may_vote_for(plan):
                return
            if round_.transfer is not None and self._has_opposed(round_, plan, round_.transfer.ranges):
                ranges = round_.transfer.ranges
                message = Opposed(round_.sequence, plan.authority, round_.posted.num_parts, ranges)
                await self._tell_leader(round_, plan, message)
                return
            vote = self._vote(round_, plan)
            self.outcomes.quorum.record_vote(plan)
            round_.record_mean(vote)
            message = Complete(round_.sequence, plan.authority, vote)
        except TransferFailed as problem:
            logger.info("round %d: no transfer with %s: %s", round_.sequence, problem.peer, problem)
            self.heartbeats.beat_soon(problem.peer)
            message = Trouble(
                round_.sequence, plan.authority, problem.peer, str(problem)[:200], withheld=problem.withheld
            )
        except Lie as lie:
            logger.info("round %d: a lie of %s: %s", round_.sequence, lie.peer, lie)
            self.audit.record_lie(lie, round_.sequence)
            message = Trouble(round_.sequence, plan.authority, lie.peer, str(lie)[:200], lie=True)
        await self._tell_leader(round_, plan, message)
        await self._compare_votes(plan, message)

    def _has_opposed(self, round_: OwnRound, plan: Plan, ranges: tuple[SignedRange, ...]) -> bool:
        """Whether a contribution to this plan points against the others': then it is not voted for."""
        opposed = round_.audit.find_opposed(plan, ranges)
        round_.clear({entry.peer for entry in plan.contributors} - opposed)
        return bool(opposed)

    async def _tell_leader(self, round_: OwnRound, plan: Plan, message: PeerMessage) -> None:
        """Send the leader a message, again and again, until it answers."""
        while not round_.ended:  # another plan cancels this task
            try:
                await self.calls.ask(plan.leader, message)
                break
            except (CallRefused, Malformed) as refused:
                logger.info("round %d: its leader refuses a message: %s", round_.sequence, refused)
            except Unreachable as unreachable:
                self.heartbeats.suspect(plan.leader, unreachable)
            await asyncio.sleep(timing.POLL_SECONDS)

    async def _compare_votes(self, plan: Plan, message: PeerMessage) -> None:
        """Show the other workers this vote where no commit comes: if reducers gave workers different means, that proves
        it.

        The vote itself is for the leader: else others could make a certificate of a plan that the leader has given up.
        """
        await asyncio.sleep(self.settings.lost_seconds)
        if isinstance(message, Complete):
            message = structs.replace(message, vote=structs.replace(message.vote, signature=bytes(64)))
            others = [entry.peer for entry in plan.entries if entry.peer not in (self.members.me, plan.leader)]
            await self.ask_all(message.sequence, others, message)

    async def ask_all(self, sequence: int, peers: list[str], message: PeerMessage) -> dict[str, PeerMessage]:
        """Ask several peers; return the answers of those that give one."""

        async def ask(peer: str) -> PeerMessage | None:
            try:
                return await self.calls.ask(peer, message)
            except (Unreachable, CallRefused, Malformed) as problem:
                logger.info("round %d: %s does not answer: %s", sequence, peer, problem)
                if isinstance(problem, Unreachable):
                    self.heartbeats.suspect(peer, problem)
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        return {peer: answer for peer, answer in zip(peers, answers, strict=True) if answer is not None}

    def compare_ranges(self, message: Complete) -> PeerMessage:
        """A worker of the plan that this one follows tells its mean, as reducers have signed it. Raises Malformed."""
        round_ = self.rounds.get(message.sequence)
        if round_ is not None and round_.plan is not None and round_.plan.authority == message.authority:
            self.outcomes.notary.check_ranges(round_.plan, message.vote.num_parts, message.vote.ranges)
            if round_.vote is not None:
                self.audit.compare_means(round_.plan, (round_.vote, message.vote))
        return Done()

    def _vote(self, round_: OwnRound, plan: Plan) -> Vote:
        if round_.transfer is not None:
            return round_.transfer.vote
        return self.outcomes.notary.vote(plan, round_.posted.num_parts, ())

    async def serve_parts(self, stream: Stream, request: OpenParts) -> None:
        """Another worker's parts, which may arrive before the plan that they belong to."""
        end = clock.now() + self.settings.lost_seconds
        while clock.now() < end:
            round_ = self.rounds.get(request.sequence)
            if round_ is not None and round_.transfer is not None and round_.authority == request.authority:
                if round_.plan is not None and round_.plan.entry(stream.peer) is not None:
                    await round_.transfer.serve(stream)
                return
            if round_ is None or round_.authority > request.authority:
                return
            round_.planned.clear()
            try:
                async with asyncio.timeout(timing.POLL_SECONDS):
                    await round_.planned.wait()
            except TimeoutError:
                continue
