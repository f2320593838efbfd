"""A run that cannot recover ends with an error instead of training on for nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.local import alone
from diloco.errors import EngineError
from diloco.training.config.run import RunConfig
from diloco.training.config.tables import InnerConfig, TrainingConfig
from diloco.training.loop import Training
from diloco.training.records.events import EventLog, read_events


def training(tmp_path: Path, lr: float = 1e20, **changes: Any) -> Training:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    data = DataConfig(
        source=str(text), vocab_size=300, sequence_length=8, shards=1, validation_fraction=0.1, cache_dir=str(tmp_path)
    )
    config = RunConfig(
        workers=1,
        inner=InnerConfig(lr=lr, warmup_steps=0, clip_norm=None),
        data=data,
        training=TrainingConfig(batch_size=2, eval_windows=4),
        **changes,
    )
    return Training(config, prepare(data), alone(), EventLog(tmp_path, 0), torch.device("cpu"), tmp_path, leader=True)


def failures(folder: Path) -> list[str]:
    return [event["failure"] for event in read_events(folder) if event["type"] == "round"]


def test_a_run_whose_parameters_are_not_finite_ends_after_three_failed_rounds_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the last 3 rounds failed.*not finite.*lower inner\.lr \(1e\+20\)"):
        training(tmp_path, steps=100, sync=SyncConfig(num_inner_steps=2)).run()
    assert len(failures(tmp_path)) == 3 and all("not finite" in failure for failure in failures(tmp_path))


def test_rounds_that_fail_after_the_last_step_count_too(tmp_path: Path) -> None:
    late = training(tmp_path, steps=9, sync=SyncConfig(num_inner_steps=3, overlap_steps=2))
    with pytest.raises(EngineError, match="the last 4 rounds failed"):
        late.run()
    assert late.mode.averager.inner_steps == 9
    assert "worker_finished" not in {event["type"] for event in read_events(tmp_path)}
    late.fail(EngineError("as above"))
    assert (tmp_path / "model" / "model.safetensors").exists()


def test_a_sample_that_cannot_be_written_is_left_out_and_the_run_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: object, **__: object) -> list[int]:
        raise RuntimeError("probability tensor contains nan")

    monkeypatch.setattr("diloco.training.records.outputs.generate", dies)
    training(tmp_path, lr=1e-3, steps=2, sync=SyncConfig(num_inner_steps=1)).run()
    events = read_events(tmp_path)
    assert [event["reason"] for event in events if event["type"] == "sample_skipped"] == [
        "probability tensor contains nan"
    ]
    assert "worker_finished" in {event["type"] for event in events}
