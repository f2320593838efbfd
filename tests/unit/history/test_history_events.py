"""Events as classes: written and read the same, logs of other versions, and the documentation of every field."""

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import diloco
from diloco.history.events import (
    EVENT_TYPES,
    MemberReport,
    RoundEndedEvent,
    RoundMember,
    StepEvent,
    UnknownEvent,
    event_fields,
    make_event,
    read_event,
)
from diloco.history.log import EventLog, read_events
from diloco.history.run_history import LiveHistory, RunHistory
from support.dashboard_runs import append, calm_events, event, write_run
from support.golden_runs import RUNS, outputs, write_golden_run

DOCUMENT = (Path(diloco.__file__).parents[2] / "docs" / "events.md").read_text()
LINE: dict[str, Any] = {"v": 1, "time": 5.0, "worker": 1}


def test_an_event_is_read_as_it_was_written_with_what_others_told(tmp_path: Path) -> None:
    report = MemberReport(inner_steps=3, loss=math.nan, extra={"validation_loss": math.nan, "done": True})
    member = RoundMember(worker=2, anchor_digest="a", report=report)
    written = RoundEndedEvent(sequence=4, mean_norm=1.5, members=[member], refused={"1": "late"}, bytes_sent=7)
    log = EventLog(tmp_path, 3)
    log.emit(written)
    log.close()
    json.loads((tmp_path / "events.jsonl").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    [read] = read_events(tmp_path)
    assert isinstance(read, RoundEndedEvent) and read.worker == 3
    told = read.members[0].report
    assert (told.inner_steps, told.loss, dict(told.extra)) == (3, None, {"validation_loss": None, "done": True})
    assert event_fields(read) == event_fields(written)


def test_what_a_newer_version_writes_is_kept() -> None:
    newer = read_event({**LINE, "type": "step", "step": 5, "warmth": [1, {"deep": 2}]})
    assert isinstance(newer, StepEvent) and newer.extra == {"warmth": [1, {"deep": 2}]}
    assert event_fields(newer)["warmth"] == [1, {"deep": 2}]
    unknown = read_event({**LINE, "type": "teleported", "where": "sea"})
    assert isinstance(unknown, UnknownEvent) and (unknown.name, unknown.problem) == ("teleported", None)
    assert unknown.extra == {"where": "sea"} and unknown.time == 5.0


def test_what_an_earlier_version_did_not_write_has_its_default() -> None:
    old = read_event({**LINE, "type": "round", "sequence": 3, "step": 20, "norm": 1.0})
    assert isinstance(old, RoundEndedEvent)
    assert (old.members, old.similarity, old.bytes_sent, old.dropped) == ((), None, 0, False)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ({"type": "step"}, "it has no step"),
        ({"type": "step", "step": "ten"}, "step is 'ten', which is no count"),
        ({"type": "step", "step": True}, "step is True, which is no count"),
        ({"type": "round", "sequence": 1, "members": [{"worker": []}]}, "members is worker is [], which is no count"),
        ({"type": "round", "sequence": 1, "refused": 7}, "refused is 7, which is no table"),
        ({"type": "corpus", "shard_tokens": "many"}, "shard_tokens is 'many', which is no list"),
    ],
)
def test_fields_that_are_not_those_of_the_type_are_named_and_the_event_is_left_out(
    line: dict[str, Any], problem: str
) -> None:
    read = read_event(LINE | line)
    assert isinstance(read, UnknownEvent) and read.problem == problem
    history = RunHistory()
    history.update(read)
    assert (history.events, history.refused_events, history.workers) == (1, 1, {})
    with pytest.raises(ValueError, match="can be made of"):
        make_event(line["type"], line)


def test_a_number_that_is_none_is_a_gap() -> None:
    read = read_event({**LINE, "type": "step", "step": 5, "loss": "low", "gradient_norm": 10**400})
    assert isinstance(read, StepEvent) and (read.loss, read.gradient_norm) == (None, None)


def test_every_type_and_field_is_documented_and_nothing_else() -> None:
    rows: dict[str, str] = {}
    for names, content in re.findall(r"^\| (`[a-z_`, ]+) \| (.*) \|$", DOCUMENT, re.MULTILINE):
        rows |= dict.fromkeys(re.findall(r"`([a-z_]+)`", names), content)
    assert rows.keys() == EVENT_TYPES.keys()
    everywhere = {"time", "worker", "extra"}
    for type_, kind in EVENT_TYPES.items():
        missing = [each.name for each in fields(kind) if each.name not in everywhere]
        missing = [name for name in missing if f"`{name}`" not in rows[type_]]
        assert not missing, f"{type_}: docs/events.md does not say what {', '.join(missing)} is"


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("size", [1, 7, 400])
def test_a_log_that_is_followed_gives_the_same_as_one_that_is_read_as_a_whole(
    name: str, size: int, tmp_path: Path
) -> None:
    """`size`: bytes that come at a time; half a line is never an event."""
    whole = write_golden_run(tmp_path / "whole" / name, name)
    data = (whole / "events.jsonl").read_bytes()
    live = LiveHistory(whole)
    log = whole / "events.jsonl"
    log.write_bytes(b"")
    pieces = [data[first : first + size * 97] for first in range(0, len(data), size * 97)]
    for piece in pieces:
        with log.open("ab") as file:
            file.write(piece)
        live.refresh()
    expected = outputs(whole, name)
    assert live.history.events == len(data.splitlines()) and live.history.refused_events == 0
    from diloco.dashboard.series import series
    from diloco.dashboard.snapshot import snapshot
    from diloco.history.figures import RunFigures

    figures = RunFigures(live.history)
    assert _json(series(figures, 30)) == _json({key: expected["series"][key] for key in series(figures, 30)})
    ended = whole / "summary.json"
    page = snapshot(figures, RUNS[name][0].values(), json.loads(ended.read_text()) if ended.exists() else None, 0.0)
    for key in ("rounds", "communication", "workers", "members", "notes", "validation", "step", "tokens", "health"):
        assert _json(page[key]) == _json(expected["state"][key]), key
    assert live.history.notes.lines == expected["notes"]


def _json(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_a_log_that_is_replaced_begins_a_new_history(tmp_path: Path) -> None:
    live = LiveHistory(write_run(tmp_path, calm_events(steps=40)))
    assert live.refresh() and RunHistory is type(live.history)
    assert live.history.local_workers[0].reached == 40 and not live.refresh()
    write_run(tmp_path, calm_events(steps=20))
    assert live.refresh() and live.beginnings == 1
    assert live.history.local_workers[0].reached == 20
    append(tmp_path, event("step", 30.0, step=30))
    assert live.refresh() and live.history.local_workers[0].reached == 30
