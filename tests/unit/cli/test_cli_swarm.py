"""What a person sees and may ask of a swarm: display, status, refusals of the command line. No network, no run."""

import errno
import io
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from diloco.cli.config_parser import parse_config
from diloco.cli.display.live import RunView, plain_line, render
from diloco.cli.display.run_display import joining_hint
from diloco.cli.join import check_seats
from diloco.cli.main import run
from diloco.data.preparation.received_corpus import corpus_files
from diloco.errors import ConfigError, DataError, RunComplete
from diloco.history.events import SwarmEvent
from diloco.history.log import EventLog
from diloco.history.run_history import LiveHistory
from diloco.swarm.config import SwarmConfig
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.run_key import RunKey
from diloco.swarm.trust.signatures import sign
from diloco.training.config.run import RunConfig, TrainingConfig
from diloco.training.config.run_file import merge, to_toml
from diloco.training.processes.start import check_out
from diloco.training.processes.swarm_start import (
    agreed_description,
    check_clock,
    check_space,
    check_unfinished,
    receive_text,
)
from diloco.training.records.run_description import RunDescription
from diloco.training.records.summary import summarize
from support.event_log import Event, history_of
from support.saved_runs import small_corpus

CONFIG = RunConfig(engine="swarm", workers=1, steps=400, training=TrainingConfig(batch_size=2))


def event(type_: str, worker: int = 3, **fields: Any) -> Event:
    return {"v": 1, "time": 0.0, "worker": worker, "type": type_, **fields}


def shown(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=140)
    console.print(render(view))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return str(text)


def view_of(*events: Event) -> RunView:
    return RunView(CONFIG, history_of(events))


def test_the_display_has_the_members_elsewhere_with_place_step_lag_and_last_contribution() -> None:
    listed = [
        {"member": 3, "where": "here", "step": 90, "loss": 3.0, "contributed": 7, "state": "training"},
        {"member": 5, "where": "far away", "step": 82, "loss": None, "contributed": 6, "state": "training"},
        {"member": 6, "where": "gone", "step": 40, "loss": 3.3, "contributed": None, "state": "lost"},
    ]
    picture_ = shown(view_of(event("joined", step=80, rounds=8), event("members", present=listed)))
    assert "a swarm of 2" in picture_ and "far away" in picture_ and "round 6" in picture_ and "lost" in picture_
    assert [word for word in picture_.split() if word == "here"].__len__() == 1  # only in the title: it has a row above
    far = next(line for line in picture_.splitlines() if "far away" in line)
    assert far.split()[-5:] == ["8", "-", "round", "6", "training"]


def test_what_happens_to_members_is_noted_once_and_without_control_characters() -> None:
    lost = event("member_lost", member=5, label="evil\x1b[2J", reason="silent", peer="x")
    view = view_of(
        event("member_joined", member=5, label="a", peer="x"),
        event("member_joined", 4, member=5, label="a", peer="x"),
        lost,
        event("alone", member=3),
        event("diverged", member=3),
        event("resync", step=90, sequence=9, reason="it missed round 8"),
        event("member_left", member=6, label="", peer="y"),
        event("member_banned", member=7, label="", peer="z", reason="not finite"),
        event("waiting", present=1, wanted=2),
    )
    lines = view.history.notes.lines
    assert len(lines) == 8
    assert not any("\x1b" in note for note in lines)
    assert "training alone at the moment" in lines[2] and "went on without the others" in lines[3]


def test_who_was_there_before_has_not_joined_and_several_workers_here_tell_of_a_loss_once() -> None:
    at = {"member": 5, "label": "a", "peer": "12D3KooWx"}
    lost = [
        event("member_lost", 3, **at, reason="12D3KooWx could not be reached a moment ago"),
        event("member_lost", 4, **at, reason="silent for 5 s"),
    ]
    view = view_of(event("member_joined", **at, already=True), *lost)
    assert view.history.notes.lines == ["worker 5 (a) is lost (it could not be reached); training continues without it"]
    later = [event("member_joined", 4, **at), event("member_joined", 3, **at), *lost]
    view = view_of(event("member_joined", **at, already=True), *lost, *(one | {"time": 100.0} for one in later))
    assert [note.split()[-1] for note in view.history.notes.lines] == ["it", "joined", "it"]


