"""A round that this worker has posted, with what is under way for it: the transfer, and the trainer that waits."""

import asyncio
from dataclasses import dataclass, field, replace

from diloco.engines.rounds import RoundPhases
from diloco.swarm.node import clock
from diloco.swarm.node.audit import RoundAudit
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol.certificate import Vote
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.round import RoundState
from diloco.swarm.trainer import RoundOutcome


@dataclass(eq=False)
class OwnRound(RoundState):
    audit: RoundAudit = field(default_factory=RoundAudit)
    transfer: Transfer | None = None
    task: "asyncio.Task[None] | None" = None
    bytes_sent: int = 0
    bytes_received: int = 0
    outcome: "asyncio.Future[RoundOutcome]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    planned: asyncio.Event = field(default_factory=asyncio.Event)
    fetching: asyncio.Lock = field(default_factory=asyncio.Lock)

    def stop_transfer(self) -> None:
        if self.task is not None:
            self.task.cancel()
            self.task = None
        if self.transfer is not None:
            self.transfer.close()
            self.bytes_sent += self.transfer.bytes_sent
            self.bytes_received += self.transfer.bytes_received
            self.transfer = None

    def record_mean(self, vote: Vote) -> None:
        """The whole mean of the plan is here, and this worker votes for it."""
        if self.transfer is None or self.planned_at is None:
            self.vote_for(vote)
            return
        reduced = self.transfer.reduce_seconds
        sent = max(0.0, clock.now() - self.planned_at - reduced)
        phases = RoundPhases(self.planned_at - self.started, sent, reduced)
        self.vote_for(vote, self.transfer.comparison, phases)

    def succeed(self, plan: Plan) -> None:
        """The mean of this plan counts."""
        self._end(self.success(plan))

    def fail(self, reason: str, *, resync: bool = False, fatal: bool = False) -> None:
        self._end(self.failure(reason, resync=resync, fatal=fatal))

    def _end(self, outcome: RoundOutcome) -> None:
        self.stop_transfer()
        if not self.ended:
            outcome = replace(
                outcome,
                bytes_sent=self.bytes_sent,
                bytes_received=self.bytes_received,
                seconds=clock.now() - self.started,
            )
            self.end(outcome)
            self.outcome.set_result(outcome)
