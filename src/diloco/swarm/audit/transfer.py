"""The audit of one attempt at a round: what a worker checks while parts and means arrive.

A reducer takes only parts that their senders are bound to (merkle.py), and that are no longer than their headers claim:
it signs nothing before all of its range fit, since it would be named as a liar itself, when the mean is checked
(mean_check.py). With the parts it gets their sender's signature, so that it can prove to others that they are too long.
A mean is finite, and never longer than the longest contribution in it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from msgspec import structs

from diloco.codecs.base import Codec
from diloco.codecs.encoded import scratch
from diloco.codecs.registry import codec
from diloco.swarm.audit import directions, merkle
from diloco.swarm.audit.long_parts import has_signed_contribution, norm_of, sign_contribution
from diloco.swarm.node import transfer
from diloco.swarm.node.audit import Lie, TransferAudit
from diloco.swarm.protocol.certificate import SIGNATURE_BYTES, Notary
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.proofs import LongParts, ShownPart
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trainer import PostedRound

_MAX_PROOF_BYTES = 4096
_MOST_SHOWN_BYTES = 1 << 19  # of parts that prove a contribution too long


class AuditedTransfer(TransferAudit):
    commitment_bytes = SIGNATURE_BYTES + _MAX_PROOF_BYTES

    def __init__(self, plan: Plan, posted: PostedRound, leaves: Sequence[bytes], notary: Notary, me: str) -> None:
        """`leaves`: of the tree over the posted parts of this worker, `me`."""
        super().__init__(plan)
        self.me = me
        self._posted = posted
        self._leaves = leaves
        self._notary = notary
        self._codec = codec(posted.codec)
        self._width = self._codec.part_bytes(posted.part_elements)
        rows = plan.ranges(posted.num_parts).get(me, range(0))
        self._rows = rows
        self._committed = CommittedParts(plan, me, rows, posted)
        self._norms = NormCheck(plan, self._codec)
        self._mean_squares: dict[str, list[float]] = {}

    # What binds a sender to its parts

    def commit(self, rows: range) -> bytes:
        return self._own_signature + merkle.prove(self._leaves, rows)

    @cached_property
    def _own_signature(self) -> bytes:
        own = self.plan.entry(self.me)
        assert own is not None
        return sign_contribution(self._notary, self.plan.key, own.contribution)

    def read_commitment(self, sender: str, data: bytes) -> None:
        signature = data[:SIGNATURE_BYTES]
        proof = data[SIGNATURE_BYTES:]
        entry = self.plan.entry(sender)
        assert entry is not None
        if not has_signed_contribution(self._notary, sender, self.plan.key, entry.contribution, signature):
            raise Malformed("it has not signed its contribution")
        self._committed.signatures[sender] = signature
        self._committed.proofs[sender] = proof

    # The parts of this worker's range

    def add_parts(self, parts: Mapping[str, memoryview]) -> None:
        for peer, piece in parts.items():
            self._committed.add(peer, piece)

    def find_long(self, squares: Sequence[float]) -> Lie | None:
        return self._norms.add(squares)

    def prove_long(self, lie: Lie, parts: memoryview, rest: memoryview) -> Lie:
        """Add a proof to the lie, if the sender is bound to the parts that have come."""
        self._committed.add(lie.peer, rest)
        if not self._committed.is_bound(lie.peer):
            return lie
        return Lie(lie.peer, str(lie), signed=True, proof=self._prove(lie.peer, parts))

    def _prove(self, peer: str, parts: memoryview) -> LongParts | None:
        """Show the longest parts of a contribution, as many as are longer than its header claims; None if that is too
        many for a message."""
        entry = self.plan.entry(peer)
        width = self._width
        assert entry is not None
        data = {self._rows.start + row: parts[row * width : (row + 1) * width] for row in range(len(self._rows))}
        name = self._posted.codec
        elements = self._posted.part_elements
        norms = {part: norm_of(name, [encoded], elements) for part, encoded in data.items()}
        chosen: list[int] = []
        for part in sorted(norms, key=lambda part: -norms[part]):
            chosen.append(part)
            if (len(chosen) + 1) * (width + _MAX_PROOF_BYTES) > _MOST_SHOWN_BYTES:
                return None
            if math.hypot(*(norms[number] for number in chosen)) > entry.parsed.claim.norm * self._codec.norm_slack:
                break
        else:
            return None
        shown = tuple(ShownPart(part, bytes(data[part]), self._committed.proof_of(peer, part)) for part in chosen)
        contribution = structs.replace(entry.contribution, note=b"")
        return LongParts(peer, contribution, self._committed.signatures[peer], shown)

    def check_range(self) -> None:
        if (stranger := self._committed.stranger()) is not None:
            raise Lie(stranger, "its parts are not those that it is bound to")

    @torch.no_grad()
    def compare_directions(self, parts: Mapping[str, memoryview]) -> bytes:
        """Compute the cosines of the contributions in this reducer's sampled parts, as bytes."""
        sampled = directions.sampled_parts(self.plan, self.me, self._posted.num_parts)
        if not sampled:
            return b""
        values = []
        width = self._width
        for entry in self.plan.contributors:
            rows = [parts[entry.peer][(part - self._rows.start) * width :][:width] for part in sampled]
            decoded = torch.empty(len(rows), self._posted.part_elements)
            self._codec.decode(torch.stack([torch.frombuffer(row, dtype=torch.uint8) for row in rows]), decoded)
            values.append(decoded)
        return directions.compare(values)

    # The means of others

    def add_mean(self, reducer: str, mean: memoryview) -> None:
        self._mean_squares.setdefault(reducer, []).append(self._squared_norm(mean))

    @torch.no_grad()
    def _squared_norm(self, mean: memoryview) -> float:
        """Compute the squared norm of some parts of a mean."""
        squares = 0.0
        means = self._codec.for_means
        elements = self._posted.part_elements
        encoded = torch.frombuffer(mean, dtype=torch.uint8).view(-1, means.part_bytes(elements))
        for some in torch.split(encoded, max(1, transfer.BATCH_ELEMENTS // elements)):
            values = scratch("decoded", (len(some), elements), some.device)
            means.decode(some, values)
            squares += float(torch.linalg.vector_norm(values)) ** 2
        return squares

    def check_mean(self, reducer: str) -> None:
        if (fault := self._norms.fault_of_mean(sum(self._mean_squares.pop(reducer, [])))) is not None:
            raise Lie(reducer, fault, signed=True)


class CommittedParts:
    """The parts that a reducer has received, against the roots that their senders have in the plan."""

    def __init__(self, plan: Plan, me: str, rows: range, posted: PostedRound) -> None:
        """`rows`: the range that `me` reduces."""
        self._rows = rows
        self._num_parts = posted.num_parts
        self._part_bytes = posted.contribution.num_bytes // max(1, posted.num_parts)
        self._roots = {entry.peer: entry.root for entry in plan.contributors if entry.peer != me}
        self._leaves: dict[str, list[bytes]] = {peer: [] for peer in self._roots}
        self.proofs: dict[str, bytes] = {}
        self.signatures: dict[str, bytes] = {}
        """Each sender's signature under its contribution: its header, and the root that its parts are bound to."""

    def add(self, peer: str, parts: memoryview) -> None:
        """Take in the next parts of the range from `peer`; this worker's own are known."""
        if peer in self._leaves:
            self._leaves[peer] += merkle.leaves(parts, self._part_bytes)

    def stranger(self) -> str | None:
        """Find a worker whose parts are not those that it is bound to; None if there is none."""
        return next((peer for peer in self._roots if not self.is_bound(peer)), None)

    def is_bound(self, peer: str) -> bool:
        """Whether all parts of the range have come from this worker, and are those that it is bound to."""
        if peer not in self._roots:
            return False
        try:
            proof = self.proofs.get(peer, b"")
            return merkle.root_from(self._leaves[peer], self._rows, self._num_parts, proof) == self._roots[peer]
        except Malformed:
            return False

    def proof_of(self, peer: str, part: int) -> bytes:
        """Make the proof that this part, which has come from a worker that `is_bound`, is in its contribution."""
        return merkle.narrow(self._leaves[peer], self._rows, part, self._num_parts, self.proofs[peer])


class NormCheck:
    """The norms of what arrives in a transfer: of parts against their sender's header, of a mean against all."""

    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._plan = plan
        self._codec = codec
        self._squares = dict.fromkeys((entry.peer for entry in plan.contributors), 0.0)
        """The squared norm of the parts that have arrived from each contributor."""

    def add(self, squares: Sequence[float]) -> Lie | None:
        """Add the squared norms of more parts, one for each contributor. Returns the lie of a contributor that has now
        sent more than the norm in its header."""
        for entry, square in zip(self._plan.contributors, squares, strict=True):
            claimed = entry.parsed.claim.norm
            total = self._squares[entry.peer] = self._squares[entry.peer] + square
            norm = math.sqrt(total) if math.isfinite(total) else math.inf
            if not norm <= claimed * self._codec.norm_slack:
                return Lie(entry.peer, f"its parts have the norm {norm:.3g}, it claimed {claimed:.3g}")
        return None

    def fault_of_mean(self, squares: float) -> str | None:
        """Return the fault of a reducer's part of the mean, if it has one: a mean is finite, and never longer than the
        longest contribution in it."""
        longest = self._plan.longest
        slack = self._codec.norm_slack * self._codec.for_means.norm_slack
        if math.isfinite(squares) and math.sqrt(squares) <= longest * slack:
            return None
        return f"its part of the mean is longer than any contribution ({longest:.3g})"
