"""`diloco status`: what it shows of a swarm, in 80 columns, and what it says of a run that has ended. No network."""

import io
import json
import shutil
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec import structs
from rich.console import Console

from diloco.cli.main import run
from diloco.cli.runs import status as command_module
from diloco.cli.runs.status import headlines, lines, rows, table
from diloco.errors import EngineError, Excluded, RendezvousError
from diloco.swarm.node import guest as guest_module
from diloco.swarm.protocol.status import MemberStatus, RunStatus
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from diloco.training.records.summary import SUMMARY_FILE, summarize
from support.event_log import history_of
from support.recorded_runs import CONFIG, RESUMED, RUN, event, run_folder


def member(number: int, **changes: Any) -> MemberStatus:
    status = MemberStatus(
        number=number, has_state=True, next_round=8, ended_round=7, position=80 - number, tokens=5000, loss=3.5,
        step_seconds=0.5, contributed_round=6, label=f"host-{number}", peer=f"12D3{number:06d}", silent_seconds=0.2,
        latency_seconds=0.02,
    )  # fmt: skip
    return structs.replace(status, **changes)


JOINING = member(4, has_state=False, loss=-1.0, contributed_round=-1, step_seconds=0.0)
TOLD = RunStatus("abcd", (member(0), member(1, live=False), JOINING), "12D3000000", {"8": "gathering"}, {})


def test_who_was_never_heard_is_shown_as_such() -> None:
    told = member(2, live=False, label="", position=0, silent_seconds=28552.1)
    (row,) = rows(structs.replace(TOLD, members=(told,)))
    assert row[-3] == "never" and row[-1] == "not met"


def test_a_bucket_whose_workers_have_all_left_still_tells_how_far_the_run_is() -> None:
    told = RunStatus("s3://a/b", (member(0, live=False, left=True, position=400), member(1, live=False)), None, {}, {})
    assert headlines(told, 400) == [
        "run s3://a/b · complete after 400 steps · 0 workers · 8 rounds",
        "0.00 steps/s in all",
    ]


def test_status_tells_of_everyone_where_it_is_how_far_behind_and_what_it_last_gave() -> None:
    assert headlines(TOLD, 400) == [
        "run abcd · step 80 of 400 (20%) · 2 workers · 8 rounds",
        "round 8 in progress (gathering) · 2.00 steps/s in all · led by worker 0",
    ]
    first, lost, joining = rows(TOLD)
    assert first[2:8] == ("80", "0", "2.00", "3.500", "5,000", "round 6") and first[-1] == "training"
    assert lost[3] == "-" and lost[-1] == "lost"
    assert joining[3] == "4" and joining[7] == "none yet" and joining[-1] == "joining"
    assert lines(TOLD)[0].startswith("worker 0  where host-0 000000  step 80  behind 0")


@pytest.mark.parametrize(
    "told",
    [
        TOLD,
        structs.replace(
            TOLD,
            members=tuple(
                member(
                    number,
                    label="a-machine-with-a-long-name",
                    position=123456,
                    tokens=9_999_999_999,
                    contributed_round=99_998,
                )
                for number in (0, 100)
            ),
        ),
    ],
)
def test_the_table_fits_80_columns_and_cuts_nothing_but_names(told: RunStatus) -> None:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(told, wide=False))
    shown = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, shown)) <= 80 and len(shown) == 1 + len(told.members)
    for line, row in zip(shown[1:], rows(told), strict=True):
        assert all(cell in line for index, cell in enumerate(row) if index not in (6, 9)), line
    assert all(len(line) <= 80 for line in headlines(told, 1_000_000))


def test_the_tokens_of_all_workers_are_those_that_a_live_worker_has_counted() -> None:
    members = (member(0, run_tokens=12_000), member(1, run_tokens=99_000, live=False), member(2, run_tokens=11_500))
    assert headlines(structs.replace(TOLD, members=members))[2] == "12,000 tokens of all workers in the run's means"


