"""diloco export: transformers loads what it writes, with the same logits; the card tells what the run says, no more."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.cli.main import run
from diloco.cli.runs.export import parse_size
from diloco.core.config import OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.training.config.run import InnerConfig, RunConfig
from support.pretrained_models import FAMILIES, logits, make_folder, make_run, some_tokens

FILES = {
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"),
}


def export(folder: Path, target: Path, *options: str) -> int:
    return run(["export", str(folder), "--to", str(target), *options])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_gives_the_same_logits_and_texts_in_transformers(family: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run", model=f"hf:{make_folder(tmp_path / 'base', family)}")
    assert export(tmp_path / "run", tmp_path / "new") == 0
    assert {path.name for path in (tmp_path / "new").iterdir()} == FILES
    tokens = some_tokens()
    torch.testing.assert_close(logits(tmp_path / "new", tokens), logits(tmp_path / "base", tokens), atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "new")
    for text in ("every worker trains", "  spaces , and ünïcödé 🙂\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert tokenizer.eos_token_id == AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.eos_token_id == 0


def test_a_native_model_is_exported_in_shards_with_the_same_logits(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "new", "--max-shard-size", "30KB") == 0
    names = {path.name for path in (tmp_path / "new").iterdir()}
    assert names > (FILES - {"model.safetensors"}) | {"model.safetensors.index.json"}
    assert len([name for name in names if name.endswith(".safetensors")]) > 2
    tokens = some_tokens()
    torch.testing.assert_close(logits(tmp_path / "new", tokens), logits(tmp_path / "base", tokens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_weights_have_the_type_that_was_asked_for_and_config_json_says_so(dtype: str, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert export(tmp_path / "run", tmp_path / "new", "--dtype", dtype) == 0
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto").state_dict()
    wanted = getattr(torch, dtype)
    assert all(torch.equal(after[name], tensor.to(wanted)) for name, tensor in before.items())


def test_whoever_may_read_the_folder_may_read_its_files(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    former = os.umask(0o022)
    try:
        assert export(tmp_path / "run", tmp_path / "new") == 0
    finally:
        os.umask(former)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "new").iterdir()} == {0o644}


def test_the_card_tells_what_the_run_says(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base")
    config = RunConfig(
        model=ModelChoice(f"hf:{folder}"),
        outer=OuterConfig(optimizer="nesterov", momentum=0.35),
        sync=SyncConfig(num_inner_steps=77, codec="int8", warm_start=60),
        inner=InnerConfig(optimizer="muon"),
        data=DataConfig(source="/home/someone/secret/texts", tokenizer=str(folder), sequence_length=48),
    )
    numbers = {
        "parameters": 1234567, "workers": 5, "inner_steps": 4321, "rounds": 56, "rounds_failed": 3, "tokens": 98765432,
        "num_inner_steps": 77, "codec": "int8", "validation_perplexity": 17.25, "initial_validation_perplexity": 301.5,
        "bytes_sent_per_worker": 111222333, "data_parallel_bytes_per_worker": 444555666777, "seconds": 3601.0,
    }  # fmt: skip
    summary = make_run(tmp_path / "run", config, model=f"hf:{folder}", **numbers)
    assert export(tmp_path / "run", tmp_path / "new", "--dtype", "bfloat16") == 0
    card = (tmp_path / "new" / "README.md").read_text()
    for part in (
        *("1,234,567", "| workers | 5 |", "4,321", "56, 3 failed", "98,765,432", "(H) | 77 |", "| codec | int8 |"),
        *("17.25 (before: 301.50)", "111,222,333 bytes", "444,555,666,777", "3,601", "nesterov, lr 0.7, momentum 0.35"),
        *("| warm start | the first 60 steps data-parallel |", "Muon, peak learning rate 0.0004, batch"),
        *("the weights of base", "| data | texts |", "the model's own", "| sequence length | 48 |", "bfloat16"),
        *(f"diloco {summary['versions']['diloco']}", f"torch {torch.__version__}", "The run came to its end."),
        *("library_name: transformers", "- diloco"),
    ):
        assert part in card, (part, card)
    for private in ("/home", "secret", str(tmp_path), "base_model", "license"):
        assert private not in card


def test_a_run_that_was_stopped_or_failed_says_so_on_its_card(tmp_path: Path) -> None:
    base = str(make_folder(tmp_path / "base"))
    make_run(tmp_path / "stopped", model=base, status="stopped", inner_steps=12)
    assert export(tmp_path / "stopped", tmp_path / "a") == 0
    assert "stopped after 12 inner steps, before its end" in (tmp_path / "a" / "README.md").read_text()
    make_run(tmp_path / "failed", model=base, status="failed", error="worker 1 | was killed", inner_steps=7)
    assert export(tmp_path / "failed", tmp_path / "b") == 0
    assert "failed after 7 inner steps (worker 1 | was killed)" in (tmp_path / "b" / "README.md").read_text()


def test_a_card_names_the_model_of_the_hub_that_was_started_from(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    config = (tmp_path / "run" / "config.toml").read_text()
    (tmp_path / "run" / "config.toml").write_text(config.replace(str(tmp_path / "base"), "hf:owner/name"))
    assert export(tmp_path / "run", tmp_path / "new") == 0
    card = (tmp_path / "new" / "README.md").read_text()
    assert "base_model: owner/name\n" in card
    assert "the weights of owner/name" in card


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").write_text("mine")
    before = sorted(tmp_path.iterdir())
    for source, target, option, words in (
        ("run", "used", "--dtype=float32", "exists and is not an empty folder"),
        ("run", "new", "--max-shard-size=5 bananas", "is not a size"),
        ("run", "new", "--dtype=int4", "int4"),
        ("absent", "new", "--dtype=float32", "there is no such folder"),
        ("base", "new", "--dtype=float32", "has no config.toml"),
    ):
        assert export(tmp_path / source, tmp_path / target, option) == 2
        assert words in " ".join(capsys.readouterr().err.split())
    (tmp_path / "run" / "summary.json").unlink()
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert "has not ended" in capsys.readouterr().err
    (tmp_path / "run" / "model" / "config.json").unlink()
    assert export(tmp_path / "run", tmp_path / "new") == 2
    assert "written when the run ends" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "used" / "file").read_text() == "mine"


def test_an_export_that_fails_midway_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    before = sorted(tmp_path.iterdir())

    def full(tensors: object, path: Path, metadata: object) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("diloco.models.weights.save_file", full)
    assert export(tmp_path / "run", tmp_path / "new") == 1
    assert "no space left" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 kib", 1536), ("300M", 3 * 10**8), ("12", 12), ("2TiB", 2**41)]
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "0", "-1GB", "5XB", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)
