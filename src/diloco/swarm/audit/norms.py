"""The norms of what arrives in a transfer: of parts against their sender's header, of a mean against all headers."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from diloco.codecs.base import Codec
from diloco.codecs.registry import codec
from diloco.engines.rounds import RoundKey
from diloco.swarm.audit import merkle
from diloco.swarm.protocol.certificate import LongParts
from diloco.swarm.protocol.notary import Notary
from diloco.swarm.protocol.plan import Plan, parse_header
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trainer import PostedRound, PresentWorker


class Encoding(NamedTuple):
    """The encoding of the contributions to a fragment's rounds, the same for all workers of a run."""

    layout_digest: str
    codec: str
    part_elements: int
    num_parts: int

    @classmethod
    def of(cls, posted: PostedRound) -> "Encoding":
        layout = parse_header(0, posted.header).layout_digest
        return cls(layout, posted.codec, posted.part_elements, posted.num_parts)


@torch.no_grad()
def norm_of(name: str, parts: Sequence[bytes | memoryview], part_elements: int) -> float:
    """The norm of some encoded parts; infinite if one is not finite."""
    values = torch.empty(1, part_elements)
    squares = 0.0
    for part in parts:
        codec(name).decode(torch.frombuffer(bytearray(part), dtype=torch.uint8).view(1, -1), values)
        squares += float(torch.linalg.vector_norm(values.double())) ** 2
    return math.sqrt(squares) if math.isfinite(squares) else math.inf


def are_long(lie: LongParts, encoding: Encoding) -> bool:
    """Whether these are parts of the contribution, and longer than its header claims. Its signature is checked."""
    header = parse_header(0, lie.contribution.header)
    used = codec(encoding.codec)
    width = used.part_bytes(encoding.part_elements)
    total = encoding.num_parts
    if len({shown.part for shown in lie.parts}) != len(lie.parts) or any(
        len(shown.data) != width for shown in lie.parts
    ):
        return False
    for shown in lie.parts:
        leaf = merkle.leaves(memoryview(shown.data), width)
        try:
            if merkle.root_from(leaf, range(shown.part, shown.part + 1), total, shown.proof) != lie.contribution.root:
                return False
        except Malformed:
            return False
    norm = norm_of(encoding.codec, [shown.data for shown in lie.parts], encoding.part_elements)
    return not norm <= header.claim.norm * used.norm_slack


# The signature that goes with the parts of a contribution: with it a reducer that finds them longer than the header
# claims can prove that to others.


def sign_contribution(notary: Notary, key: RoundKey, contribution: PresentWorker) -> bytes:
    return notary.sign("contribution", key, contribution.header, contribution.root)


def has_signed_contribution(
    notary: Notary, peer: str, key: RoundKey, contribution: PresentWorker, signature: bytes
) -> bool:
    return notary.has_signed(peer, signature, "contribution", key, contribution.header, contribution.root)


class NormCheck:
    """The check of the norms of one transfer."""

    def __init__(self, plan: Plan, codec: Codec) -> None:
        self._plan = plan
        self._codec = codec
        self._squares = dict.fromkeys((entry.peer for entry in plan.contributors), 0.0)
        """The squared norm of the parts that have arrived from each contributor."""

    def add(self, squares: list[float]) -> tuple[str, str] | None:
        """Add the squared norms of more parts, one for each contributor. Returns a contributor that has now sent more
        than the norm in its header, and the reason to give."""
        for entry, square in zip(self._plan.contributors, squares, strict=True):
            claimed = entry.parsed.claim.norm
            total = self._squares[entry.peer] = self._squares[entry.peer] + square
            norm = math.sqrt(total) if math.isfinite(total) else math.inf
            if not norm <= claimed * self._codec.norm_slack:
                return entry.peer, f"its parts have the norm {norm:.3g}, it claimed {claimed:.3g}"
        return None

    def fault_of_mean(self, squares: float) -> str | None:
        """The fault of a reducer's part of the mean, if it has one: a mean is finite, and never longer than the longest
        contribution in it."""
        longest = self._plan.longest
        slack = self._codec.norm_slack * self._codec.for_means.norm_slack
        if math.isfinite(squares) and math.sqrt(squares) <= longest * slack:
            return None
        return f"its part of the mean is longer than any contribution ({longest:.3g})"
