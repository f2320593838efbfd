"""`diloco export --checkpoint`: the model of a checkpoint, also of a run that has not ended."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diloco.cli.main import run
from diloco.core.config import SyncConfig
from diloco.history.run_history import history_until
from diloco.training.config.run_file import to_toml
from diloco.training.records.summary import summarize
from support.dashboard_runs import TOKENS_PER_STEP, append, event
from support.golden_runs import CONFIG, write_golden_run
from support.saved_runs import quick_runs, small_config, small_corpus, tensors_of, train


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_runs():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 3 and 6 that was killed after step 7."""
    place = tmp_path_factory.mktemp("run")
    data, corpus = small_corpus(place)
    config = small_config(data, SyncConfig(num_inner_steps=2), steps=20)
    train(place / "run", config, corpus, ends={0: 7, 1: 7})
    (place / "run" / "config.toml").write_text(to_toml(replace(config, data=data)))
    return place / "run"


@pytest.mark.parametrize(("asked", "step"), [("latest", 6), ("3", 3)])
def test_the_anchor_of_a_checkpoint_is_exported_before_the_run_has_ended(
    folder: Path, tmp_path: Path, asked: str, step: int
) -> None:
    assert run(["export", str(folder), "--checkpoint", asked, "--to", str(tmp_path / "new")]) == 0
    written = load_file(tmp_path / "new" / "model.safetensors")
    saved = tensors_of(folder, step, 0)
    assert written and all(torch.equal(tensor, saved[f"outer.anchor.{name}"]) for name, tensor in written.items())
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    assert f"after {step} of 20 inner steps" in (tmp_path / "new" / "README.md").read_text()
    assert not list(folder.glob(".export-*"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--checkpoint", "4"], "has the checkpoints of steps 3, 6"),
        (["--checkpoint", "newest"], "give `latest`, or the inner step"),
        ([], "--checkpoint latest"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    folder: Path, tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(folder), "--to", str(tmp_path / "new"), *options]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_a_damaged_checkpoint_is_not_exported(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in folder.glob("checkpoints/step-00000003/worker-*/rank-0.safetensors"):
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert run(["export", str(folder), "--checkpoint", "3", "--to", str(tmp_path / "new")]) == 1
    assert "damaged" in capsys.readouterr().err


def test_the_card_of_a_checkpoint_has_the_counts_of_its_step_though_the_run_went_on(tmp_path: Path) -> None:
    folder = write_golden_run(tmp_path / "plain", "plain")  # checkpoint of step 40, and an end after step 60
    append(folder, event("members", 70.0, present=[], run_tokens=99 * TOKENS_PER_STEP))
    summary = summarize(CONFIG, history_until(folder, 40))
    assert (summary["inner_steps"], summary["rounds"], summary["validation_step"]) == (40, 2, 40)
    assert summary["tokens"] == 2 * 40 * TOKENS_PER_STEP
    assert summary["bytes_sent_per_worker"] == 2000 and summary["seconds"] == 47.5  # from -3 to the checkpoint at 44.5
    assert history_until(folder, 40).run_tokens.last("tokens") is None
