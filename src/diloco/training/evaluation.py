"""Validation loss of a model on its worker's share of the fixed validation windows; with a loss mask, over the tokens
that are learnt only."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import exp, nan

import torch

from diloco.data.corpus import Corpus
from diloco.data.order import validation_batches
from diloco.engines.rounds import Member
from diloco.engines.worker_ranks import ALONE, WorkerRanks
from diloco.models.base import LanguageModel
from diloco.training.config.run import RunConfig
from diloco.training.micro_batches import MicroBatch
from diloco.training.precision import Precision

_BATCH = 16
_MOST_COUNTED = 4096
"""Shares whose tokens are remembered."""


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
        """`accumulation`: a batch has as many rows as a step's micro-batches, of which there are so many."""
        self._config, self._corpus, self._model, self._precision, self._ranks = config, corpus, model, precision, ranks
        self._share_tokens: dict[tuple[int, int], int] = {}
        self._accumulation = accumulation
        self.seconds = 0.0
        """Spent on evaluations since it was last set to 0."""

    @cached_property
    def all_tokens(self) -> int:
        """Of all shares together."""
        return self.share_tokens(0, 1)

    def share_tokens(self, index: int, shares: int) -> int:
        """The tokens of the share with this index, of so many shares, without measuring it."""
        if (index, shares) not in self._share_tokens:
            if len(self._share_tokens) >= _MOST_COUNTED:
                self._share_tokens.clear()
            length, limit = self._config.data.sequence_length, self._config.training.eval_windows
            masked, cpu = self._corpus.meta.masked, torch.device("cpu")
            windows = validation_batches(self._corpus, length, _BATCH, index, shares, limit)
            counts = [MicroBatch.of(torch.from_numpy(rows), cpu, masked=masked).tokens for rows in windows]
            self._share_tokens[index, shares] = int(sum(counts))
        return self._share_tokens[index, shares]

    def measure(self, index: int, shares: int, stopped: Callable[[], bool] | None = None) -> Evaluation:
        """The share of the validation windows with this index, of so many shares."""
        started, config = time.monotonic(), self._config
        share = (index, shares, config.training.eval_windows)
        batch, length = max(1, config.training.batch_size // self._accumulation), config.data.sequence_length
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
    """`share` is (worker, workers, windows of all workers together). The model's train/eval mode stays as it was.

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
    """The evaluation over all shares, from the members' reports; None while they are of different steps."""
    reports = [member.report for member in members if member.report.validation_tokens]
    tokens = sum(report.validation_tokens for report in reports)
    if not tokens or len({report.validation_step for report in reports}) > 1:
        return None
    return Evaluation(sum(r.validation_loss * r.validation_tokens for r in reports) / tokens, tokens)
