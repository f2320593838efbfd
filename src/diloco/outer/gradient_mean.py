"""The mean of the workers' gradients, for steps that all of them take alike: data parallelism.

Gradients are one flat vector, which travels through the codec and the engine that carry outer gradients. Used at every
step of the data-parallel mode and of a warm start.
"""

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import EncodedVector
from diloco.core.fragments import PartLayout
from diloco.engines.rounds import Contribution, Report, RoundResult


class GradientMean:
    """Averages gradients: `contribution` is for a round of all workers, and `take` puts its mean in place of the
    gradients."""

    def __init__(self, parameters: Mapping[str, Tensor], how: Codec, max_norm_ratio: float | None) -> None:
        """`max_norm_ratio` as in SyncConfig."""
        self._parameters = list(parameters.values())
        self._max_norm_ratio = max_norm_ratio
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes), device=device)
        self._vector = EncodedVector(how, PartLayout(sum(sizes)), device)
        self._views = [
            self._flat[end - parameter.numel() : end].view(parameter.shape)
            for parameter, end in zip(self._parameters, accumulate(sizes), strict=True)
        ]

    def zero_grad(self) -> None:
        """Set gradients to 0, in the flat vector, so that averaging needs no copying."""
        self._flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    @torch.no_grad()
    def contribution(self, weight: float, layout_digest: str, report: Report) -> Contribution:
        """Encode the gradients of this worker, from wherever its backward pass has left them; none counts as 0."""
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            if parameter.dtype == view.dtype:
                parameter.grad = view
        self._vector.encode(0, self._flat)
        norm = float(torch.linalg.vector_norm(self._flat))
        return Contribution(self._vector, weight, norm, "", layout_digest, self._max_norm_ratio, report)

    def take(self, result: RoundResult) -> None:
        """Put the mean in place of every gradient."""
        self._flat.copy_(result.mean.decode(0, self._vector.layout.num_parts))
        for parameter, view in zip(self._parameters, self._views, strict=True):
            if parameter.dtype != view.dtype:
                parameter.grad = view.to(parameter.dtype)
