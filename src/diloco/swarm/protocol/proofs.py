"""Proofs that a worker has lied, as they travel between members. Every member can check them; audit/liars.py does."""

from typing import Annotated

from msgspec import Meta, Struct

from diloco.engines.rounds import RoundKey
from diloco.swarm.protocol.certificate import Certificate, Sha256, SignedRange
from diloco.swarm.protocol.plan import MAX_WORKERS, Plan
from diloco.swarm.protocol.status import PeerName
from diloco.swarm.trainer import PresentWorker
from diloco.swarm.trust.signatures import Signature


class CertifiedPlan(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The end of a round as it travels to other members."""

    plan: Plan
    certificate: Certificate


class TwoPlans(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Proof against the workers that have voted for two plans of one round and authority, and against a leader that has
    got two plans of one term certified. No honest worker votes so; and the votes of honest workers reach their
    leader only, which commits one plan in a term."""

    one: CertifiedPlan
    other: CertifiedPlan
    credentials: Annotated[dict[PeerName, Annotated[bytes, Meta(max_length=4096)]], Meta(max_length=MAX_WORKERS)]
    """The credentials of the voters: the receiver may not have met them."""

    def voters(self) -> list[str]:
        """Return the workers whose votes are in both certificates, if the plans are of one authority; `Notary` checks
        the votes."""
        if self.one.plan.authority != self.other.plan.authority:
            return []
        return sorted(self.one.certificate.signatures.keys() & self.other.certificate.signatures.keys())

    def leader(self) -> str | None:
        """Return the leader of both plans, if it is the same one in the same term."""
        one = self.one.plan
        other = self.other.plan
        return one.leader if one.leader == other.leader and one.authority.term == other.authority.term else None


class TwoRanges(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Proof against `peer`: it has signed two means of its range in one plan."""

    key: RoundKey
    plan: Sha256
    peer: PeerName
    one: SignedRange
    other: SignedRange


class ShownPart(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An encoded part of a contribution, and the proof that its author was bound to it (audit/merkle.py)."""

    part: Annotated[int, Meta(ge=0, le=1 << 40)]
    data: bytes
    proof: Annotated[bytes, Meta(max_length=4096)]


class LongParts(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Proof against `peer`: parts of its contribution are longer than its header claims, or not finite."""

    peer: PeerName
    contribution: PresentWorker
    signature: Signature
    """The author's, under its contribution."""
    parts: Annotated[tuple[ShownPart, ...], Meta(max_length=1024)]
