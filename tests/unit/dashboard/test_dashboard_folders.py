"""Run folders that are gone, linked, unreadable or hostile: the page says so, and the server goes on."""

import copy
import os
import random
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from diloco.dashboard.metrics import exposition
from diloco.dashboard.runs import Run, RunFolder
from diloco.errors import ConfigError
from support.dashboard_runs import append, calm_events, event, round_events, started, step, write_run
from support.dashboard_server import serving


def test_a_run_that_is_deleted_stays_on_the_page_with_a_message_and_leaves_the_list(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, calm_events(steps=40))
    runs = RunFolder(tmp_path)
    assert runs.find()["one"].state()["step"] == 40
    shutil.rmtree(tmp_path / "one")
    assert list(runs.find()) == ["two"]
    gone = runs.run("one")
    assert gone is not None
    assert gone.state()["step"] == 40 and "is gone" in gone.state()["problems"][0]
    write_run(tmp_path / "one", calm_events(steps=20))  # perhaps with the same inode
    assert gone.state()["step"] == 20 and gone.state()["problems"] == []
    shutil.rmtree(tmp_path)
    assert runs.find() == {}


@pytest.mark.parametrize("obstacle", ["folder", "pipe", "endless"])
def test_a_log_that_is_no_file_is_a_message(tmp_path: Path, obstacle: str) -> None:
    run = Run(write_run(tmp_path, calm_events(steps=40)), "run")
    assert run.state()["step"] == 40
    log = tmp_path / "events.jsonl"
    log.unlink()
    if obstacle == "folder":
        log.mkdir()
    elif obstacle == "pipe":
        os.mkfifo(log)
    else:
        log.symlink_to("/dev/zero")
    state = run.state()
    assert state["step"] == 40 and "events.jsonl cannot be read" in state["problems"][0]


def test_links_show_no_run_twice_and_lead_nowhere_for_ever(tmp_path: Path) -> None:
    write_run(tmp_path / "group" / "run", calm_events(steps=20))
    for name, target in {"again": "group/run", "self": ".", "group/up": "..", "none": "nowhere"}.items():
        (tmp_path / name).symlink_to(target)
    assert list(RunFolder(tmp_path).find()) in (["group/run"], ["again"])


def test_names_that_cannot_be_shown_are_told_apart_and_served(tmp_path: Path) -> None:
    for name in (b"a\xff", b"a\xfe", b"new\nline", "right\u202eleft".encode()):
        write_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)), calm_events(steps=20))
    names = list(RunFolder(tmp_path).find())
    assert len(names) == 4 and all(name.isprintable() for name in names)
    with serving(tmp_path) as served:
        for name in names:
            assert served.json(f"/api/run/{quote(name)}/state")["step"] == 20


def test_a_file_is_refused_as_such(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(ConfigError, match="it is a file"):
        RunFolder(tmp_path / "x")


def test_times_that_cannot_be_are_damage_and_a_clock_that_goes_back_is_not(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path, calm_events(steps=40)), "run")
    append(tmp_path, step(0, 50) | {"time": 1e300}, step(0, 50) | {"time": -5}, step(0, 60) | {"time": 1_600_000_000})
    state = run.state()
    assert state["step"] == 40 and "2 damaged lines" in state["problems"][0]
    assert state["workers"][0]["step"] == 60
    assert len(run.series(None, 500, None)["loss"]["step"]) == 5


ODD: list[Any] = [
    None, -1, 10**400, 1e308, "x" * 300, "<script>", [], {}, [[[]]], True, "NaN", [None] * 9, {"a": [1]}, -(2**63), 0.5,
]  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_events_with_any_fields_break_no_answer(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    listed = {"member": 1, "where": "a", "step": 7, "loss": 3.0, "contributed": 2, "state": "training", "link": "relay"}
    events = [
        *calm_events(steps=60), *round_events(3, 3, 20),
        event("members", 70.0, present=[listed]), event("member_lost", 71.0, member=1, peer="p", reason="r"),
        event("resumed", 72.0, step=40, rounds=2, workers=2, workers_before=2, notes=[]), step(0, 70),
        event("worker_finished", 80.0, inner_steps=70, tokens=1, confirmed=[]), event("corpus", 83.0, skipped={}),
        event("sample", 81.0, prompt="a", text="b"), event("state_arriving", 82.0, received_bytes=1, all_bytes=2),
        started(1, 2, 84.0),
    ]  # fmt: skip

    def odd() -> Any:
        return copy.deepcopy(chance.choice(ODD))

    for _ in range(60):
        entry = chance.choice(events)
        name = chance.choice(sorted(set(entry) - {"v", "time", "worker", "type"}))
        entry[name] = odd()
        for member in entry["members"] if isinstance(entry.get("members"), list) else ():
            if isinstance(member, dict):
                member[chance.choice(["worker", "report", "norm", "anchor_digest"])] = odd()
            if isinstance(member, dict) and isinstance(member.get("report"), dict):
                member["report"][chance.choice(sorted(member["report"]) or ["tokens"])] = copy.deepcopy(
                    chance.choice(ODD)
                )
    chance.shuffle(events)
    run = Run(write_run(tmp_path, events, engine=chance.choice(["swarm", "local"])), "run")
    for until in (None, 1_700_000_030.0):
        state = run.state(until)
        run.series(until, 100, None)
        run.rounds(until, 10)
        assert exposition([state])
    run.config()
    run.brief()
