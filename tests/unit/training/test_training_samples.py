"""Samples during training: when they are written, and that training does not notice them."""

import json
from pathlib import Path

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.tokenizer import Tokenizer
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.history.events import Event, SampleEvent
from diloco.history.log import EventLog
from diloco.models.choice import ModelChoice
from diloco.models.registry import build_model
from diloco.training.config.run import InnerConfig, RunConfig, TrainingConfig
from diloco.training.loop import Training
from diloco.training.records import outputs
from diloco.training.records.outputs import sample_prompt
from support.event_log import read_events


def _train(folder: Path, cache: Path, interval: int | None) -> Training:
    folder.mkdir()
    text = cache / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    data = DataConfig(
        source=str(text), vocab_size=300, sequence_length=8, shards=1, validation_fraction=0.1, cache_dir=str(cache)
    )
    shape = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
    }
    training = Training(
        RunConfig(
            workers=1,
            steps=7,
            model=ModelChoice(**shape),
            inner=InnerConfig(lr=1e-3, warmup_steps=0),
            sync=SyncConfig(num_inner_steps=2),
            data=data,
            training=TrainingConfig(batch_size=2, eval_windows=4, sample_tokens=5, sample_interval=interval),
        ),
        prepare(data), alone(), EventLog(folder, 0), torch.device("cpu"), folder, leader=True,
    )  # fmt: skip
    training.run()
    return training


def test_samples_come_every_so_many_steps_and_change_no_bit_of_the_training(tmp_path: Path) -> None:
    with_samples = _train(tmp_path / "with", tmp_path, 3)
    without = _train(tmp_path / "without", tmp_path, None)
    written = [event["step"] for event in read_events(tmp_path / "with") if event["type"] == "sample"]
    assert written == [3, 6, 7]
    assert [event["step"] for event in read_events(tmp_path / "without") if event["type"] == "sample"] == [7]
    assert with_samples.mode.anchor_digest() == without.mode.anchor_digest()


def test_an_interval_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.sample_interval = 0 must be at least 1"):
        TrainingConfig(sample_interval=0)
    with pytest.raises(ConfigError, match=r"sample_interval = 5 is for workers of one rank"):
        RunConfig(ranks="2", training=TrainingConfig(sample_interval=5))


def _chat_corpus(folder: Path, **more: object) -> tuple[Corpus, DataConfig]:
    rows = [
        {"messages": [{"role": "user", "content": f"what is {i}?"}, {"role": "assistant", "content": f"it is {i}"}]}
        for i in range(40)
    ]
    source = folder / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(
        source=str(source), format="chat", chat_template="chatml", vocab_size=300, sequence_length=64, shards=1,
        validation_fraction=0.2, cache_dir=str(folder), **more,
    )  # fmt: skip
    return prepare(data), data


def test_the_sample_of_a_run_on_conversations_is_an_answer(tmp_path: Path) -> None:
    corpus, data = _chat_corpus(tmp_path)
    tokenizer = Tokenizer.load(corpus.tokenizer_path)
    asked = sample_prompt(corpus, RunConfig(data=data), tokenizer)
    assert asked.text.startswith("<|im_start|>user\nwhat is ") and asked.text.endswith("<|im_start|>assistant\n")
    assert asked.tokens == tokenizer.encode(asked.text) and asked.end == "<|im_end|>"
    given = RunConfig(data=data, training=TrainingConfig(sample_prompt="who?"))
    assert sample_prompt(corpus, given, tokenizer).text == "<|im_start|>user\nwho?<|im_end|>\n<|im_start|>assistant\n"


def test_a_run_that_learns_whole_conversations_samples_an_answer_to_a_greeting(tmp_path: Path) -> None:
    corpus, data = _chat_corpus(tmp_path, loss_on="all")
    asked = sample_prompt(corpus, RunConfig(data=data), Tokenizer.load(corpus.tokenizer_path))
    assert asked.text == "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n"


def test_the_event_has_the_answer_without_the_end_of_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, data = _chat_corpus(tmp_path)
    written = Tokenizer.load(corpus.tokenizer_path).encode("it is 7<|im_end|>\n<|im_start|>user")
    monkeypatch.setattr(outputs, "generate", lambda *_, **__: written)
    events: list[Event] = []
    model = build_model("tiny", vocab_size=corpus.vocab_size, sequence_length=64)
    outputs.sample(model, corpus, RunConfig(data=data), events.append, 3)
    [event] = events
    assert isinstance(event, SampleEvent) and event.text == "it is 7"
