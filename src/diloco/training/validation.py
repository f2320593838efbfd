"""Validation: each worker measures its share, reports it with the next round, and the leader adds the shares up.

This is the validation of a fixed set of workers, which all measure at the same steps; swarm/validation.py is that of
workers that come and go.
"""

from dataclasses import replace
from typing import Any

from diloco.engines.base import Connection
from diloco.history.log import EventLog
from diloco.training.config.run import RunConfig
from diloco.training.evaluation import Evaluation, Evaluator, combine
from diloco.training.modes import Mode


class Validation:
    """One worker's part; of a machine's workers only the leader writes the loss over all shares."""

    def __init__(
        self, config: RunConfig, evaluator: Evaluator, engine: Connection, events: EventLog, *, leader: bool
    ) -> None:
        self._config, self._evaluator, self._engine, self._events = config, evaluator, engine, events
        self._leader = leader
        self.announced_step = -1

    def measure_start(self, mode: Mode, *, joined: bool) -> None:
        """Before the first inner step of a run. `joined`: this worker has the state of a run in progress."""
        del joined
        self._events.emit("starting", doing="validation")
        self.measure(mode)

    def due(self, step: int) -> bool:
        """Whether the outer parameters are measured after this step."""
        return self._config.evaluation_due(step) and step < self._config.steps

    def measure(self, mode: Mode) -> None:
        """On the outer parameters; the next round carries the result to the other workers."""
        step = mode.averager.inner_steps
        with mode.outer_parameters():
            result = self._evaluator.measure(self._engine.worker, self._engine.workers)
        self._events.emit("evaluation", step=step, loss=result.loss, tokens=result.tokens)
        self._tell(mode, result, step)

    def measure_end(self, mode: Mode) -> None:
        """On the final parameters, which are in the model already."""
        result = self._evaluator.measure(self._engine.worker, self._engine.workers)
        # After a stop the workers are some steps apart; the step to evaluate at must be the same for all.
        step = max([mode.averager.inner_steps, *(member.report.inner_steps for member in self._engine.members())])
        self._tell(mode, result, step)

    def announce(self) -> None:
        """Write the loss over all shares, once every worker has reported its own."""
        members = self._engine.members()
        step = max((member.report.validation_step for member in members), default=-1)
        whole = combine(members) if self._leader and step > self.announced_step else None
        if whole is not None:
            self._announce(step, whole)

    def announce_end(self) -> None:
        """After the last round."""
        self.announce()

    def state_dict(self) -> dict[str, Any]:
        return {"announced_step": self.announced_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.announced_step = state["announced_step"]

    def _tell(self, mode: Mode, result: Evaluation, step: int) -> None:
        """With the next round."""
        mode.averager.report = replace(
            mode.averager.report, validation_loss=result.loss, validation_tokens=result.tokens, validation_step=step
        )

    def _announce(self, step: int, whole: Evaluation, **more: object) -> None:
        self.announced_step = step
        if self._leader:
            self._events.emit(
                "validation", step=step, loss=whole.loss, perplexity=whole.perplexity, tokens=whole.tokens, **more
            )
