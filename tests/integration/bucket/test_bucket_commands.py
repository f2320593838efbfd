"""A run in a bucket by its commands: train, join, status, a kill of all that a machine has, Ctrl-C, resume.

The commands are new interpreters: a fork of a process that has used obstore has none of its threads.
"""

import os
import signal
from pathlib import Path

import pytest

from diloco.cli.main import run as command
from diloco.models.native.model import load_model
from support.forks import start_interpreter
from support.train_runs import Run, start, write_text

SHORT = ("--engine=bucket", "--steps=100000", "--H=10", "--checkpoint.interval=20")


def join(url: str, folder: Path, *options: str) -> Run:
    here = (f"--out={folder}", f"--data.cache_dir={folder.parent / 'other-cache'}", "--device=cpu", "--threads=1")
    return Run(folder, ["join", url, *here, *options], launch=start_interpreter)


def rounds_of_both(run: Run) -> list[set[str]]:
    """The anchor digests in each round that both workers were in."""
    return [
        {member["anchor_digest"] for member in event["members"]}
        for event in run.events
        if event["type"] == "round" and len(event["members"]) == 2
    ]


@pytest.mark.slow
def test_two_machines_a_killed_founder_that_comes_back_and_one_who_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/bucket"
    text = write_text(tmp_path / "text.txt")
    with start(tmp_path / "first", text, *SHORT, f"--bucket={url}", launch=start_interpreter) as first:
        first.wait_until(lambda: f"join {url}" in first.output, "the command for others")
        with join(url, tmp_path / "second") as second:
            second.wait_until(lambda: len(rounds_of_both(second)) >= 2, "rounds of both")

            def shows_both() -> bool:
                assert command(["status", url]) == 0
                told = capsys.readouterr().out
                return "2 workers" in told and told.count("training") == 2

            second.wait_until(shows_both, "a status of both")
            for pid in [first.process.pid, *first.workers()]:
                os.kill(pid, signal.SIGKILL)
            first.assert_nothing_is_left()
            again = Run(first.folder, ["train", f"--resume={first.folder}"], launch=start_interpreter)
            with again:
                before = len(rounds_of_both(second))
                second.wait_until(lambda: len(rounds_of_both(second)) >= before + 2, "rounds of both again")
                for run in (again, second):
                    run.process.send_signal(signal.SIGINT)
                assert again.code() == 0, again.errors
                assert second.code() == 0, second.errors
                again.assert_nothing_is_left()
            second.assert_nothing_is_left()
        assert all(len(digests) == 1 for digests in rounds_of_both(second))
    assert {event["worker"] for event in first.events} == {0}, "it came back under its number"
    load_model(second.folder / "model")


def test_a_second_run_in_a_bucket_a_bucket_without_a_run_and_a_wrong_place_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"file://{tmp_path}/bucket"
    assert command(["join", url, f"--out={tmp_path / 'run'}"]) == 2
    assert "has no run: begin one" in capsys.readouterr().err
    files = tmp_path / "bucket" / "files"
    files.mkdir(parents=True)
    (files / "run.json").write_text("{}")
    assert command(["train", "--engine=bucket", f"--bucket={url}", f"--out={tmp_path / 'run'}"]) == 2
    assert f"{url} has a run already: join it" in capsys.readouterr().err
    assert command(["join", url, f"--out={tmp_path / 'run'}"]) == 2
    assert "description of its run cannot be read" in capsys.readouterr().err
    assert command(["status", "s3://"]) == 2
    assert "cannot be opened" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
