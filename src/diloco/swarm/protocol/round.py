"""The state of a round that a worker has posted. Only the methods here change it.

Its phase follows from these facts; `TRANSITIONS` says which phase can follow on which, and why (a table of them is in
docs/protocol.md, made by table.py).
"""

import enum
from dataclasses import dataclass, field

from diloco.core.config import Merge
from diloco.engines.rounds import Comparison, RoundPhases
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol.certificate import Agreed, Certificate, Vote
from diloco.swarm.protocol.plan import NO_AUTHORITY, Authority, Plan, parse_header
from diloco.swarm.trainer import PostedRound, PresentWorker, RoundOutcome


class RoundPhase(enum.Enum):
    POSTED = "posted"
    WAITING = "waiting"
    PLANNED = "planned"
    VOTED = "voted"
    ENDED = "ended"
    GIVEN_UP = "given up"


MEANING: dict[RoundPhase, str] = {
    RoundPhase.POSTED: "no leader has the header, or the last one was lost, passed over or is to be asked again",
    RoundPhase.WAITING: "a leader has the header, and waits for others",
    RoundPhase.PLANNED: "it follows a plan, whose workers exchange parts; it keeps that if the leader is lost",
    RoundPhase.VOTED: "it has the whole mean and has voted for it, as it tells a new leader; for no other of the plan",
    RoundPhase.ENDED: "the mean counts: most have voted for it",
    RoundPhase.GIVEN_UP: "the round has failed for this worker; its work is in the next one",
}

TRANSITIONS: dict[RoundPhase, dict[RoundPhase, str]] = {
    RoundPhase.POSTED: {
        RoundPhase.WAITING: "the leader answers Ready with Waiting, or another leader is known",
        RoundPhase.PLANNED: "Plan",
        RoundPhase.ENDED: "a member shows the certificate of a plan with this worker's header, and its mean is fetched",
        RoundPhase.GIVEN_UP: "no majority, no leader, the deadline; or others have ended the round without this worker",
    },
    RoundPhase.WAITING: {
        RoundPhase.POSTED: "the leader is lost or passed over, or has been silent for two seconds",
        RoundPhase.PLANNED: "Plan",
        RoundPhase.ENDED: "as above",
        RoundPhase.GIVEN_UP: "as above",
    },
    RoundPhase.PLANNED: {
        RoundPhase.VOTED: "all parts of the mean are here, and no contribution to it points against the others",
        RoundPhase.ENDED: "as above",
        RoundPhase.GIVEN_UP: "as above",
    },
    RoundPhase.VOTED: {
        RoundPhase.PLANNED: "Plan of a higher authority; or another mean counts, and is fetched into the same memory",
        RoundPhase.ENDED: "Commit with the votes of most for this mean",
        RoundPhase.GIVEN_UP: "as above",
    },
    RoundPhase.ENDED: {},
    RoundPhase.GIVEN_UP: {},
}
"""Phase -> the phases that may follow, and what takes the round there."""


