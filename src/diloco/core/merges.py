"""The ways to merge contributions other than their weighted mean, by name (`sync.merge`).

Each takes the parts of all contributions at once and writes what counts as their mean. To add one: a function here or
in a file of its own, a line in MERGES, its name and the fewest contributions that it takes in core/config.py
(FEWEST_TO_MERGE), a row in docs/configuration.md. An experiment of the laboratory adds both lines in its own file.

Centred clipping (`clipped`): a mean that no single worker can pull far, for four and more workers. The median of three
contributions is one of them: a round with fewer than four is averaged plainly (core/config.py).

Part by part (arXiv 2012.10333, with the median as the centre):

    x_i  = the mean of the others, where it points against their sum or is next to nothing (see below)
    c    = the median of the contributions, element by element
    τ    = the median of their distances ‖x_i − c‖
    mean = c + Σ w_i · min(1, τ / ‖x_i − c‖) · (x_i − c) / Σ w_i

A contribution far from the centre counts as one at the usual distance. Weights are kept. Outer gradients are noisy: one
that is turned around is hardly farther from the centre than the others, and only its angle tells. So a contribution
whose cosine with the sum of the others, each at the same length, is below -4/√n (n elements: four deviations of what
chance gives) counts as their mean. So does one that is shorter than a tenth of the median: it would only make the mean
shorter. At most a third is left out so, the most opposed first. How often that happens is told with the mean.

Where all are equally far this is the plain mean. Sums are made of element-wise additions alone, in a fixed order: the
same bits wherever a part is reduced, and however many with it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from diloco.core.merging import shares

MergeParts = Callable[[Sequence[Tensor], Sequence[float], Tensor, Sequence[float]], Tensor]
"""(values, weights, out, scales) -> replaced.

`values` has a tensor [rows, elements] for each contribution, which may be overwritten; `out`, which gets the merged
parts, may be one of them. `scales` is empty, or has a factor for each contribution. `replaced` has, for each
contribution, in how many of the rows it counted as the mean of the others: zeros where no contribution ever does. All
that reduce a part must get the same bits: no randomness, and sums in a fixed order.
"""

_DEVIATIONS = 4.0
_LEAST_SHARE = 0.1


def clipped_mean(values: Sequence[Tensor], weights: Sequence[float], out: Tensor, scales: Sequence[float]) -> Tensor:
    """Merge parts [rows, elements], one tensor for each contribution; `out`, which gets the mean, may be one of them.

    Returns in how many of the parts each contribution counted as the mean of the others.
    """
    stacked = torch.stack(tuple(values))
    for row, scale in zip(stacked, scales or (1.0,) * len(values), strict=True):
        if scale != 1:
            row.mul_(scale)
    portions = shares(weights)
    replaced = _replace_opposed(stacked, portions)
    centre = _median(stacked)
    stacked.sub_(centre)
    distances = _sum_of_squares(stacked).sqrt_()  # [contributions, rows]
    usual = distances.sort(0).values[(len(values) - 1) // 2]
    factors = torch.where(distances > usual, usual / distances, torch.ones_like(distances))
    total = sum(portions)
    out.copy_(centre)
    for row, factor, portion in zip(stacked, factors, portions, strict=True):
        out.add_(row.mul_((factor * (portion / total))[:, None]))
    return replaced


def _replace_opposed(stacked: Tensor, portions: Sequence[float]) -> Tensor:
    """Put the mean of the others in place of each opposed or tiny part; returns for each contribution in how many."""
    cosines = _agreement(stacked)  # [contributions, rows]
    first = cosines.argsort(stable=True, dim=0)[: (len(stacked) - 1) // 3]
    opposed = torch.zeros_like(cosines, dtype=torch.bool).scatter_(0, first, True)
    opposed &= cosines < -_DEVIATIONS / stacked.shape[-1] ** 0.5
    counts = opposed.sum(1)
    if not bool(counts.any()):
        return counts
    mean = torch.zeros_like(stacked[0])
    total = torch.zeros_like(cosines[0])
    for row, left_out, portion in zip(stacked, opposed, portions, strict=True):
        share = torch.where(left_out, 0.0, portion)
        mean.add_(row * share[:, None])
        total.add_(share)
    mean.div_(total[:, None])
    for row, left_out in zip(stacked, opposed, strict=True):
        row.copy_(torch.where(left_out[:, None], mean, row))
    return counts


def _agreement(stacked: Tensor) -> Tensor:
    """Return the cosine of each contribution with the sum of the others, each at length 1; -2 if it is next to
    nothing."""
    norms = _sum_of_squares(stacked).sqrt_()
    lengths = torch.where(norms > 0, norms, 1.0)
    total = torch.zeros_like(stacked[0])
    for row, length in zip(stacked, lengths, strict=True):
        total.add_(row / length[:, None])
    own = torch.where(norms > 0, 1.0, 0.0)
    products = _sum_over_elements(stacked * total) / lengths
    squares = _sum_of_squares(total) - 2 * products + own
    cosines = (products - own) / squares.clamp_min(1e-12).sqrt_()
    usual = norms.sort(0).values[(len(stacked) - 1) // 2]
    return torch.where(norms < _LEAST_SHARE * usual, -2.0, cosines)


def _median(stacked: Tensor) -> Tensor:
    ordered = stacked.sort(0).values
    count = len(stacked)
    return (ordered[(count - 1) // 2] + ordered[count // 2]).mul_(0.5)


def _sum_of_squares(values: Tensor) -> Tensor:
    return _sum_over_elements(values.square())


def _sum_over_elements(values: Tensor) -> Tensor:
    """Sum over the last dimension: halves are added to each other until one element is left."""
    while (size := values.shape[-1]) > 1:
        half = size // 2
        added = values[..., :half] + values[..., half : 2 * half]
        values = torch.cat((added, values[..., 2 * half :]), -1) if size % 2 else added
    return values[..., 0]


MERGES: dict[str, MergeParts] = {"clipped": clipped_mean}
