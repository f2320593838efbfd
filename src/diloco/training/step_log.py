"""What one worker has done itself so far, and the `step` events that tell of it.

In a swarm a worker's position in the schedule jumps: tokens and seconds are of the steps that it took itself, and a
step is logged whenever a multiple of `training.log_interval` was reached or jumped over.
"""

import time
from typing import Any

from torch import Tensor

from diloco.engines.worker_ranks import WorkerRanks
from diloco.history.events import FirstStepEvent, StartingEvent, StepEvent
from diloco.history.log import EventLog
from diloco.training.compute import Precision
from diloco.training.config.run import RunConfig
from diloco.training.modes import Mode
from diloco.training.validation import Evaluator


class StepLog:
    """Counts one worker's tokens and seconds, and writes the events of its steps."""

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
        """The loss of the last inner step that was logged."""
        self._joined_at = 0  # steps of an earlier worker that count as none of this one's
        self._seconds_before = 0.0  # of earlier starts
        self._started = time.monotonic()
        self._logged_step = 0
        self._first_began: float | None = None  # when the first step began, until it has ended

    def begin(self, *, compiled: bool) -> None:
        """Begin to count: evaluations before the first step are left out."""
        self._started = time.monotonic()
        self._evaluator.seconds = 0.0
        self._logged_step = self._mode.averager.inner_steps
        self._first_began = time.monotonic()
        self._events.emit(StartingEvent(doing="compiling" if compiled else "first step"))

    def restart(self) -> None:
        """Count steps and seconds from here: those that were loaded are another worker's."""
        self._joined_at = self._mode.steps_taken
        self._seconds_before = 0.0

    def due(self, step: int) -> bool:
        """Return whether a step is logged: every multiple of the interval, and the last one, so that a short run has a
        loss."""
        interval = self._config.training.log_interval
        last = self._config.steps
        return step // interval > self._logged_step // interval or step >= last > self._logged_step

    def log(self, step: int, loss: Tensor, norm: Tensor | None, rate: float) -> None:
        self._logged_step = step
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
                sync_seconds=state.counters.sync_seconds,
                bytes_sent=state.counters.bytes_sent,
                rounds=state.rounds,
            )
        )

    def step_taken(self) -> None:
        """Tell how long the first inner step took; called after every one."""
        if self._first_began is not None:
            self._events.emit(FirstStepEvent(seconds=time.monotonic() - self._first_began))
            self._first_began = None

    def tokens(self, more_steps: int = 0) -> int:
        """Return the tokens that this worker itself has trained on, and those of `more_steps` more."""
        return (self._mode.steps_taken + more_steps - self._joined_at) * self._config.tokens_per_step

    def seconds(self) -> float:
        """Return the seconds of training and rounds, without evaluations."""
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
