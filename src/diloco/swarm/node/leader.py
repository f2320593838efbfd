"""The rounds that this node leads, and the messages of their workers.

The first Ready of a round makes the leader (`Leader`) start a `LedRound`:

    inquire   ask all members for the state of this round: an earlier leader may have come far
    gather    until all members are ready, or patience is over: then the slow ones are told to post what they have
    attempt   send a plan to all ready workers; those that die, freeze or lie are left out of the next attempt
    commit    when all live workers have the whole mean; or most have it, and the others take as long again as a
              transfer usually does. The leader's own worker counts it last: if the leader dies before any other has
              heard of it, no worker has ended the round, and the next leader goes on

A leader that finds a higher authority, or the round ended, steps down. Its own worker need not be in the round.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from msgspec import structs

from diloco.core.config import Merge
from diloco.engines.rounds import RoundKey
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.participant import Participant
from diloco.swarm.protocol.attendance import Patience
from diloco.swarm.protocol.certificate import SIGNATURE_BYTES, Certificate, Vote
from diloco.swarm.protocol.leading import InquiryAnswers, LeadPhase, LedRoundState, SteppedDown, code_of, leader_of_most
from diloco.swarm.protocol.membership import clashes
from diloco.swarm.protocol.messages import (
    Commit,
    Complete,
    Done,
    Ended,
    Inquire,
    LedBy,
    NotLeader,
    Opposed,
    Posted,
    Ready,
    Superseded,
    Trouble,
    Waiting,
)
from diloco.swarm.protocol.plan import NO_AUTHORITY, Authority, Entry, Plan
from diloco.swarm.protocol.shares import Shares
from diloco.swarm.protocol.terms import Terms, own_terms
from diloco.swarm.protocol.troubles import Dropped, Quarrels
from diloco.swarm.protocol.wire import Malformed, PeerMessage

logger = logging.getLogger(__name__)


class Leader:
    def __init__(self, participant: Participant, hurry: Callable[[str, int], None]) -> None:
        """`hurry(peer, sequence)`: have a slow worker post the work that it has."""
        self.participant = participant
        self.hurry = hurry
        self.members = participant.members
        self.settings = participant.settings
        self.shares = Shares(self.members, participant.transfers)
        self.quarrels = Quarrels(self.members.me)
        self._rounds: dict[int, LedRound] = {}
        self._patience = Patience(self.settings, clock.now())
        self._too_few: dict[str, int] = {}
        """Worker -> the round for which no plan could be made, as too few were left; it is told so when it asks
        again."""

    # Messages of workers

    def answer_ready(self, sender: str, ready: Ready) -> PeerMessage:
        entry = Entry(sender, ready.contribution)
        key = entry.parsed.key
        if self.participant.outcomes.has_ended(key.sequence):
            return Ended()
        led = self._rounds.get(key.sequence)
        if led is None and self.members.leader() != self.members.me:
            return NotLeader()
        if entry.number != self.members.number_of(sender) or clashes(self.members, sender):
            raise CallRefused(f"{entry.number} is the number of another worker, or not yet this one's here", "number")
        if self._too_few.pop(sender, None) == key.sequence:  # if it asks again, it is tried again
            raise CallRefused("too few workers are left in this round", "few")
        if led is None:
            led = self._rounds[key.sequence] = LedRound(self, key)
            self.members.faults.start(led.run(), "leading a round")
        led.add(entry, ready.max_norm_ratio, ready.merge)
        return Waiting()

    def record_complete(self, sender: str, message: Complete) -> PeerMessage:
        if (led := self._current(sender, message)) is None:
            return self.participant.compare_ranges(message)
        led.record_vote(sender, message.vote)
        return Done()

    def record_trouble(self, sender: str, message: Trouble) -> PeerMessage:
        if (led := self._current(sender, message)) is not None:
            led.troubles.add(sender, message)
            self.members.changed()
        return Done()

    def record_opposed(self, sender: str, message: Opposed) -> PeerMessage:
        """Raises Malformed."""
        if (led := self._current(sender, message)) is not None:
            led.record_opposed(message)
        return Done()

    def _current(self, sender: str, message: Complete | Trouble | Opposed) -> "LedRound | None":
        """Return the round that the message is about, if it is about the plan that is carried out now."""
        led = self._rounds.get(message.sequence)
        if led is None or led.plan is None or led.authority != message.authority or led.plan.entry(sender) is None:
            return None
        return led

    # How long rounds take

    @property
    def patience_seconds(self) -> float:
        return self._patience.seconds(clock.now())

    def record_end(self, led: "LedRound") -> None:
        self._rounds.pop(led.key.sequence, None)
        if led.too_few:
            self._too_few |= dict.fromkeys(led.ready, led.key.sequence)
        self._patience.record_end_here(led.half_ready_at, clock.now())
        self.members.changed()

    def record_end_elsewhere(self, sequence: int) -> None:
        """This worker has ended a round; if another member leads it, only its own post tells how long that took."""
        own = self.participant.rounds.get(sequence)
        if own is not None and sequence not in self._rounds:
            self._patience.record_end_elsewhere(own.started, clock.now())

    # State

    def phases(self) -> dict[int, str]:
        """Return the rounds that this node leads, and the phase of each."""
        return {sequence: led.phase.value for sequence, led in self._rounds.items()}

    async def wait_for_earlier(self, sequence: int) -> bool:
        """Wait until no earlier round is led here: rounds end in their order. Return whether there was one."""
        waited = False
        while any(other < sequence for other in self._rounds):
            waited = True
            await self.members.wait_for_change(timing.POLL_SECONDS)
        return waited


class LedRound(LedRoundState):
    def __init__(self, leader: Leader, key: RoundKey) -> None:
        self._leader = leader
        self._participant = leader.participant
        self._outcomes = leader.participant.outcomes
        self._audit = leader.participant.outcomes.audit
        self._heartbeats = leader.participant.heartbeats
        self._waking = leader.participant.members
        super().__init__(
            key,
            leader.participant.members,
            self._outcomes.quorum,
            self._outcomes.missed,
            leader.shares,
            leader.quarrels,
            self._terms_of_own_post,
            leader.participant.layout,
        )

    def _terms_of_own_post(self) -> Terms | None:
        own = self._participant.rounds.get(self.key.sequence)
        return None if own is None else own_terms(own.posted)

    def add(self, entry: Entry, max_norm_ratio: float | None, merge: Merge) -> None:
        super().add(entry, max_norm_ratio, merge)
        self._waking.changed()

    def record_vote(self, sender: str, vote: Vote) -> None:
        """Raises Malformed."""
        assert self.plan is not None
        self._outcomes.notary.check_vote(self.plan, sender, vote)
        self.votes[sender] = vote
        if any(other.mean != vote.mean for other in self.votes.values()):
            self._audit.compare_means(self.plan, list(self.votes.values()))
        self._waking.changed()

    def record_opposed(self, message: Opposed) -> None:
        """Find the opposed contributions from what the reducers have signed, which any worker may pass on. Raises
        Malformed."""
        assert self.plan is not None
        self._outcomes.notary.check_ranges(self.plan, message.num_parts, message.ranges)
        self.opposed |= self._audit.find_opposed(self.plan, message.num_parts, message.ranges)
        unsigned = Vote(message.num_parts, message.ranges, bytes(SIGNATURE_BYTES))
        self._audit.compare_means(self.plan, [unsigned, *self.votes.values()])
        self._waking.changed()

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self._settings.timeout_seconds):
                if await self._inquire():
                    return
                await self._gather()
                await self._conclude()
        except SteppedDown as why:
            logger.info("round %d: %s", self.key.sequence, why)
        except TimeoutError:
            logger.warning("round %d did not end within %g s", self.key.sequence, self._settings.timeout_seconds)
        finally:
            self._leader.record_end(self)

    # Inquire

    async def _inquire(self) -> bool:
        """Ask all members for the state of the round; return whether this has ended it, with the plan of an earlier
        leader."""
        answers = await inquire_in_turn(self._participant, self.key, self.authority, self._leader.wait_for_earlier)
        if (plan := answers.plan) is not None:
            self._audit.compare_means(plan, list(answers.votes(plan).values()))
        certificate = self.judge_inquiry(answers, self._waking.permissions.bans())
        if plan is not None and certificate is not None:
            await self._commit(plan, certificate)
            return True
        for peer, answer in answers.posted.items():
            try:
                self.add_posted(peer, answer)
            except (CallRefused, Malformed) as problem:
                logger.info("round %d: %s is not in it: %s", self.key.sequence, peer, problem)
        return False

    # Gather

    async def _gather(self) -> None:
        while missing := self.missing():
            self._check_going_on()
            step = self.gather(missing, self._leader.patience_seconds, clock.now())
            for name in step.ask:
                self._heartbeats.beat_soon(name)
            for name in step.hurry:
                self._leader.hurry(name, self.key.sequence)
            if step.enough:
                break
            await self._waking.wait_for_change(timing.POLL_SECONDS)
        self.end_gathering(clock.now())

    def _check_going_on(self) -> None:
        self.check_going_on(self._outcomes.has_ended(self.key.sequence))

    # Attempt

    async def _conclude(self) -> None:
        """Make plans until one succeeds, and commit it."""
        while True:
            await self._wait_until_it_may_go_on()
            plan = self.make_plan()
            for peer in self._gathered.left_out:
                logger.warning("%s posts on other terms than this run's", peer)
            decided = await self._attempt(plan)
            if isinstance(decided, Certificate):
                await self._commit(plan, decided)
                return
            for peer, reason in decided.peers.items():
                logger.info("round %d goes on without %s: %s", self.key.sequence, peer, reason)
            self.leave_out(decided)

    async def _wait_until_it_may_go_on(self) -> None:
        live = len(self._members.live())
        while not self.may_go_on():
            self._check_going_on()
            self.phase = LeadPhase.SILENT
            await self._waking.wait_for_change(timing.POLL_SECONDS)
        if len(self._members.live()) > live:
            raise SteppedDown("other workers are back, and may have gone on")

    async def _attempt(self, plan: Plan) -> Dropped | Certificate:
        """Offer the plan to its workers, until they have voted for its mean or cannot."""
        self.begin_attempt()
        transfers = self._participant.transfers
        grace = transfers.grace(plan, self._settings.lost_seconds, self._settings.stall_seconds)
        offers = [asyncio.create_task(self._offer(plan, entry.peer, self.refusals)) for entry in plan.entries]
        try:
            while True:
                decided = self.judge_attempt(plan, grace, clock.now()) or await self._judge_troubles(plan)
                if decided is not None:
                    return decided
                if self.is_blocked(plan):
                    return Dropped({})
                await self._waking.wait_for_change(timing.POLL_SECONDS)
        finally:
            for offer in offers:
                offer.cancel()

    async def _judge_troubles(self, plan: Plan) -> Dropped | None:
        """Judge the reports of the plan's workers about each other; None: go on."""
        if not self.troubles.reported:
            return None
        if self.troubles.accused(plan):
            end = clock.now() + self._settings.lost_seconds
            while clock.now() < end and not self.troubles.are_sure(plan):
                await self._waking.wait_for_change(timing.POLL_SECONDS)
            return self.troubles.judge_lies(plan, self._quarrels)
        await asyncio.sleep(timing.TROUBLE_SECONDS)
        dropped = self.troubles.judge_failures(plan, self._shares, self._quarrels, self._quorum.is_majority)
        if dropped is not None and dropped.withheld is not None:
            self._waking.emit_about("reducer_passed_over", dropped.withheld, round=plan.key.sequence)
        return dropped

    async def _offer(self, plan: Plan, peer: str, refusals: dict[str, object]) -> None:
        """Send the plan to a worker, again and again, until it has answered."""
        answer: object = None
        while answer is None:
            try:
                answer = await self._participant.calls.ask(peer, plan)
            except Unreachable as problem:
                self._heartbeats.suspect(peer, problem)
            except (CallRefused, Malformed) as problem:
                logger.info("round %d: %s does not take the plan: %s", self.key.sequence, peer, problem)
                answer = problem if code_of(problem) in ("plan", "rounds") else None
            if answer is None:
                await asyncio.sleep(timing.POLL_SECONDS)
        if not isinstance(answer, Done):
            refusals[peer] = answer
            self._waking.changed()

    # Commit

    async def _commit(self, plan: Plan, certificate: Certificate) -> None:
        """Tell all other workers first, and count the mean here when at least one of them has answered."""
        self.phase = LeadPhase.COMMITTING
        others = [
            entry.peer for entry in plan.entries if entry.peer != self._members.me and self._members.is_live(entry.peer)
        ]
        self._quarrels.settle([entry.peer for entry in plan.entries])
        commit = Commit(self.key.sequence, self.authority, plan.digest, certificate)
        commits = [asyncio.create_task(self._participant.ask_all(self.key.sequence, [peer], commit)) for peer in others]
        for commit_answers in asyncio.as_completed(commits):
            answers = await commit_answers
            if any(isinstance(answer, Superseded) for answer in answers.values()):
                raise SteppedDown("another worker leads it now")
            if answers:
                break
        own = self._participant.rounds.get(self.key.sequence)
        counted = own is not None and not own.ended and self._outcomes.commit(own, plan.digest, certificate)
        if not counted and plan.entry(self._members.me) is None:
            self._outcomes.record_missed(self.key.sequence)
        await asyncio.gather(*commits)


