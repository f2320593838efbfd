"""diloco generate: the text that the model writes, from runs and model folders, native or of transformers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from diloco.cli.main import run
from diloco.models.hugging_face import HuggingFaceModel
from diloco.models.native.model import NativeModel
from diloco.models.registry import open_model
from support.pretrained_models import make_folder, make_run

PROMPT = "every worker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "llama")


def written(capsys: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    assert run(["generate", str(folder), PROMPT, "--max-tokens", "12", *options]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("family", ["llama, tied", "gpt2", "qwen2"])
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "m", family)
    assert isinstance(open_model(folder), NativeModel if "llama" in family else HuggingFaceModel)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
    )
    expected = tokenizer.decode(output[0], skip_special_tokens=True)
    shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "\ufffd" for letter in expected)
    assert written(capsys, folder, "--greedy") == shown + "\n"


def test_a_run_folder_writes_with_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "run")
    assert written(capsys, tmp_path / "run", "--greedy") == written(capsys, tmp_path / "base", "--greedy")


def test_the_seed_decides_and_without_one_texts_differ(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert written(capsys, folder, "--seed=1") == written(capsys, folder, "--seed=1")
    assert written(capsys, folder, "--seed=1") != written(capsys, folder, "--seed=2")
    assert len({written(capsys, folder, "--temperature=3", "--top-k=300") for _ in range(3)}) > 1


def test_one_likely_token_or_no_temperature_is_greedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = written(capsys, folder, "--greedy")
    assert written(capsys, folder, "--top-k=1") == greedy == written(capsys, folder, "--temperature=0")
    assert written(capsys, folder, "--temperature=1e-300") == greedy == written(capsys, folder, "--temperature=5e-324")


@pytest.mark.parametrize("family", ["llama, tied", "gpt2"])
def test_a_model_with_weights_that_are_not_finite_is_refused_by_name(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "m", family)
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if "norm" in name or "ln_f" in name)
    tensors[name][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert run(["generate", str(folder), PROMPT]) == 2
    captured = capsys.readouterr()
    assert f"weights that are not finite (the first is {name}" in captured.err and captured.out == ""


def test_what_is_wrong_is_said_in_one_line(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    (tmp_path / "empty").mkdir()
    for tokens, words in (
        ([tmp_path / "absent", "x"], "there is no such folder"),
        ([tmp_path / "empty", "x"], "neither config.toml nor config.json"),
        ([tmp_path / "run", "x"], "no process trains there: continue it with `diloco train --resume"),
        ([folder, ""], "has no tokens"),
        ([folder, "long " * 100], "tokens and the model takes 64: give a shorter one"),
        ([folder, "x", "--max-tokens=0"], "must be at least 1"),
        ([folder, "x", "--threads=0"], "must be at least 1"),
        ([folder, "x", "--temperature=-1"], "temperature is -1.0"),
        ([folder, "x", "--top-k=0"], "top_k is 0"),
        ([folder, "x", "--seed=99999999999999999999999"], "must be from 0 to 2**63 - 1"),
        ([folder, "x", "--seed=-1"], "must be from 0 to 2**63 - 1"),
        ([folder, "x", "--greedy", "--seed=1"], "--seed has no effect with --greedy"),
        ([folder, "x", "--greedy", "--temperature=1"], "--temperature has no effect with --greedy"),
    ):
        assert run(["generate", *(str(token) for token in tokens)]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
        assert captured.out == ""


@pytest.mark.parametrize("verb", ["generate", "export"])
def test_the_help_fits_a_screen_and_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([verb, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert any(f"diloco {verb} runs/" in line for line in lines)
