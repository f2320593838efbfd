"""The shapes: what is refused and how it is said, what the presets weigh, what Hugging Face's file says."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.presets import PRESETS, preset
from diloco.models.native.transformer import Transformer

SMALL = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_sequence_length=24,
    tie_embeddings=True,
)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": 0}, ["num_layers", "0", "at least 1"]),
        ({"vocab_size": 10.5}, ["vocab_size", "10.5", "whole number"]),
        ({"hidden_size": True}, ["hidden_size", "True", "whole number"]),
        ({"num_kv_heads": 3}, ["num_heads is 4", "num_kv_heads is 3", "divisor"]),
        ({"head_dim": 15}, ["head_dim", "15", "even", "16"]),
        ({"hidden_size": 30}, ["hidden_size is 30", "num_heads is 4", "32"]),
        ({"rope_theta": 0.0}, ["rope_theta", "0.0", "above 0"]),
        ({"norm_eps": float("nan")}, ["norm_eps", "nan", "finite"]),
        ({"norm_eps": "small"}, ["norm_eps", "'small'", "number"]),
        ({"tie_embeddings": 1}, ["tie_embeddings", "1", "true or false"]),
    ],
)
def test_a_bad_shape_is_refused_with_the_name_the_value_and_the_rule(
    changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        replace(SMALL, **changes)  # type: ignore[arg-type]
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", PRESETS)
def test_the_counted_parameters_of_a_preset_are_the_real_ones(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(PRESETS[name])
    assert PRESETS[name].num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [("60m", 60), ("150m", 150), ("400m", 400), ("llama-1b", 1100)],
)
def test_a_preset_has_the_size_it_is_named_after_within_three_percent(name: str, millions: int) -> None:
    assert PRESETS[name].num_parameters() == pytest.approx(millions * 1e6, rel=0.03)


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads", "head_dim"),
    [("60m", 3, 896, 16, 64), ("150m", 12, 896, 16, 64), ("400m", 12, 1536, 12, 128)],
)
def test_the_papers_presets_have_the_dimensions_of_its_table_1(
    name: str, layers: int, hidden: int, heads: int, head_dim: int
) -> None:
    config = PRESETS[name]
    assert (config.num_layers, config.hidden_size, config.num_heads, config.head_dim) == (
        layers,
        hidden,
        heads,
        head_dim,
    )
    assert (config.vocab_size, config.max_sequence_length) == (32000, 1024)


def test_a_preset_takes_the_vocabulary_and_the_sequence_length_of_the_run_and_keeps_the_rest() -> None:
    assert preset("60m", vocab_size=512, max_sequence_length=64) == replace(
        PRESETS["60m"], vocab_size=512, max_sequence_length=64
    )
    assert preset("60m") == PRESETS["60m"]


def test_a_vocabulary_of_zero_is_refused_and_not_taken_for_the_presets_own() -> None:
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        preset("tiny", vocab_size=0)


def test_an_unknown_preset_is_refused_with_the_nearest_name_and_all_names() -> None:
    with pytest.raises(ConfigError, match=r"'llama150m'.*did you mean 'llama-150m'.*tiny, 60m") as error:
        preset("llama150m")
    assert "llama-1b" in str(error.value)


def test_the_hugging_face_config_describes_the_same_shape_back() -> None:
    config = replace(SMALL, rope_theta=5e5, norm_eps=1e-6, tie_embeddings=False)
    assert ModelConfig.from_hf_config(config.hf_config()) == config


def test_a_hugging_face_config_of_transformers_4_gives_its_rope_theta() -> None:
    hf = SMALL.hf_config()
    del hf["rope_parameters"]
    hf["rope_theta"] = 123.0
    assert ModelConfig.from_hf_config(hf).rope_theta == 123.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "gpt2"),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("mlp_bias", True),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 5e5}),
        ("num_hidden_layers", None),
    ],
)
def test_a_hugging_face_config_that_we_cannot_compute_is_refused_by_its_key(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        ModelConfig.from_hf_config(SMALL.hf_config() | {key: value})
    assert repr(value) in str(error.value)


def test_shapes_and_presets_import_no_torch() -> None:
    code = "import sys; import diloco.models.native.presets; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