# Inquire
#
# An earlier leader may have come far. If a member has ended the round, it has ended. If members have the whole mean of
# a plan, it may count for a worker that cannot be asked now: the plan of the highest authority is the one to commit.
# With a majority of answers, of which every committed plan had one too, no two leaders commit different plans.


async def inquire_in_turn(
    participant: Participant, key: RoundKey, authority: Authority, wait_for_earlier: Callable[[int], Awaitable[bool]]
) -> InquiryAnswers:
    """Do what `inquire` does; when it returns, no earlier round is under way. Raises SteppedDown.

    The question travels beside the earlier rounds: a promise holds whenever it was given. It is asked again if there is
    something to commit, which must not end before the earlier rounds, or if these have changed the members that count
    and the answers are no majority of those.
    """
    answers = await inquire(participant, key, authority)
    if not await wait_for_earlier(key.sequence):
        return answers
    if answers.plan is None and participant.outcomes.quorum.is_majority(answers.answered):
        return answers
    later = answers.authority._replace(term=answers.authority.term + 1)
    return await inquire(participant, key, later)


async def inquire(participant: Participant, key: RoundKey, authority: Authority) -> InquiryAnswers:
    """Ask all live members for the state of a round, until a majority has answered. Raises SteppedDown."""
    members = participant.members
    own = participant.rounds.get(key.sequence)
    before = NO_AUTHORITY
    if own is not None:
        before = own.authority
        authority = authority._replace(term=max(authority.term, own.authority.term + 1))
    while True:
        peers = [members.me, *(peer.name for peer in members.live())]
        answers = await participant.ask_all(key.sequence, peers, Inquire(key.sequence, authority))
        answers = _step_down_if_most_follow_others(participant, key.sequence, answers, before, authority)
        seen = await _judge(participant, key.sequence, answers)
        if seen is not None and seen.leader >= authority.leader:
            authority = authority._replace(term=seen.term + 1)
        elif participant.outcomes.quorum.is_majority(answers):
            posted = {peer: answer for peer, answer in answers.items() if isinstance(answer, Posted)}
            checked = {peer: _checked(participant, key.sequence, peer, answer) for peer, answer in posted.items()}
            return InquiryAnswers(authority, checked, frozenset(answers))
        else:
            await members.wait_for_change(timing.POLL_SECONDS)
        if participant.outcomes.has_ended(key.sequence):
            raise SteppedDown("it has ended already")


