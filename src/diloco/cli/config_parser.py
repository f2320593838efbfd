"""Options on the command line to a RunConfig: what `diloco train` and `diloco join` have in common."""

from collections.abc import Sequence
from typing import Annotated

from cyclopts import App, Parameter

from diloco.training.config.run import RunConfig

PARAMETER = Parameter(name_transform=lambda name: name, negative=())
"""An option is named as its field is, and true or false is its value."""


def _check_is_no_option(_: type, value: str | None) -> None:
    if value is not None and value.startswith("-") and value != "-":
        raise ValueError(
            f"unknown option {value}: of what begins with a hyphen, only - (standard input) can stand here"
        )


HYPHEN = Parameter(allow_leading_hyphen=True, validator=_check_is_no_option)
"""For an argument that may be `-`, standard input: without this a hyphen begins an option."""


def parse_config(tokens: Sequence[str]) -> RunConfig:
    """Return the configuration that these options of `diloco train` give, validated."""
    parser = App(default_parameter=PARAMETER)

    @parser.default
    def config_of(*, config: Annotated[RunConfig, Parameter(name="*")] = RunConfig()) -> RunConfig:  # noqa: B008
        return config

    _, bound, _ = parser.parse_args(list(tokens), exit_on_error=False, print_error=False)
    config: RunConfig = bound.arguments.get("config", RunConfig())
    return config
