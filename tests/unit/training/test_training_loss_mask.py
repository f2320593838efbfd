"""A loss mask: only answers count, in the loss, its gradient and the validation, however a batch is shared out."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoTokenizer

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.order import validation_batches
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.rounds import Contribution
from diloco.engines.worker_ranks import ALONE
from diloco.models.base import LanguageModel
from diloco.models.registry import build_model
from diloco.outer.gradient_mean import GradientMean
from diloco.training.config.run import TrainingConfig
from diloco.training.micro_batches import MicroBatch, micro_batches
from diloco.training.validation import evaluate
from support.event_log import read_events
from support.pretrained_models import VOCAB, make_folder
from support.saved_runs import quick_runs, small_config, train

CPU = torch.device("cpu")


@pytest.fixture(params=["native", "hugging face"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> LanguageModel:
    folder = str(make_folder(tmp_path / "model"))
    name = folder if request.param == "native" else f"hf:{folder}"
    return build_model(name, vocab_size=VOCAB - 10, sequence_length=16)


def some_windows(rows: int = 8) -> np.ndarray:  # type: ignore[type-arg]
    """The first row has nothing to learn, the last only that."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB - 20, (rows, 17))
    hidden = rng.random((rows, 17)) < np.linspace(1.1, -0.1, rows)[:, None]
    return np.where(hidden, ~tokens, tokens)


def expected_loss(model: LanguageModel, windows: np.ndarray) -> torch.Tensor:  # type: ignore[type-arg]
    """As transformers has it: labels of −100 are left out of the mean."""
    given = torch.from_numpy(windows)
    tokens = torch.where(given < 0, ~given, given)
    labels = torch.where(given < 0, -100, given)[:, 1:]
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), labels.flatten())


def gradient(model: LanguageModel) -> torch.Tensor:
    found = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    model.zero_grad()
    return found


@pytest.mark.parametrize("parts", [1, 4, 8])
def test_loss_and_gradient_are_those_of_the_learnt_targets_whatever_the_micro_batches(
    model: LanguageModel, parts: int
) -> None:
    windows = some_windows()
    expected = expected_loss(model, windows)
    expected.backward()  # type: ignore[no-untyped-call]
    wanted = gradient(model)
    batches, learnt = micro_batches(windows, ALONE, parts, CPU, masked=True)
    assert learnt == (windows[:, 1:] >= 0).sum() == sum(batch.tokens for batch in batches)
    loss = torch.zeros(())
    for batch in batches:
        part = batch.loss(model.loss) / len(batches)
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient(model), wanted, atol=1e-6, rtol=1e-4)


def test_windows_without_anything_to_learn_give_no_gradient_and_no_nan(model: LanguageModel) -> None:
    windows = ~np.abs(np.arange(34).reshape(2, 17))
    (batch,), learnt = micro_batches(windows, ALONE, 1, CPU, masked=True)
    loss = batch.loss(model.loss)
    loss.backward()  # type: ignore[no-untyped-call]
    assert learnt == batch.tokens == 0 and loss == 0 and not gradient(model).any()


def test_without_a_mask_the_loss_is_the_models_own_bit_for_bit(model: LanguageModel) -> None:
    tokens = torch.from_numpy(np.abs(some_windows()))
    (batch,), learnt = micro_batches(tokens.numpy(), ALONE, 1, CPU, masked=False)
    assert learnt is None and batch.tokens == 8 * 16
    assert torch.equal(batch.loss(model.loss), model.loss(tokens[:, :-1], tokens[:, 1:]))


def chat_config(folder: Path) -> DataConfig:
    """Questions are noise, and every answer is the same."""
    rng = random.Random(0)
    rows = [
        {"prompt": "".join(rng.choices("abcdefghijklmnop", k=12)), "completion": " yes, of course"} for _ in range(600)
    ]
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(
        source=str(folder / "rows.jsonl"),
        format="completion",
        cache_dir=str(folder / "cache"),
        vocab_size=300,
        sequence_length=16,
        shards=4,
    )


