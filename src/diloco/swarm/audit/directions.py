"""The directions of a round's contributions: what each reducer tells of them, and which of them are refused for it.

A reducer takes up to eight parts of its range, which the digest of the plan draws: no contributor knew them when it was
bound to its parts. It tells the cosine of every pair of contributions there, and signs that with the digest of its
range (certificate.py). So all workers of a plan have the same cosines, and come to the same decision
(core/directions.py) before they vote: where a contribution points against the others, they do not vote for this plan,
and the leader makes the next one without it (node/led_round.py).

Fewer than half of the reducers decide nothing that is told of a pair, where more than half of the contributors reduce
parts. Where fewer do, a single one may: so each worker compares what was told of its own pairs with the numbers of the
contributions, and with the contribution of the other worker itself where they are far apart, or where a contribution
was refused (mean_check.py). A reducer that has told another cosine is banned, as for a wrong mean.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from diloco.codecs.registry import codec
from diloco.core import directions
from diloco.swarm.protocol.certificate import SignedRange, reducers
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.trainer import PostedRound

_SAMPLED = 8  # parts of a range
_UNIT = 32767


def sampled_parts(plan: Plan, reducer: str, num_parts: int) -> list[int]:
    """The parts of a reducer's range in which it compares directions; none where they are not compared."""
    if not compares(plan):
        return []
    parts = plan.ranges(num_parts)[reducer]
    seed = int.from_bytes(hashlib.sha256(b"directions" + plan.digest + reducer.encode()).digest(), "little")
    return sorted(random.Random(seed).sample(parts, min(_SAMPLED, len(parts))))


def compares(plan: Plan) -> bool:
    """Whether directions are compared: not of too few or too many contributions, nor without a bound on norms."""
    return plan.max_norm_ratio is not None and directions.FEWEST <= len(plan.contributors) <= directions.MOST


@torch.no_grad()
def compare(values: Sequence[Tensor]) -> bytes:
    """The cosines of all pairs of contributions, as a reducer sends them. `values`: its sampled parts of each
    contribution, as one tensor."""
    cosines = directions.pair_cosines(values)
    return struct.pack(f"<{len(cosines)}h", *(round(_UNIT * cosine) for cosine in cosines))


def size(plan: Plan) -> int:
    """The bytes of what `compare` gives, for the contributors of this plan."""
    return 2 * directions.num_pairs(len(plan.contributors)) if compares(plan) else 0


def unpack(told: bytes) -> list[float]:
    """The cosines in what `compare` gave."""
    return [value / _UNIT for (value,) in struct.iter_unpack("<h", told)]


def find_opposed(plan: Plan, num_parts: int, ranges: Sequence[SignedRange]) -> dict[str, float]:
    """Contributor that points against the others -> its median cosine with most of them."""
    if not compares(plan):
        return {}
    names = [entry.peer for entry in plan.contributors]
    told = {
        names.index(reducer): unpack(signed.directions)
        for reducer, signed in zip(reducers(plan, num_parts), ranges, strict=True)
        if len(signed.directions) == size(plan)
    }
    scales = plan.decision.scales or (1.0,) * len(names)
    norms = [entry.parsed.claim.norm * scale for entry, scale in zip(plan.contributors, scales, strict=True)]
    opposed = {names[place]: cosine for place, cosine in directions.opposed(norms, told).items()}
    return opposed if 2 * (len(opposed) + len(plan.opposed)) < len(plan.entries) else {}


def told_of(
    plan: Plan, ranges: Sequence[SignedRange], peer: str, posted: PostedRound
) -> Iterator[tuple[str, dict[str, float]]]:
    """Each reducer but `peer`, with the cosines that it tells of the contribution of `peer` with each other one."""
    names = [entry.peer for entry in plan.contributors]
    for teller, signed in zip(reducers(plan, posted.num_parts), ranges, strict=True):
        if teller != peer and len(signed.directions) == size(plan) > 0:
            pairs = zip(combinations(names, 2), unpack(signed.directions), strict=True)
            yield teller, {pair[0] if pair[1] == peer else pair[1]: cosine for pair, cosine in pairs if peer in pair}


@torch.no_grad()
def cosine_of(posted: PostedRound, one: Sequence[bytes], other: Sequence[bytes]) -> float:
    """The cosine of the same encoded parts of two contributions."""
    decoded = []
    for parts in (one, other):
        values = torch.empty(len(parts), posted.part_elements)
        rows = torch.stack([torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts])
        codec(posted.codec).decode(rows, values)
        decoded.append(values)
    return directions.pair_cosines(decoded)[0]
