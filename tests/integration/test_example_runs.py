"""The run files of examples/runs: each is read as `diloco train FILE` reads it, and trains a small model to its end."""

from dataclasses import replace
from pathlib import Path

import pytest

from diloco.cli.main import app
from diloco.data.config import DataConfig
from diloco.data.corpus import Corpus
from diloco.models.choice import ModelChoice
from diloco.training.config.run import CheckpointConfig, InnerConfig, RunConfig, TrainingConfig
from diloco.training.config.run_file import merge
from diloco.training.records.summary import summarize
from support.event_log import history_of, read_events
from support.saved_runs import quick_runs, small_corpus, train

FILES = sorted((Path(__file__).parents[2] / "examples" / "runs").glob("*.toml"))


def resolved(file: Path) -> RunConfig:
    tokens, _ = merge([str(file)])
    _, bound, _ = app["train"].parse_args(tokens)
    config = bound.arguments["config"]
    assert isinstance(config, RunConfig)
    return config


def shortened(config: RunConfig) -> RunConfig:
    """The methods of a run file, with a few short rounds."""
    fragments = min(config.sync.fragments, 2)  # of a model of two blocks
    sync = replace(config.sync, num_inner_steps=8, warm_start=4, fragments=fragments, timeout_seconds=100.0)
    return replace(config, sync=sync, model=ModelChoice("micro"), steps=28, workers=2, device="cpu", threads=1)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[DataConfig, Corpus]:
    return small_corpus(tmp_path_factory.mktemp("text"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_an_example_run_trains_to_its_end(file: Path, tmp_path: Path, text: tuple[DataConfig, Corpus]) -> None:
    data, corpus = text
    config = replace(
        shortened(resolved(file)),
        data=data,
        inner=InnerConfig(lr=1e-2, warmup_steps=3),
        training=TrainingConfig(batch_size=2, eval_windows=4, eval_interval=14, log_interval=1, sample_tokens=0),
        checkpoint=CheckpointConfig(interval=14, asynchronous=False),
    )
    with quick_runs():
        train(tmp_path / "run", config, corpus)
    summary = summarize(config, history_of(read_events(tmp_path / "run")))
    assert summary["inner_steps"] == 28
    assert summary["rounds_failed"] == 0
    assert summary["rounds"] >= 3
    assert len(set(summary["anchor_digests"])) == 1


def test_there_is_a_run_file_for_each_situation_and_the_page_of_methods_names_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "methods.md").read_text()
    assert {file.stem for file in FILES} == {"home", "regions", "cluster"}
    assert all(f"examples/runs/{file.name}" in page for file in FILES)
