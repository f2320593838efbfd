"""A configuration as a run file: whatever is written is read again as the same."""

import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.cli.main import app, run
from diloco.core.config import OUTER_NUMBERS, OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.models.choice import ModelChoice
from diloco.models.native.presets import PRESETS
from diloco.training.config.recipes import RECIPES
from diloco.training.config.run import InnerConfig, RunConfig, TrainingConfig
from diloco.training.config.run_file import merge, own_fields, sections, to_toml


def resolved(*tokens: str | Path) -> RunConfig:
    """What `diloco train` would run with."""
    merged, _ = merge([str(token) for token in tokens])
    _, bound, _ = app.parse_args(["train", *merged], exit_on_error=False, print_error=False)
    config: RunConfig = bound.arguments.get("config", RunConfig())
    return config


def run_file(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def numbers(low: float, high: float, **more: Any) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_infinity=False, **more)


WORDS = st.text(min_size=1).filter(lambda text: text.strip() and text.strip().lower() not in ("none", "null"))
POSITIVE = st.integers(1, 10**6)


@st.composite
def inner_configs(draw: st.DrawFn) -> InnerConfig:
    return InnerConfig(
        lr=draw(numbers(1e-9, 10.0)),
        weight_decay=draw(numbers(0, 10)),
        beta1=draw(numbers(0, 0.999)),
        warmup_steps=draw(st.integers(0, 10**6)),
        final_lr_ratio=draw(numbers(0, 1)),
        clip_norm=draw(st.none() | numbers(1e-3, 1e3)),
    )


@st.composite
def outer_configs(draw: st.DrawFn) -> OuterConfig:
    optimizer = draw(st.sampled_from(sorted(OUTER_NUMBERS)))
    given = {name: draw(st.none() | numbers(0.01, 0.99)) for name in OUTER_NUMBERS[optimizer]}
    return OuterConfig(optimizer=optimizer, **given)  # type: ignore[arg-type]


@st.composite
def sync_configs(draw: st.DrawFn) -> SyncConfig:
    H = draw(POSITIVE)
    return SyncConfig(
        num_inner_steps=H,
        codec=draw(st.sampled_from(["fp32", "fp16", "bf16", "int8", "int4", "e3m0"])),
        fragments=draw(st.integers(1, 100)),
        overlap_steps=draw(st.integers(0, H - 1)),
        mixing=draw(numbers(0, 0.99)),
        max_norm_ratio=draw(st.none() | numbers(1.5, 1e9)),
        timeout_seconds=draw(numbers(0.1, 86_400)),
    )


def whole_shape(name: str) -> ModelChoice:
    """A preset with all its numbers, as a run file has it."""
    shape = vars(PRESETS[name])
    return ModelChoice(name, **{one.name: shape[one.name] for one in fields(ModelChoice) if one.name in shape})


@st.composite
def run_configs(draw: st.DrawFn) -> RunConfig:
    optional_text = st.none() | WORDS
    tokenizer = draw(optional_text)
    vocabulary = {} if tokenizer is not None else {"vocab_size": draw(st.integers(257, 2**20))}
    accumulation = draw(st.integers(1, 8))
    return RunConfig(
        model=draw(st.sampled_from([*map(whole_shape, RECIPES), ModelChoice("a model of tomorrow")])),
        workers=draw(POSITIVE),
        steps=draw(POSITIVE),
        mode=draw(st.sampled_from(["diloco", "data-parallel"])),
        seed=draw(st.integers(0, 2**63 - 1)),
        out=draw(optional_text),
        device=draw(st.sampled_from(["auto", "cpu", "cuda"])),
        threads=draw(st.none() | POSITIVE),
        port=draw(st.none() | st.integers(1, 65535)),
        inner=draw(inner_configs()),
        outer=draw(outer_configs()),
        sync=draw(sync_configs()),
        data=DataConfig(
            source=draw(WORDS),
            tokenizer=tokenizer,
            cache_dir=draw(optional_text),
            validation_fraction=draw(numbers(0, 1, exclude_min=True, exclude_max=True)),
            **vocabulary,
        ),
        training=TrainingConfig(
            batch_size=accumulation * draw(st.integers(1, 100)),
            accumulation=accumulation,
            eval_interval=draw(st.none() | POSITIVE),
            sample_prompt=draw(st.text()),
            sample_tokens=draw(st.integers(0, 100)),
        ),
    )


@settings(max_examples=25)
@given(config=run_configs())
def test_the_file_of_any_valid_configuration_gives_that_configuration_again(
    config: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("configurations") / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert replace(resolved(path), recipe=None) == config, "a recipe adds nothing to a whole configuration"


def test_print_config_explains_every_option_and_is_itself_a_valid_run_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--inner.clip_norm=none", "--outer.lr=0.25", "--training.sample_prompt=[bold]:smile:[/] \\[x] \x7f 😀"]
    assert run(["train", *options, "--print-config"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line and not line.startswith("[")]
    assert lines.pop(0).startswith("# recipe warm: ")
    names = [name for section in sections(RunConfig()).values() for name in own_fields(section)]
    assert [line.removeprefix("# ").split(" =")[0] for line in lines] == names
    for line in lines:
        explanation = line.rpartition("  # ")[2]
        assert len(explanation) > 10 and explanation != line, f"no explanation: {line}"
    tomllib.loads(text)
    assert resolved(run_file(tmp_path, text)) == resolved(*options)
