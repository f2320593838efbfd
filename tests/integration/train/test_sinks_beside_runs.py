"""Sinks beside a run, in real processes: what they do wrong is told, and does the run no harm."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco.sinks.follower import read_state
from diloco.sinks.process import SinkProcesses
from support.forks import start_interpreter
from support.recorded_runs import RUN, append, run_folder
from support.sink_packages import broken_packages
from support.train_runs import start, write_text

pytestmark = pytest.mark.slow


def python_path(*folders: Path) -> str:
    return os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])


def wait_until(happened: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_sink_writes_all_up_to_the_end_of_the_run_and_one_that_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(broken_packages(tmp_path / "packages")))
    run = run_folder(tmp_path / "run", RUN[:5], ended=False)
    notes: list[str] = []
    with SinkProcesses(["wandb", "trackio"], run, notes.append, grace_seconds=1.0) as sinks:
        processes = list(sinks._processes.values())
        wait_until(lambda: sinks._processes["trackio"].poll() is not None)
    with SinkProcesses(["tensorboard"], run, notes.append, grace_seconds=200.0) as sinks:
        processes += sinks._processes.values()
        wait_until(lambda: read_state(run, "tensorboard").events == 5)
        append(run, RUN[5:])
    assert read_state(run, "tensorboard").events == len(RUN)
    assert all(process.returncode is not None for process in processes)
    hanging, failing = sorted(notes, key=lambda note: "trackio" in note)
    assert f"`diloco sink {run} wandb` writes the rest" in hanging
    assert "ConnectionError: no such server" in failing
    assert "the training is not affected" in failing


def test_a_sink_ends_by_itself_when_its_run_is_killed(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", RUN, ended=False)
    code = (
        "import sys, time; from pathlib import Path; from diloco.sinks.process import SinkProcesses\n"
        "with SinkProcesses(['tensorboard'], Path(sys.argv[1]), print) as sinks:\n"
        "    print(sinks._processes['tensorboard'].pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    watched = subprocess.run(
        ["timeout", "200", "tail", f"--pid={child}", "-f", "/dev/null"], check=False
    )  # returns when the process is gone
    assert watched.returncode == 0
    assert read_state(run, "tensorboard").events == len(RUN)


def test_a_run_with_a_broken_sink_is_as_good_as_any_and_says_once_what_is_wrong(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    packages = broken_packages(tmp_path / "packages")
    options = ("--steps=30", "--H=10", "--sinks=tensorboard,trackio")
    environment = {"PYTHONPATH": python_path(packages)}
    with start(tmp_path / "run", text, *options, environment=environment, launch=start_interpreter) as run:
        assert run.code() == 0, run.errors
    assert run.summary["status"] == "complete"
    assert run.output.count("note: the sink trackio has ended: ConnectionError: no such server") == 1, run.output
    state = read_state(run.folder, "tensorboard")
    assert (state.events, state.lost) == (len(run.events), 0)
    assert (run.folder / "sinks" / "tensorboard" / "worker-1").is_dir()
