"""A run that cannot recover ends with an error instead of training on for nothing."""

from pathlib import Path

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.shards import prepare
from diloco.engines.local import alone
from diloco.errors import EngineError
from diloco.training.config import InnerConfig, RunConfig, TrainingConfig
from diloco.training.events import EventLog, read_events
from diloco.training.loop import Training


def test_a_run_whose_parameters_are_not_finite_ends_after_three_failed_rounds_and_says_why(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    data = DataConfig(
        source=str(text), vocab_size=300, sequence_length=8, shards=1, validation_fraction=0.1, cache_dir=str(tmp_path)
    )
    config = RunConfig(
        workers=1,
        steps=100,
        inner=InnerConfig(lr=1e20, warmup_steps=0, clip_norm=None),
        sync=SyncConfig(num_inner_steps=2),
        data=data,
        training=TrainingConfig(batch_size=2, eval_windows=4),
    )
    events = EventLog(tmp_path, 0)
    training = Training(config, prepare(data), alone(), events, torch.device("cpu"), tmp_path, leader=True)
    with pytest.raises(EngineError, match=r"the last 3 rounds failed.*not finite.*lower inner\.lr \(1e\+20\)"):
        training.run()
    failures = [event["failure"] for event in read_events(tmp_path) if event["type"] == "round"]
    assert len(failures) == 3 and all("not finite" in failure for failure in failures)
