"""The windows of an inner step as inputs, targets and the targets that are learnt, in micro-batches.

Without a loss mask every target is learnt and the loss is their mean. With one (data.format chat or completion) the
loss is the mean over the learnt targets of the whole batch, whichever micro-batch or rank has them: each micro-batch's
own mean is scaled by its part of them.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from diloco.data.order import Int64
from diloco.engines.worker_ranks import WorkerRanks


class Loss(Protocol):
    """The loss of a model: mean cross entropy of the targets, or of those at the flat indices `learnt`."""

    def __call__(self, tokens: Tensor, targets: Tensor, learnt: Tensor | None = None) -> Tensor: ...


class MicroBatch(NamedTuple):
    inputs: Tensor
    """(B, T), int64; targets likewise."""
    targets: Tensor
    tokens: int
    """Targets that are learnt."""
    learnt: Tensor | None = None
    """Their indices in the flattened targets; None: all."""
    scale: float = 1.0
    """Tokens that are learnt here, relative to the mean of all micro-batches of the step."""

    @classmethod
    def of(
        cls, windows: Tensor, device: torch.device, *, masked: bool = False, mean_tokens: float | None = None
    ) -> "MicroBatch":
        """`windows`: (B, T + 1); `masked`: a token t that is not learnt is −1 − t."""
        if not masked:
            windows = windows.to(device)
            return cls(windows[:, :-1], windows[:, 1:], windows[:, 1:].numel())
        inputs = windows[:, :-1]
        targets = windows[:, 1:]
        learnt = (targets.flatten() >= 0).nonzero().squeeze(1)
        tokens = len(learnt)
        scale = 1.0 if mean_tokens is None else tokens / max(mean_tokens, 1e-9)
        if not tokens:  # the model computes a loss all the same, since other ranks may wait for this one
            learnt = torch.arange(targets.numel())
            scale = 0.0
        return cls(_numbers(inputs).to(device), _numbers(targets).to(device), tokens, learnt.to(device), scale)

    def loss(self, model_loss: Loss) -> Tensor:
        """Return the part of the step's loss that these windows are, times the number of micro-batches."""
        if self.learnt is None:
            return model_loss(self.inputs, self.targets)
        return model_loss(self.inputs, self.targets, self.learnt) * self.scale


def _numbers(windows: Tensor) -> Tensor:
    """Return the numbers of tokens, learnt or not."""
    return torch.where(windows < 0, ~windows, windows)


def micro_batches(
    windows: Int64, ranks: WorkerRanks, parts: int, device: torch.device, *, masked: bool
) -> tuple[list[MicroBatch], int | None]:
    """This rank's rows of a worker's windows in `parts`; and with a loss mask, the tokens that the worker learns."""
    whole = torch.from_numpy(windows)
    own = whole.chunk(ranks.count)[ranks.rank]
    if not masked:
        return [MicroBatch.of(part, device) for part in own.to(device).chunk(parts)], None
    learnt = int((whole[:, 1:] >= 0).sum())
    mean = learnt / (ranks.count * parts)
    return [MicroBatch.of(part, device, masked=True, mean_tokens=mean) for part in own.chunk(parts)], learnt
