"""One round, from the leader's side.

    inquire   ask all members for the state of this round: an earlier leader may have come far (inquiry.py)
    gather    until all members are ready, or patience is over: then the slow ones are told to post what they have
    attempt   send a plan to all ready workers; those that die, freeze or lie are left out of the next attempt
    commit    when all live workers have the whole mean; or most have it, and the others take twice the usual time. The
              leader's own worker counts it last: if the leader dies before any other has heard of it, no worker has
              ended the round, and the next leader goes on

A leader that finds a higher authority, or the round ended, steps down. Its own worker need not be in the round.
"""

import asyncio
import logging
import math
from collections.abc import Collection
from typing import Protocol

from diloco.core.config import Merge
from diloco.engines.rounds import RoundKey
from diloco.swarm.audit.directions import find_opposed
from diloco.swarm.audit.range_signatures import SIGNATURE_BYTES
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.inquiry import SteppedDown, inquire_in_turn
from diloco.swarm.node.participant import Participant
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.certificate import Certificate, Vote, certify, is_most, largest_group
from diloco.swarm.protocol.membership import clashes
from diloco.swarm.protocol.messages import Commit, Done, Ended, Opposed, Posted, Superseded
from diloco.swarm.protocol.plan import Authority, Entry, Plan
from diloco.swarm.protocol.shares import Shares
from diloco.swarm.protocol.terms import ReadyWorkers, Terms, own_layout, own_terms
from diloco.swarm.protocol.troubles import Dropped, Quarrels, Troubles, choose
from diloco.swarm.protocol.wire import Malformed

logger = logging.getLogger(__name__)


class Leading(Protocol):
    """What a led round needs of leader.py."""

    participant: Participant
    shares: Shares
    quarrels: Quarrels

    @property
    def patience_seconds(self) -> float: ...

    def hurry(self, peer: str, sequence: int) -> None: ...

    def record_end(self, led: "LedRound") -> None: ...

    async def wait_for_earlier(self, sequence: int) -> bool: ...


