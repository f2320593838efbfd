"""What --model may name: presets, folders, models of the hub; what is wrong with one is said at once and by name."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from transformers import AutoModelForCausalLM

from diloco.errors import ConfigError
from diloco.models.native.model import NativeModel
from diloco.models.pretrained import check_model, is_pretrained, short_name
from diloco.models.registry import build_model
from support.pretrained_models import LENGTH, VOCAB, logits, make_folder, some_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "small-llama")


def changed(folder: Path, target: Path, **changes: object) -> Path:
    """A copy with another config.json."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changes))
    return target


def test_names_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "tiny").mkdir()
    assert [is_pretrained(n) for n in ("tiny", "400m", "typo")] == [False] * 3  # a preset's name is the preset's
    assert [is_pretrained(n) for n in ("mine", "a/b", "./tiny", "hf:gpt2", "hf:tiny")] == [True] * 5
    assert [short_name(n) for n in ("tiny", "a/b/", "hf:openai/gpt2", "hf:/")] == ["tiny", "b", "gpt2", "model"]
    with pytest.raises(ConfigError, match="presets are tiny"):
        check_model("typo")


def test_a_pretrained_model_is_described_without_loading_it(folder: Path) -> None:
    code = (
        "import sys; from diloco.models.pretrained import check_model; "
        f"m = check_model({str(folder)!r}); print(m.vocab_size, m.max_sequence_length, m.tokenizer); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(VOCAB), str(LENGTH), str(folder)]


def test_a_folder_gives_the_native_model_the_same_logits_and_keeps_its_own_limits(folder: Path) -> None:
    model = build_model(str(folder), vocab_size=VOCAB - 5, sequence_length=16)
    assert isinstance(model, NativeModel)
    assert (model.vocab_size, model.max_sequence_length) == (VOCAB, LENGTH)
    assert model.training
    tokens = some_tokens()
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), logits(folder, tokens), atol=1e-5, rtol=0)


def test_a_preset_takes_the_vocabulary_and_length_of_the_run() -> None:
    model = build_model("tiny", vocab_size=300, sequence_length=40)
    assert (model.vocab_size, model.max_sequence_length) == (300, 40)


def test_a_model_with_its_own_tokenizer_keeps_its_files_and_special_tokens(folder: Path, tmp_path: Path) -> None:
    source = changed(folder, tmp_path / "m", bos_token_id=4, eos_token_id=[0, 9])
    (source / "chat_template.jinja").write_text("{{ messages }}")
    build_model(str(source), vocab_size=9, sequence_length=9).save(
        tmp_path / "saved", tokenizer_path=source / "tokenizer.json", end_of_text="<|endoftext|>"
    )
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (4, [0, 9])
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (source / name).read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_tokenizer_or_sequence_that_is_too_large_is_refused_with_the_remedy(folder: Path, prefix: str) -> None:
    with pytest.raises(ConfigError, match=rf"tokenizer has {VOCAB + 1} tokens.*vectors for {VOCAB}.*own tokenizer"):
        build_model(f"{prefix}{folder}", vocab_size=VOCAB + 1, sequence_length=8)
    with pytest.raises(ConfigError, match=rf"sequence_length = 65.*--data.sequence_length {LENGTH}"):
        build_model(f"{prefix}{folder}", vocab_size=VOCAB, sequence_length=LENGTH + 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters"),
    ],
)
def test_what_the_native_model_does_not_compute_is_refused_and_sent_to_transformers(
    folder: Path, tmp_path: Path, change: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=r"hf:PATH") as error:
        check_model(str(changed(folder, tmp_path / "m", **change)))
    assert words in str(error.value)


def test_weights_that_the_native_model_has_no_place_for_are_named_and_sent_to_transformers(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", attention_bias=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": False}))
    with pytest.raises(ConfigError, match=r"q_proj\.bias is unexpected.*hf:"):
        build_model(str(folder), vocab_size=9, sequence_length=9)


def test_a_folder_that_is_not_there_or_no_model_is_refused_with_a_hint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"there is no folder .*absent/model; for a model of the .* hub write hf:absent"
    ):
        check_model("absent/model")
    with pytest.raises(ConfigError, match=r"there is no folder /absent/model$"):
        check_model("hf:/absent/model")
    (tmp_path / "run" / "model").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"has no config.json; give a model's folder"):
        check_model(str(tmp_path / "run"))
    (tmp_path / "run" / "model" / "config.json").write_bytes((folder / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=r"did you mean .*run/model\?"):
        check_model(str(tmp_path / "run"))
    with pytest.raises(ConfigError, match="safetensors only"):
        check_model(str(tmp_path / "run" / "model"))


def test_a_model_without_a_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size None"):
        check_model(f"hf:{changed(folder, tmp_path / 'm', vocab_size=None)}")


def test_transformers_is_asked_for_only_where_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.models.pretrained.find_spec", lambda _: None)
    check_model(str(folder))
    with pytest.raises(
        ConfigError, match=r"needs the package transformers: .*pip install -c constraints\.txt -e '\.\[hf\]'"
    ):
        check_model(f"hf:{folder}")


# The hub


def answer(status: int) -> SimpleNamespace:
    return SimpleNamespace(status_code=status, headers={}, request=SimpleNamespace(url="https://hub/x"), text="")


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (errors.GatedRepoError("gated", response=answer(403)), r"is gated .* accept its conditions .* log in"),  # type: ignore[arg-type]
        (errors.RepositoryNotFoundError("no", response=answer(404)), "has no such model, or it is private"),  # type: ignore[arg-type]
        (errors.HFValidationError("bad name"), "check the name"),
        (errors.LocalEntryNotFoundError("cannot reach it"), r"cannot be fetched .*\(cannot reach it\).*hf:PATH"),
        (ConnectionError("no route\nto anywhere"), r"cannot be fetched .*\(no route\).*check the network"),
        (RuntimeError("proxy"), r"cannot be fetched .*\(proxy\)"),
    ],
)
def test_every_problem_with_the_hub_is_one_clear_error(
    monkeypatch: pytest.MonkeyPatch, problem: Exception, words: str
) -> None:
    def fails(name: str, *, local_files_only: bool = False, **_: object) -> str:
        raise errors.LocalEntryNotFoundError("not here") if local_files_only else problem

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fails)
    with pytest.raises(ConfigError, match=words) as error:
        check_model("hf:owner/name")
    assert "owner/name" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_model_of_the_hub_is_downloaded_once_small_files_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, downloads = tmp_path / "cache", []

    def snapshot(name: str, *, allow_patterns: list[str], local_files_only: bool = False, **_: object) -> str:
        if local_files_only:
            if not cache.exists():
                raise errors.LocalEntryNotFoundError("not here")
            return str(cache)
        downloads.append(allow_patterns)
        cache.mkdir(exist_ok=True)
        for path in {path for pattern in allow_patterns for path in folder.glob(pattern)}:
            (cache / path.name).write_bytes(path.read_bytes())
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    pretrained = check_model("hf:owner/name", weights=False)
    assert pretrained is not None and pretrained.tokenizer == "hf:owner/name"
    assert (cache / "tokenizer.json").is_file()
    assert not (cache / "model.safetensors").exists()
    check_model("hf:owner/name")
    assert len(downloads) == 2
    assert not [pattern for patterns in downloads for pattern in patterns if pattern.endswith((".bin", ".py", ".pt"))]
    build_model("hf:owner/name", vocab_size=VOCAB, sequence_length=8)
    assert len(downloads) == 2
