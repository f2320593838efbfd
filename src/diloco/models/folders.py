"""Writes model folders that appear whole or not at all, into paths that are free."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from diloco.atomic_files import replace_folder, write_file
from diloco.errors import ConfigError


def write_json(path: Path, content: Mapping[str, object]) -> None:
    write_file(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def replace_model_folder(path: Path) -> Iterator[Path]:
    """Write into the yielded new folder; it becomes `path` when the block ends without an error."""
    with ExitStack() as stack:
        try:
            new = stack.enter_context(replace_folder(path))
        except OSError as error:
            raise ConfigError(
                f"the model folder {path} cannot be made ({error.strerror}): choose another place"
            ) from error
        yield new
        readable = new.stat().st_mode & 0o666
        for file in new.iterdir():
            file.chmod(readable)  # safetensors makes files that only their owner can read


def check_unused(path: Path) -> None:
    """Refuse a path where there is something already."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not an empty folder: choose another, or remove it")
    except OSError as error:
        raise ConfigError(f"{path} cannot be looked at ({error.strerror}): choose another place") from error
