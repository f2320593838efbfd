"""Every value with which a run trained is in its config.toml, its summary and its model card."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.cli.config_parser import parse_config
from diloco.core.config import SyncConfig
from diloco.engines.local import alone
from diloco.history.log import EventLog
from diloco.models.choice import ModelChoice
from diloco.training.config.run_file import merge, read_run_file
from diloco.training.loop import Training
from diloco.training.records.model_card import model_card
from diloco.training.records.run_folder import RUN_FILE
from diloco.training.records.summary import write_summary
from diloco.version import __version__
from support.saved_runs import quick_runs, small_config, small_corpus


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_runs():
        yield


def test_a_run_tells_the_values_that_were_left_open(tmp_path: Path) -> None:
    data, corpus = small_corpus(tmp_path)
    config = small_config(
        data, SyncConfig(num_inner_steps=3, fragments=2), workers=1, steps=3, device="auto", threads=None
    )
    folder = tmp_path / "run"
    folder.mkdir()
    training = Training(config, corpus, alone(), EventLog(folder, 0), torch.device("cpu"), folder, leader=True)
    training.run()
    summary = write_summary(folder, config)
    text = (folder / RUN_FILE).read_text()
    card = model_card(summary, read_run_file(folder / RUN_FILE), dtype="float32")
    decided = {"device": "cpu", "compute.precision": "fp32", "outer.momentum": 0.9, "outer.lr": 0.7, "threads": 1}
    decided |= {"compute.compile": False, "model.fragments": 3}
    decided |= {"text.digest": corpus.digest, "version.diloco": __version__, "version.torch": torch.__version__}
    for key, value in decided.items():
        assert summary["resolved"][key] == value, key
        assert f"#   {key} = {value}\n" in text, key
        assert key == "threads" or f"{key} = " in card, key
    for key, value in config.values().items():
        assert key in summary["resolved"] and (value in (None, "auto") or summary["resolved"][key] == value), key
    assert "seed = 0\n" in card and 'sync.codec = "fp16"\n' in card and "training.eval_interval = 6\n" in card
    assert str(tmp_path) not in card  # no path of this machine


def test_a_run_tells_the_error_feedback_that_its_codec_brings(tmp_path: Path) -> None:
    data, corpus = small_corpus(tmp_path)
    config = small_config(data, SyncConfig(num_inner_steps=2, codec="2bit"), workers=1, steps=2)
    Training(config, corpus, alone(), EventLog(tmp_path, 0), torch.device("cpu"), tmp_path, leader=True)._emit_start()
    text = (tmp_path / RUN_FILE).read_text()
    assert "#   sync.error_feedback = True\n" in text and "#   sync.error_decay = 0.95\n" in text


def test_the_config_with_its_comment_is_still_the_run_file_of_a_resume(tmp_path: Path) -> None:
    data, corpus = small_corpus(tmp_path)
    config = small_config(data, SyncConfig(num_inner_steps=2), workers=1, steps=2, model=ModelChoice("tiny"))
    Training(config, corpus, alone(), EventLog(tmp_path, 0), torch.device("cpu"), tmp_path, leader=True)._emit_start()
    again = parse_config(merge([str(tmp_path / RUN_FILE)])[0])
    assert replace(again, model=config.model, recipe=None) == config  # merging fills in a preset's shape
