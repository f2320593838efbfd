"""The signatures of workers under a mean, and the certificate that makes it count (docs/protocol.md).

Each contributor of a plan reduces a range of parts, and signs the digest of that range (`SignedRange`). A worker that
has the whole mean signs its digest (`Vote`). A majority of the plan's workers with one digest is a `Certificate`: the
mean counts.

A digest of a range is made of the digests of its parts, and that of a mean of its ranges'. So one part can be shown
later, and checked alone.
"""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct

from diloco.swarm.protocol.plan import MAX_WORKERS, Plan
from diloco.swarm.protocol.status import PeerName
from diloco.swarm.trust.signatures import Signature

Bytes = bytes | bytearray | memoryview
Sha256 = Annotated[bytes, Meta(min_length=32, max_length=32)]

FEWEST_COMPARED = 3
MOST_COMPARED = 64
"""Contributions whose directions are compared: the pairs of more would be many bytes."""


class SignedRange(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The digest of the parts of a mean that one worker has reduced, signed by that worker."""

    digest: Sha256
    signature: Signature
    directions: Annotated[bytes, Meta(max_length=1 << 12)] = b""
    """The cosines of the contributions in some of these parts (audit/directions.py), which the signature covers too: of
    `directions_bytes`."""


Ranges = Annotated[tuple[SignedRange, ...], Meta(max_length=MAX_WORKERS)]
"""Signed ranges in the order of the plan's contributors, without those that reduce no part."""


class Vote(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker has the whole mean of a plan, and signs the digest of it."""

    num_parts: Annotated[int, Meta(ge=0, le=1 << 40)]
    ranges: Ranges
    signature: Signature

    @property
    def mean(self) -> bytes:
        return mean_digest(self.num_parts, self.ranges)


class Certificate(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Most workers of a plan have voted for one mean."""

    num_parts: Annotated[int, Meta(ge=0, le=1 << 40)]
    ranges: Ranges
    signatures: Annotated[dict[PeerName, Signature], Meta(max_length=MAX_WORKERS)]

    @property
    def mean(self) -> bytes:
        return mean_digest(self.num_parts, self.ranges)


class Agreed(NamedTuple):
    """The end of a round: its plan, and the certificate with which its mean counts."""

    plan: Plan
    certificate: Certificate

    @property
    def late(self) -> list[str]:
        """The workers of the plan that had not voted when it was committed."""
        return [entry.peer for entry in self.plan.entries if entry.peer not in self.certificate.signatures]


def mean_digest(num_parts: int, ranges: Iterable[SignedRange]) -> bytes:
    digests = (hashlib.sha256(signed.digest + signed.directions).digest() for signed in ranges)
    return hashlib.sha256(num_parts.to_bytes(8, "little") + b"".join(digests)).digest()


def reducers(plan: Plan, num_parts: int) -> list[str]:
    """The workers whose ranges are in a mean, in order."""
    return [peer for peer, rows in plan.ranges(num_parts).items() if rows] if plan.has_mean else []


def compares_directions(plan: Plan) -> bool:
    """Whether reducers compare the directions of the contributions: not of too few or too many, nor without a bound on
    norms."""
    return plan.max_norm_ratio is not None and FEWEST_COMPARED <= len(plan.contributors) <= MOST_COMPARED


def directions_bytes(plan: Plan) -> int:
    """The bytes of what each reducer signs of the directions of this plan's contributions: two for each pair."""
    count = len(plan.contributors)
    return 2 * (count * (count - 1) // 2) if compares_directions(plan) else 0


def range_digests(plan: Plan, num_parts: int, mean: Bytes) -> list[bytes]:
    """The digests of the ranges of an encoded mean that has arrived whole."""
    width = len(mean) // num_parts if num_parts else 0
    view = memoryview(mean)
    digests = []
    for rows in plan.ranges(num_parts).values() if plan.has_mean else ():
        digest = RangeDigest(width)
        digest.add(view[rows.start * width : rows.stop * width])
        digests += [digest.digest()] if rows else []
    return digests


class RangeDigest:
    """Takes in a range some whole parts at a time, in order."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._hash = hashlib.sha256()

    def add(self, parts: memoryview) -> None:
        for first in range(0, len(parts), max(1, self._part_bytes)):
            self._hash.update(hashlib.sha256(parts[first : first + self._part_bytes]).digest())

    def digest(self) -> bytes:
        return self._hash.digest()


def largest_group(votes: Mapping[str, Vote]) -> dict[str, Vote]:
    """The votes for the mean that has most of them."""
    means = [vote.mean for vote in votes.values()]
    most = max(means, key=means.count, default=b"")
    return {peer: vote for peer, vote in votes.items() if vote.mean == most}


def is_most(plan: Plan, voters: Iterable[str]) -> bool:
    """More than half of the plan's workers: of two both, of one itself."""
    return 2 * sum(plan.entry(peer) is not None for peer in set(voters)) > len(plan.entries)


def certify(plan: Plan, votes: Mapping[str, Vote]) -> Certificate | None:
    """The certificate of the mean with most votes; None if these are not of most workers of the plan."""
    group = largest_group(votes)
    if not group or not is_most(plan, group):
        return None
    vote = next(iter(group.values()))
    signatures = {peer: group[peer].signature for peer in sorted(group)}
    return Certificate(vote.num_parts, vote.ranges, signatures)
