"""The signatures of workers under a mean, and the certificate that makes it count (docs/protocol.md).

Each contributor of a plan reduces a range of parts, and signs the digest of that range (`SignedRange`). A worker that
has the whole mean signs its digest (`Vote`). A majority of the plan's workers with one digest is a `Certificate`: the
mean counts.

`Notary` signs for this worker with the key of its identity, and checks what others have signed.

A digest of a range is made of the digests of its parts, and that of a mean of its ranges'. So one part can be shown
later, and checked alone.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta, Struct

from diloco.engines.rounds import RoundKey
from diloco.errors import ConfigError
from diloco.swarm.network.identity import public_key_of
from diloco.swarm.protocol.plan import MAX_WORKERS, Plan
from diloco.swarm.protocol.status import PeerName
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trust.signatures import Purpose, Signature, is_signed, sign

SIGNATURE_BYTES = 64
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
    """Return the workers whose ranges are in a mean, in order."""
    return [peer for peer, rows in plan.ranges(num_parts).items() if rows] if plan.has_mean else []


def compares_directions(plan: Plan) -> bool:
    """Whether reducers compare the directions of the contributions: not of too few or too many, nor without a bound on
    norms."""
    return plan.max_norm_ratio is not None and FEWEST_COMPARED <= len(plan.contributors) <= MOST_COMPARED


def directions_bytes(plan: Plan) -> int:
    """Return the bytes of what each reducer signs of the directions of this plan's contributions: two for each pair."""
    count = len(plan.contributors)
    return 2 * (count * (count - 1) // 2) if compares_directions(plan) else 0


def range_digests(plan: Plan, num_parts: int, mean: Bytes) -> list[bytes]:
    """Return the digests of the ranges of an encoded mean that has arrived whole."""
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
    """Return the votes for the mean that has most of them."""
    means = [vote.mean for vote in votes.values()]
    most = max(means, key=means.count, default=b"")
    return {peer: vote for peer, vote in votes.items() if vote.mean == most}


def is_most(plan: Plan, voters: Iterable[str]) -> bool:
    """More than half of the plan's workers: of two both, of one itself."""
    return 2 * sum(plan.entry(peer) is not None for peer in set(voters)) > len(plan.entries)


def certify(plan: Plan, votes: Mapping[str, Vote]) -> Certificate | None:
    """Make the certificate of the mean with most votes; None if these are not of most workers of the plan."""
    group = largest_group(votes)
    if not group or not is_most(plan, group):
        return None
    vote = next(iter(group.values()))
    signatures = {peer: group[peer].signature for peer in sorted(group)}
    return Certificate(vote.num_parts, vote.ranges, signatures)


class Notary:
    def __init__(self, run: str, peer: str, seed: bytes) -> None:
        """`run`: its id. `seed`: this worker's private key."""
        self._run = run
        self._peer = peer
        self._seed = seed
        self.is_invited: Callable[[str], bool] = lambda _: True
        """Whether a peer has shown a credential of this run; a vote of another one counts for nothing."""

    # Signing

    def sign_range(self, plan: Plan, digest: bytes, directions: bytes = b"") -> SignedRange:
        return SignedRange(digest, self.sign("range", plan.key, plan.digest, digest + directions), directions)

    def vote(self, plan: Plan, num_parts: int, ranges: tuple[SignedRange, ...]) -> Vote:
        mean = mean_digest(num_parts, ranges)
        return Vote(num_parts, ranges, self.sign("mean", plan.key, plan.digest, mean))

    def sign(self, purpose: Purpose, key: RoundKey, about: bytes, digest: bytes) -> bytes:
        """Sign a digest in a round. `about`: the digest of the plan, or else what the signature is bound to."""
        return sign(self._seed, purpose, _statement(self._run, key, about, digest))

    # Checking

    def has_signed_range(self, plan: Plan, reducer: str, signed: SignedRange) -> bool:
        told = signed.digest + signed.directions
        return self.has_signed(reducer, signed.signature, "range", plan.key, plan.digest, told)

    def check_vote(self, plan: Plan, voter: str, vote: Vote) -> None:
        """Raises Malformed."""
        self.check_ranges(plan, vote.num_parts, vote.ranges)
        if not self.has_signed(voter, vote.signature, "mean", plan.key, plan.digest, vote.mean):
            raise Malformed(f"{voter} has not signed its vote")

    def has_voted(self, plan: Plan, voter: str, certificate: Certificate) -> bool:
        signature = certificate.signatures[voter]
        return self.has_signed(voter, signature, "mean", plan.key, plan.digest, certificate.mean)

    def check(self, plan: Plan, certificate: Certificate) -> None:
        """Raises Malformed unless most of the plan's workers have voted for the certificate's mean."""
        self.check_ranges(plan, certificate.num_parts, certificate.ranges)
        mean = certificate.mean
        voters = [
            peer
            for peer, signature in certificate.signatures.items()
            if self.is_invited(peer) and self.has_signed(peer, signature, "mean", plan.key, plan.digest, mean)
        ]
        if not is_most(plan, voters):
            raise Malformed(
                f"round {plan.key.sequence}: {len(voters)} of {len(plan.entries)} workers have signed its mean"
            )

    def check_mean(self, plan: Plan, certificate: Certificate, mean: Bytes) -> None:
        """Raises Malformed unless the bytes that have arrived are those that were voted for."""
        parts = certificate.num_parts
        digests = range_digests(plan, parts, mean) if not parts or len(mean) % parts == 0 else []
        if digests != [signed.digest for signed in certificate.ranges]:
            raise Malformed(f"a mean of round {plan.key.sequence} that is not the one that was voted for")

    def check_ranges(self, plan: Plan, num_parts: int, ranges: Sequence[SignedRange]) -> None:
        """Raises Malformed."""
        names = reducers(plan, num_parts)
        if len(names) != len(ranges):
            raise Malformed(f"{len(ranges)} signed ranges of a mean instead of {len(names)}")
        for name, signed in zip(names, ranges, strict=True):
            if len(signed.directions) != directions_bytes(plan) or not self.has_signed_range(plan, name, signed):
                raise Malformed(f"{name} has not signed its range of the mean")

    def has_signed(
        self, peer: str, signature: bytes, purpose: Purpose, key: RoundKey, about: bytes, digest: bytes
    ) -> bool:
        return _is_signed_by(peer, signature, purpose, _statement(self._run, key, about, digest))


class RangeSignatures:
    """The digests of the ranges of one plan's mean, taken while their parts arrive, and their reducers' signatures."""

    def __init__(self, plan: Plan, num_parts: int, part_bytes: int, notary: Notary) -> None:
        self._plan = plan
        self._num_parts = num_parts
        self._notary = notary
        self._digests = {peer: RangeDigest(part_bytes) for peer in plan.ranges(num_parts)}
        self._signed: dict[str, SignedRange] = {}

    def add(self, reducer: str, parts: memoryview) -> None:
        """Take in the next whole parts of a reducer's range."""
        self._digests[reducer].add(parts)

    def sign(self, me: str, directions: bytes) -> None:
        """This worker's own range is whole; `directions`: of the contributions to it."""
        self._signed[me] = self._notary.sign_range(self._plan, self._digests[me].digest(), directions)

    def own(self, me: str) -> bytes:
        """This worker's directions and signature, as `record` reads them."""
        signed = self._signed[me]
        return signed.directions + signed.signature

    @property
    def told_bytes(self) -> int:
        """The bytes of what `record` reads."""
        return directions_bytes(self._plan) + SIGNATURE_BYTES

    def record(self, reducer: str, told: bytes) -> None:
        """Take in a reducer's directions and signature, once its range is whole. Raises Malformed if they do not fit
        it."""
        directions = told[:-SIGNATURE_BYTES]
        signature = told[-SIGNATURE_BYTES:]
        signed = SignedRange(self._digests[reducer].digest(), signature, directions)
        fits = len(directions) == directions_bytes(self._plan)
        if not fits or not self._notary.has_signed_range(self._plan, reducer, signed):
            raise Malformed("the part of the mean that has arrived is not the one that its reducer has signed")
        self._signed[reducer] = signed

    @property
    def ranges(self) -> tuple[SignedRange, ...]:
        """The signed ranges of the whole mean."""
        return tuple(self._signed[peer] for peer in self._digests if peer in self._signed)

    def vote(self) -> Vote:
        """This worker's vote for the whole mean."""
        return self._notary.vote(self._plan, self._num_parts, self.ranges)


def _statement(run: str, key: RoundKey, about: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((run, key.sequence, key.fragment, about, digest))).digest()


@lru_cache(maxsize=8192)
def _is_signed_by(peer: str, signature: bytes, purpose: Purpose, data: bytes) -> bool:
    """Cached, since the votes of a round have the same ranges."""
    try:
        return is_signed(public_key_of(peer), signature, purpose, data)
    except (ValueError, ConfigError):
        return False
