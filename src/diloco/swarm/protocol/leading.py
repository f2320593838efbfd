"""The decisions of a round's leader: which workers are in its plan, which in the next one, when the mean counts.

    inquire   all members tell what they have of this round: an earlier leader may have come far (`judge_inquiry`)
    gather    until all are ready, or patience is over: then the slow ones are told to post what they have (`gather`)
    plan      of all that are ready, live and fit to be in a plan together (`make_plan`)
    attempt   until all live workers of the plan have voted for one mean; or most have, and the others take too long
              (`judge_attempt`). Workers that die, freeze or lie are left out of the next plan

A leader that finds a higher authority, or the round ended, steps down. Its own worker need not be in the round. Each
decision is a function of the state here and of the time; node/leader.py carries them out.
"""

import enum
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec import structs

from diloco.core.config import Merge
from diloco.engines.rounds import RoundKey
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol.attendance import seconds_to_post
from diloco.swarm.protocol.certificate import Certificate, Vote, certify, is_most, largest_group
from diloco.swarm.protocol.membership import Membership, clashes
from diloco.swarm.protocol.messages import Ended, Posted, Superseded
from diloco.swarm.protocol.missed_rounds import MissedRounds
from diloco.swarm.protocol.plan import Authority, Entry, Plan
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.shares import Shares
from diloco.swarm.protocol.terms import ReadyWorkers, Terms, own_layout
from diloco.swarm.protocol.troubles import Dropped, Quarrels, Troubles, choose


class SteppedDown(Exception):
    """Another worker leads this round, or it has ended already."""


class LeadPhase(enum.Enum):
    """What a leader is doing in a round; `diloco status` shows the value."""

    GATHERING = "gathering"
    SILENT = "waiting: most others have fallen silent"
    AVERAGING = "averaging"
    COMMITTING = "committing"


@dataclass(frozen=True)
class InquiryAnswers:
    """The answers of a majority of the members to a new leader."""

    authority: Authority
    """Higher than any that the members have seen."""
    posted: dict[str, Posted]
    answered: frozenset[str]

    @property
    def plan(self) -> Plan | None:
        """The plan to commit, if there is one: of the highest authority whose whole mean a member has."""
        complete = [answer.complete.plan for answer in self.posted.values() if answer.complete is not None]
        return max(complete, key=lambda plan: plan.authority, default=None)

    def votes(self, plan: Plan) -> dict[str, Vote]:
        voted = {peer: answer.complete for peer, answer in self.posted.items() if answer.complete is not None}
        return {peer: complete.vote for peer, complete in voted.items() if complete.plan.digest == plan.digest}


@dataclass(frozen=True)
class Gather:
    """What to do now about the workers that have not posted."""

    ask: list[str]
    """Members to ask now whether they are still live."""
    hurry: list[str]
    """Members to tell to post what they have."""
    enough: bool
    """The round waits no longer."""