def test_tokens_that_a_loop_of_ones_own_does_not_tell_are_shown_as_unknown() -> None:
    (row,) = rows(structs.replace(TOLD, members=(member(0, tokens=0),)))
    assert row[2] == "80" and row[6] == "-"


def test_a_swarm_at_its_last_step_is_complete() -> None:
    assert [row[-1] for row in rows(TOLD, 80)] == ["done", "lost", "joining"]
    assert headlines(TOLD, 80)[0] == "run abcd · complete after 80 steps · 2 workers · 8 rounds"


class FakeGuest:
    """Gives these answers one after another, errors too."""

    answers: ClassVar[list[Any]] = []

    def __init__(self, invitation: Any, **options: Any) -> None:
        del invitation, options

    def __enter__(self) -> "FakeGuest":
        if isinstance(self.answers[0], Exception):
            raise self.answers[0]
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing."""

    def fetch(self, name: str, *_: object) -> None:
        raise EngineError(f"no {name}")

    def status(self) -> RunStatus:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, RunStatus)
        return answer


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answers(*given: Any) -> None:
        monkeypatch.setattr(FakeGuest, "answers", list(given))

    monkeypatch.setattr(guest_module, "Guest", FakeGuest)
    monkeypatch.setattr(command_module, "_WATCH_SECONDS", 0.0)
    return answers


NOBODY = RendezvousError("no worker of this run answers")
ADDRESS = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLkhZ83dY1LmFf5XnBgoMVSW3cXcPfqssj2o4hE8osbLE"


def ended_run(folder: Path, **changes: Any) -> str:
    """A run folder of a swarm that has ended; its invitation."""
    run_folder(folder, [], ended=False)
    summary = summarize(CONFIG, history_of([])) | {
        "status": "complete",
        "error": None,
        "inner_steps": 400,
        "seconds": 60.0,
    }
    (folder / SUMMARY_FILE).write_text(json.dumps(summary | {"engine": "swarm"} | changes))
    word = invite(RunKey.create(), [ADDRESS], 600.0, time.time()).text()
    (folder / "swarm").mkdir()
    (folder / "swarm" / "worker-0.invitation").write_text(word)
    return word


def test_a_run_that_has_ended_is_complete_after_so_many_steps_and_no_error(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    word = ended_run(tmp_path / "runs" / "mine", validation_perplexity=12.5, validation_step=400)
    monkeypatch.chdir(tmp_path)
    for name in ("runs/mine", word):  # by the folder, and by an invitation to the run of that folder
        ask(NOBODY)
        assert run(["status", name]) == 0
        told = capsys.readouterr().out
        assert "complete after 400 steps (runs/mine)" in told and "perplexity 12.50 at step 400" in told
    ask(NOBODY)
    assert run(["join", word]) == 0
    assert "the run is complete after 400 steps (runs/mine)" in capsys.readouterr().out
    ask(NOBODY)
    assert run(["status", "runs/mine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["summary"]["inner_steps"] == 400


def test_a_worker_that_left_early_does_not_hide_the_end_of_the_run_on_the_same_machine(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    word = ended_run(tmp_path / "runs" / "first")
    ended_run(tmp_path / "runs" / "left-early", status="stopped", inner_steps=30)
    (tmp_path / "runs" / "left-early" / "swarm" / "worker-0.invitation").write_text(word)
    monkeypatch.chdir(tmp_path)
    for command in ("join", "status"):
        ask(NOBODY)
        assert run([command, word]) == 0
        assert "complete after 400 steps (runs/first)" in capsys.readouterr().out


def test_a_run_of_a_fixed_set_of_workers_that_has_ended_says_so_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path / "mine", engine="torch_distributed", status="stopped", inner_steps=30)
    shutil.rmtree(tmp_path / "mine" / "swarm")
    assert run(["status", str(tmp_path / "mine")]) == 0
    told = capsys.readouterr().out
    assert "stopped after 30 of 40 steps" in told and "to continue: diloco train --resume" in told
    assert "no worker answers" not in told and "in the whole swarm" not in told


@pytest.mark.parametrize(("rounds", "counted"), [(1, "1 round, "), (2, "2 rounds, ")])
def test_the_tokens_of_a_swarm_that_has_ended_are_said_to_be_those_of_all(
    rounds: int, counted: str, tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path / "mine", rounds=rounds, tokens=2048)
    ask(NOBODY)
    assert run(["status", str(tmp_path / "mine")]) == 0
    assert f"{counted}2,048 tokens in the whole swarm, " in capsys.readouterr().out


@pytest.mark.parametrize("type_", ["loss_not_finite", "excluded"])
def test_a_run_that_would_end_the_same_is_not_advised_to_be_resumed(
    type_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "mine", [*RUN, event(type_, step=21, loss="nan")])
    assert run(["status", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "failed after 20 of 40 steps" in told and "to continue" not in told
    run_folder(tmp_path / "again", [*RUN, event(type_, step=21, loss="nan"), *RESUMED])
    assert run(["status", str(tmp_path / "again")]) == 0
    assert "to continue" in capsys.readouterr().out, "the start after that one has ended otherwise"


def test_a_run_of_a_fixed_set_of_workers_that_has_not_ended_says_where_its_progress_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("status of such a run needs no package of the swarm")

    monkeypatch.setattr("diloco.cli.runs.status.check_swarm", refuse)
    folder = tmp_path / "killed"
    run_folder(folder, [], ended=False)
    assert run(["status", str(folder)]) == 2
    told = capsys.readouterr().err
    assert f"{folder} is not a run of a swarm" in told and f"train --resume {folder} continues it" in told
    assert str(folder / "events.jsonl") in told


def test_a_run_of_a_fixed_set_of_workers_that_trains_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path / "live", RUN, ended=False)
    monkeypatch.setattr(command_module, "is_training", lambda _: True)
    assert run(["status", str(folder)]) == 0
    told = capsys.readouterr().out
    assert told.startswith("training: step 20 of 40 (50%) · loss 3.250 · validation perplexity 8.00 at step 10 · ")
    assert "2,000 tokens/s · 2 rounds · left" in told
    assert run(["status", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 20


def test_a_run_that_was_left_early_says_so_and_how_to_go_on(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path / "mine", status="stopped", inner_steps=30)
    ask(NOBODY)
    assert run(["status", str(tmp_path / "mine")]) == 0
    told = capsys.readouterr().out
    assert "stopped on this machine after 30 of 40 steps" in told and f"--resume {tmp_path / 'mine'}" in told


def test_what_is_not_known_is_an_error_that_says_what_is(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    word = invite(RunKey.create(), [ADDRESS], 600.0, time.time()).text()
    ask(NOBODY)
    assert run(["status", word]) == 1
    assert str(NOBODY) in capsys.readouterr().err
    run_folder(tmp_path / "killed", [], ended=False)
    (tmp_path / "killed" / "swarm").mkdir()
    (tmp_path / "killed" / "swarm" / "worker-0.invitation").write_text(word)
    ask(NOBODY)
    assert run(["status", "killed"]) == 1
    assert f"no worker of it runs on this machine, and {NOBODY}" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "join"])
def test_an_invitation_without_addresses_says_so_and_how_to_get_one(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([command, invite(RunKey.create(), [], 600.0, time.time()).text()]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "the invitation has no address of a worker" in told and "invite RUN" in told


def test_a_machine_that_is_excluded_reads_why_though_its_own_run_has_ended(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_run(tmp_path / "mine")
    ask(Excluded("the swarm does not admit this machine: revoked"))
    assert run(["status", str(tmp_path / "mine")]) == 1
    assert "revoked" in capsys.readouterr().err


def test_watch_shows_it_again_until_no_worker_answers(
    tmp_path: Path, ask: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_run(tmp_path / "mine")
    later = structs.replace(TOLD, members=(member(0, position=81),))
    ask(TOLD, later, EngineError("the swarm no longer answers"))
    assert run(["status", str(tmp_path / "mine"), "--watch"]) == 0
    told = capsys.readouterr().out
    assert "step 81" in told and "complete after 400 steps" in told
    assert run(["status", str(tmp_path / "mine"), "--watch", "--json"]) == 2
