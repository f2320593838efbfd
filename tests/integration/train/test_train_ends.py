"""Every way in which `diloco train` can be cut short: kills, stops, crashes. Never a hang, never a process left."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diloco.errors import ConfigError
from diloco.models.native.model import load_model
from diloco.training.records.summary import read_summary
from support.forks import start_interpreter
from support.train_runs import Run, start, write_text

pytestmark = pytest.mark.slow

ENDLESS = ("--steps=100000", "--H=5", "--sync.timeout_seconds=100")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("corpus") / "text.txt")


@pytest.fixture(scope="module", autouse=True)
def silent(text: Path) -> Iterator[Run]:
    """Begun before the other tests and looked at after them, because it takes a while without computing anything."""
    with start(text.parent / "silent", text, "--steps=100000", "--H=5", "--sync.timeout_seconds=15") as run:
        run.wait_for_step(6)
        os.kill(run.workers()[1], signal.SIGSTOP)
        yield run


def assert_one_message(run: Run, *parts: str) -> None:
    """The last line of stderr is the error; what stands above it, if anything, is one worker's own output."""
    lines = run.errors.rstrip().splitlines()
    assert sum(line.startswith("error: ") for line in lines) == 1, run.errors
    for part in parts:
        assert part in lines[-1], run.errors
    in_launcher = re.findall(r"launcher\.py\", line \d+, in (\w+)", run.errors)
    assert set(in_launcher) <= {"run_worker"}, "a traceback of the launcher itself, not of a worker that it began"


def assert_failed_summary(run: Run) -> None:
    summary = run.summary
    assert summary["status"] == "failed"
    assert summary["error"] == run.errors.rstrip().splitlines()[-1].removeprefix("error: ")


def test_a_worker_killed_in_the_middle_ends_the_run_with_its_name_and_what_was_agreed(
    tmp_path: Path, text: Path
) -> None:
    with start(tmp_path / "run", text, *ENDLESS) as run:
        run.wait_for_step(12)
        os.kill(run.workers()[1], signal.SIGKILL)
        assert run.code() == 1
        run.assert_nothing_is_left()
    assert_one_message(run, "worker 1 of 2 failed", "SIGKILL")
    assert_failed_summary(run)
    summary = run.summary
    assert summary["inner_steps"] >= 12
    assert summary["rounds"] >= 2
    assert summary["rounds"] <= summary["inner_steps"] // 5
    assert summary["tokens"] > 0
    assert "diloco · failed" in run.output
    model = load_model(run.folder / "model")
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert not [path for path in (run.folder / "model").iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("number", "options"),
    [
        (signal.SIGINT, ["--H=7"]),
        (signal.SIGTERM, ["--mode=data-parallel"]),
        (signal.SIGINT, ["--sync.warm_start=100000"]),
    ],
)
def test_a_stop_ends_the_run_cleanly_with_equal_anchors_and_a_summary(
    tmp_path: Path, text: Path, number: signal.Signals, options: list[str]
) -> None:
    with start(tmp_path / "run", text, "--steps=100000", *options) as run:
        run.wait_for_step(10)
        os.kill(run.process.pid, number)
        assert run.code() == 0, run.errors
        run.assert_nothing_is_left()
    summary = run.summary
    assert run.errors == ""
    assert summary["status"] == "stopped"
    assert summary["error"] is None
    assert len(summary["anchor_digests"]) == 2
    assert len(set(summary["anchor_digests"])) == 1
    assert 10 <= summary["inner_steps"] < 100_000
    assert summary["validation_step"] == summary["inner_steps"]
    assert "diloco · stopped" in run.output
    load_model(run.folder / "model")


def test_a_stop_before_the_workers_are_ready_is_not_lost(tmp_path: Path, text: Path) -> None:
    with start(tmp_path / "run", text, *ENDLESS, launch=start_interpreter) as run:  # its workers import for seconds
        run.wait_until(lambda: len(run.workers()) == 2, "the workers to be there")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.code() == 0, run.errors
        run.assert_nothing_is_left()
    assert run.errors == ""
    assert run.summary["status"] == "stopped"
    assert "diloco · stopped" in run.output  # also if there is nothing more to report


