"""The directions of a round's contributions: what each reducer reports of them, and which of them are refused for it.

A reducer takes up to eight parts of its range, which the digest of the plan draws: no contributor knew them when it was
bound to its parts. It reports the cosine of every pair of contributions there, and signs that with the digest of its
range (certificate.py). So all workers of a plan have the same cosines, and come to the same decision (`opposed`)
before they vote: where a contribution points against the others, they do not vote for this plan, and the leader makes
the next one without it (node/leader.py).

Fewer than half of the reducers decide no cosine of a pair, where more than half of the contributors reduce parts. Where
fewer do, a single one may: so each worker compares what was reported of its own pairs with the numbers of the
contributions, and with the contribution of the other worker itself where they are far apart, or where a contribution
was refused (mean_check.py). A reducer that has reported another cosine is banned, as for a wrong mean.

Outer gradients of honest workers agree, the more so the more alike their data are; one that is turned around has
the opposite cosine with every one of them. The decision, from the cosines c_ij of all pairs:

    c_ij      the (upper) median of what is reported of a pair: by all, the two included, where more than half of the
              contributors report, so that fewer than half of the reducers that lie decide no pair; where fewer report,
              by others than the two
    m_i       the median of c_ij over the others
    majority  the ⌊n/2⌋ + 1 contributions with the highest m_i: fewer than half that lie are not among themselves in it
    level     the median of what is reported of the majority's pairs
    spread    1.5 times the median distance of that from level: a standard deviation, were it normal

A contribution is against the others if its (upper) median cosine with the majority is below each of these:

    -level / 2            it is nearer to the opposite of an honest one than to an honest one
    -2.5 · spread         members of the majority do not differ so much among themselves
    -0.05                 where it is longer than twice the median, which no honest one is that takes as many steps
    -0.2                  where it is not

and only where level is above 2.5 · spread. Workers with different data agree less and less while training converges,
and an honest one of a minority then points against the sum of the others: such a round has no clear majority, and
nothing is refused. Two of three contributions are a majority without a spread: they must agree by 0.5, or by 0.1 where
the third is longer than twice the median.
"""

import hashlib
import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import median, median_high

import torch
from torch import Tensor

from diloco.codecs.registry import codec
from diloco.swarm.protocol.certificate import (
    FEWEST_COMPARED,
    MOST_COMPARED,
    SignedRange,
    compares_directions,
    directions_bytes,
    reducers,
)
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.trainer import PostedRound

_SAMPLED = 8  # parts of a range
_UNIT = 32767
_SPREADS = 2.5
_DEVIATION = 1.5  # of a normal distribution, in median distances from its middle
_SHARE = 0.5  # of the level
_LONG = 2.0  # times the median norm
_LEAST = 0.2
_LEAST_OF_LONG = 0.05
_LEVEL_OF_TWO = 0.5
_LEVEL_OF_TWO_AND_LONG = 0.1


# What a reducer reports


def sampled_parts(plan: Plan, reducer: str, num_parts: int) -> list[int]:
    """Return the parts of a reducer's range in which it compares directions; none where they are not compared."""
    if not compares_directions(plan):
        return []
    parts = plan.ranges(num_parts)[reducer]
    seed = int.from_bytes(hashlib.sha256(b"directions" + plan.digest + reducer.encode()).digest(), "little")
    return sorted(random.Random(seed).sample(parts, min(_SAMPLED, len(parts))))


@torch.no_grad()
def compare(values: Sequence[Tensor]) -> bytes:
    """Compute the cosines of all pairs of contributions, as a reducer sends them. `values`: its sampled parts of each
    contribution, as one tensor."""
    cosines = pair_cosines(values)
    return struct.pack(f"<{len(cosines)}h", *(round(_UNIT * cosine) for cosine in cosines))


def unpack(reported: bytes) -> list[float]:
    """Read the cosines in what `compare` gave."""
    return [value / _UNIT for (value,) in struct.iter_unpack("<h", reported)]


def pair_cosines(values: Sequence[Tensor]) -> list[float]:
    """Compute the cosine of every pair, in the order of `combinations`; 0 where one of the two is 0."""
    rows = torch.stack([value.reshape(-1) for value in values]).double()
    products = rows @ rows.T
    lengths = products.diagonal().sqrt().clamp_min(1e-300)  # of a row of zeros all products are 0
    cosines = (products / lengths / lengths[:, None]).clamp(-1, 1).tolist()
    return [cosines[i][j] for i, j in combinations(range(len(values)), 2)]


