"""Notice a training loss that is nan or infinite, without letting a step on a GPU wait for it."""

import math
from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.engines.worker_ranks import WorkerRanks


@dataclass(frozen=True)
class BadLoss:
    """A loss that is nan or infinite, and the inner step that has it."""

    step: int
    loss: float
    more: str = ""

    def __str__(self) -> str:
        return f"{self.loss:.4g} {self.more}".rstrip()


class LossCheck:
    """Finds a loss that is not finite: on a CPU in its own step, on a GPU one step later, so that no step waits for it.

    A gradient that overflowed and was skipped (fp16) has a finite loss: the loss scale is not in it.
    """

    def __init__(self, ranks: WorkerRanks) -> None:
        self._ranks = ranks
        self._copied: deque[tuple[int, Tensor, torch.cuda.Event]] = deque()  # on their way to the CPU

    def check(self, step: int, loss: Tensor, *, now: bool) -> BadLoss | None:
        """Return the first bad loss that is known. `now`: this step's too, whatever waits for it. Collective among the
        ranks of a worker: a rank that ended alone would block the others."""
        bad = self._own(step, loss, now=now)
        if self._ranks.count > 1 and self._ranks.any(bad is not None) and bad is None:
            return BadLoss(step, math.nan)
        return bad

    def _own(self, step: int, loss: Tensor, *, now: bool) -> BadLoss | None:
        if not loss.is_cuda:
            value = loss.item()
            return None if math.isfinite(value) else BadLoss(step, value)
        copy = torch.empty((), dtype=loss.dtype, pin_memory=True)
        copy.copy_(loss, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._copied.append((step, copy, event))
        while len(self._copied) > (0 if now else 1):
            at, value_there, arrived = self._copied.popleft()
            arrived.synchronize()
            if not math.isfinite(value_there.item()):
                return BadLoss(at, value_there.item())
        return None
