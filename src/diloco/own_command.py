"""How this program was started, so that every command it prints can be copied: `.venv/bin/diloco`, say. Torch-free."""

import os
import shlex
import shutil
import sys
from pathlib import Path

_VARIABLE = "DILOCO_COMMAND"
"""Set by `diloco` for the processes that it starts, which have other names themselves."""
_NAME = "diloco"


def command(*words: str) -> str:
    """Return a command line of this program, as the user would type it here."""
    return " ".join([os.environ.get(_VARIABLE) or _default(), *words])


def remember(started_as: str) -> None:
    """Remember how the program was started. `started_as`: sys.argv[0] of `diloco` or `python -m diloco`; of any other
    start nothing is remembered."""
    path = Path(started_as)
    if path.name == "__main__.py":
        os.environ[_VARIABLE] = f"{_shown(Path(sys.executable))} -m {_NAME}"
    elif path.name == _NAME:
        os.environ[_VARIABLE] = _shown(path)


def _default() -> str:
    """Return the program beside this Python, if it is there: a script of the user's own prints hints too."""
    beside = Path(sys.executable).with_name(_NAME)
    return _shown(beside) if beside.is_file() else _NAME


def _shown(path: Path) -> str:
    """Return the name alone if the shell finds this very file by it, else the path, from the current folder if it is
    below."""
    in_path = shutil.which(path.name)
    if in_path is not None and path.exists() and path.samefile(in_path):
        return path.name
    absolute = path.absolute()
    below_here = absolute.is_relative_to(Path.cwd())
    return shlex.quote(str(absolute.relative_to(Path.cwd()) if below_here else absolute))
