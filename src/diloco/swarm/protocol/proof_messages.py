"""The messages by which members check each other; protocol/messages.py has them too."""

from typing import Annotated

from msgspec import Meta

from diloco.swarm.protocol.certificate import LongParts, Sha256, TwoPlans, TwoRanges
from diloco.swarm.protocol.wire import Malformed, PeerMessage

# Liars


class Projections(PeerMessage, frozen=True):
    """The numbers of the sender's parts, from `first` on (audit/mean_check.py). Answered by Done."""

    plan: Sha256
    first: Annotated[int, Meta(ge=0, le=1 << 40)]
    values: Annotated[bytes, Meta(max_length=1 << 19)]

    def __post_init__(self) -> None:
        if len(self.values) % 4:
            raise Malformed(f"{len(self.values)} bytes of numbers")


class AskPart(PeerMessage, frozen=True):
    """Answered by Part or NotHere."""

    plan: Sha256
    part: Annotated[int, Meta(ge=0, le=1 << 40)]


class Part(PeerMessage, frozen=True):
    """A part of the sender's contribution, encoded, and the proof that it was bound to it."""

    data: bytes
    proof: Annotated[bytes, Meta(max_length=4096)]


class Proof(PeerMessage, frozen=True):
    """A member has lied, as every other can check. Answered by Done."""

    lie: TwoRanges | LongParts | TwoPlans


# States


class AskStateDigest(PeerMessage, frozen=True):
    """A worker that fetches the state before this round asks other members for theirs. Answered by StateDigest."""

    sequence: Annotated[int, Meta(ge=0, le=1 << 62)]


class StateDigest(PeerMessage, frozen=True):
    digest: Sha256 | None = None
    pending: bool = False
    """It is being computed: ask again."""
