"""Validation: each worker measures its share, reports it with the next round, and the leader adds the shares up."""

import time
from dataclasses import replace

from diloco.data.corpus import Corpus
from diloco.engines.base import Connection
from diloco.models.base import LanguageModel
from diloco.training.config.run import RunConfig
from diloco.training.evaluation import Evaluation, combine, evaluate
from diloco.training.modes import Mode
from diloco.training.precision import Precision
from diloco.training.records.events import EventLog


class Validation:
    """One worker's part. Its share follows from its index among the present members."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        model: LanguageModel,
        precision: Precision,
        engine: Connection,
        events: EventLog,
    ) -> None:
        self._config, self._corpus, self._model, self._precision = config, corpus, model, precision
        self._engine, self._events = engine, events
        self.share = (engine.worker, engine.workers)
        """This worker's index, and of how many."""
        self.seconds = 0.0
        """Spent on evaluations since it was last set to 0."""
        self.announced_step = -1
        self.measured_step = -1

    def due(self, step: int) -> bool:
        """Whether a multiple of the interval has been reached, or jumped over, since the last evaluation."""
        interval = self._config.eval_interval
        if self._engine.elastic:
            return step // interval > max(0, self.measured_step) // interval and step < self._config.steps
        return self._config.evaluation_due(step) and step < self._config.steps

    def measure(self, mode: Mode) -> None:
        """On the outer parameters; the next round carries the result to the other workers."""
        started = time.monotonic()
        state = mode.averager
        step = state.inner_steps
        if self._engine.elastic:  # some may have jumped a little further; all must report the same step
            step -= step % self._config.eval_interval
        with mode.outer_parameters():
            result = self._here()
        self._events.emit("evaluation", step=step, loss=result.loss, tokens=result.tokens)
        self._tell(mode, result, step)
        self.seconds += time.monotonic() - started

    def measure_end(self, mode: Mode) -> None:
        """On the final parameters, which are in the model already."""
        started = time.monotonic()
        result = self._here()
        self.seconds += time.monotonic() - started
        # After a stop the workers are some steps apart; the step to evaluate at must be the same for all.
        step = max([mode.averager.inner_steps, *(member.report.inner_steps for member in self._engine.members())])
        self._tell(mode, result, step)

    def _tell(self, mode: Mode, result: Evaluation, step: int) -> None:
        self.measured_step = step
        mode.averager.report = replace(
            mode.averager.report, validation_loss=result.loss, validation_tokens=result.tokens, validation_step=step
        )

    def _here(self) -> Evaluation:
        config = self._config
        share = (*self.share, config.training.eval_windows)
        batch = max(1, config.training.batch_size // config.training.accumulation)
        with self._precision.autocast():
            return evaluate(self._model, self._corpus, config.data.sequence_length, batch, share, self._engine.ranks)

    def announce(self) -> None:
        """Write the loss over all shares, once every worker has reported its own; in a swarm, over the shares reported
        by the time of the next round."""
        members = self._engine.members()
        step = max((member.report.validation_step for member in members), default=-1)
        if self._engine.elastic:
            members = tuple(member for member in members if member.report.validation_step == step)
        whole = combine(members) if step > self.announced_step else None
        if whole is not None:
            self.announced_step = step
            self._events.emit(
                "validation", step=step, loss=whole.loss, perplexity=whole.perplexity, tokens=whole.tokens
            )
