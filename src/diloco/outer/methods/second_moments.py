"""AdamW's second moment, averaged among the workers in every n-th round (DES-LOC, arXiv 2505.22549).

Inner optimizer state is a worker's own in DiLoCo. The second moment v changes slowly and scales every step; averaged
now and then, it lets workers with few tokens each step as one with many. Bias-corrected values travel, v / (1 − β₂^t),
so that workers that have taken different numbers of steps, a joiner say, average the same thing.

The moments travel like a fragment of their own, without an anchor: their mean takes the place of each worker's v. In
the rounds between, that fragment is a header. They travel in fp32, or in bf16 with any other codec: fewer bits would
make small moments 0, and the next step a division by nothing.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import PartLayout
from diloco.engines.base import Connection
from diloco.errors import ConfigError


class SecondMoments:
    """Of the parameters that AdamW steps, as one flat vector in the model's order."""

    def __init__(self, inner: Optimizer, parameters: Mapping[str, Tensor], every: int) -> None:
        self._inner, self._every = inner, every
        known = self._betas()
        self._parameters = [parameter for parameter in parameters.values() if parameter in known]
        if not self._parameters:
            raise ConfigError(
                f"sync.second_moment_every = {every} averages AdamW's second moment, and {type(inner).__name__} has "
                "none: leave it out, or use torch.optim.AdamW"
            )
        self._ends = list(accumulate(parameter.numel() for parameter in self._parameters))
        self.layout = PartLayout(self._ends[-1])

    def vector(self, codec_name: str) -> EncodedVector:
        """What travels, if outer gradients travel with that codec."""
        return EncodedVector(codec(moments_codec(codec_name)), self.layout, self._parameters[0].device)

    def due(self, turn: int) -> bool:
        return (turn + 1) % self._every == 0

    @torch.no_grad()
    def encode(self, vector: EncodedVector) -> float:
        """This worker's moments into the vector; their norm. 0 where a parameter has not been stepped yet."""
        flat = torch.zeros(self.layout.numel, device=self._parameters[0].device)
        for part, moment, correction in self._states(flat):
            part.copy_(moment.reshape(-1)).div_(correction)
        vector.encode(0, flat)
        return float(torch.linalg.vector_norm(flat))

    @torch.no_grad()
    def take(self, mean: EncodedVector) -> None:
        """The mean in place of this worker's moments."""
        flat = mean.decode(0, self.layout.num_parts, self._parameters[0].device).clone()
        for part, moment, correction in self._states(flat):
            moment.copy_(part.mul_(correction).view(moment.shape))

    def _states(self, flat: Tensor) -> list[tuple[Tensor, Tensor, float]]:
        """Each parameter's place in a flat vector, its v and 1 − β₂^t, as far as it has been stepped."""
        found, betas = [], self._betas()
        for parameter, end in zip(self._parameters, self._ends, strict=True):
            state: Mapping[str, Any] = self._inner.state.get(parameter, {})
            if "exp_avg_sq" in state and float(state["step"]) > 0:
                correction = 1.0 - betas[parameter] ** float(state["step"])
                found.append((flat[end - parameter.numel() : end], state["exp_avg_sq"], correction))
        return found

    def _betas(self) -> dict[Tensor, float]:
        """β₂ of each parameter that an Adam steps."""
        return {
            p: float(group["betas"][1])
            for group in self._inner.param_groups
            if "betas" in group
            for p in group["params"]
        }


def second_moments(
    sync: SyncConfig, engine: Connection, inner: Optimizer, parameters: Mapping[str, Tensor]
) -> SecondMoments | None:
    """What is to be averaged; None if nothing is. A worker that is always alone has the mean already."""
    every = sync.second_moment_every
    if every is None:
        return None
    if set(engine.sizes) != {1}:
        raise ConfigError(f"sync.second_moment_every = {every} is for workers of one rank: leave it out")
    found = SecondMoments(inner, parameters, every)
    return found if engine.workers > 1 or engine.elastic else None


def moments_codec(codec_name: str) -> str:
    """The codec of second moments beside that of the outer gradients."""
    return "fp32" if codec_name == "fp32" else "bf16"
