"""Ways to compress that are not options; benchmarks/codec_quality.py compares them with those that are."""

from typing import ClassVar

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.integers import Int4
from diloco.codecs.registry import CODECS
from diloco.codecs.top_k import TopK, TopKMean
from diloco.methods.pruning import prune_


class DenseMean(TopK):
    """Top-k whose means travel as int4 of all values."""

    name = "topk, dense mean"
    means_drop_values = False

    def __init__(self) -> None:
        super().__init__()
        self.for_means = Int4()


class ForgottenMean(TopK):
    """Top-k whose means drop values without error feedback for them: these are lost."""

    name = "topk, dropped values lost"
    means_drop_values = False


class RememberingMean(TopKMean):
    """Error feedback at the reducer: what a mean has left out is added to the next one. For one span of parts."""

    name = "topk mean, remembered"

    def __init__(self) -> None:
        super().__init__()
        self._left_out: Tensor | None = None

    def encode(self, values: Tensor, out: Tensor) -> None:
        if self._left_out is None or self._left_out.shape != values.shape:
            self._left_out = torch.zeros_like(values)
        corrected = values + 0.95 * self._left_out
        super().encode(corrected, out)
        decoded = torch.empty_like(values)
        self.decode(out, decoded)
        self._left_out = corrected - decoded


class RememberedTopK(TopK):
    """Top-k with error feedback at the reducer."""

    name = "topk, feedback at the reducer"
    means_drop_values = False
    reducer: ClassVar[Codec] = RememberingMean()
    """The same for all workers of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.for_means = self.reducer


CODECS.update({variant.name: variant for variant in (DenseMean, ForgottenMean, RememberedTopK)})


def by_sign(rows: Tensor, fraction: float) -> None:
    """Prune first the values whose sign is not the neuron's (that of its sum), smallest first; then the smallest
    others."""
    count = int(fraction * rows.shape[1])
    elected = rows.sum(dim=1, keepdim=True).sign()
    sizes = rows.abs()
    order = torch.where(rows.sign() == elected, sizes + sizes.amax(dim=1, keepdim=True), sizes)
    if count:
        rows.masked_fill_(order <= order.kthvalue(count, dim=1, keepdim=True).values, 0.0)


def by_sign_largest(rows: Tensor, fraction: float) -> None:
    """Prune as by_sign does, but of the values with the other sign the largest first."""
    count = int(fraction * rows.shape[1])
    elected = rows.sum(dim=1, keepdim=True).sign()
    sizes = rows.abs()
    largest = sizes.amax(dim=1, keepdim=True)
    order = torch.where(rows.sign() == elected, sizes + 2 * largest, largest - sizes)
    if count:
        rows.masked_fill_(order <= order.kthvalue(count, dim=1, keepdim=True).values, 0.0)


READINGS = {"magnitude": prune_, "other sign first": by_sign, "other sign first, largest": by_sign_largest}