# Which contributions are refused for it


def find_opposed(plan: Plan, num_parts: int, ranges: Sequence[SignedRange]) -> dict[str, float]:
    """Return a map: contributor that points against the others -> its median cosine with most of them."""
    if not compares_directions(plan):
        return {}
    names = [entry.peer for entry in plan.contributors]
    reported = {
        names.index(reducer): unpack(signed.directions)
        for reducer, signed in zip(reducers(plan, num_parts), ranges, strict=True)
        if len(signed.directions) == directions_bytes(plan)
    }
    scales = plan.decision.scales or (1.0,) * len(names)
    norms = [entry.parsed.claim.norm * scale for entry, scale in zip(plan.contributors, scales, strict=True)]
    against = {names[place]: cosine for place, cosine in opposed(norms, reported).items()}
    return against if 2 * (len(against) + len(plan.opposed)) < len(plan.entries) else {}


def opposed(norms: Sequence[float], reported: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Position of each contribution that points against the others -> its median cosine with the majority.

    `norms`: with which each of them counts. `reported`: the cosines of all pairs, by the position of their reducer.
    """
    count = len(norms)
    if not FEWEST_COMPARED <= count <= MOST_COMPARED or not reported:
        return {}
    values_of = _by_pair(count, reported)
    cosines = {pair: median_high(values) for pair, values in values_of.items()}
    cosines |= {(j, i): cosine for (i, j), cosine in cosines.items()}
    majority = _majority(count, cosines)
    inside = [pair for pair in values_of if majority.issuperset(pair)]
    level = median(value for pair in inside for value in values_of[pair])
    spread = 0.0
    if len(inside) > 1:
        spread = _DEVIATION * median(abs(value - level) for pair in inside for value in values_of[pair])
    if level <= _SPREADS * spread:
        return {}
    usual = sorted(norms)[(count - 1) // 2]
    against: dict[int, float] = {}
    for i in sorted(set(range(count)) - majority):
        long = norms[i] > _LONG * usual
        if len(inside) == 1 and level < (_LEVEL_OF_TWO_AND_LONG if long else _LEVEL_OF_TWO):
            continue
        bound = max(_SHARE * level, _SPREADS * spread, _LEAST_OF_LONG if long else _LEAST)
        cosine = median_high(cosines[i, j] for j in majority)
        if cosine < -bound:
            against[i] = cosine
    return against


def _by_pair(count: int, reported: Mapping[int, Sequence[float]]) -> dict[tuple[int, int], list[float]]:
    """Return what is reported of each pair: by all, or by others than the two where only few report and others do."""
    most_report = 2 * len(reported) > count
    values_of = {}
    for place, pair in enumerate(combinations(range(count), 2)):
        by_others = [cosines[place] for reducer, cosines in reported.items() if most_report or reducer not in pair]
        values_of[pair] = by_others or [cosines[place] for cosines in reported.values()]
    return values_of


def _majority(count: int, cosines: Mapping[tuple[int, int], float]) -> set[int]:
    """Find the ⌊n/2⌋ + 1 contributions with the highest median cosine; of equal ones those that come first."""
    middles = [median(cosines[i, j] for j in range(count) if j != i) for i in range(count)]
    return set(sorted(range(count), key=lambda i: (-middles[i], i))[: count // 2 + 1])


# What each worker checks of it


def told_of(
    plan: Plan, ranges: Sequence[SignedRange], peer: str, posted: PostedRound
) -> Iterator[tuple[str, dict[str, float]]]:
    """Go through the reducers but `peer`, with the cosines that each reports of the contribution of `peer` with each
    other one."""
    names = [entry.peer for entry in plan.contributors]
    for reducer, signed in zip(reducers(plan, posted.num_parts), ranges, strict=True):
        if reducer != peer and len(signed.directions) == directions_bytes(plan) > 0:
            pairs = zip(combinations(names, 2), unpack(signed.directions), strict=True)
            yield reducer, {pair[0] if pair[1] == peer else pair[1]: cosine for pair, cosine in pairs if peer in pair}


@torch.no_grad()
def cosine_of(posted: PostedRound, first: Sequence[bytes], second: Sequence[bytes]) -> float:
    """Compute the cosine of the same encoded parts of two contributions."""
    decoded = []
    for parts in (first, second):
        values = torch.empty(len(parts), posted.part_elements)
        rows = torch.stack([torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts])
        codec(posted.codec).decode(rows, values)
        decoded.append(values)
    return pair_cosines(decoded)[0]
