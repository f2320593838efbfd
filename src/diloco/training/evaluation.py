"""Validation loss of a model on its worker's share of the fixed validation windows; with a loss mask, over the tokens
that are learnt only."""

from dataclasses import dataclass
from math import exp, nan

import torch

from diloco.data.corpus import Corpus
from diloco.data.order import validation_batches
from diloco.engines.rounds import Member
from diloco.engines.worker_ranks import ALONE, WorkerRanks
from diloco.models.base import LanguageModel
from diloco.training.micro_batches import MicroBatch


@dataclass(frozen=True)
class Evaluation:
    """Mean cross entropy in nats over `tokens` tokens."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(
    model: LanguageModel,
    corpus: Corpus,
    sequence_length: int,
    batch_size: int,
    share: tuple[int, int, int],
    ranks: WorkerRanks = ALONE,
) -> Evaluation:
    """`share` is (worker, workers, windows of all workers together). The model's train/eval mode stays as it was.

    The ranks of a worker share out the rows of each batch. All ranks run every batch, since a sharded model needs them
    all; a rank without a row runs the first row and does not count it.
    """
    worker, workers, windows = share
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total = tokens = 0.0
    for batch in validation_batches(corpus, sequence_length, batch_size, worker, workers, windows):
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
