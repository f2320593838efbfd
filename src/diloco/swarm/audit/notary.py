"""Signs for this worker with the key of its identity, and checks what others have signed (certificate.py)."""

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

import msgspec

from diloco.engines.rounds import RoundKey
from diloco.errors import ConfigError
from diloco.swarm.audit.directions import size
from diloco.swarm.network.identity import public_key_of
from diloco.swarm.protocol.certificate import (
    Bytes,
    Certificate,
    SignedRange,
    TwoRanges,
    Vote,
    is_most,
    mean_digest,
    range_digests,
    reducers,
)
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trainer import PresentWorker
from diloco.swarm.trust.signatures import Purpose, is_signed, sign


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
        return SignedRange(digest, self._sign("range", plan.key, plan.digest, digest + directions), directions)

    def vote(self, plan: Plan, num_parts: int, ranges: tuple[SignedRange, ...]) -> Vote:
        mean = mean_digest(num_parts, ranges)
        return Vote(num_parts, ranges, self._sign("mean", plan.key, plan.digest, mean))

    def _sign(self, purpose: Purpose, key: RoundKey, plan: bytes, digest: bytes) -> bytes:
        return sign(self._seed, purpose, _statement(self._run, key, plan, digest))

    def sign_contribution(self, key: RoundKey, contribution: PresentWorker) -> bytes:
        """The signature that goes with the parts: with it a reducer that finds them longer than the header claims can
        prove that to others."""
        return self._sign("contribution", key, contribution.header, contribution.root)

    # Checking

    def has_signed_range(self, plan: Plan, reducer: str, signed: SignedRange) -> bool:
        told = signed.digest + signed.directions
        return self._has_signed(reducer, signed.signature, "range", plan.key, plan.digest, told)

    def check_vote(self, plan: Plan, voter: str, vote: Vote) -> None:
        """Raises Malformed."""
        self.check_ranges(plan, vote.num_parts, vote.ranges)
        if not self._has_signed(voter, vote.signature, "mean", plan.key, plan.digest, vote.mean):
            raise Malformed(f"{voter} has not signed its vote")

    def has_voted(self, plan: Plan, voter: str, certificate: Certificate) -> bool:
        signature = certificate.signatures[voter]
        return self._has_signed(voter, signature, "mean", plan.key, plan.digest, certificate.mean)

    def check(self, plan: Plan, certificate: Certificate) -> None:
        """Raises Malformed unless most of the plan's workers have voted for the certificate's mean."""
        self.check_ranges(plan, certificate.num_parts, certificate.ranges)
        mean = certificate.mean
        voters = [
            peer
            for peer, signature in certificate.signatures.items()
            if self.is_invited(peer) and self._has_signed(peer, signature, "mean", plan.key, plan.digest, mean)
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

    def has_signed_contribution(self, peer: str, key: RoundKey, contribution: PresentWorker, signature: bytes) -> bool:
        return self._has_signed(peer, signature, "contribution", key, contribution.header, contribution.root)

    def is_proof(self, proof: TwoRanges) -> bool:
        ranges = (proof.one, proof.other)
        statements = [signed.digest + signed.directions for signed in ranges]
        return statements[0] != statements[1] and all(
            self._has_signed(proof.peer, signed.signature, "range", proof.key, proof.plan, statement)
            for signed, statement in zip(ranges, statements, strict=True)
        )

    def check_ranges(self, plan: Plan, num_parts: int, ranges: Sequence[SignedRange]) -> None:
        """Raises Malformed."""
        names = reducers(plan, num_parts)
        if len(names) != len(ranges):
            raise Malformed(f"{len(ranges)} signed ranges of a mean instead of {len(names)}")
        for name, signed in zip(names, ranges, strict=True):
            if len(signed.directions) != size(plan) or not self.has_signed_range(plan, name, signed):
                raise Malformed(f"{name} has not signed its range of the mean")

    def _has_signed(
        self, peer: str, signature: bytes, purpose: Purpose, key: RoundKey, plan: bytes, digest: bytes
    ) -> bool:
        return _is_signed_by(peer, signature, purpose, _statement(self._run, key, plan, digest))


def _statement(run: str, key: RoundKey, plan: bytes, digest: bytes) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode((run, key.sequence, key.fragment, plan, digest))).digest()


@lru_cache(maxsize=8192)
def _is_signed_by(peer: str, signature: bytes, purpose: Purpose, data: bytes) -> bool:
    """Cached, since the votes of a round have the same ranges."""
    try:
        return is_signed(public_key_of(peer), signature, purpose, data)
    except (ValueError, ConfigError):
        return False