def test_validation_is_the_mean_over_the_learnt_tokens_and_the_same_for_any_share(
    model: LanguageModel, tmp_path: Path
) -> None:
    corpus = prepare(chat_config(tmp_path / "data"))
    whole = evaluate(model, corpus, 16, 4, (0, 1, 10**6))
    windows = np.concatenate(list(validation_batches(corpus, 16, 4)))
    assert whole.tokens == (windows[:, 1:] >= 0).sum() < windows[:, 1:].size
    model.eval()
    with torch.no_grad():
        assert whole.loss == pytest.approx(float(expected_loss(model, windows)), rel=1e-5)
    shares = [evaluate(model, corpus, 16, 3, (worker, 3, 10**6)) for worker in range(3)]
    assert sum(share.tokens for share in shares) == whole.tokens
    mean = sum(share.loss * share.tokens for share in shares) / whole.tokens
    assert mean == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("mode", ["diloco", "data-parallel"])
def test_a_run_learns_the_answers_to_questions_that_are_noise(tmp_path: Path, mode: str) -> None:
    data = chat_config(tmp_path / "data")
    corpus = prepare(data)
    training = TrainingConfig(batch_size=4, accumulation=2, eval_windows=8, eval_interval=40, log_interval=10,
                              sample_tokens=0)  # fmt: skip
    config = small_config(data, SyncConfig(num_inner_steps=10), mode=mode, steps=80, training=training)
    config = replace(config, checkpoint=replace(config.checkpoint, interval=0))
    with quick_runs():
        workers = train(tmp_path / "run", config, corpus)
    events = read_events(tmp_path / "run")
    losses = [event["loss"] for event in events if event["type"] == "validation"]
    assert not (tmp_path / "run" / "model" / "chat_template.jinja").exists(), "prompts that are texts need none"
    assert losses[0] > 4 and losses[-1] < 1, "the answer alone has been learnt: the letters of a question cannot be"
    (told,) = [event for event in events if event["type"] == "corpus"]
    assert told["learnt_tokens"] == corpus.meta.learnt_tokens
    if mode == "data-parallel":  # each gradient weighs as much as it has tokens behind it
        assert all(0 < worker.mode.averager.weight < 4 * 16 for worker in workers)  # type: ignore[union-attr]


def test_gradients_of_a_warm_start_weigh_as_much_as_they_have_learnt_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = chat_config(tmp_path / "data")
    weights, contribution = [], GradientMean.contribution

    def seen(self: GradientMean, weight: float, *rest: Any) -> Contribution:
        weights.append(weight)
        return contribution(self, weight, *rest)

    monkeypatch.setattr(GradientMean, "contribution", seen)
    config = small_config(data, SyncConfig(num_inner_steps=2, warm_start=2), steps=4)
    with quick_runs():
        train(tmp_path / "run", config, prepare(data))
    assert len(weights) == 4 and all(0 < weight < 2 * 16 and weight == int(weight) for weight in weights)


def test_a_model_that_was_trained_on_conversations_has_their_template(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes, " * 20}]
    rows = [{"messages": [{**messages[0], "content": f"is {i} a number"}, messages[1]]} for i in range(60)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = replace(
        chat_config(tmp_path / "data"), source=str(tmp_path / "rows.jsonl"), format="chat", chat_template="chatml"
    )
    corpus = prepare(data)
    config = small_config(data, SyncConfig(num_inner_steps=2), steps=2)
    with quick_runs():
        train(tmp_path / "run", config, corpus)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    told = theirs.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert told == "<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\n"


def test_micro_batches_of_a_worker_with_ranks_add_up_to_the_whole_batch(model: LanguageModel) -> None:
    class TwoRanks:
        count = 2

        def __init__(self, rank: int) -> None:
            self.rank = rank

    windows = some_windows()
    total = 0.0
    for rank in range(2):
        batches, _ = micro_batches(windows, TwoRanks(rank), 2, CPU, masked=True)  # type: ignore[arg-type]
        total += sum(float(batch.loss(model.loss).detach()) / len(batches) for batch in batches) / 2
    assert total == pytest.approx(float(expected_loss(model, windows).detach()), rel=1e-5)
    assert MicroBatch.of(torch.from_numpy(windows), CPU, masked=True).scale == 1.0
