"""Where in a run folder its model is. Torch-free."""

from pathlib import Path

from diloco.errors import ConfigError
from diloco.models.pretrained import CONFIG_FILE

RUN_FILE = "config.toml"
MODEL_FOLDER = "model"


def run_model(run: Path) -> Path:
    """The model folder of a run: what its workers last agreed on. The one place that knows where a run keeps it."""
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder: there is no such folder")
    if not (run / RUN_FILE).is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {RUN_FILE}")
    if not (run / MODEL_FOLDER / CONFIG_FILE).is_file():
        raise ConfigError(f"{run} has no {MODEL_FOLDER}/ yet: it is written when the run ends; wait for it, or stop it")
    return run / MODEL_FOLDER


def any_model(path: Path) -> Path:
    """The model folder that a person means: a run's, or the folder itself."""
    if (path / CONFIG_FILE).is_file():
        return path
    if path.is_dir() and not (path / RUN_FILE).is_file():
        raise ConfigError(f"{path} has neither {RUN_FILE} nor {CONFIG_FILE}: give a run folder or a model folder")
    return run_model(path)
