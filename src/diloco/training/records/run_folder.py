"""Where in a run folder its model is, and what to do if there is none yet. Torch-free."""

import shlex
from pathlib import Path

from diloco.errors import ConfigError
from diloco.models.pretrained import CONFIG_FILE
from diloco.own_command import command
from diloco.run_lock import is_training

RUN_FILE = "config.toml"
MODEL_FOLDER = "model"
ADAPTER_FOLDER = "adapter"


def run_model(run: Path) -> Path:
    """Return the model folder of a run: the parameters that its workers last agreed on."""
    check_run_folder(run)
    if not (run / MODEL_FOLDER / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{run} has no {MODEL_FOLDER}/ yet: it is written when the run ends; {how_to_end(run)}. The model of a "
            f"checkpoint: `diloco export {shlex.quote(str(run))} --checkpoint latest --to DIR`"
        )
    return run / MODEL_FOLDER


def check_run_folder(run: Path) -> None:
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder: there is no such folder")
    if not (run / RUN_FILE).is_file():
        raise ConfigError(f"{run} is not a run folder: it has no {RUN_FILE}")


def how_to_end(run: Path) -> str:
    """Return what to do about a run that has not ended."""
    if is_training(run):
        return "a process trains there: wait for it, or stop it"
    return f"no process trains there: continue it with `{resume_command(run)}`"


def resume_command(run: Path) -> str:
    return command("train", "--resume", shlex.quote(str(run)))


def model_folder_of(path: Path) -> Path:
    """Return the model folder of a run, or the folder itself if it holds a model."""
    if (path / CONFIG_FILE).is_file():
        return path
    if path.is_dir() and not (path / RUN_FILE).is_file():
        raise ConfigError(f"{path} has neither {RUN_FILE} nor {CONFIG_FILE}: give a run folder or a model folder")
    return run_model(path)