def _step_down_if_most_follow_others(
    participant: Participant, sequence: int, answers: dict[str, PeerMessage], before: Authority, asked: Authority
) -> dict[str, PeerMessage]:
    """Return the answers without those of members that follow another leader, and so promise nothing. Raises
    SteppedDown.

    `before`: what the own worker had promised before this node asked with the authority `asked`.
    """
    followed = {peer: answer.leader if isinstance(answer, LedBy) else None for peer, answer in answers.items()}
    leader = leader_of_most(followed, participant.outcomes.quorum.is_majority)
    if leader is not None:
        if (own := participant.rounds.get(sequence)) is not None:
            own.take_back(asked, before)
            own.turn_to(leader)
        raise SteppedDown(f"{leader} leads it")
    return {peer: answer for peer, answer in answers.items() if followed[peer] is None}


async def _judge(participant: Participant, sequence: int, answers: dict[str, PeerMessage]) -> Authority | None:
    """Return the highest authority that the members had seen before. Raises SteppedDown."""
    seen: list[Authority] = []
    for peer, answer in answers.items():
        if isinstance(answer, Ended):
            if peer != participant.members.me and await _has_ended(participant, sequence, peer):
                raise SteppedDown("it has ended already")
        elif isinstance(answer, Posted | Superseded):
            seen.append(answer.seen)
    return max(seen, default=None)


async def _has_ended(participant: Participant, sequence: int, peer: str) -> bool:
    """Whether a round has ended, as `peer` says; its word alone is not enough."""
    own = participant.rounds.get(sequence)
    outcomes = participant.outcomes
    if own is not None:
        await outcomes.resolve(own, peer)
        return own.ended or participant.members.most_ended(sequence)
    try:
        agreed = await outcomes.ask(peer, sequence)
    except (Unreachable, CallRefused, Malformed) as problem:
        logger.info("round %d: %s does not give its outcome: %s", sequence, peer, problem)
        agreed = None
    return agreed is not None or participant.members.most_ended(sequence)


def _checked(participant: Participant, sequence: int, peer: str, answer: Posted) -> Posted:
    """Return the answer, without its vote if that is not valid."""
    voted = answer.complete
    try:
        if voted is not None:
            participant.outcomes.notary.check_vote(voted.plan, peer, voted.vote)
            if voted.plan.key.sequence != sequence:
                raise Malformed("a plan of another round")
    except Malformed as problem:
        logger.info("round %d: %s has no valid vote: %s", sequence, peer, problem)
        return structs.replace(answer, complete=None)
    return answer
