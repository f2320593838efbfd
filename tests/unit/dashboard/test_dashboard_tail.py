"""The event log as the dashboard reads it: half lines, damage, truncation, replacement, other versions."""

import json
import math
import os
from pathlib import Path

from diloco.dashboard.runs import QuickLines, Run
from diloco.history.events import StepEvent
from diloco.history.log import EventReader
from support.dashboard_runs import append, calm_events, event, started, write_run


def test_each_event_is_read_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    tail = EventReader(write_run(tmp_path, [started(0, 1)]), QuickLines)
    assert [entry.type for entry in tail.read()[0]] == ["worker_started"]
    line = json.dumps(event("step", 1.0, step=10, loss=3.0)) + "\n"
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line[:20])
    assert tail.read() == ([], False)
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line[20:])
    [logged] = tail.read()[0]
    assert isinstance(logged, StepEvent) and logged.step == 10
    assert tail.damaged_lines == 0


def test_lines_that_are_no_events_are_counted_and_left_out(tmp_path: Path) -> None:
    write_run(tmp_path, [started(0, 1)])
    bad = [b"{", b"[1, 2]", b'"text"', b"null", b'{"type": 3, "worker": 0, "time": 1}', b"\xff\xfe", b"[" * 100_000,
           b'{"type": "step", "worker": 0, "time": NaN}', b'{"type": "step", "worker": 1e9, "time": 1}']  # fmt: skip
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"\n".join(bad) + b"\n")
    append(tmp_path, event("step", 1.0, step=10, loss=3.0))
    tail = EventReader(tmp_path, QuickLines)
    assert [entry.type for entry in tail.read()[0]] == ["worker_started", "step"]
    assert tail.damaged_lines == len(bad)


def test_a_number_that_is_nan_is_a_gap_and_the_rest_of_the_line_is_read(tmp_path: Path) -> None:
    write_run(tmp_path, [started(0, 1), event("step", 1.0, step=10, loss=math.nan, tokens=5)])
    tail = EventReader(tmp_path, QuickLines)
    last = tail.read()[0][-1]
    assert isinstance(last, StepEvent)
    assert (last.step, last.loss, last.tokens) == (10, None, 5) and tail.damaged_lines == 0


def test_a_truncated_or_replaced_log_is_read_from_its_beginning(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path, calm_events(steps=100)), "run")
    assert run.state()["step"] == 100
    write_run(tmp_path, calm_events(steps=40))
    assert run.state()["step"] == 40
    other = tmp_path / "other"
    write_run(other, calm_events(steps=80))
    (other / "events.jsonl").replace(tmp_path / "events.jsonl")
    assert run.state()["step"] == 80
    (tmp_path / "events.jsonl").unlink()
    assert run.state()["step"] == 80, "what was read stays"
    os.utime(tmp_path / "config.toml", (0, 0))
    empty = Run(tmp_path, "run").state()
    assert empty["status"] == "empty" and "has not started" in empty["problems"][0]


def test_a_log_of_a_newer_version_says_so_and_shows_what_is_known(tmp_path: Path) -> None:
    events = calm_events(steps=40)
    run = Run(write_run(tmp_path, events), "run")
    append(tmp_path, event("step", 50.0, step=50, loss=1.0) | {"v": 7}, event("teleport", 51.0, where={"x": [1]}))
    state = run.state()
    assert "version 7" in state["problems"][0]
    assert state["workers"][0]["step"] == 50


def test_events_with_fields_of_another_shape_are_counted_and_harm_nothing(tmp_path: Path) -> None:
    run = Run(write_run(tmp_path, calm_events(steps=40)), "run")
    append(
        tmp_path,
        event("round", 60.0, sequence="x"),
        event("round", 60.0, sequence=9, step=41, members=7, mean_norm=1.0),
        event("members", 60.0, present=[{"member": "?"}]),
        event("resumed", 60.0),
        event("member_lost", 60.0),
        event("sample", 60.0, text={"a": 1}),
        event("step", 60.0, step=50, loss="many", tokens=10**400),
        event("starting", 61.0),
    )
    state = run.state()
    assert state["step"] == 40
    assert any("unknown fields" in problem for problem in state["problems"])
    run.series(None, 100, None)
    run.rounds(None, 5)
