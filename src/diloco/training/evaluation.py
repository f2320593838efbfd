"""Validation loss of a model on its worker's share of the fixed validation windows."""

from dataclasses import dataclass
from math import exp, nan

import torch

from diloco.data.corpus import Corpus
from diloco.data.order import validation_batches
from diloco.engines.rounds import Member
from diloco.models.base import LanguageModel


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
    model: LanguageModel, corpus: Corpus, sequence_length: int, batch_size: int, share: tuple[int, int, int]
) -> Evaluation:
    """`share` is (worker, workers, windows of all workers together). Leaves the model in its mode."""
    worker, workers, windows = share
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, tokens = 0.0, 0
    for batch in validation_batches(corpus, sequence_length, batch_size, worker, workers, windows):
        window = torch.from_numpy(batch).to(device)
        count = window.shape[0] * sequence_length
        total += model.loss(window[:, :-1], window[:, 1:]).item() * count
        tokens += count
    model.train(was_training)
    return Evaluation(total / tokens if tokens else nan, tokens)


def combine(members: tuple[Member, ...]) -> Evaluation | None:
    """The evaluation of all workers together, from what each reported of its share; None while any is missing."""
    reports = [member.report for member in members if member.report.validation_tokens]
    tokens = sum(report.validation_tokens for report in reports)
    if not tokens or len({report.validation_step for report in reports}) > 1:
        return None
    return Evaluation(sum(r.validation_loss * r.validation_tokens for r in reports) / tokens, tokens)
