"""What a joiner is told of a run, and what of it is believed."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.cli.join import check_own_options, joined_config
from diloco.core.config import OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.errors import ConfigError
from diloco.models.choice import ModelChoice
from diloco.training.config.run import InnerConfig, RunConfig, is_shared
from diloco.training.records.run_description import RunDescription

DIGEST = "ab" * 32
FOUNDER = RunConfig(
    model=ModelChoice("tiny", num_layers=3),
    engine="swarm",
    workers=3,
    steps=77,
    seed=5,
    out="/somewhere/else",
    port=4000,
    inner=InnerConfig(lr=1e-3, clip_norm=None),
    outer=OuterConfig(optimizer="sgd", lr=0.5),
    sync=SyncConfig(num_inner_steps=7, codec="int8", max_norm_ratio=None),
    data=DataConfig(source="/home/founder/secret.txt", vocab_size=300, sequence_length=9),
)


def written(tmp_path: Path, **changes: Any) -> Path:
    told = json.loads(RunDescription.of(FOUNDER, DIGEST).text())
    config = changes.pop("config", {})
    told |= changes
    told["config"] |= config
    path = tmp_path / "run.json"
    path.write_text(json.dumps(told))
    return path


def test_a_joiner_has_the_founders_configuration_in_all_that_is_shared(tmp_path: Path) -> None:
    joiner = joined_config(RunDescription.read(written(tmp_path)), ["--workers=2", "--device=cpu"])
    assert joiner.shared() == FOUNDER.shared()
    assert joiner.identity(DIGEST, "m") == FOUNDER.identity(DIGEST, "m")
    assert (joiner.workers, joiner.device, joiner.out, joiner.port) == (2, "cpu", None, None)
    assert joiner.data.source == "swarm"


def test_a_joiners_samples_begin_with_the_founders_prompt_unless_it_names_its_own(tmp_path: Path) -> None:
    told = RunDescription.read(written(tmp_path, sample_prompt="def "))
    assert joined_config(told, []).training.sample_prompt == "def "
    assert joined_config(told, check_own_options(["--data.source", "my.txt"])).training.sample_prompt == "def "
    own = check_own_options(["--training.sample_prompt", "class "])
    assert joined_config(told, own).training.sample_prompt == "class "
    assert joined_config(told, check_own_options(["--training.sample_tokens", "0"])).training.sample_tokens == 0
    founder = replace(FOUNDER, training=replace(FOUNDER.training, sample_prompt="def "))
    assert RunDescription.of(founder, DIGEST).sample_prompt == "def "


@pytest.mark.parametrize("prompt", [7, ["def "], "x" * 1001])
def test_a_prompt_that_is_no_short_text_is_refused(tmp_path: Path, prompt: Any) -> None:
    with pytest.raises(ConfigError, match="prompt of samples"):
        RunDescription.read(written(tmp_path, sample_prompt=prompt))


def test_nothing_that_concerns_the_founders_machine_is_told() -> None:
    text = RunDescription.of(FOUNDER, DIGEST).text()
    assert "secret" not in text and "somewhere" not in text and "4000" not in text
    own = {"out", "data.source", "data.cache_dir", "data.tokenizer", "sinks", "model.name", "device", "compute.compile"}
    assert not any(is_shared(key) for key in own)


def test_own_text_is_this_machines_choice(tmp_path: Path) -> None:
    joiner = joined_config(RunDescription.read(written(tmp_path)), check_own_options(["--data.source", "my.txt"]))
    assert joiner.data.source == "my.txt"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"data.source": "/etc/passwd"}, "data.source"),
        ({"out": "/root"}, "out"),
        ({"model": "hf:evil/model"}, "model"),
        ({"data.tokenizer": "hf:evil/tokenizer"}, "data.tokenizer"),
        ({"sync.codec": ["int8"]}, "sync.codec"),
        ({"steps": {"a": 1}}, "steps"),
        ({"inner.optimizer": "x" * 65}, "inner.optimizer"),
        ({"inner.optimizer": "adamw\n--out=/root"}, "inner.optimizer"),
    ],
)
def test_a_description_that_could_do_more_than_describe_is_refused(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        RunDescription.read(written(tmp_path, config=config))


@pytest.mark.parametrize("changes", [{"model": "hf:evil/model"}, {"model": "../m"}, {"corpus": "../x"}, {"corpus": 7}])
def test_a_model_is_a_preset_and_a_text_is_a_digest(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="names a model or a text"):
        RunDescription.read(written(tmp_path, **changes))


@pytest.mark.parametrize(
    ("config", "said"),
    [({"steps": 0}, "steps"), ({"sync.codec": "pickle"}, "codec"), ({"steps": 2.5}, "whole"), ({"inner.lr": -1}, "lr")],
)
def test_values_are_checked_like_those_of_a_run_file(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    description = RunDescription.read(written(tmp_path, config=config))
    with pytest.raises(Exception, match=said):
        joined_config(description, [])


def test_another_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="install the same version"):
        RunDescription.read(written(tmp_path, version="99"))


@pytest.mark.parametrize("text", ["", "[]", "{}", "{" * 100_000])
def test_what_is_no_description_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        RunDescription.read(path)


def test_a_model_that_is_no_preset_must_be_named_by_whoever_joins(tmp_path: Path) -> None:
    founder = replace(FOUNDER, model=ModelChoice("/models/mine"))
    path = tmp_path / "run.json"
    path.write_text(RunDescription.of(founder, DIGEST).text())
    description = RunDescription.read(path)
    assert description.model is None
    with pytest.raises(ConfigError, match="--model"):
        joined_config(description, [])
    assert joined_config(description, ["--model=/here/mine"]).model == ModelChoice("/here/mine")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--steps", "5"], "--steps is the same for all"),
        (["--sync.codec=int8"], "is the same for all"),
        (["--H", "5"], "sync.num_inner_steps is the same"),
        (["--resume", "x"], "not an option of diloco join"),
        (["--nonsense"], "not an option of diloco join"),
    ],
)
def test_what_is_the_swarms_to_say_is_no_option_of_join(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_own_options(given)