def test_the_second_stop_kills_at_once(tmp_path: Path, text: Path) -> None:
    with start(tmp_path / "run", text, *ENDLESS) as run:
        run.wait_for_step(12)
        for pid in run.workers():
            os.kill(pid, signal.SIGSTOP)  # deaf to the first stop
        os.kill(run.process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert run.process.poll() is None
        while run.process.poll() is None:  # two signals that come before the process looks are one
            run.process.send_signal(signal.SIGINT)
            time.sleep(0.5)
        assert run.code() == 1
        run.assert_nothing_is_left()
    assert_one_message(run, "second")
    assert "Traceback" not in run.errors
    assert_failed_summary(run)
    assert run.summary["inner_steps"] >= 12
    assert run.summary["rounds"] >= 2


def test_workers_vanish_when_their_launcher_is_killed(tmp_path: Path, text: Path) -> None:
    with start(tmp_path / "run", text, *ENDLESS) as run:
        run.wait_for_step(1)
        assert len(run.workers()) == 2
        run.process.kill()
        run.process.wait()
        run.assert_nothing_is_left()
        with pytest.raises(ConfigError, match="has not ended"):
            read_summary(run.folder)


def test_a_worker_that_crashes_at_its_start_shows_its_own_traceback_and_ends_the_run(
    tmp_path: Path, text: Path
) -> None:
    broken = tmp_path / "broken" / "torch"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('this torch is broken')")
    path = os.pathsep.join([str(broken.parent), os.environ.get("PYTHONPATH", "")])
    with start(tmp_path / "run", text, *ENDLESS, environment={"PYTHONPATH": path}, launch=start_interpreter) as run:
        assert run.code() == 1
        run.assert_nothing_is_left()
    assert_one_message(run, "worker", "of 2 failed", "this torch is broken")
    assert run.errors.count("Traceback (most recent call last)") == 1
    assert_failed_summary(run)
    assert run.summary["inner_steps"] == 0


def test_a_port_in_use_is_said_to_be_in_use(tmp_path: Path, text: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with start(tmp_path / "run", text, *ENDLESS, f"--port={port}") as run:
            assert run.code() == 1
            run.assert_nothing_is_left()
    assert_one_message(run, f"127.0.0.1:{port}", "in use", "choose another port")
    assert_failed_summary(run)


def test_data_that_is_cut_off_under_a_running_worker_ends_the_run(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    with start(tmp_path / "run", text, *ENDLESS) as run:
        run.wait_for_step(6)
        for shard in (tmp_path / "cache").glob("*/train-*.bin"):
            os.truncate(shard, 0)
        assert run.code() == 1
        run.assert_nothing_is_left()
    assert_one_message(run, "of 2 failed", "SIGBUS")
    assert_failed_summary(run)
    assert run.summary["inner_steps"] >= 6


def test_a_model_folder_that_cannot_be_made_fails_the_run_with_that_reason(tmp_path: Path, text: Path) -> None:
    with start(tmp_path / "run", text, *ENDLESS, f"--port={free_port()}") as run:
        run.wait_for_step(6)
        (run.folder / "model").write_text("in the way")
        os.kill(run.process.pid, signal.SIGINT)
        assert run.code() == 2
        run.assert_nothing_is_left()
    assert_one_message(run, str(run.folder / "model"), "cannot be made")
    assert_failed_summary(run)
    assert run.summary["inner_steps"] >= 6
    assert len(set(run.summary["anchor_digests"])) == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_worker_that_answers_no_more_ends_the_run_within_the_bounded_wait(silent: Run) -> None:
    assert silent.code() == 1
    silent.assert_nothing_is_left()
    assert_one_message(silent, "worker 0 of 2 failed", "did not answer", "15 s", "worker 1 did not end and was killed")
    assert_failed_summary(silent)
    assert silent.summary["rounds"] >= 1
    load_model(silent.folder / "model")
