"""Options that are true or false, on the command line and in a run file."""

from pathlib import Path

import pytest

from diloco.cli.main import app
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import merge, to_toml


def resolved(*tokens: str) -> RunConfig:
    merged, _ = merge(tokens)
    _, bound, _ = app.parse_args(["train", *merged], exit_on_error=False, print_error=False)
    config: RunConfig = bound.arguments.get("config", RunConfig())
    return config


@pytest.mark.parametrize("more", [(), ("--steps", "7")])
@pytest.mark.parametrize(
    ("tokens", "value"),
    [
        ((), None),
        (("--compute.compile",), True),
        (("--compute.compile", "true"), True),
        (("--compute.compile=true",), True),
        (("--compute.compile", "false"), False),
        (("--compute.compile=false",), False),
    ],
)
def test_a_flag_may_be_given_alone_or_with_a_value(
    tokens: tuple[str, ...], more: tuple[str, ...], value: bool | None
) -> None:
    config = resolved(*tokens, *more)
    assert config.compute.compile is value
    assert config.steps == (7 if more else 800)


def test_flags_of_a_run_file_are_obeyed_and_written_back(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[compute]\ncompile = false\ncheckpoint_activations = true\n", encoding="utf-8")
    config = resolved(str(file))
    assert config.compute.compile is False and config.compute.checkpoint_activations is True
    file.write_text(to_toml(config), encoding="utf-8")
    assert resolved(str(file)) == config
