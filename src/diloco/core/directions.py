"""Which contributions point against the others, from the cosines of all pairs: a decision of one round, by all alike.

Outer gradients of honest workers agree, the more so the more alike their data are; one that is turned around has
the opposite cosine with every one of them. Each worker that reduces some parts tells the cosines of the pairs there
(`pair_cosines`), and all decide from what all have told (`opposed`):

    c_ij      the (upper) median of what is told of a pair: by all, the two included, where more than half of the
              contributors tell, so that fewer than half of the tellers that lie decide no pair; where fewer tell, by
              others than the two
    m_i       the median of c_ij over the others
    majority  the ⌊n/2⌋ + 1 contributions with the highest m_i: fewer than half that lie are not among themselves in it
    level     the median of what is told of the majority's pairs
    spread    1.5 times the median distance of that from level: a standard deviation, were it normal

A contribution is against the others if its (upper) median cosine with the majority is below each of these:

    -level / 2            it is nearer to the opposite of an honest one than to an honest one
    -2.5 · spread         members of the majority do not differ so much among themselves
    -0.05                 where it is longer than twice the median, which no honest one is that takes as many steps
    -0.2                  where it is not

and only where level is above 2.5 · spread. Workers with different data agree less and less while training converges,
and an honest one of a minority then points against the sum of the others: such a round has no clear majority, and
nothing is found. Two of three contributions are a majority without a spread: they must agree by 0.5, or by 0.1 where
the third is longer than twice the median.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median, median_high

import torch
from torch import Tensor

FEWEST, MOST = 3, 64
"""Contributions whose directions are compared: the pairs of more would be many bytes."""
_SPREADS = 2.5
_DEVIATION = 1.5  # of a normal distribution, in median distances from its middle
_SHARE = 0.5  # of the level
_LONG = 2.0  # times the median norm
_LEAST, _LEAST_OF_LONG = 0.2, 0.05
_LEVEL_OF_TWO, _LEVEL_OF_TWO_AND_LONG = 0.5, 0.1


def num_pairs(contributors: int) -> int:
    return contributors * (contributors - 1) // 2


def pair_cosines(values: Sequence[Tensor]) -> list[float]:
    """The cosine of every pair, in the order of `combinations`; 0 where one of the two is 0."""
    rows = torch.stack([value.reshape(-1) for value in values]).double()
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows = torch.where(lengths > 0, rows / lengths.clamp_min(1e-300), 0.0)
    products = rows @ rows.T
    return [float(products[i, j].clamp(-1, 1)) for i, j in combinations(range(len(values)), 2)]


def opposed(norms: Sequence[float], told: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Position of each contribution that points against the others -> its median cosine with the majority.

    `norms`: with which each of them counts. `told`: the cosines of all pairs, by the position of their teller.
    """
    count = len(norms)
    if not FEWEST <= count <= MOST or not told:
        return {}
    pairs = list(combinations(range(count), 2))
    most_tell = 2 * len(told) > count
    told_of = {
        pair: [cosines[place] for teller, cosines in told.items() if most_tell or teller not in pair]
        or [cosines[place] for cosines in told.values()]
        for place, pair in enumerate(pairs)
    }
    cosines = {pair: median_high(values) for pair, values in told_of.items()}
    cosines |= {(j, i): cosine for (i, j), cosine in cosines.items()}
    middles = [median(cosines[i, j] for j in range(count) if j != i) for i in range(count)]
    majority = sorted(range(count), key=lambda i: (-middles[i], i))[: count // 2 + 1]
    inside = [pair for pair in pairs if pair[0] in majority and pair[1] in majority]
    level = median(value for pair in inside for value in told_of[pair])
    spread = _DEVIATION * median(abs(value - level) for pair in inside for value in told_of[pair])
    spread = spread if len(inside) > 1 else 0.0
    if level <= _SPREADS * spread:
        return {}
    usual = sorted(norms)[(count - 1) // 2]
    against: dict[int, float] = {}
    for i in sorted(set(range(count)) - set(majority)):
        long = norms[i] > _LONG * usual
        if len(inside) == 1 and level < (_LEVEL_OF_TWO_AND_LONG if long else _LEVEL_OF_TWO):
            continue
        bound = max(_SHARE * level, _SPREADS * spread, _LEAST_OF_LONG if long else _LEAST)
        cosine = median_high(cosines[i, j] for j in majority)
        if cosine < -bound:
            against[i] = cosine
    return against
