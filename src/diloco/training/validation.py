"""Validation: each worker measures its share, reports it with the next round, and the leader adds the shares up.

A share is one worker's part of the fixed validation windows; with a loss mask only the tokens that are learnt count.
`Validation` is that of a fixed set of workers, which all measure at the same steps; swarm/validation.py is that of
workers that come and go.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, nan
from typing import Any

import torch

from diloco.data.corpus import Corpus
from diloco.data.order import validation_batches
from diloco.engines.base import Connection
from diloco.engines.rounds import Member
from diloco.engines.worker_ranks import ALONE, WorkerRanks
from diloco.history.events import EvaluationEvent, StartingEvent, ValidationEvent
from diloco.history.log import EventLog
from diloco.models.base import LanguageModel
from diloco.training.compute import Precision
from diloco.training.config.run import RunConfig
from diloco.training.micro_batches import MicroBatch
from diloco.training.modes import Mode

_BATCH = 16
_MOST_COUNTED = 4096
"""The shares whose tokens are remembered."""


@dataclass(frozen=True)
class Evaluation:
    """Mean cross entropy in nats over `tokens` tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))


class Evaluator:
    """Measures a model as a run's configuration says."""

    def __init__(
        self,
        config: RunConfig,
        corpus: Corpus,
        model: LanguageModel,
        precision: Precision,
        ranks: WorkerRanks,
        accumulation: int,
    ) -> None:
        """`accumulation` is the number of micro-batches of a step; an evaluation's batch has as many rows as one of
        them."""
        self._config = config
        self._corpus = corpus
        self._model = model
        self._precision = precision
        self._ranks = ranks
        self._share_tokens: dict[tuple[int, int], int] = {}
        self._accumulation = accumulation
        self.seconds = 0.0
        """Seconds spent on evaluations since it was last set to 0."""

    @cached_property
    def all_tokens(self) -> int:
        """The tokens of all shares together."""
        return self.share_tokens(0, 1)

    def share_tokens(self, index: int, shares: int) -> int:
        """Return the tokens of the share with this index, of so many shares, without measuring it."""
        if (index, shares) not in self._share_tokens:
            if len(self._share_tokens) >= _MOST_COUNTED:
                self._share_tokens.clear()
            length = self._config.data.sequence_length
            limit = self._config.training.eval_windows
            masked = self._corpus.meta.masked
            cpu = torch.device("cpu")
            windows = validation_batches(self._corpus, length, _BATCH, index, shares, limit)
            counts = [MicroBatch.of(torch.from_numpy(rows), cpu, masked=masked).tokens for rows in windows]
            self._share_tokens[index, shares] = int(sum(counts))
        return self._share_tokens[index, shares]

    def measure(self, index: int, shares: int, stopped: Callable[[], bool] | None = None) -> Evaluation:
        """Measure the share of the validation windows with this index, of so many shares."""
        started = time.monotonic()
        config = self._config
        share = (index, shares, config.training.eval_windows)
        batch = max(1, config.training.batch_size // self._accumulation)
        length = config.data.sequence_length
        with self._precision.autocast():
            result = evaluate(self._model, self._corpus, length, batch, share, self._ranks, stopped)
        self.seconds += time.monotonic() - started
        return result


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    corpus: Corpus,
    sequence_length: int,
    batch_size: int,
    share: tuple[int, int, int],
    ranks: WorkerRanks = ALONE,
    stopped: Callable[[], bool] | None = None,
) -> Evaluation:
    """Measure a share of the validation text: (worker, workers, windows of all workers together). The model's
    train/eval mode stays as it was.

    `stopped`: asked before every batch; once it is true, the rest is left out.

    The ranks of a worker share out the rows of each batch. All ranks run every batch, since a sharded model needs them
    all; a rank without a row runs the first row and does not count it.
    """
    worker, workers, windows = share
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = tokens = 0.0
    for batch in validation_batches(corpus, sequence_length, batch_size, worker, workers, windows):
        if stopped is not None and stopped():
            break
        rows = batch[ranks.rank :: ranks.count]
        window = torch.from_numpy(rows if len(rows) else batch[:1])
        part = MicroBatch.of(window, device, masked=corpus.meta.masked)
        count = part.tokens if len(rows) else 0
        total += part.loss(model.loss).item() * count
        tokens += count
    model.train(was_training)
    total, tokens = ranks.sums(total, tokens)
    return Evaluation(total / tokens if tokens else nan, int(tokens))


def combine(members: tuple[Member, ...]) -> Evaluation | None:
    """Return the evaluation over all shares, from the members' reports; None while they are of different steps."""
    reports = [member.report for member in members if member.report.validation_tokens]
    tokens = sum(report.validation_tokens for report in reports)
    if not tokens or len({report.validation_step for report in reports}) > 1:
        return None
    return Evaluation(sum(r.validation_loss * r.validation_tokens for r in reports) / tokens, tokens)


class Validation:
    """One worker's part in the validation; of a machine's workers only the leader writes the loss over all shares."""

    def __init__(
        self, config: RunConfig, evaluator: Evaluator, engine: Connection, events: EventLog, *, leader: bool
    ) -> None:
        self._config = config
        self._evaluator = evaluator
        self._engine = engine
        self._events = events
        self._leader = leader
        self.announced_step = -1

    def measure_start(self, mode: Mode, *, joined: bool) -> None:
        """Measure before the first inner step of a run. `joined`: this worker has the state of a run in progress."""
        del joined
        self._events.emit(StartingEvent(doing="validation"))
        self.measure(mode)

    def due(self, step: int) -> bool:
        """Return whether the outer parameters are measured after this step."""
        return self._config.evaluation_due(step) and step < self._config.steps

    def measure(self, mode: Mode) -> None:
        """Measure the outer parameters; the next round carries the result to the other workers."""
        step = mode.averager.inner_steps
        with mode.outer_parameters():
            result = self._evaluator.measure(self._engine.worker, self._engine.workers)
        self._events.emit(EvaluationEvent(step=step, loss=result.loss, tokens=result.tokens))
        self._report(mode, result, step)

    def measure_end(self, mode: Mode) -> None:
        """Measure the final parameters, which are in the model already."""
        result = self._evaluator.measure(self._engine.worker, self._engine.workers)
        # After a stop the workers are some steps apart; the step to evaluate at must be the same for all.
        step = max([mode.averager.inner_steps, *(member.report.inner_steps for member in self._engine.members())])
        self._report(mode, result, step)

    def announce(self) -> None:
        """Write the loss over all shares, once every worker has reported its own."""
        members = self._engine.members()
        step = max((member.report.validation_step for member in members), default=-1)
        whole = combine(members) if self._leader and step > self.announced_step else None
        if whole is not None:
            self._announce(step, whole)

    def announce_end(self) -> None:
        """Write what is complete after the last round."""
        self.announce()

    def state_dict(self) -> dict[str, Any]:
        return {"announced_step": self.announced_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.announced_step = state["announced_step"]

    def _report(self, mode: Mode, result: Evaluation, step: int) -> None:
        """Report a result with the next round."""
        mode.averager.report = replace(
            mode.averager.report, validation_loss=result.loss, validation_tokens=result.tokens, validation_step=step
        )

    def _announce(self, step: int, whole: Evaluation, **more: Any) -> None:
        self.announced_step = step
        if self._leader:
            self._events.emit(
                ValidationEvent(step=step, loss=whole.loss, perplexity=whole.perplexity, tokens=whole.tokens, **more)
            )
