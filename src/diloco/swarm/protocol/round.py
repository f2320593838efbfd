"""What this worker knows of a round that it has posted."""

import asyncio
from dataclasses import dataclass, field
from functools import cached_property

from msgspec import structs

from diloco.core.config import Merge
from diloco.engines.rounds import Comparison, RoundPhases
from diloco.swarm.audit import merkle
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.node import clock
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.certificate import Certificate, Vote
from diloco.swarm.protocol.plan import NO_AUTHORITY, Authority, Plan
from diloco.swarm.trainer import PostedRound, PresentWorker, RoundOutcome


@dataclass(eq=False)
class Round:
    posted: PostedRound
    number: int
    """This worker's."""
    started: float = field(default_factory=clock.now)
    authority: Authority = NO_AUTHORITY
    """The highest that has sent a message in this round."""
    leaves: merkle.Tree = field(default_factory=lambda: merkle.Tree([]))
    """The tree over the posted parts."""
    minority_since: float | None = None
    """When this worker last began to see no majority."""
    stuck_since: float | None = None
    """When this worker began to wait for a leader that could go on (leader_watch.py)."""
    ended_alone_since: float | None = None
    """When a leader first said that it had ended this round, and had no mean that counts here."""
    unknown_since: float | None = None
    """When this worker was first offered a plan with a worker whose invitation it does not know."""
    leader: str | None = None
    """The leader that has this worker's header."""
    refusals: int = 0
    """Of the header, in a row."""
    plan: Plan | None = None
    vote: Vote | None = None
    """For the whole mean of `plan`, which is in the posted memory."""
    cleared: set[str] = field(default_factory=set)
    """Workers whose contribution does not point against the others', in the last plan whose whole mean was here."""
    certificate: Certificate | None = None
    """That the mean counts."""
    comparison: Comparison = field(default_factory=Comparison)
    """Of the contributions to that mean, where this worker took part in its transfer."""
    planned_at: float | None = None
    phases: RoundPhases = field(default_factory=RoundPhases)
    """Of that mean, on the same condition."""
    transfer: Transfer | None = None
    task: "asyncio.Task[None] | None" = None
    bytes_sent: int = 0
    bytes_received: int = 0
    outcome: "asyncio.Future[RoundOutcome]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def sequence(self) -> int:
        return self.posted.key.sequence

    @property
    def limits(self) -> tuple[float | None, Merge]:
        """What the run says of norms and of the mean."""
        return self.posted.max_norm_ratio, self.posted.merge

    @property
    def ended(self) -> bool:
        return self.outcome.done()

    @cached_property
    def root(self) -> bytes:
        return merkle.root(self.leaves)

    @property
    def contribution(self) -> PresentWorker:
        return PresentWorker(self.number, self.posted.header, self.posted.note, self.root)

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

    def stop_transfer(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None
        if self.transfer is not None:
            self.transfer.close()
            self.bytes_sent += self.transfer.bytes_sent
            self.bytes_received += self.transfer.bytes_received
            self.transfer = None

    def succeed(self, plan: Plan) -> None:
        """The mean of this plan counts."""
        decision, failure = plan.decision, None
        if not decision.contributors and decision.refused.keys() - set(plan.opposed):
            failure = f"round {self.sequence}: every contribution was refused: {decision.refused}"
        diverged = decision.resync and self.number in decision.refused and self.number not in plan.opposed
        self._end(
            RoundOutcome(
                self.posted.key,
                failure=failure,
                resync=diverged if failure is None else decision.resync,
                contributors=decision.contributors,
                refused=decision.refused,
                clipped=decision.clipped,
                merge=decision.merge,
                plain=decision.plain,
                total_weight=decision.total_weight,
                present=tuple(entry.for_trainer for entry in plan.entries),
                roster=plan.roster,
                comparison=self.comparison,
                phases=self.phases,
                signatures=0 if self.certificate is None else len(self.certificate.signatures),
                mean_digest="" if self.certificate is None else self.certificate.mean.hex()[:16],
            )
        )

    def transferred(self, vote: Vote) -> None:
        """The whole mean of the plan is here."""
        self.vote = vote
        if self.transfer is not None and self.planned_at is not None:
            reduced = self.transfer.reduce_seconds
            sent = max(0.0, clock.now() - self.planned_at - reduced)
            self.comparison = self.transfer.comparison
            self.phases = RoundPhases(self.planned_at - self.started, sent, reduced)

    def fail(self, reason: str, *, resync: bool = False, fatal: bool = False) -> None:
        failure = f"round {self.sequence}: {reason}"
        self._end(RoundOutcome(self.posted.key, failure=failure, resync=resync, fatal=fatal))

    def _end(self, outcome: RoundOutcome) -> None:
        self.stop_transfer()
        if not self.ended:
            seconds = clock.now() - self.started
            sizes = {"bytes_sent": self.bytes_sent, "bytes_received": self.bytes_received}
            self.outcome.set_result(structs.replace(outcome, **sizes, seconds=seconds))
