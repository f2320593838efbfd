"""Centred clipping: a mean that no single worker can pull far, for four and more workers (`sync.merge = clipped`).

Part by part (arXiv 2012.10333, with the median as the centre):

    c    = the median of the contributions, element by element
    τ    = the median of their distances ‖x_i − c‖
    mean = c + Σ w_i · min(1, τ / ‖x_i − c‖) · (x_i − c) / Σ w_i

A contribution in the wrong direction is far from the centre and counts as one at the usual distance. Weights are kept.
Where all are equally far this is the plain mean. Sums are made of element-wise additions alone, in a fixed order: the
same bits wherever a part is reduced, and however many with it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco.core.merging import shares

FEWEST = 4
"""Contributions: the median of three is one of them, and a round with fewer is averaged as with `merge = mean`."""


def clipped_mean(values: Sequence[Tensor], weights: Sequence[float], out: Tensor, scales: Sequence[float]) -> Tensor:
    """Of parts [rows, elements], one tensor for each contribution; `out` may be one of them."""
    stacked = torch.stack(tuple(values))
    for row, scale in zip(stacked, scales or (1.0,) * len(values), strict=True):
        if scale != 1:
            row.mul_(scale)
    centre = _median(stacked)
    stacked.sub_(centre)
    distances = _sum_of_squares(stacked).sqrt_()  # [contributions, rows]
    usual = distances.sort(0).values[(len(values) - 1) // 2]
    factors = torch.where(distances > usual, usual / distances, torch.ones_like(distances))
    portions = shares(weights)
    total = sum(portions)
    out.copy_(centre)
    for row, factor, portion in zip(stacked, factors, portions, strict=True):
        out.add_(row.mul_((factor * (portion / total))[:, None]))
    return out


def _median(stacked: Tensor) -> Tensor:
    ordered = stacked.sort(0).values
    count = len(stacked)
    return (ordered[(count - 1) // 2] + ordered[count // 2]).mul_(0.5)


def _sum_of_squares(values: Tensor) -> Tensor:
    """Over the last dimension: halves are added to each other until one element is left."""
    squares = values.square()
    while (size := squares.shape[-1]) > 1:
        half = size // 2
        added = squares[..., :half] + squares[..., half : 2 * half]
        squares = torch.cat((added, squares[..., 2 * half :]), -1) if size % 2 else added
    return squares[..., 0]
