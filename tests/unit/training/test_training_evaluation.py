"""Evaluation: shares of workers combine to the evaluation of one."""

from dataclasses import replace
from math import nan

import pytest
import torch

from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.rounds import Member, Report
from diloco.models.native.presets import preset
from diloco.models.native.transformer import Transformer
from diloco.training.validation import Evaluation, combine, evaluate

LENGTH = 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    folder = tmp_path_factory.mktemp("evaluation")
    lines = [f"line {number * number} of a text without end" for number in range(800)]
    (folder / "text.txt").write_text("\n".join(lines))
    return prepare(
        DataConfig(
            source=str(folder / "text.txt"),
            vocab_size=270,
            shards=2,
            validation_fraction=0.1,
            cache_dir=str(folder / "cache"),
        )
    )


@pytest.fixture(scope="module")
def model(corpus: Corpus) -> Transformer:
    torch.manual_seed(1)
    return Transformer(preset("tiny", vocab_size=corpus.vocab_size, max_sequence_length=LENGTH))


def member(worker: int, result: Evaluation, step: int = 7) -> Member:
    report = Report(validation_loss=result.loss, validation_tokens=result.tokens, validation_step=step)
    return Member(worker, "", 1.0, 1.0, report)


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_the_shares_of_the_workers_combine_to_the_evaluation_of_one(
    corpus: Corpus, model: Transformer, workers: int, batch_size: int
) -> None:
    whole = evaluate(model, corpus, LENGTH, 16, (0, 1, 32))
    shares = [evaluate(model, corpus, LENGTH, batch_size, (worker, workers, 32)) for worker in range(workers)]
    together = combine(tuple(member(worker, share) for worker, share in enumerate(shares)))
    assert together is not None
    assert together.tokens == whole.tokens == 32 * LENGTH
    assert together.loss == pytest.approx(whole.loss, abs=1e-5)
    assert together.perplexity == pytest.approx(whole.perplexity, rel=1e-5)


def test_an_evaluation_is_the_mean_cross_entropy_of_the_tokens(corpus: Corpus, model: Transformer) -> None:
    tokens = torch.tensor(corpus.validation()[: LENGTH + 1].astype("int64"))[None]
    expected = torch.nn.functional.cross_entropy(model(tokens[:, :-1])[0], tokens[0, 1:])
    result = evaluate(model, corpus, LENGTH, 4, (0, 1, 1))
    assert result.tokens == LENGTH
    assert result.loss == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_in_its_mode_without_gradients(corpus: Corpus, model: Transformer, training: bool) -> None:
    model.train(training)
    model.zero_grad()
    evaluate(model, corpus, LENGTH, 4, (0, 1, 8))
    assert model.training is training
    assert all(module.training is training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_worker_without_windows_changes_nothing(corpus: Corpus, model: Transformer) -> None:
    shares = [evaluate(model, corpus, LENGTH, 4, (worker, 3, 2)) for worker in range(3)]
    assert shares[2].tokens == 0
    together = combine(tuple(member(worker, share) for worker, share in enumerate(shares)))
    whole = evaluate(model, corpus, LENGTH, 4, (0, 1, 2))
    assert together is not None
    assert together.loss == pytest.approx(whole.loss, abs=1e-5)


def test_shares_of_different_steps_are_not_combined() -> None:
    first, second = member(0, Evaluation(2.0, 10)), member(1, Evaluation(4.0, 30), step=8)
    assert combine((first, second)) is None
    again = combine((first, replace(second, report=replace(second.report, validation_step=7))))
    assert again == Evaluation(3.5, 40)


def test_before_anyone_has_evaluated_there_is_no_evaluation() -> None:
    assert combine(()) is None
    assert combine((member(0, Evaluation(nan, 0)), member(1, Evaluation(nan, 0)))) is None


def test_a_hopeless_loss_still_has_a_perplexity() -> None:
    assert Evaluation(1e9, 1).perplexity < float("inf")
