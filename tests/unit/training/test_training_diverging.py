"""A run that cannot recover ends with an error instead of training on for nothing."""

import errno
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.local import alone
from diloco.errors import EngineError, LossNotFinite, ModelNotWritten
from diloco.history.log import EventLog
from diloco.training.config.run import ComputeConfig, InnerConfig, RunConfig, TrainingConfig
from diloco.training.loop import Training
from diloco.training.loss_check import LossCheck
from diloco.training.records.summary import summarize
from support.event_log import history_of, read_events
from support.saved_runs import quick_runs, small_config, small_corpus, train


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


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the loss were never seen: rounds alone tell that the parameters are not finite."""
    monkeypatch.setattr(LossCheck, "check", lambda *_, **__: None)


@pytest.mark.usefixtures("late")
def test_a_run_whose_parameters_are_not_finite_ends_after_three_failed_rounds_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"the last 3 rounds failed.*not finite.*lower inner\.lr \(1e\+20\)"):
        training(tmp_path, steps=100, sync=SyncConfig(num_inner_steps=2)).run()
    assert len(failures(tmp_path)) == 3 and all("not finite" in failure for failure in failures(tmp_path))


@pytest.mark.usefixtures("late")
def test_rounds_that_fail_after_the_last_step_count_too(tmp_path: Path) -> None:
    run = training(tmp_path, steps=9, sync=SyncConfig(num_inner_steps=3, overlap_steps=2))
    with pytest.raises(EngineError, match="the last 4 rounds failed"):
        run.run()
    assert run.mode.averager.inner_steps == 9
    assert "worker_finished" not in {event["type"] for event in read_events(tmp_path)}
    run.fail(EngineError("as above"))
    assert (tmp_path / "model" / "model.safetensors").exists()


# A loss that is not finite


def test_a_loss_that_is_not_finite_is_told_with_its_step_and_ends_the_run_at_once(tmp_path: Path) -> None:
    run = training(tmp_path, steps=1000, sync=SyncConfig(num_inner_steps=500))
    with pytest.raises(LossNotFinite, match=r"worker 0 is nan at step \d.*to resume would lead to.*a lower --inner.lr"):
        run.run()
    told = [event for event in read_events(tmp_path) if event["type"] == "loss_not_finite"]
    assert [event["loss"] for event in told] == ["nan"] and told[0]["step"] == run.mode.averager.inner_steps + 1
    assert told[0]["step"] < 10 and f"at step {told[0]['step']}" in str(run._not_finite)
    assert run._not_finite is not None
    run.fail(run._not_finite)
    assert not list((tmp_path / "checkpoints").glob("**/*.json")), "a state that comes to the same loss is not saved"
    assert "worker_finished" not in {event["type"] for event in read_events(tmp_path)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataConfig, Corpus]]:
    with quick_runs():
        yield small_corpus(tmp_path_factory.mktemp("diverging"))


@pytest.mark.parametrize("bad", [{1: 8}, {0: 8}, {0: 8, 1: 8}, {1: 1}], ids=str)
@pytest.mark.parametrize("kind", ["diloco", "warm start", "data-parallel"])
def test_when_one_workers_loss_is_not_finite_all_end_in_order_with_the_same_finite_parameters(
    kind: str,
    bad: dict[int, int],
    prepared: tuple[DataConfig, Corpus],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data, corpus = prepared
    sync = SyncConfig(num_inner_steps=3, warm_start=12 if kind == "warm start" else 0, timeout_seconds=60)
    config = small_config(data, sync, mode="data-parallel" if kind == "data-parallel" else "diloco")
    begun: list[Training] = []
    began = Training.__init__

    def with_bad_losses(self: Training, *given: Any, **named: Any) -> None:
        began(self, *given, **named)
        begun.append(self)
        loss, worker = self.placed.loss, self.engine.worker

        def seen(*tokens: Any, **more: Any) -> torch.Tensor:
            found = loss(*tokens, **more)
            return found * math.nan if self.mode.averager.inner_steps + 1 == bad.get(worker) else found

        object.__setattr__(self.placed, "loss", seen)

    monkeypatch.setattr(Training, "__init__", with_bad_losses)
    with pytest.raises(LossNotFinite, match="is nan at step"):
        train(tmp_path / "run", config, corpus)
    events = read_events(tmp_path / "run")
    assert {event["worker"]: event["step"] for event in events if event["type"] == "loss_not_finite"} == bad
    good = [event for event in events if event["type"] == "worker_finished"]
    assert {event["worker"] for event in good} == {0, 1} - bad.keys() and all(event["stopped_early"] for event in good)
    assert max(worker.mode.averager.inner_steps for worker in begun) < config.steps
    if not (kind == "data-parallel" and len(bad) == 2):  # no worker has a gradient then
        first, second = ([p.detach() for p in worker.model.parameters()] for worker in begun)
        assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(first, second, strict=True))
    summary = summarize(config, history_of(events), None)
    assert summary["status"] == "failed" and "is nan at step" in summary["error"]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_gradient_that_overflows_in_fp16_is_skipped_and_is_no_loss_that_is_not_finite(tmp_path: Path) -> None:
    run = training(
        tmp_path, lr=1e-3, steps=4, sync=SyncConfig(num_inner_steps=2), compute=ComputeConfig(precision="fp16")
    )
    assert run.precision._scaler is not None
    run.precision._scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    run.run()
    types = {event["type"] for event in read_events(tmp_path)}
    assert run.mode.skipped_steps > 0 and "worker_finished" in types and "loss_not_finite" not in types


def test_a_run_shorter_than_the_log_interval_has_a_loss(tmp_path: Path) -> None:
    training(tmp_path, lr=1e-3, steps=3, sync=SyncConfig(num_inner_steps=2)).run()
    (step,) = [event for event in read_events(tmp_path) if event["type"] == "step"]
    assert step["step"] == 3 and step["loss"] > 0


# What does not end a run


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


def test_a_disk_that_fills_up_does_not_end_training_and_the_model_that_has_no_room_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = training(tmp_path, lr=1e-3, steps=6, sync=SyncConfig(num_inner_steps=2))
    with monkeypatch.context() as disk:
        disk.setattr(run.events, "_write", full)
        disk.setattr("diloco.training.checkpoints.store.write_tensors", full)
        disk.setattr("diloco.training.loop.write_model", full)
        disk.setattr("diloco.training.loop.write_resolved", lambda *_: None)
        with pytest.raises(ModelNotWritten, match=r"its end at step 6, but .*No space left on device.*no checkpoint"):
            run.run()
    assert run.mode.averager.inner_steps == 6
    run.events.close()
    types = [event["type"] for event in read_events(tmp_path)]
    assert "worker_finished" in types and "model_failed" in types and "checkpoint_failed" in types
