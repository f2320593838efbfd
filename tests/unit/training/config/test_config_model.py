"""The table [model]: a preset as the base, and numbers of its shape as keys of the run file and as options."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diloco.cli.main import app, run
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.models.native.presets import PRESETS, preset
from diloco.models.registry import build_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import merge, to_toml
from support.pretrained_models import make_folder


def resolved(*tokens: str) -> RunConfig:
    """What `diloco train` would run with."""
    _, bound, _ = app.parse_args(["train", *merge(list(tokens))[0]], exit_on_error=False, print_error=False)
    config: RunConfig = bound.arguments["config"]
    return config


def test_the_shape_of_a_run_file_is_the_shape_of_the_model_that_is_built(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[model]\nhidden_size = 64\nnum_layers = 2\n")
    model = build_model(resolved(str(tmp_path / "run.toml")).model, vocab_size=300, sequence_length=16)
    assert (
        sum(p.numel() for p in model.parameters())
        == preset(
            "tiny", vocab_size=300, max_sequence_length=16, shape={"hidden_size": 64, "num_layers": 2}
        ).num_parameters()
    )
    assert model.state_dict()["model.embed_tokens.weight"].shape == (300, 64)
    assert not any(name.startswith("model.layers.2.") for name in model.state_dict())
    torch.testing.assert_close(model(torch.zeros(1, 4, dtype=torch.int64)).shape, torch.Size((1, 4, 300)))


def test_an_option_wins_over_the_file_and_the_file_over_the_preset(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nname = "60m"\nnum_layers = 5\nnorm_eps = 1e-6\n')
    chosen = resolved(str(tmp_path / "run.toml"), "--model.num_layers", "7").model
    assert (chosen.name, chosen.num_layers, chosen.norm_eps) == ("60m", 7, 1e-6)
    assert chosen.hidden_size == PRESETS["60m"].hidden_size


def test_sizes_that_follow_from_another_keep_the_presets_proportion() -> None:
    wider = resolved("--model.hidden_size=256").model
    assert (wider.intermediate_size, wider.num_heads, wider.head_dim) == (704, 4, 64)
    more = resolved("--model.num_heads=8").model
    assert (more.hidden_size, more.num_kv_heads, more.head_dim) == (128, 4, 16)
    assert resolved("--model.hidden_size=256", "--model.intermediate_size=300").model.intermediate_size == 300


def test_a_preset_named_as_before_is_that_preset(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "60m"\n')
    assert resolved(str(tmp_path / "run.toml")).model == resolved("--model=60m").model
    shape = preset("60m", shape=resolved("--model", "60m").model.shape())
    assert shape == PRESETS["60m"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--model.hidden_size=130"], ["hidden_size is 130", "num_heads is 4", "132"]),
        (["--model.hidden_size=100", "--model.num_heads=3"], ["hidden_size is 100", "num_heads is 3"]),
        (["--model.hidden_size=0"], ["model.hidden_size is 0", "at least 1"]),
        (["--model.num_layers=2.5"], ["model.num_layers = 2.5", "whole number"]),
        (["--model.num_kv_heads=3"], ["num_kv_heads is 3", "divisor"]),
        (["--model.head_dim=7"], ["head_dim is 7", "even"]),
        (["--model.rope_theta=-1"], ["rope_theta is -1", "above 0"]),
        (["--model=tinny", "--model.hidden_size=64"], ["tinny", "did you mean 'tiny'"]),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_the_rule(
    given: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", *given]) == 2
    text = " ".join(capsys.readouterr().err.split())
    assert not [part for part in said if part not in text], text


@pytest.mark.parametrize("prefix", ["", "hf:"])
def test_a_shape_has_no_effect_on_a_pretrained_model_and_is_refused(tmp_path: Path, prefix: str) -> None:
    folder = make_folder(tmp_path / "m")
    with pytest.raises(ConfigError, match=r"model\.hidden_size = 64 has no effect on the pre-trained model"):
        ModelChoice(f"{prefix}{folder}", hidden_size=64)


@pytest.mark.parametrize(
    ("key", "near"), [("vocab_size", "data.vocab_size"), ("num_hidden_layers", "model.num_layers")]
)
def test_an_unknown_key_of_the_model_is_refused_with_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    (tmp_path / "run.toml").write_text(f"[model]\n{key} = 4\n")
    with pytest.raises(ConfigError, match=f"unknown key 'model.{key}'; did you mean '{near}'"):
        merge([str(tmp_path / "run.toml")])


def test_the_shape_of_a_run_file_is_not_put_upon_another_model(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(to_toml(resolved("--model.num_layers=3")))
    tokens, notes = merge([str(file), "--model=60m"])
    assert f"--model.num_layers={PRESETS['60m'].num_layers}" in tokens
    assert notes and "--model names 60m" in notes[0] and "model.num_layers" in notes[0]


def test_a_resumed_run_keeps_its_shape(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(to_toml(resolved("--model.num_layers=3")))
    assert resolved(f"--resume={tmp_path}").model.num_layers == 3
    with pytest.raises(ConfigError, match=r"started with model\.num_layers = 3"):
        merge([f"--resume={tmp_path}", "--model.num_layers=4"])


def test_runs_of_different_shape_are_different_runs() -> None:
    one = RunConfig()
    other = replace(one, model=ModelChoice("tiny", num_layers=3))
    built = [build_model(c.model, vocab_size=300, sequence_length=8).description for c in (one, other)]
    assert one.identity("c", built[0]) != other.identity("c", built[1])
