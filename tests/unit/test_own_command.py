"""Commands that diloco prints can be copied: they name the program as it was started."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.own_command import command, remember
from diloco.version import __version__


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a virtual environment whose programs the shell does not find by name."""
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("diloco", "python"):
        (programs / name).write_text("")
        (programs / name).chmod(0o755)
    monkeypatch.delenv("DILOCO_COMMAND", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    monkeypatch.chdir(tmp_path)
    return programs


@pytest.mark.parametrize("started_as", [".venv/bin/diloco", "ABSOLUTE"])
def test_a_program_in_a_virtual_environment_is_named_by_its_path(elsewhere: Path, started_as: str) -> None:
    remember(started_as.replace("ABSOLUTE", str(elsewhere / "diloco")))
    assert command("train", "--resume", "x") == ".venv/bin/diloco train --resume x"
    assert os.environ["DILOCO_COMMAND"] == ".venv/bin/diloco"  # for the processes that it starts


def test_a_program_that_the_shell_finds_is_named_by_its_name(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(elsewhere))
    remember(str(elsewhere / "diloco"))
    assert command("doctor") == "diloco doctor"


def test_a_module_is_named_as_python_m(elsewhere: Path) -> None:
    remember("/lib/diloco/__main__.py")
    assert command("doctor") == ".venv/bin/python -m diloco doctor"


def test_from_another_folder_the_path_is_whole_and_quoted(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "with space"
    there.mkdir()
    monkeypatch.chdir(there)
    remember(str(elsewhere / "diloco"))
    assert command("doctor") == f"{elsewhere / 'diloco'} doctor"
    (there / "diloco").write_text("")
    monkeypatch.chdir("/")
    remember(str(there / "diloco"))
    assert command().startswith("'") and command().endswith("with space/diloco'")


def test_a_script_of_the_users_own_prints_the_program_beside_its_python(elsewhere: Path) -> None:
    remember("train.py")
    assert command("doctor") == ".venv/bin/diloco doctor"
    (elsewhere / "diloco").unlink()
    assert command("doctor") == "diloco doctor"


def test_diloco_can_be_run_as_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    done = subprocess.run([sys.executable, "-m", "diloco", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, __version__)
