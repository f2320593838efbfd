"""The sinks by name. To add one: a class in its own file, a line here, its name in training/config/run.py."""

from collections.abc import Iterable
from importlib.util import find_spec

from diloco.errors import ConfigError, install_hint
from diloco.sinks.base import Sink
from diloco.sinks.tensorboard import TensorBoardSink
from diloco.sinks.trackio import TrackioSink
from diloco.sinks.wandb import WandbSink

SINKS: dict[str, type[Sink]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink, "trackio": TrackioSink}


def check_installed(names: Iterable[str]) -> None:
    """Refuse a sink whose package is missing, before anything is started."""
    for name in names:
        package = SINKS[name].package
        if not _installed(package):
            raise ConfigError(
                f"the sink {name} needs the package {package}, which is not installed: {install_hint(name)}"
            )


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # a module without a spec, such as a test's stand-in
        return True
