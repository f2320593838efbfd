"""The parts that a reducer has received, against the roots that their senders have in the plan (merkle.py).

A reducer that added up other parts than a worker is bound to would be named as a liar itself, when the mean is checked
(mean_check.py). So it signs nothing before all parts fit.
"""

from diloco.swarm.audit import merkle
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trainer import PostedRound

MAX_PROOF_BYTES = 4096


class CommittedParts:
    def __init__(self, plan: Plan, me: str, rows: range, posted: PostedRound) -> None:
        """`rows`: the range that `me` reduces."""
        self._plan = plan
        self._rows = rows
        self._num_parts = posted.num_parts
        self._part_bytes = posted.contribution.num_bytes // max(1, posted.num_parts)
        self._leaves: dict[str, list[bytes]] = {entry.peer: [] for entry in plan.contributors if entry.peer != me}
        self.proofs: dict[str, bytes] = {}
        self.signatures: dict[str, bytes] = {}
        """Each sender's signature under its contribution: its header, and the root that its parts are bound to."""

    def add(self, peer: str, parts: memoryview) -> None:
        """Take in the next parts of the range from `peer`; this worker's own are known."""
        if peer in self._leaves:
            self._leaves[peer] += merkle.leaves(parts, self._part_bytes)

    def stranger(self) -> str | None:
        """A worker whose parts are not those that it is bound to; None if there is none."""
        roots = {entry.peer: entry.root for entry in self._plan.contributors}
        return next((peer for peer in self._leaves if not self._fits(peer, roots[peer])), None)

    def is_bound(self, peer: str) -> bool:
        """Whether all parts of the range have come from this worker, and are those that it is bound to."""
        roots = {entry.peer: entry.root for entry in self._plan.contributors}
        return peer in self._leaves and self._fits(peer, roots[peer])

    def proof_of(self, peer: str, part: int) -> bytes:
        """The proof that this part, which has come from a worker that `is_bound`, is in its contribution."""
        return merkle.narrow(self._leaves[peer], self._rows, part, self._num_parts, self.proofs[peer])

    def _fits(self, peer: str, root: bytes) -> bool:
        try:
            proof = self.proofs.get(peer, b"")
            return merkle.root_from(self._leaves[peer], self._rows, self._num_parts, proof) == root
        except Malformed:
            return False