@dataclass(eq=False)
class RoundState:
    posted: PostedRound
    number: int
    """This worker's number."""
    started: float
    authority: Authority = NO_AUTHORITY
    """The highest authority that has sent a message in this round: no lower one is obeyed."""
    root: bytes = b""
    """Binds this worker to its posted parts (audit/merkle.py)."""
    leader: str | None = None
    """The leader that has this worker's header."""
    denied_by: str | None = None
    """The member that was asked last, and said that it does not lead; None: the one that was asked takes the header."""
    refusals: int = 0
    """How often the header was refused in a row."""
    plan: Plan | None = None
    planned_at: float | None = None
    led_since: float | None = None
    """When the first plan of the leader of `plan` arrived."""
    vote: Vote | None = None
    """This worker's vote for the whole mean of `plan`, which is in the posted memory."""
    comparison: Comparison = field(default_factory=Comparison)
    """The comparison of the contributions to that mean; empty if it was fetched later."""
    phases: RoundPhases = field(default_factory=RoundPhases)
    """Phase times of that mean; empty if it was fetched later."""
    cleared: set[str] = field(default_factory=set)
    """Workers whose contribution does not point against the others', in the last plan whose whole mean was here."""
    certificate: Certificate | None = None
    """The votes with which the mean counts; None before."""
    result: RoundOutcome | None = None
    """The end of the round for this worker; None before."""
    minority_since: float | None = None
    """When this worker last began to see no majority (following.py)."""
    unknown_since: float | None = None
    """When it was first offered a plan with a worker whose invitation it does not know (following.py)."""
    stuck_since: float | None = None
    """When it began to wait for a leader that could go on (following.py)."""
    ended_alone_since: float | None = None
    """When a leader first said that it had ended this round, and had no mean that counts here (following.py)."""

    @property
    def sequence(self) -> int:
        return self.posted.key.sequence

    @property
    def limits(self) -> tuple[float | None, Merge]:
        """The run's bound on norms and its way to merge."""
        return self.posted.max_norm_ratio, self.posted.merge

    @property
    def contribution(self) -> PresentWorker:
        return PresentWorker(self.number, self.posted.header, self.posted.note, self.root)

    @property
    def ended(self) -> bool:
        """Whether the round is over for this worker, with its mean or without."""
        return self.result is not None

    @property
    def phase(self) -> RoundPhase:
        if self.result is not None:
            return RoundPhase.GIVEN_UP if self.certificate is None else RoundPhase.ENDED
        if self.plan is not None:
            return RoundPhase.PLANNED if self.vote is None else RoundPhase.VOTED
        return RoundPhase.POSTED if self.leader is None else RoundPhase.WAITING

    # The leader

    def turn_to(self, leader: str | None) -> None:
        """`leader` has this worker's header, or is to get it next; None: it goes to the member that leads now."""
        self.leader = leader

    def record_accepted(self, leader: str) -> None:
        """The leader has taken the header."""
        self.turn_to(leader)
        self.denied_by = None
        self.refusals = 0

    def record_denied(self, leader: str) -> None:
        """The member that this worker takes for the leader says that it is none: the views of both settle within a
        beat, if it is honest."""
        self.denied_by = leader

    def record_refused(self) -> None:
        self.refusals += 1

    def take_number(self, number: int) -> None:
        """Another worker had this one's: the header goes out under a new number."""
        self.number = number
        self.refusals = 0

    # Messages of leaders

    def promise(self, authority: Authority) -> Authority:
        """Obey no lower authority from now on; returns the highest that was seen before."""
        before = self.authority
        self.authority = authority
        return before

    def take_back(self, own: Authority, before: Authority) -> None:
        """This worker's own node has stepped down before it has made a plan of its authority `own`: no plan of another
        leader is refused for it. What was promised to others, before or since, holds."""
        if self.authority.leader == own.leader:
            self.authority = before

    def check_plan(self, plan: Plan, sender: str, me: str) -> None:
        """Raises CallRefused if the worker `me` cannot follow it in this round."""
        own = plan.entry(me)
        if plan.leader != sender:
            raise CallRefused(f"the plan names {plan.leader} as its leader, not its sender {sender}", "plan")
        if own is None or own.contribution != self.contribution:
            raise CallRefused("the plan does not have this worker's header as it was sent", "plan")
        if (plan.max_norm_ratio, plan.merge) != self.limits or plan.key != self.posted.key:
            raise CallRefused("the plan has another fragment, max_norm_ratio or merge", "plan")
        if {entry.parsed.layout_digest for entry in plan.entries} != {own.parsed.layout_digest}:
            raise CallRefused("the plan has a worker that trains another model", "plan")

    def check_opposed(self, plan: Plan, last: Plan | None) -> None:
        """A leader cannot have a contribution refused for its direction that this worker has seen to be right.

        In a first plan only those are refused that were so in the last round. Raises CallRefused.
        """
        right = set(self.cleared)
        if plan.authority.attempt == 1 and last is not None:
            right |= {entry.peer for entry in last.entries} - {*last.opposed_peers}
        if wronged := right.intersection(plan.opposed_peers):
            raise CallRefused(f"the contribution of {min(wronged)} does not point against the others", "plan")

    def follow(self, plan: Plan, now: float) -> None:
        """The parts are exchanged anew; an earlier mean is given up."""
        self.promise(plan.authority)
        self.turn_to(plan.leader)
        if self.plan is None or self.plan.leader != plan.leader:
            self.led_since = now
        self.plan = plan
        self.planned_at = now
        self.drop_mean()

    # How it has ended for others

    def is_in(self, plan: Plan, me: str) -> bool:
        """Whether the plan has the contribution of this worker, `me`, as it was posted."""
        own = plan.entry(me)
        return own is not None and own.contribution.header == self.posted.header

    def has_mean_of(self, agreed: Agreed) -> bool:
        """Whether the mean with this certificate is in the posted memory, or the round has none."""
        same_plan = self.plan is not None and self.plan.digest == agreed.plan.digest
        same_mean = self.vote is not None and self.vote.mean == agreed.certificate.mean
        return not agreed.plan.has_mean or (same_plan and same_mean)

    def has_another_anchor(self, plan: Plan) -> bool:
        """Whether this worker's anchor before the round was not that of the plan's contributors: then the means of
        others are not for its state."""
        own = parse_header(self.number, self.posted.header)
        theirs = {entry.parsed.claim.anchor_digest for entry in plan.contributors}
        return bool(theirs) and plan.key == own.key and own.claim.anchor_digest not in theirs

    # The mean

    def may_vote_for(self, plan: Plan) -> bool:
        """Whether no later leader has asked since the plan came: that one was told that this worker lacks the mean."""
        return self.authority.leader <= plan.authority.leader

    def vote_for(self, vote: Vote, comparison: Comparison | None = None, phases: RoundPhases | None = None) -> None:
        """The whole mean of the plan is here, and this worker votes for it."""
        self.vote = vote
        self.comparison = comparison or self.comparison
        self.phases = phases or self.phases

    def clear(self, workers: set[str]) -> None:
        """The contributions of these workers point with the others', as this worker has seen."""
        self.cleared = workers

    def drop_mean(self) -> None:
        """The posted memory holds no whole mean any more."""
        self.vote = None
        self.comparison = Comparison()
        self.phases = RoundPhases()

    def certify(self, certificate: Certificate) -> None:
        self.certificate = certificate

    def success(self, plan: Plan) -> RoundOutcome:
        """Make the outcome for the trainer when the mean of this plan counts."""
        decision = plan.decision
        failure = None
        if not decision.contributors and decision.refused.keys() - set(plan.opposed):
            failure = f"round {self.sequence}: every contribution was refused: {decision.refused}"
        diverged = decision.resync and self.number in decision.refused and self.number not in plan.opposed
        return RoundOutcome(
            self.posted.key,
            failure=failure,
            resync=diverged if failure is None else decision.resync,
            present=tuple(entry.for_trainer for entry in plan.entries),
            roster=plan.roster,
            comparison=self.comparison,
            phases=self.phases,
            signatures=0 if self.certificate is None else len(self.certificate.signatures),
            mean_digest="" if self.certificate is None else self.certificate.mean.hex()[:16],
            **decision.summary_fields(),
        )

    def end(self, result: RoundOutcome) -> None:
        self.result = result

    def failure(self, reason: str, *, resync: bool = False, fatal: bool = False) -> RoundOutcome:
        return RoundOutcome(self.posted.key, failure=f"round {self.sequence}: {reason}", resync=resync, fatal=fatal)
