"""The command line of a run that goes on: its own run file, and nothing that would make another run of it."""

from pathlib import Path

import pytest

from diloco.cli.main import run
from diloco.core.config import SyncConfig
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.training.config.run import CheckpointConfig, RunConfig, may_change
from diloco.training.config.run_file import merge, to_toml


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "a run"
    path.mkdir()
    (path / "config.toml").write_text(to_toml(RunConfig(seed=7, steps=40, sync=SyncConfig(10, max_norm_ratio=None))))
    return path


def test_a_resumed_run_has_the_values_of_its_own_run_file_and_stays_in_its_folder(folder: Path) -> None:
    tokens, notes = merge(["--resume", str(folder), "--steps", "80"])
    assert {"--seed=7", "--sync.num_inner_steps=10", "--sync.max_norm_ratio=none", f"--out={folder}"} <= set(tokens)
    assert "--steps=40" not in tokens and tokens[-4:] == ["--resume", str(folder), "--steps", "80"]
    assert notes == [] and "--outer.momentum=0.5" not in tokens  # no recipe on top


@pytest.mark.parametrize(
    "options",
    [
        *(["--steps=99"], ["--workers=3"], ["--device=cpu"], ["--checkpoint.keep=5"], ["--training.log_interval=2"]),
        *(["--seed=7"], ["--H", "10"], ["--inner.lr", "0.00040"], ["--sinks=tensorboard"], ["--threads", "1"]),
    ],
)
def test_what_makes_no_other_run_of_it_may_be_given(folder: Path, options: list[str]) -> None:
    merge([f"--resume={folder}", *options])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed=8"], "this run was started with seed = 7, and another value would make another run"),
        (["--H", "20"], "started with sync.num_inner_steps = 10"),
        (["--codec=int8"], "started with sync.codec = fp16"),
        (["--model=60m"], "started with model.name = tiny"),
        (["--outer.lr=0.1"], "started with outer.lr = none"),
        (["--out=elsewhere"], "a resumed run stays in its folder"),
        (["--training.batch_size=3"], "started with training.batch_size = 512"),
    ],
)
def test_what_would_make_another_run_of_it_is_refused_with_the_reason(
    folder: Path, options: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        merge([f"--resume={folder}", *options])


def test_a_folder_that_is_no_run_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, why in ((tmp_path / "nothing", "there is no such folder"), (tmp_path, "it has no config.toml")):
        assert run(["train", "--resume", str(path)]) == 2
        assert why in " ".join(capsys.readouterr().err.split())
    with pytest.raises(ConfigError, match="has a run file of its own"):
        merge(["run.toml", "--resume", str(folder)])


@pytest.mark.parametrize("options", [["--resume"], ["--resume="], ["--resume", "--steps=9"]])
def test_resume_without_a_folder_says_that_the_folder_is_missing(options: list[str]) -> None:
    with pytest.raises(ConfigError, match="--resume without a run folder: name the one to continue, as in"):
        merge(options)


def test_a_run_and_its_checkpoints_have_in_common_what_may_not_change() -> None:
    one = RunConfig(steps=10, workers=2, seed=1).lasting("corpus", "a model")
    assert one == RunConfig(steps=20, workers=3, seed=1, threads=4, model=ModelChoice("elsewhere")).lasting(
        "corpus", "a model"
    )
    assert one != RunConfig(steps=10, seed=2).lasting("corpus", "a model") and one != RunConfig().lasting(
        "b", "a model"
    )
    assert not may_change("checkpoints") and may_change("checkpoint.keep") and not may_change("steps_more")


def test_checkpoints_come_after_rounds_or_as_often_as_was_asked() -> None:
    def due(config: RunConfig) -> list[int]:
        return [step for step in range(1, config.steps + 1) if config.checkpoint_due(step)]

    assert due(RunConfig(steps=40, sync=SyncConfig(10))) == []  # at least 50 steps apart; the end is saved anyway
    assert due(RunConfig(steps=120, sync=SyncConfig(15))) == [60, 120]
    assert due(RunConfig(steps=800, sync=SyncConfig(10))) == list(range(80, 801, 80))
    overlapped = SyncConfig(10, overlap_steps=3)
    assert due(RunConfig(steps=160, sync=overlapped)) == [53, 103, 153]
    warmed = RunConfig(steps=200, sync=SyncConfig(10, warm_start=85))
    assert due(warmed) == [50, 135, 185]
    assert [step for step in range(1, 140) if warmed.evaluation_due(step)] == [20, 40, 60, 80, 105, 125]
    assert [warmed.checkpoints_until(step) for step in (49, 85, 135, 200)] == [0, 1, 2, 3]
    often = CheckpointConfig(interval=25)
    assert due(RunConfig(steps=60, sync=overlapped, checkpoint=often)) == [25, 50]
    assert due(RunConfig(steps=60, checkpoint=CheckpointConfig(interval=0))) == []


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpoint.interval = -1 must be at least 0"):
        CheckpointConfig(interval=-1)
    with pytest.raises(ConfigError, match=r"checkpoint.keep = 0 must be at least 1"):
        CheckpointConfig(keep=0)