def test_a_worker_that_waits_for_the_swarm_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=200)
    (tmp_path / "events").mkdir()
    poll = joining_hint(console, CONFIG, LiveHistory(tmp_path))
    poll()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60.0)
    poll()
    poll()
    assert console.file.getvalue().count("not in the swarm yet") == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("founded", "going_on", "owner", "seats", "printed"),
    [(True, False, True, 1, 1), (True, False, True, 3, 3), (True, False, True, 0, 0), (True, True, True, 1, 0),
     (False, False, True, 1, 0), (False, False, False, 1, 0)],
)  # fmt: skip
def test_the_worker_that_starts_the_swarm_prints_as_many_invitations_as_it_was_told_each_for_one_worker(
    tmp_path: Path, founded: bool, going_on: bool, owner: bool, seats: int, printed: int
) -> None:
    console = Console(file=io.StringIO(), width=200)
    key = RunKey.create()
    word = invite(
        key, ["/ip4/127.0.0.1/tcp/9/p2p/12D3KooWLkhZ83dY1LmFf5XnBgoMVSW3cXcPfqssj2o4hE8osbLE"], 60.0, time.time()
    )
    (tmp_path / "swarm").mkdir()
    (tmp_path / "swarm" / "worker-0.invitation").write_text(word.text())
    if owner:
        key.save(tmp_path / "swarm" / "run.key")
    live = LiveHistory(tmp_path)
    poll = joining_hint(console, replace(CONFIG, swarm=SwarmConfig(seats=seats)), live)
    log = EventLog(tmp_path, 0)
    for _ in range(2):
        log.emit(SwarmEvent(founded=founded, going_on=going_on))
        live.refresh()
        poll()
    told = console.file.getvalue()  # type: ignore[attr-defined]
    words = [Invitation.parse(line, time.time()) for line in told.splitlines() if line.strip().startswith("diloco2")]
    assert len({one.id for one in words} - {word.id}) == len(words) == printed
    assert told.count(f"diloco invite {tmp_path}") == owner
    assert ("join -" in told) == (printed > 0)


def test_each_worker_of_a_joining_machine_needs_an_invitation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_seats(2, 2)
    with pytest.raises(ConfigError, match=r"--workers 2, and 1 invitation is given: each .*invite RUN --seats 2"):
        check_seats(2, 1)
    monkeypatch.delenv("DILOCO_INVITATION", raising=False)
    assert run(["join", "--workers", "2"]) == 2
    assert "no invitation is given: paste it after" in capsys.readouterr().err


def test_an_invitation_that_a_run_folder_here_has_used_is_told_with_the_way_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    word = invite(RunKey.create(), [], 600.0, time.time()).text()
    swarm = tmp_path / "runs" / "mine" / "swarm"
    swarm.mkdir(parents=True)
    (swarm / "worker-0.invitation").write_text(word)
    (swarm / "worker-0.key").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO(word))
    assert run(["join", "-"]) == 2
    told = capsys.readouterr().err
    assert "was used here, by runs/mine: continue there" in told and "--resume runs/mine" in told


@pytest.mark.parametrize("verb", ["join -", "status -", "revoke runs/mine -", "invite runs/mine --renew -"])
def test_each_verb_with_an_invitation_from_a_closed_standard_input_ends_with_two_and_the_remedy(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    swarm = tmp_path / "runs" / "mine" / "swarm"
    swarm.mkdir(parents=True)
    (swarm / "worker-0.invitation").write_text(invite(RunKey.create(), [], 600.0, time.time()).text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", None)  # as Python has it after `<&-`
    assert run(verb.split()) == 2
    told = capsys.readouterr().err
    assert "standard input (-), which is closed" in told and "@FILE" in told


@pytest.mark.parametrize("verb", ["status -", "revoke runs/mine -", "invite runs/mine --renew -"])
def test_each_verb_that_takes_an_invitation_reads_it_from_standard_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    swarm = tmp_path / "runs" / "mine" / "swarm"
    swarm.mkdir(parents=True)
    (swarm / "worker-0.invitation").write_text(invite(RunKey.create(), [], 600.0, time.time()).text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("no invitation"))
    assert run(verb.split()) == 2
    assert "this is not an invitation: one begins with" in capsys.readouterr().err


def test_an_unknown_option_is_not_taken_for_an_invitation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--prot=4000"]) == 2
    assert "unknown option --prot=4000" in capsys.readouterr().err


def test_an_invitation_as_an_argument_is_told_to_be_readable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    word = invite(RunKey.create(), [], 600.0, time.time()).text()
    assert run(["join", word]) == 1  # it has no address
    assert "other users of this machine can read an argument" in capsys.readouterr().err
    (tmp_path / "word").write_text(word)
    assert run(["join", "@word"]) == 1
    assert "other users" not in capsys.readouterr().err


def test_a_run_at_its_end_cannot_be_joined_and_says_that_it_is_complete() -> None:
    description = RunDescription.of(CONFIG, "ab" * 32)
    at = SimpleNamespace(live=True, number=0, position=399)
    assert check_unfinished(description, SimpleNamespace(members=[at])) == 1  # type: ignore[arg-type]
    at.position = 400
    with pytest.raises(RunComplete, match="the run is complete after 400 steps: there is nothing left to join"):
        check_unfinished(description, SimpleNamespace(members=[at]))  # type: ignore[arg-type]


def test_a_stop_says_whether_the_swarm_continues() -> None:
    begun = [event("worker_started", workers=2, parameters=1, unigram_perplexity=None)]
    begun.append(event("member_joined", member=1, peer="p1"))
    view = view_of(*begun)
    view.stopping = True
    assert "leaving the swarm, which continues; press Ctrl-C again to stop now" in shown(view)
    view = view_of(*begun, event("member_lost", member=1, peer="p1"))
    view.stopping = True
    assert "stopping, with a checkpoint; press Ctrl-C again to stop now" in shown(view)


def test_time_left_goes_by_the_steps_that_a_worker_took_itself() -> None:
    per_step = CONFIG.tokens_per_step
    joined = event("joined", step=300, rounds=30)
    step = event(
        "step", step=350, loss=3.0, tokens=50 * per_step, elapsed_seconds=25.0, sync_seconds=1.0, bytes_sent=0, rounds=5
    )
    view = view_of(joined, step)
    assert view.step == 350 and view.time_left == pytest.approx(25.0)
    assert "step 350/400" in plain_line(view)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mode", "data-parallel"], "fixed set of workers"),
        (["--ranks", "2", "--codec", "topk"], "with error feedback"),
        (["--ranks", "2", "--sync.second_moment_every", "2"], "workers of one rank"),
        (["--backend", "nccl", "--device", "cuda"], "has no effect with engine = swarm"),
        (["--data.partition", "clusters", "--data.feature_model", "x"], "change hands"),
        (["--port", "65535", "--workers", "2"], "beyond 65535"),
        (["--swarm.min_workers", "0"], "at least 1"),
        (["--swarm.lost_seconds", "1"], "from 2 to 600"),
        (["--swarm.patience", "-1"], "at least 0"),
        (["--swarm.invitation_days", "0"], "above 0"),
    ],
)
def test_what_a_swarm_cannot_do_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(Exception, match=said):
        parse_config(merge(["--engine", "swarm", *options])[0])