class LedRound:
    def __init__(self, leader: Leading, key: RoundKey) -> None:
        self._leader, self.key = leader, key
        self._participant, self._outcomes = leader.participant, leader.participant.outcomes
        self._quorum = self._outcomes.quorum
        self._members, self._heartbeats = self._participant.members, self._participant.heartbeats
        self._settings = self._participant.settings
        self._gathered = ReadyWorkers(self._participant.layout)
        self.ready = self._gathered.entries
        self.votes: dict[str, Vote] = {}
        """Of the workers that have the whole mean of `plan`."""
        self.troubles = Troubles(self._members)
        self.plan: Plan | None = None
        self.phase = "gathering"
        self.authority = Authority(1, -self._members.status.number)
        self.half_ready_at: float | None = None
        self.too_few = False
        """No plan could be made of the workers that are ready."""
        self.opposed: set[str] = set()
        """Workers whose contribution points against the others'."""
        self._counts_missed = True
        """Workers that missed rounds count as more than one, unless a worker has seen that they missed none."""

    def add(self, entry: Entry, max_norm_ratio: float | None, merge: Merge) -> None:
        """A worker is ready. Raises CallRefused if it trains something else than this one."""
        self._gathered.add(entry, Terms(*own_layout(entry), max_norm_ratio, merge), self._own_terms())
        self._members.changed()

    def _own_terms(self) -> Terms | None:
        own = self._participant.rounds.get(self.key.sequence)
        return None if own is None else own_terms(own.posted)

    def record_vote(self, sender: str, vote: Vote) -> None:
        """Raises Malformed."""
        assert self.plan is not None
        self._outcomes.notary.check_vote(self.plan, sender, vote)
        self.votes[sender] = vote
        if any(other.mean != vote.mean for other in self.votes.values()):
            self._outcomes.liars.compare(self.plan, list(self.votes.values()))
        self._members.changed()

    def record_opposed(self, message: Opposed) -> None:
        """What the reducers have signed tells it, and any worker can pass that on. Raises Malformed."""
        assert self.plan is not None
        self._outcomes.notary.check_ranges(self.plan, message.num_parts, message.ranges)
        self.opposed |= find_opposed(self.plan, message.num_parts, message.ranges).keys()
        unsigned = Vote(message.num_parts, message.ranges, bytes(SIGNATURE_BYTES))
        self._outcomes.liars.compare(self.plan, [unsigned, *self.votes.values()])
        self._members.changed()

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
        """Whether the round has ended, with a mean that some workers have already."""
        answers = await inquire_in_turn(self._participant, self.key, self.authority, self._leader.wait_for_earlier)
        self.authority = answers.authority
        if (plan := answers.plan) is not None:
            votes = answers.votes(plan)
            self._outcomes.liars.compare(plan, list(votes.values()))
            certificate = certify(plan, agreed := largest_group(votes))
            if certificate is not None and self._quorum.is_majority(agreed):
                await self._commit(plan, certificate)
                return True
            if self._may_count(plan, {*agreed, *(e.peer for e in plan.entries if e.peer not in answers.answered)}):
                raise SteppedDown("workers that are silent may have ended it")
        for peer, answer in answers.posted.items():
            self._add(peer, answer)
        return False

    def _may_count(self, plan: Plan, voters: Collection[str]) -> bool:
        """Whether an earlier leader can have got a certificate from these workers, without the dead and the banned."""
        peers, banned = self._members.peers, self._members.permissions.bans()
        there = [peer for peer in voters if peer not in banned and (peer not in peers or not peers[peer].gone)]
        return bool(self._quorum.counted()) and is_most(plan, there) and self._quorum.may_be_majority(there)

    def _add(self, peer: str, answer: Posted) -> None:
        try:
            entry = Entry(peer, answer.contribution)
            fits = entry.number == self._members.number_of(peer) and not clashes(self._members, peer)
            if fits and peer not in self.ready and entry.parsed.key.sequence == self.key.sequence:
                self.add(entry, answer.max_norm_ratio, answer.merge)
        except (CallRefused, Malformed) as problem:
            logger.info("round %d: %s is not in it: %s", self.key.sequence, peer, problem)

    # Gather

    async def _gather(self) -> None:
        hurried_at: float | None = None
        while missing := self._missing():
            self._step_down_if_ended()
            now = clock.now()
            live_ready = [name for name in self.ready if self._members.is_live(name)]
            if self.half_ready_at is None and len(live_ready) >= len(missing) and self._quorum.is_majority(live_ready):
                self.half_ready_at = now
            for name in missing:
                peer = self._members.peers.get(name)
                if peer is not None and now - peer.heard_at > 0.6 * self._settings.beat_seconds:
                    self._heartbeats.beat_soon(name)
            since_half = 0.0 if self.half_ready_at is None else now - self.half_ready_at
            if hurried_at is None and since_half > self._leader.patience_seconds:
                hurried_at = now
                for name in missing:
                    self._leader.hurry(name, self.key.sequence)
            grace = self._grace_seconds(missing)
            if hurried_at is not None and now - hurried_at > grace and self._quorum.is_majority(live_ready):
                break
            await self._members.wait_for_change(timing.POLL_SECONDS)
        self.half_ready_at = self.half_ready_at or clock.now()

    def _step_down_if_ended(self) -> None:
        """Others may end a round that this node has begun to lead; its worker then fetches their state."""
        if self._outcomes.has_ended(self.key.sequence):
            raise SteppedDown("it has ended already")
        if not self._quorum.can_end(self.key.sequence):
            raise SteppedDown("most workers are in a later one")

    def _missing(self) -> list[str]:
        """Members with the state that have not posted this round."""
        expected = [peer.name for peer in self._members.with_state()]
        if self._members.status.has_state:
            expected.append(self._members.me)
        expects = self._members.attendance.expects
        return [name for name in expected if name not in self.ready and expects(name)]

    def _grace_seconds(self, missing: list[str]) -> float:
        """How long hurried workers may take: the inner step that they are in."""
        peers = [self._members.peers[name] for name in missing if name in self._members.peers]
        slowest = max((peer.status.step_seconds for peer in peers), default=0.0)
        least = timing.LEAST_GRACE_SHARE * self._settings.lost_seconds
        return min(max(least, 3 * slowest), self._settings.timeout_seconds / 4)

    # Attempt

    async def _conclude(self) -> None:
        """Make plans until one succeeds, and commit it."""
        dropped: set[str] = set()
        while True:
            await self._wait_until_it_may_go_on()
            if (terms := self._gathered.settle(self._own_terms())) is None:
                raise SteppedDown("no worker in it trains what this one does")
            self.key = RoundKey(self.key.sequence, terms.fragment)
            here = [
                e
                for e in self.ready.values()
                if e.peer not in dropped and self._members.is_live(e.peer) and not clashes(self._members, e.peer)
            ]
            here = choose(
                here, self.key.sequence, self._leader.quarrels, self._members.attendance, self._quorum.is_majority
            )
            if not here or not self._quorum.is_majority([entry.peer for entry in here]):
                self.too_few = True
                raise SteppedDown("too few workers are left in it")
            self.authority = self.authority._replace(attempt=self.authority.attempt + 1)
            entries = tuple(sorted(here, key=lambda entry: entry.number))
            roster = tuple(sorted({*self._members.roster(), *(entry.number for entry in entries)}))
            names = [entry.peer for entry in entries]
            majority = bool(self._quorum.counted()) and self._quorum.is_majority(names)
            self.plan = Plan(
                self.key, self.authority, self._members.me, entries, roster, majority,
                terms.max_norm_ratio, terms.merge, self._leader.shares.make(entries),
                self._outcomes.missed.rounds_of(self.key.fragment, entries) if self._counts_missed else (),
                self._quorum.next_counted(), self._quorum.last_ended, self._opposed_numbers(entries),
            )  # fmt: skip
            problem = await self._attempt(self.plan)
            if isinstance(problem, Certificate):
                await self._commit(self.plan, problem)
                return
            for peer, reason in problem.peers.items():
                logger.info("round %d goes on without %s: %s", self.key.sequence, peer, reason)
                if not problem.lost:
                    dropped.add(peer)
                    self._members.attendance.record_trouble(peer)

    def _opposed_numbers(self, entries: tuple[Entry, ...]) -> tuple[int, ...]:
        """Those of this round; in the first plan those that were so in the last rounds, if they are fewer than half."""
        if self.authority.attempt == 1:
            last = self._quorum.last
            before = {*last.opposed_peers} if last is not None else set()
            self.opposed |= {peer for peer in before if not self._members.attendance.compares(peer)}
        here = [entry for entry in entries if entry.peer in self.opposed and entry.parsed.claim.weight > 0]
        numbers = tuple(entry.number for entry in here)
        if 2 * len(numbers) < len(entries):
            return numbers
        self.opposed.clear()  # others were lost since: half cannot be told from the other half
        return ()

    async def _wait_until_it_may_go_on(self) -> None:
        live = len(self._members.live())
        while not (self._members.may_go_on() and self._quorum.is_here()):
            self._step_down_if_ended()
            self.phase = "waiting: most others have fallen silent"
            await self._members.wait_for_change(timing.POLL_SECONDS)
        if len(self._members.live()) > live:
            raise SteppedDown("other workers are back, and may have gone on")

    async def _attempt(self, plan: Plan) -> "Dropped | Certificate":
        """A certificate: all live workers have the whole mean; or most have it, and the others take too long."""
        self.phase = "averaging"
        self.votes = {}
        self.troubles.begin()
        refusals: dict[str, object] = {}
        grace = self._participant.transfers.grace(plan, self._settings.lost_seconds, self._settings.stall_seconds)
        shares, certified_at = self._leader.shares, math.inf
        offers = [asyncio.create_task(self._offer(plan, entry.peer, refusals)) for entry in plan.entries]
        try:
            while True:
                agreed = largest_group(self.votes)
                certificate = certify(plan, agreed) if self._quorum.is_majority(agreed) else None
                waiting = [e.peer for e in plan.entries if e.peer not in agreed]
                live = [peer for peer in waiting if self._members.is_live(peer)]
                if not live and certificate is not None:
                    return certificate
                if lost := {peer: "it is lost" for peer in waiting if peer not in live}:
                    return Dropped(lost, lost=True)
                certified_at = math.inf if certificate is None else min(certified_at, clock.now())
                if certificate is not None and clock.now() - certified_at > grace:
                    return certificate  # the others are in the mean, and fetch it
                if any(isinstance(refusal, Superseded | Ended) for refusal in refusals.values()):
                    raise SteppedDown("another worker leads it now, or it has ended")
                if self._counts_missed and any(_code(refusal) == "rounds" for refusal in refusals.values()):
                    self._counts_missed = False
                    return Dropped({})
                if refusals:
                    return Dropped({peer: f"it answers {type(said).__name__}" for peer, said in refusals.items()})
                if self.opposed.intersection(entry.peer for entry in plan.contributors):
                    return Dropped({})
                problem = await self.troubles.judge(plan, shares, self._leader.quarrels, self._quorum.is_majority)
                if problem is not None:
                    return problem
                if shares.is_blocked(plan):
                    return Dropped({})
                await self._members.wait_for_change(timing.POLL_SECONDS)
        finally:
            for offer in offers:
                offer.cancel()

    async def _offer(self, plan: Plan, peer: str, refusals: dict[str, object]) -> None:
        """Again and again, until the worker has answered."""
        answer: object = None
        while answer is None:
            try:
                answer = await self._participant.calls.ask(peer, plan)
            except Unreachable as problem:
                self._heartbeats.suspect(peer, problem)
            except (CallRefused, Malformed) as problem:
                logger.info("round %d: %s does not take the plan: %s", self.key.sequence, peer, problem)
                answer = problem if _code(problem) in ("plan", "rounds") else None
            if answer is None:
                await asyncio.sleep(timing.POLL_SECONDS)
        if not isinstance(answer, Done):
            refusals[peer] = answer
            self._members.changed()

    # Commit

    async def _commit(self, plan: Plan, certificate: Certificate) -> None:
        """Tell all other workers first, and count the mean here when at least one of them has answered."""
        self.phase = "committing"
        others = [e.peer for e in plan.entries if e.peer != self._members.me and self._members.is_live(e.peer)]
        self._leader.quarrels.settle([entry.peer for entry in plan.entries])
        commit = Commit(self.key.sequence, self.authority, plan.digest, certificate)
        commits = [asyncio.create_task(self._participant.ask_all(self.key.sequence, [peer], commit)) for peer in others]
        for next_one in asyncio.as_completed(commits):
            answers = await next_one
            if any(isinstance(answer, Superseded) for answer in answers.values()):
                raise SteppedDown("another worker leads it now")
            if answers:
                break
        own = self._participant.rounds.get(self.key.sequence)
        counted = own is not None and not own.ended and self._outcomes.commit(own, plan.digest, certificate)
        if not counted and plan.entry(self._members.me) is None:
            self._outcomes.record_missed(self.key.sequence)
        await asyncio.gather(*commits)


def _code(answer: object) -> str | None:
    """Of a refusal."""
    return answer.code if isinstance(answer, CallRefused) else None
