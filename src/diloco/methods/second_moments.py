"""AdamW's second moment, averaged among the workers in every n-th round (DES-LOC, arXiv 2505.22549).

Inner optimizer state is a worker's own in DiLoCo. The second moment v changes slowly and scales every step; averaged
now and then, it lets workers with few tokens each step as one with many. Bias-corrected values travel, v / (1 − β₂^t),
so that workers that have taken different numbers of steps, a joiner say, average the same thing.

The moments travel like a fragment of their own, without an anchor: their mean takes the place of each worker's v. In
the rounds between, and once a worker has taken all its steps, that fragment is a header. They travel in fp32, or in
bf16 with any other codec: fewer bits would make small moments 0, and the next step a division by nothing.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.core.outer_optimizers import SGD
from diloco.errors import ConfigError
from diloco.outer.method import Method, Options
from diloco.outer.sending import NO_DIGEST, Group, Sending


class SecondMoments(Method):
    """`sync.second_moment_every`: one more group, of no fragment."""

    @classmethod
    def chosen(cls, options: Options) -> "SecondMoments | None":
        """Build the method if it is asked for. A worker that is always alone has the mean already, but its inner
        optimizer is checked all the same."""
        every = options.sync.second_moment_every
        engine = options.engine
        if every is None:
            return None
        method = cls(options.inner, options.parameters, every, options.sync.codec)
        return method if engine.workers > 1 or engine.elastic else None

    def __init__(self, inner: Optimizer, parameters: Mapping[str, Tensor], every: int, codec_name: str) -> None:
        """`codec_name`: of the outer gradients."""
        self.moments = MomentsSending(inner, parameters, every, codec_name)

    def groups(self) -> Sequence[Group]:
        return [Group((), SGD(lr=1.0), None, sending=self.moments)]


class MomentsSending(Sending):
    """The moments of the parameters that AdamW steps, as one flat vector in the model's order."""

    def __init__(self, inner: Optimizer, parameters: Mapping[str, Tensor], every: int, codec_name: str) -> None:
        self._inner = inner
        self._every = every
        known = self._betas()
        self._parameters = [parameter for parameter in parameters.values() if parameter in known]
        if not self._parameters:
            raise ConfigError(
                f"sync.second_moment_every = {every} averages AdamW's second moment, and {type(inner).__name__} has "
                "none: leave it out, or use torch.optim.AdamW"
            )
        self._ends = list(accumulate(parameter.numel() for parameter in self._parameters))
        self.layout = PartLayout(self._ends[-1])
        self.vector = EncodedVector(codec(moments_codec(codec_name)), self.layout, self._parameters[0].device)

    def due(self, turn: int) -> bool:
        return (turn + 1) % self._every == 0

    def is_header_only(self, turn: int, done: bool) -> bool:
        return done or not self.due(turn)

    @torch.no_grad()
    def encode(self, turn: int, theta_i: Tensor | None) -> tuple[float, float | None]:
        """Encode the moments, if they are due. Those of a parameter that has not been stepped yet are 0."""
        del theta_i
        if not self.due(turn):
            return 0.0, None
        flat = torch.zeros(self.layout.numel, device=self._parameters[0].device)
        for part, moment, correction in self._states(flat):
            part.copy_(moment.reshape(-1)).div_(correction)
        self.vector.encode(0, flat)
        return float(torch.linalg.vector_norm(flat)), None

    @torch.no_grad()
    def merge(self, mean: EncodedVector, mixing: float, turn: int, *, plain: bool) -> tuple[str, float | None]:
        """Put the mean in place of this worker's moments, unless it keeps what is its own."""
        del turn, plain
        if mixing < 1:
            self._take(mean)
        return NO_DIGEST, 0.0

    def _take(self, mean: EncodedVector) -> None:
        flat = mean.decode(0, self.layout.num_parts, self._parameters[0].device).clone()
        for part, moment, correction in self._states(flat):
            moment.copy_(part.mul_(correction).view(moment.shape))

    def _states(self, flat: Tensor) -> list[tuple[Tensor, Tensor, float]]:
        """Return each parameter's place in a flat vector, its v and 1 − β₂^t, if it has been stepped."""
        states = []
        betas = self._betas()
        for parameter, end in zip(self._parameters, self._ends, strict=True):
            state: Mapping[str, Any] = self._inner.state.get(parameter, {})
            if "exp_avg_sq" in state and float(state["step"]) > 0:
                correction = 1.0 - betas[parameter] ** float(state["step"])
                states.append((flat[end - parameter.numel() : end], state["exp_avg_sq"], correction))
        return states

    def _betas(self) -> dict[Tensor, float]:
        """Return β₂ of each parameter that an Adam steps."""
        return {
            p: float(group["betas"][1])
            for group in self._inner.param_groups
            if "betas" in group
            for p in group["params"]
        }


def moments_codec(codec_name: str) -> str:
    """Return the name of the codec of second moments beside that of the outer gradients."""
    return "fp32" if codec_name == "fp32" else "bf16"
