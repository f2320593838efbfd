"""The moments of a round, and of a state, at which a node asks its audit whether another worker lies.

The classes here trust every worker: rounds end with them as they do among honest workers, and a simulated swarm may use
them (simulator/workers.py). A run has `Auditor` (audit/auditor.py), which overrides every method. Nothing else of
audit/ is known to node/ and protocol/.

    Audit           one for a node: what others have signed, the proofs that go around, the states that are offered
    RoundAudit      one for each round that this worker posts
    TransferAudit   one for each attempt at such a round: the parts of the others, and the means of their ranges
    StateAudit      one for each state that another member offers
"""

# ruff: noqa: ARG002 - a worker that trusts all others reads none of it

from collections.abc import Awaitable, Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from diloco.swarm.node.calls import Calls
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.certificate import (
    Agreed,
    Bytes,
    Certificate,
    Notary,
    SignedRange,
    Vote,
    directions_bytes,
)
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.proofs import LongParts
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.wire import Malformed, PeerMessage
from diloco.swarm.trainer import PostedRound, Snapshot


class Lie(Exception):
    """A worker has sent parts, or the mean of its range, that no honest worker sends. The round goes on without it.

    `signed`: it has signed the lie, so that this worker is certain of it. `proof`: others can check it too.
    """

    def __init__(self, peer: str, reason: str, *, signed: bool = False, proof: LongParts | None = None) -> None:
        super().__init__(reason)
        self.peer = peer
        self.signed = signed
        self.proof = proof


class AnotherState(Exception):
    """Most other members have another state than the one that is offered, or none is there to ask."""


@dataclass(frozen=True)
class AuditedNode:
    """The parts of a node that its audit works with."""

    members: Members
    calls: Calls
    notary: Notary
    quorum: Quorum
    take_snapshot: Callable[[], Awaitable[Snapshot | None]]
    """This worker's own state now; None if its trainer has none yet."""


class TransferAudit:
    """The audit of one attempt at a round. It is asked as a contributor, and as the reducer of a range."""

    commitment_bytes = 0
    """The most that `commit` returns."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def commit(self, rows: range) -> bytes:
        """Return the bytes that go before this worker's parts `rows`, to the worker that reduces them."""
        return b""

    def read_commitment(self, sender: str, data: bytes) -> None:
        """Take what another worker has sent before its parts of this worker's range. Raises Malformed."""

    def add_parts(self, parts: Mapping[str, memoryview]) -> None:
        """Take in the next parts of this worker's range, by contributor, before they are added up. In the reducing
        thread."""

    def find_long(self, squares: Sequence[float]) -> Lie | None:
        """Find the lie of a contributor whose parts are longer than its header claims, with the last ones, whose
        squared norms these are."""
        return None

    def prove_long(self, lie: Lie, parts: memoryview, rest: memoryview) -> Lie:
        """Add a proof to the lie that `find_long` has found, where there is one. `parts`: all of this worker's range,
        of which `rest` is not added up. In the reducing thread."""
        return lie

    def check_range(self) -> None:
        """All parts of this worker's range are added up. Raises Lie."""

    def compare_directions(self, parts: Mapping[str, memoryview]) -> bytes:
        """Compute what this reducer signs of the directions of the contributions, with its range. In the reducing
        thread."""
        return bytes(directions_bytes(self.plan))

    def add_mean(self, reducer: str, mean: memoryview) -> None:
        """Take in the next parts of the mean of a reducer's range. In the reducing thread."""

    def check_mean(self, reducer: str) -> None:
        """The whole mean of the reducer's range is here. Raises Lie."""


class RoundAudit:
    """The audit of a round that this worker posts."""

    root = b""
    """Binds this worker to its posted parts; it is in the plan."""

    def follow(self, plan: Plan) -> TransferAudit:
        """This worker begins to exchange parts as this plan says."""
        return TransferAudit(plan)

    def find_opposed(self, plan: Plan, ranges: tuple[SignedRange, ...]) -> AbstractSet[str]:
        """Find the contributors that point against most others, once the whole mean is here, as its reducers have
        signed: with one of them this worker does not vote for the plan."""
        return frozenset()

    def end(self, agreed: Agreed, mean: Bytes | None, copied: Callable[[], Awaitable[None]]) -> None:
        """The round has ended in this way, and this worker has its mean, in `mean` once it is `copied`; None if it is
        not kept."""


class StateAudit:
    """The audit of a state that a member offers, while it arrives."""

    def check(self) -> None:
        """A piece has arrived. Raises AnotherState as soon as it is known that the state is not that of most."""

    async def end(self, snapshot: Snapshot) -> None:
        """The whole state is here. Raises AnotherState, or Malformed if it is none."""


class Audit:
    """The audit of a node, asked from its start to its end."""

    def __init__(self, node: AuditedNode) -> None:
        pass

    # A round

    async def post(self, posted: PostedRound) -> RoundAudit:
        """This worker is about to post a round: before any other knows of it."""
        return RoundAudit()

    async def copied(self) -> None:
        """Return when the trainer may write into the memory of all rounds."""

    def find_opposed(self, plan: Plan, num_parts: int, ranges: Sequence[SignedRange]) -> AbstractSet[str]:
        """Return the contributors to this plan that point against most others, as its reducers have signed."""
        return frozenset()

    def compare_means(self, plan: Plan, means: Sequence[Vote | Certificate]) -> None:
        """Several means of one plan have been told here; their signatures are right."""

    def compare_ends(self, one: Agreed, other: Agreed) -> None:
        """A round has ended in two ways, here and elsewhere; their signatures are right."""

    def record_lie(self, lie: Lie, sequence: int) -> None:
        """A transfer of round `sequence` has failed for this lie."""

    def record_offence(self, peer: str, reason: str) -> None:
        """A member has sent what an honest one does not send. It is no proof by itself."""

    # A state

    async def digest_of(self, snapshot: Snapshot) -> bytes:
        """Return 32 bytes that go with this worker's own state: the digest of what all members have alike."""
        return bytes(32)

    def check_state(
        self,
        source: str,
        snapshot: Snapshot,
        digest: bytes,
        *,
        is_newcomer: bool,
        ask_end: Callable[[int], Awaitable[Agreed | None]],
    ) -> AbstractAsyncContextManager[StateAudit]:
        """While the context lasts, the state arrives that `source` offers with this digest. Raises AnotherState.

        `is_newcomer`: this worker has been in no round yet. `ask_end`: asks the source for the end of a round.
        """
        return nullcontext(StateAudit())

    def disagreement_seconds(self) -> float:
        """Return how long ago this worker first refused a state, of those since it last took one over; 0 if it refused
        none."""
        return 0.0

    def take_over_state(self) -> None:
        """This worker's state is another one now: that of a member."""

    # Messages of its own

    async def answer(self, peer: str, request: PeerMessage) -> PeerMessage:
        """Answer a request of another member's audit. Raises Malformed if it is no such request."""
        raise Malformed(f"{type(request).__name__} is not a request")
