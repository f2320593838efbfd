"""Samples during training: when they are written, and that training does not notice them."""

from pathlib import Path

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.training.config.run import RunConfig
from diloco.training.config.tables import InnerConfig, TrainingConfig
from diloco.training.loop import Training
from diloco.training.records.events import EventLog, read_events


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