class LedRoundState:
    def __init__(
        self,
        key: RoundKey,
        members: Membership,
        quorum: Quorum,
        missed: MissedRounds,
        shares: Shares,
        quarrels: Quarrels,
        own_terms: Callable[[], Terms | None],
        layout: str | None,
    ) -> None:
        """`own_terms`: gives the terms of this worker's own post, if it has posted. `layout`: that of its earlier
        rounds."""
        self.key = key
        self._members = members
        self._settings = members.settings
        self._quorum = quorum
        self._missed_rounds = missed
        self._shares = shares
        self._quarrels = quarrels
        self._own_terms = own_terms
        self._gathered = ReadyWorkers(layout)
        self.ready = self._gathered.entries
        self.phase = LeadPhase.GATHERING
        self.authority = Authority(1, -members.status.number)
        self.half_ready_at: float | None = None
        self._hurried_at: float | None = None
        self.too_few = False
        """No plan could be made of the workers that are ready."""
        # The plan that is carried out now
        self.plan: Plan | None = None
        self.votes: dict[str, Vote] = {}
        """The votes of the workers that have the whole mean of `plan`."""
        self.refusals: dict[str, object] = {}
        """Worker -> its answer to the plan, where that is not Done."""
        self._certified_at = math.inf
        """When most had first voted for one mean; inf before."""
        # All plans of the round
        self.troubles = Troubles(members)
        self._dropped: set[str] = set()
        self.opposed: set[str] = set()
        """Workers whose contribution points against the others'."""
        self._counts_missed = True
        """Workers that missed rounds count as more than one, unless a worker has seen that they missed none."""

    def add(self, entry: Entry, max_norm_ratio: float | None, merge: Merge) -> None:
        """A worker is ready. Raises CallRefused if it trains something else than this one."""
        self._gathered.add(entry, Terms(*own_layout(entry), max_norm_ratio, merge), self._own_terms())

    def add_posted(self, peer: str, answer: Posted) -> None:
        """A worker that has posted to an earlier leader. Raises CallRefused or Malformed."""
        entry = Entry(peer, answer.contribution)
        fits = entry.number == self._members.number_of(peer) and not clashes(self._members, peer)
        if fits and peer not in self.ready and entry.parsed.key.sequence == self.key.sequence:
            self.add(entry, answer.max_norm_ratio, answer.merge)

    # Inquire

    def judge_inquiry(self, answers: InquiryAnswers, banned: Collection[str]) -> Certificate | None:
        """Lead with the authority that the members have promised to obey. Return the certificate of the plan of an
        earlier leader, if that has enough votes. Raises SteppedDown if it may have them, with those of workers that are
        silent."""
        self.authority = answers.authority
        plan = answers.plan
        if plan is None:
            return None
        agreed = largest_group(answers.votes(plan))
        certificate = certify(plan, agreed)
        if certificate is not None and self._quorum.is_majority(agreed):
            return certificate
        silent = {entry.peer for entry in plan.entries if entry.peer not in answers.answered}
        if self._may_count(plan, {*agreed, *silent}, banned):
            raise SteppedDown("workers that are silent may have ended it")
        return None

    def _may_count(self, plan: Plan, voters: Collection[str], banned: Collection[str]) -> bool:
        """Whether an earlier leader can have got a certificate from these workers, without the dead and the banned."""
        peers = self._members.peers
        counting = [peer for peer in voters if peer not in banned and (peer not in peers or not peers[peer].gone)]
        return (
            bool(self._quorum.counting_members())
            and is_most(plan, counting)
            and self._quorum.is_majority_by_plan(counting)
        )

    # Gather

    def missing(self) -> list[str]:
        """Members with the state that have not posted this round."""
        expected = [peer.name for peer in self._members.with_state()]
        if self._members.status.has_state:
            expected.append(self._members.me)
        expects = self._members.attendance.expects
        return [name for name in expected if name not in self.ready and expects(name)]

    def gather(self, missing: list[str], patience_seconds: float, now: float) -> Gather:
        """Decide what to do about the missing workers. Raises SteppedDown."""
        live_ready = [name for name in self.ready if self._members.is_live(name)]
        most_are_ready = self._quorum.is_majority(live_ready)
        if self.half_ready_at is None and len(live_ready) >= len(missing) and most_are_ready:
            self.half_ready_at = now
        peers = [self._members.peers[name] for name in missing if name in self._members.peers]
        quiet_seconds = timing.QUIET_SHARE * self._settings.beat_seconds
        ask = [peer.name for peer in peers if now - peer.heard_at > quiet_seconds]
        since_half = 0.0 if self.half_ready_at is None else now - self.half_ready_at
        hurry: list[str] = []
        if self._hurried_at is None and since_half > patience_seconds:
            self._hurried_at = now
            hurry = missing
        slowest = max((peer.status.step_seconds for peer in peers), default=0.0)
        least = timing.LEAST_GRACE_SHARE * self._settings.lost_seconds
        grace_seconds = seconds_to_post(slowest, self._settings, least)
        over = self._hurried_at is not None and now - self._hurried_at > grace_seconds
        return Gather(ask, hurry, over and most_are_ready)

    def end_gathering(self, now: float) -> None:
        self.half_ready_at = self.half_ready_at or now

    def check_going_on(self, ended: bool) -> None:
        """Others may end a round that this node has begun to lead; its worker then fetches their state. Raises
        SteppedDown. `ended`: it has ended here."""
        if ended:
            raise SteppedDown("it has ended already")
        if not self._quorum.can_still_end(self.key.sequence):
            raise SteppedDown("most workers are in a later one")

    # Plan

    def may_go_on(self) -> bool:
        """Whether the round may go on: not while most others have just fallen silent, since a split may be between
        them."""
        return self._members.may_go_on() and self._quorum.sees_majority()

    def make_plan(self) -> Plan:
        """Raises SteppedDown if no plan can be made."""
        if (terms := self._gathered.settle(self._own_terms())) is None:
            raise SteppedDown("no worker in it trains what this one does")
        self.key = RoundKey(self.key.sequence, terms.fragment)
        fit = [entry for entry in self.ready.values() if self._is_fit(entry.peer)]
        is_majority = self._quorum.is_majority
        chosen = choose(fit, self.key.sequence, self._quarrels, self._members.attendance, is_majority)
        if not chosen or not is_majority([entry.peer for entry in chosen]):
            self.too_few = True
            raise SteppedDown("too few workers are left in it")
        self.authority = self.authority._replace(attempt=self.authority.attempt + 1)
        entries = tuple(sorted(chosen, key=lambda entry: entry.number))
        names = [entry.peer for entry in entries]
        plan = Plan(
            key=self.key,
            authority=self.authority,
            leader=self._members.me,
            entries=entries,
            roster=tuple(sorted({*self._members.roster(), *(entry.number for entry in entries)})),
            majority=bool(self._quorum.counting_members()) and is_majority(names),
            max_norm_ratio=terms.max_norm_ratio,
            merge=terms.merge,
            rounds=self._missed_rounds.rounds_of(self.key.fragment, entries) if self._counts_missed else (),
            counted=self._quorum.numbers_that_count_next(),
            last_ended=self._quorum.last_ended,
            opposed=self._opposed_numbers(entries),
        )
        self.plan = structs.replace(plan, shares=self._shares.make(plan))
        return self.plan

    def _is_fit(self, peer: str) -> bool:
        return peer not in self._dropped and self._members.is_live(peer) and not clashes(self._members, peer)

    def _opposed_numbers(self, entries: tuple[Entry, ...]) -> tuple[int, ...]:
        """Return the numbers of the workers whose contribution points against the others'; the first plan knows them
        from the last rounds. Empty unless they are fewer than half."""
        if self.authority.attempt == 1:
            last = self._quorum.last_plan
            before = {*last.opposed_peers} if last is not None else set()
            self.opposed |= {peer for peer in before if not self._members.attendance.compares(peer)}
        opposed = [entry for entry in entries if entry.peer in self.opposed and entry.parsed.claim.weight > 0]
        numbers = tuple(entry.number for entry in opposed)
        if 2 * len(numbers) < len(entries):
            return numbers
        self.opposed.clear()  # others were lost since: half cannot be told from the other half
        return ()

    # Attempt

    def begin_attempt(self) -> None:
        self.phase = LeadPhase.AVERAGING
        self.votes = {}
        self.refusals = {}
        self._certified_at = math.inf
        self.troubles.begin()

    def judge_attempt(self, plan: Plan, grace_seconds: float, now: float) -> "Dropped | Certificate | None":
        """Judge the votes and answers so far. Certificate: the mean counts. Dropped: the next plan is without these
        workers. None: wait on.

        Raises SteppedDown. `grace_seconds`: for the last votes, once most are there.
        """
        agreed = largest_group(self.votes)
        certificate = certify(plan, agreed) if self._quorum.is_majority(agreed) else None
        waiting = [entry.peer for entry in plan.entries if entry.peer not in agreed]
        live = [peer for peer in waiting if self._members.is_live(peer)]
        if not live and certificate is not None:
            return certificate
        if lost := {peer: "it is lost" for peer in waiting if peer not in live}:
            return Dropped(lost, lost=True)
        self._certified_at = math.inf if certificate is None else min(self._certified_at, now)
        if certificate is not None and now - self._certified_at > grace_seconds:
            return certificate  # the others are in the mean, and fetch it
        return self._judge_refusals(plan)

    def _judge_refusals(self, plan: Plan) -> "Dropped | None":
        if any(isinstance(refusal, Superseded | Ended) for refusal in self.refusals.values()):
            raise SteppedDown("another worker leads it now, or it has ended")
        if self._counts_missed and any(code_of(refusal) == "rounds" for refusal in self.refusals.values()):
            self._counts_missed = False
            return Dropped({})
        if self.refusals:
            return Dropped({peer: f"it answers {type(answer).__name__}" for peer, answer in self.refusals.items()})
        if self.opposed.intersection(entry.peer for entry in plan.contributors):
            return Dropped({})
        return None

    def is_blocked(self, plan: Plan) -> bool:
        """Whether two workers of the plan have lost each other, and others can reduce without them."""
        return self._shares.is_blocked(plan)

    def leave_out(self, dropped: Dropped) -> None:
        """Make the next plan without these workers; those that are lost may come back."""
        if not dropped.lost:
            for peer in dropped.peers:
                self._dropped.add(peer)
                self._members.attendance.record_trouble(peer)


def leader_of_most(answers: Mapping[str, str | None], is_majority: Callable[[Collection[str]], bool]) -> str | None:
    """Return the leader that the inquiring one gives way to; None if enough members have promised to obey it.

    `answers`: peer -> the leader that it follows; None for one that has promised to obey this one.
    """
    led_by = [leader for leader in answers.values() if leader is not None]
    promised = [peer for peer, leader in answers.items() if leader is None]
    if led_by and (2 * len(promised) <= len(answers) or not is_majority(promised)):
        return max(led_by, key=led_by.count)
    return None


def code_of(answer: object) -> str | None:
    """Return the code of a refusal (refusals.py); None for any other answer."""
    return answer.code if isinstance(answer, CallRefused) else None
