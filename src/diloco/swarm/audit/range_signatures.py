"""The digests of a mean's ranges, taken while their parts arrive, and their reducers' signatures."""

from diloco.swarm.audit.directions import size
from diloco.swarm.audit.notary import Notary
from diloco.swarm.protocol.certificate import RangeDigest, SignedRange, Vote
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.wire import Malformed

SIGNATURE_BYTES = 64


class RangeSignatures:
    """The digests and signatures of one plan's ranges."""

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

    def record(self, reducer: str, told: bytes) -> None:
        """Take in a reducer's directions and signature, once its range is whole. Raises Malformed if they do not fit
        it."""
        directions = told[:-SIGNATURE_BYTES]
        signature = told[-SIGNATURE_BYTES:]
        signed = SignedRange(self._digests[reducer].digest(), signature, directions)
        if len(directions) != size(self._plan) or not self._notary.has_signed_range(self._plan, reducer, signed):
            raise Malformed("the part of the mean that has arrived is not the one that its reducer has signed")
        self._signed[reducer] = signed

    @property
    def ranges(self) -> tuple[SignedRange, ...]:
        """The signed ranges of the whole mean."""
        return tuple(self._signed[peer] for peer in self._digests if peer in self._signed)

    def vote(self) -> Vote:
        """This worker's vote for the whole mean."""
        return self._notary.vote(self._plan, self._num_parts, self.ranges)
