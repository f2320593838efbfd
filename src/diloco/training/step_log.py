"""What one worker has done itself so far, and the `step` events that tell of it.

In a swarm a worker's position in the schedule jumps: tokens and seconds are of the steps that it took itself, and a
step is logged whenever a multiple of `training.log_interval` was reached or jumped over.
"""

import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.engines.worker_ranks import WorkerRanks
from diloco.history.events import FirstStepEvent, StartingEvent, StepEvent
from diloco.history.log import EventLog
from diloco.training.compute import Precision
from diloco.training.config.run import RunConfig
from diloco.training.modes import Mode
from diloco.training.validation import Evaluator


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


class StepLog:
    """`loss`: of the last inner step that was logged."""

    def __init__(
        self,
        config: RunConfig,
        mode: Mode,
        evaluator: Evaluator,
        precision: Precision,
        ranks: WorkerRanks,
        events: EventLog,
    ) -> None:
        self._config = config
        self._mode = mode
        self._evaluator = evaluator
        self._precision = precision
        self._ranks = ranks
        self._events = events
        self.loss: float | None = None
        self._joined_at = 0  # steps of an earlier worker that count as none of this one's
        self._seconds_before = 0.0  # of earlier starts
        self._started = time.monotonic()
        self._logged = 0
        self._first: float | None = None  # when the first step began, until it has ended

    def begin(self, *, compiled: bool) -> None:
        """Training begins now; evaluations before do not count."""
        self._started = time.monotonic()
        self._evaluator.seconds = 0.0
        self._logged = self._mode.averager.inner_steps
        self._first = time.monotonic()
        self._events.emit(StartingEvent(doing="compiling" if compiled else "first step"))

    def restart(self) -> None:
        """The state that was loaded is another worker's: its steps and seconds are not this one's."""
        self._joined_at = self._mode.steps_taken
        self._seconds_before = 0.0

    def due(self, step: int) -> bool:
        """Return whether a step is logged: every multiple of the interval, and the last one, so that a short run has a
        loss."""
        interval = self._config.training.log_interval
        last = self._config.steps
        return step // interval > self._logged // interval or step >= last > self._logged

    def log(self, step: int, loss: Tensor, norm: Tensor | None, rate: float) -> None:
        self._logged = step
        state = self._mode.averager
        self.loss = self._ranks.sums(loss.item())[0] / self._ranks.count
        self._events.emit(
            StepEvent(
                step=step,
                loss=self.loss,
                learning_rate=rate,
                gradient_norm=None if norm is None else _norm_value(norm),
                loss_scale=self._precision.loss_scale,
                tokens=self.tokens(1),
                elapsed_seconds=self.seconds(),
                sync_seconds=state.sync_seconds,
                bytes_sent=state.bytes_sent,
                rounds=state.rounds,
            )
        )

    def step_taken(self) -> None:
        """Tell how long the first inner step took; called after every one."""
        if self._first is not None:
            self._events.emit(FirstStepEvent(seconds=time.monotonic() - self._first))
            self._first = None

    def tokens(self, more_steps: int = 0) -> int:
        """Tokens that this worker itself has trained on, and those of `more_steps` more."""
        return (self._mode.steps_taken + more_steps - self._joined_at) * self._config.tokens_per_step

    def seconds(self) -> float:
        """Training and rounds, without evaluations."""
        return self._seconds_before + time.monotonic() - self._started - self._evaluator.seconds

    def state_dict(self) -> dict[str, Any]:
        return {"elapsed_seconds": self.seconds(), "loss": self.loss, "joined_at": self._joined_at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._seconds_before = state["elapsed_seconds"]
        self.loss = state["loss"]
        self._joined_at = state["joined_at"]


def _norm_value(norm: Tensor) -> float:
    """Return the value of a norm; over sharded gradients this is collective."""
    full = getattr(norm, "full_tensor", None)
    return float(norm if full is None else full())
