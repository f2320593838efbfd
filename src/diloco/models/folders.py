"""Files and folders that appear whole or not at all: they are written beside their place, then moved there.

A kill while they are written leaves the old one as it was, and at most a hidden temporary beside it.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from diloco.errors import ConfigError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file beside `path`, then move it there in one step."""
    temporary = _beside(path)
    try:
        write(temporary)
        _open_to_readers(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_bytes(path: Path, content: bytes) -> None:
    replace_file(path, lambda place: place.write_bytes(content))


def replace_json(path: Path, content: Mapping[str, object]) -> None:
    replace_bytes(path, (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `path` when the block ends without an error."""
    temporary, former = _beside(path), _beside(path, ".former")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
    except OSError as error:
        raise ConfigError(f"the model folder {path} cannot be made ({error.strerror}): choose another place") from error
    try:
        yield temporary
        for file in temporary.iterdir():
            _open_to_readers(file)
        if path.exists() and any(path.iterdir()):
            path.rename(former)  # a folder with content cannot be renamed over
        temporary.rename(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _open_to_readers(file: Path) -> None:
    """safetensors makes files for their owner alone; whoever may read the folder may read what is in it."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def check_unused(path: Path) -> None:
    """Refuse a place where a new folder would take the place of something."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(f"{path} exists and is not an empty folder: choose another, or remove it")
    except OSError as error:
        raise ConfigError(f"{path} cannot be looked at ({error.strerror}): choose another place") from error


def size_bytes(text: str) -> int:
    """`5GB` or `300 MiB` as a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    size = float(found[1]) * _UNITS.get(found[2], 0) if found else 0
    if size < 1:
        raise ConfigError(f"{text!r} is not a size: give a number and a unit, such as 5GB or 300MB")
    return int(size)


def _beside(path: Path, suffix: str = "") -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}{suffix}")