@pytest.mark.parametrize("options", [["--host", "::1"], ["--announce", "a:1"], ["--swarm.patience", "1"]])
def test_options_of_a_swarm_without_a_swarm_are_refused(options: list[str]) -> None:
    with pytest.raises(Exception, match=r"--engine swarm|has no effect in engine"):
        parse_config(merge(options)[0])


def test_one_worker_is_enough_to_begin_a_swarm() -> None:
    assert parse_config(merge(["--engine", "swarm"])[0]).workers == 1
    assert parse_config(merge(["--engine", "swarm", "--workers", "3"])[0]).workers == 3


def test_a_swarms_configuration_is_written_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    config = parse_config(merge(["--engine", "swarm", "--swarm.min_workers", "3", "--announce", "a.example:1"])[0])
    path.write_text(to_toml(config))
    assert parse_config(merge([str(path)])[0]) == config


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as held:
        held.bind(("0.0.0.0", 0))
        held.listen()
        yield held.getsockname()[1]


def test_a_port_that_is_taken_is_told_before_anything_is_prepared(
    taken: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(["train", "--engine", "swarm", "--port", str(taken), "--out", str(out)]) == 1
    assert f"port {taken} is taken" in (said := capsys.readouterr().err) and "--port" in said
    assert not out.exists()


@pytest.mark.parametrize(
    "given",
    [
        ["--announce", "no-such-name.invalid:4000"],
        ["--announce", ""],
        ["--announce", "1.2.3.4:99999"],
        ["--announce", "/ip4/1.2.3.4"],
        ["--host", "300.1.2.3"],
        ["--host", ""],
    ],
)
def test_an_address_that_cannot_be_is_told_before_there_is_a_run_folder(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert run(["train", "--engine", "swarm", *given, "--out", str(tmp_path / "run")]) == 2
    assert given[0][2:] in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_announced_name_needs_its_port(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["train", "--engine", "swarm", "--announce", "my.example", "--out", str(tmp_path / "run")]) == 2
    assert "has no port" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_is_told_before_anything_is_prepared(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for out, said in ((tmp_path / "full", "is not an empty folder"), (Path("/proc/x/y"), "cannot be written")):
        with pytest.raises(ConfigError, match=said):
            check_out(replace(CONFIG, out=str(out)))
    check_out(replace(CONFIG, out=str(tmp_path / "a" / "b")))
    assert [path.name for path in tmp_path.iterdir()] == ["full"]  # nothing is left of the try


def test_a_swarm_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert run(["train", "--engine", "swarm"]) == 2
    assert "under torchrun" in capsys.readouterr().err


@pytest.mark.parametrize("off", [-61.0, 61.0])
def test_a_clock_that_is_off_by_a_minute_is_refused_with_the_remedy(off: float) -> None:
    check_clock(time.time() + 20.0)
    with pytest.raises(ConfigError, match=r"6[01] s (ahead of|behind) the swarm's: set it, with `timedatectl"):
        check_clock(time.time() + off)


def test_a_joiner_takes_the_description_that_the_runs_key_has_signed_and_most_members_tell() -> None:
    key, other = RunKey.create(), RunKey.create()

    def signed(config: RunConfig, corpus: str = "ab" * 32, by: RunKey = key) -> RunDescription:
        plain = RunDescription.of(config, corpus)
        return replace(plain, signature=sign(by.seed, "run", plain.lasting_bytes()).hex())

    first, longer = signed(CONFIG), signed(replace(CONFIG, steps=800))
    assert first.signature == longer.signature, "steps may change on resume, without the run's key"
    assert agreed_description([longer, first, first], key.public) == first
    lies = [
        RunDescription.of(CONFIG, "ab" * 32),
        signed(replace(CONFIG, seed=5), by=other),
        replace(signed(CONFIG), corpus="cd" * 32),
    ]
    assert agreed_description([*lies, first], key.public) == first
    with pytest.raises(ConfigError, match="3 members of the swarm describe its run, and the run's key has signed none"):
        agreed_description(lies, key.public)


def test_a_false_description_of_the_text_is_asked_of_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    corpus = small_corpus(tmp_path / "there")[1]
    asked = []

    def fetch(name: str, path: Path, most_bytes: int = 0, digest: str | None = None, *, first: int = 0) -> None:
        asked.append((name, first))
        shutil.copyfile(corpus_files(corpus)[name], path)
        if name == "meta.json" and first == 0:
            path.write_text("{}")

    config = replace(
        CONFIG, data=replace(CONFIG.data, source="swarm", cache_dir=str(tmp_path / "here"), sequence_length=32)
    )
    description = RunDescription.of(config, corpus.digest)
    _, text = receive_text(config, description, fetch, 1, lambda *_: None, hosts=2)
    assert text.shared.digest == corpus.digest and ("meta.json", 1) in asked


def test_a_full_disk_while_receiving_is_one_sentence(tmp_path: Path) -> None:
    def fetch(name: str, path: Path, most_bytes: int = 0, digest: str | None = None, *, first: int = 0) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    config = replace(CONFIG, data=replace(CONFIG.data, source="swarm", cache_dir=str(tmp_path)))
    description = RunDescription.of(config, "ab" * 32)
    with pytest.raises(DataError, match=r"cannot be received into .*No space left .* no incomplete file is left"):
        receive_text(config, description, fetch, 1, lambda *_: None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_checkpoints_without_room_are_refused_before_the_text_is_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    corpus = small_corpus(tmp_path / "there")[1]
    asked = []

    def fetch(name: str, path: Path, most_bytes: int = 0, digest: str | None = None, *, first: int = 0) -> None:
        asked.append(name)
        shutil.copyfile(corpus_files(corpus)[name], path)

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    config = replace(CONFIG, data=replace(CONFIG.data, source="swarm", cache_dir=str(tmp_path / "here")))
    with pytest.raises(ConfigError, match=r"no room for this run's checkpoints in .*--checkpoint.interval 0"):
        receive_text(config, RunDescription.of(config, corpus.digest), fetch, 1, lambda *_: None)
    assert not [name for name in asked if name.endswith(".bin")]


def test_a_disk_without_room_is_told_before_anything_is_received(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(
        ConfigError,
        match=r"no room for the text in .*: 1\.5 MB needed, 10 bytes free; make room, or choose another place",
    ):
        check_space(tmp_path / "not" / "there", 1_500_000, "the text")


def test_an_earlier_end_counts_no_more_once_a_worker_has_joined_again() -> None:
    finished = {"inner_steps": 100, "stopped_early": True, "rounds": 9, "rounds_failed": 0, "anchor_digest": "d"}
    ended = event("worker_finished", **finished, members=[])
    assert history_of([ended]).workers[3].ended is not None
    assert history_of([ended, event("joined", step=120, rounds=12)]).workers[3].ended is None


def test_a_swarm_that_began_anew_takes_back_what_all_workers_here_had_done_since() -> None:
    steps = [event("step", worker, step=number, tokens=number) for worker in (0, 1) for number in (10, 20)]
    again = event("resumed", 0, step=15, workers=0, new=False)
    workers = history_of([*steps, again]).workers
    assert [list(workers[number].columns.until(None)["step"]) for number in (0, 1)] == [[10, 15], [10]]
    assert [workers[number].progress.step for number in (0, 1)] == [15, 10]


def test_the_summary_of_nothing_is_a_summary() -> None:
    assert summarize(CONFIG, history_of([]))["workers"] == 1
