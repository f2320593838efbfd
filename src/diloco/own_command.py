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
    """A command line of this program, as the user would type it here."""
    return " ".join([os.environ.get(_VARIABLE) or _default(), *words])


def remember(started_as: str) -> None:
    """`started_as`: sys.argv[0] of `diloco` or `python -m diloco`; of any other start nothing is remembered."""
    path = Path(started_as)
    if path.name == "__main__.py":
        os.environ[_VARIABLE] = f"{_shown(Path(sys.executable))} -m {_NAME}"
    elif path.name == _NAME:
        os.environ[_VARIABLE] = _shown(path)


def _default() -> str:
    """The program beside this Python, if it is there: a script of the user's own prints hints too."""
    beside = Path(sys.executable).with_name(_NAME)
    return _shown(beside) if beside.is_file() else _NAME


def _shown(path: Path) -> str:
    """The name alone if the shell finds this very file by it, else the path, from the current folder if it is below."""
    found = shutil.which(path.name)
    if found is not None and path.exists() and path.samefile(found):
        return path.name
    absolute, here = path.absolute(), Path.cwd()
    return shlex.quote(str(absolute.relative_to(here) if absolute.is_relative_to(here) else absolute))
