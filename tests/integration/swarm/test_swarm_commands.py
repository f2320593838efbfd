"""A swarm by its commands, as two people with a terminal each have it: train, join, status, a kill, Ctrl-C, resume."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from diloco.cli.main import run as command
from diloco.models.native.model import load_model
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from support.train_runs import Run, start, write_text

WARM = 10
ENDLESS = ("--engine=swarm", "--host=127.0.0.1", "--steps=100000", "--H=10", "--checkpoint.interval=20")
ENDLESS += (f"--sync.warm_start={WARM}",)
MEASURED = ("--training.eval_interval=10",)


def invitation(run: Run) -> str:
    found: list[str] = []
    run.wait_until(lambda: found.extend(re.findall(r"diloco2\w+", run.output)) or found, "an invitation")
    return found[0]


def join(folder: Path, word: str, *options: str) -> Run:
    here = (f"--out={folder}", f"--data.cache_dir={folder.parent / 'other-cache'}", "--device=cpu", "--threads=1")
    (folder.parent / f"{folder.name}.word").write_text(word)
    return Run(folder, ["join", f"@{folder.parent / folder.name}.word", *here, "--host=127.0.0.1", *options])


def contributors(run: Run) -> list[list[int]]:
    return [event["contributors"] for event in run.events if event["type"] == "round"]


def figures(run: Run) -> dict[int, tuple[float, int]]:
    """Step -> validation loss and the tokens behind it."""
    return {e["step"]: (e["loss"], e["tokens"]) for e in run.events if e["type"] == "validation"}


@pytest.mark.slow
def test_two_terminals_a_killed_founder_and_one_who_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = write_text(tmp_path / "text.txt")
    with (
        start(tmp_path / "first", text, *ENDLESS, *MEASURED) as first,
        join(tmp_path / "second", invitation(first)) as second,
    ):
        second.wait_until(lambda: [0, 1] in contributors(second), "a round of both")
        digests = [
            {member["anchor_digest"] for member in event["members"]}
            for event in second.events
            if event["type"] == "round" and len(event["members"]) == 2
        ]
        assert all(len(both) == 1 for both in digests)
        # The founder takes the warm start alone: no round is before its end and H steps; the joiner begins after it.
        first_steps = [min(e["step"] for e in run.events if e["type"] == "step") for run in (first, second)]
        assert first_steps[0] <= WARM < first_steps[1]
        assert min(e["step"] for run in (first, second) for e in run.events if e["type"] == "round") >= WARM + 10

        def shows_both() -> bool:
            assert command(["status", str(second.folder)]) == 0
            told = capsys.readouterr().out
            return "2 workers" in told and told.count("training") == 2

        second.wait_until(shows_both, "a status of both")
        second.wait_until(lambda: len(figures(first).keys() & figures(second).keys()) >= 2, "two figures on both")
        both = {s: (figures(first)[s], figures(second)[s]) for s in figures(first).keys() & figures(second).keys()}
        assert all(one == other for one, other in both.values()), both
        assert "diloco join" not in second.output  # the first one has printed the invitation
        third = ["--estimate", "--json", f"--data.cache_dir={tmp_path / 'third-cache'}", "--device=cpu"]
        assert command(["join", invitation(first), *third]) == 0
        sizes = json.loads(capsys.readouterr().out)  # of a machine that has nothing of the run yet
        started = next(event for event in second.events if event["type"] == "worker_started")
        assert sizes["workers"] == 3 and sizes["parameters"] == started["parameters"]
        for pid in [first.process.pid, *first.workers()]:
            os.kill(pid, signal.SIGKILL)
        second.wait_until(lambda: contributors(second)[-1] == [1], "a round without the founder")
        first.assert_nothing_is_left()  # its sidecar and daemon went with it
        second.process.send_signal(signal.SIGINT)
        assert second.code() == 0, second.errors
        second.assert_nothing_is_left()
    assert second.summary["status"] == "stopped" and second.summary["members_seen"] == 2
    load_model(second.folder / "model")
    assert "member_lost" in {event["type"] for event in second.events}
    saved = max(event["step"] for event in second.events if event["type"] == "checkpoint")
    again = Run(second.folder, ["train", f"--resume={second.folder}"])
    with again:
        again.wait_until(lambda: "continuing from this machine's newest checkpoint" in again.output, "to go on alone")
        again.wait_until(lambda: any(e["type"] == "resumed" for e in again.events), "the saved state")
        again.process.send_signal(signal.SIGINT)
        assert again.code() == 0, again.errors
    resumed = next(event for event in again.events if event["type"] == "resumed")
    assert resumed["step"] == saved


def test_join_says_in_one_sentence_that_nobody_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = RunKey.create()
    nobody = "12D3KooWLkhZ83dY1LmFf5XnBgoMVSW3cXcPfqssj2o4hE8osbLE"
    word = invite(key, [f"/ip4/127.0.0.1/tcp/9/p2p/{nobody}"], 600.0, time.time()).text()
    assert command(["join", word, f"--out={tmp_path / 'run'}"]) == 1
    said = capsys.readouterr().err
    assert said.count("error:") == 1 and "no worker of this run answers" in said and "diloco doctor" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda word: word[:60], "cut short"),
        (lambda word: word[:40] + ("2" if word[40] != "2" else "3") + word[41:], "damaged"),
        (lambda word: word[20:40], "not an invitation"),
        (lambda word: word.replace("diloco2", "diloco3"), "version 3"),
    ],
)
def test_a_word_that_is_no_invitation_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: object, said: str
) -> None:
    assert callable(change)
    word = invite(RunKey.create(), [], 600.0, time.time()).text()
    assert command(["join", change(word), f"--out={tmp_path / 'run'}"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_an_expired_invitation_is_told_so_with_the_remedy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    word = invite(RunKey.create(), [], 60.0, time.time() - 3600).text()
    assert command(["join", word, f"--out={tmp_path / 'run'}"]) == 2
    assert "expired" in (said := capsys.readouterr().err) and "diloco invite RUN" in said


def test_a_folder_that_is_no_swarm_has_no_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["status", str(tmp_path)]) == 2
    assert f"it has no {SWARM_FOLDER}/" in capsys.readouterr().err
    assert command(["status", str(tmp_path / "nothing")]) == 2
    assert "there is no such folder" in capsys.readouterr().err
