"""Per-neuron pruning of outer gradients (DiLoCo, arXiv 2311.08105, Table 6, after TIES, arXiv 2306.01708).

The paper prunes 25, 50 and 75 % "per neuron" by "sign pruning" and gives no formula. The reading here is the trimming
of TIES, neuron by neuron: of each row the smallest values go, whatever their sign. Electing a sign for each neuron and
pruning the values of the other sign first was tried too: it is much further from the paper's figures at 50 and 75 %
(benchmarks/codec_quality.py has both; docs/codecs.md the figures).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from diloco.core.fragments import Fragment, Span
from diloco.core.lanes import Piece
from diloco.core.outer_step import outer_gradient
from diloco.outer.method import GradientSource, LaneFragment, Method, Options


class Pruning(Method):
    """`sync.prune`: all outer gradients of parameters are pruned; counted buffers travel whole."""

    @classmethod
    def chosen(cls, options: Options) -> "Pruning | None":
        return None if options.sync.prune is None else cls(options.sync.prune)

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def gradient(self, place: LaneFragment) -> GradientSource | None:
        if place.group.buffers:
            return None

        def gradient(turn: int, theta_i: Tensor | None) -> Iterator[tuple[Span, Tensor]]:
            del turn
            return pruned_gradient(place.fragment, place.pieces, self._fraction, theta_i)

        return gradient


def prune_(rows: Tensor, fraction: float) -> None:
    """Set the ⌊fraction · n⌋ smallest |values| of each row [neurons, n] to zero, in place, and any of the same size."""
    count = int(fraction * rows.shape[1])
    if not count:
        return
    sizes = rows.abs()
    smallest = sizes.kthvalue(count, dim=1, keepdim=True).values
    rows.masked_fill_(sizes <= smallest, 0.0)


@torch.no_grad()
def pruned_gradient(
    fragment: Fragment, pieces: Sequence[Piece], fraction: float, theta_i: Tensor | None = None
) -> Iterator[tuple[Span, Tensor]]:
    """Take the outer gradient as outer_step.py does, and prune each neuron: a row of a matrix, or all of a vector.

    Needs a copy of the fragment, since spans and rows have different ends.
    """
    flat = torch.empty(fragment.numel, device=fragment.device)
    for span, delta in outer_gradient(fragment, theta_i):
        flat[span.slice].copy_(delta)
    for piece, view in zip(pieces, fragment.views(flat).values(), strict=True):
        whole = view if view.shape == torch.Size(piece.shape) else view.view(piece.shape)
        rows = whole.reshape(len(whole) if whole.dim() > 1 else 1, -1)
        prune_(rows, fraction)
        if rows.data_ptr() != whole.data_ptr():  # not in row-major order: `rows` is a copy
            whole.copy_(rows.view(whole.shape))
    for span in fragment.spans():
        yield span, flat[span.slice]
