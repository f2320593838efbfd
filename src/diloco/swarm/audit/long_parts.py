"""The proof that a contribution is longer than its header claims: some of its parts, which its author has signed."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from diloco.codecs.registry import codec
from diloco.engines.rounds import RoundKey
from diloco.swarm.audit import merkle
from diloco.swarm.protocol.certificate import Notary
from diloco.swarm.protocol.plan import parse_header
from diloco.swarm.protocol.proofs import LongParts
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
    """Compute the norm of some encoded parts; infinite if one is not finite."""
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
