"""A worker that gets another number after a network split is one worker in every reader, with its whole history."""

from pathlib import Path
from typing import Any

import pytest

from diloco.cli.display.live import RunView
from diloco.dashboard.metrics import exposition
from diloco.dashboard.runs import Run
from diloco.history.events import StepEvent
from diloco.history.log import EventLog
from diloco.history.run_history import LiveHistory, read_history
from diloco.sinks.follower import points_of
from diloco.training.config.run import RunConfig
from diloco.training.processes.swarm_worker import SwarmEvents
from diloco.training.records.summary import summarize
from support.event_log import Event, read_events
from support.recorded_runs import append, event, member, merged, run_folder, started, step

CONFIG = RunConfig(engine="swarm")
ME, OTHER = "12D3KooWmine", "12D3KooWother"
"""Both had the number 4; the other one keeps it, and is met before this worker has its new number, 7."""


def with_members(worker: int, sequence: int, number: int, *present: tuple[int, int]) -> Event:
    """`present`: number and steps of each member."""
    numbers = [one for one, _ in present]
    told = {"contributors": numbers, "roster": numbers, "members": [member(*one, 4.0) for one in present]}
    by_number = {str(one): 0.5 for one in numbers}
    more = {"agreement": by_number, "replaced": dict.fromkeys(by_number, 0.0), "signatures": 2}
    return merged(worker, sequence, number, **told, **more, time=1000.0 + number)


BEFORE = [
    event("swarm", 4, time=1000.0, name="worker-0", peer=ME, founded=False),
    started(4) | {"workers": 2},
    event("joined", 4, time=1001.0, step=0, rounds=0),
    step(4, 10, 4.0),
    event("round_posted", 4, sequence=0, fragment=0, step=10),
    with_members(4, 0, 10, (0, 10), (4, 10)),
    event("members", 4, time=1011.0, present=[{"member": 0, "step": 10}, {"member": 4, "step": 10}]),
    event("member_joined", 4, time=1012.0, member=4, peer=OTHER, label="other"),
]
AFTER = [
    event("renumbered", 7, time=1013.0, before=4, member=7, peer=ME),
    step(7, 20, 3.0),
    event("round_posted", 7, sequence=1, fragment=0, step=20),
    with_members(7, 1, 20, (0, 20), (4, 15), (7, 20)),
    event("members", 7, time=1021.0, present=[{"member": n, "step": s} for n, s in ((0, 20), (4, 15), (7, 20))]),
]


def test_the_events_after_a_new_number_are_written_under_it(tmp_path: Path) -> None:
    log, events = EventLog(tmp_path, 4), SwarmEvents()
    events.write_into(log)
    log.emit(StepEvent(step=10))
    events("renumbered", {"before": 4, "number": 7, "peer": ME})
    log.emit(StepEvent(step=20))
    log.close()
    raw = [line for line in (tmp_path / "events.jsonl").read_text().splitlines() if '"worker": 4' in line]
    assert len(raw) == 1, "the log is only appended to"
    assert [one["worker"] for one in read_events(tmp_path)] == [7, 7, 7]


def test_a_log_is_read_under_the_last_number_and_another_worker_keeps_its_own(tmp_path: Path) -> None:
    run_folder(
        tmp_path, [*BEFORE, *AFTER, event("renumbered", 9, time=1030.0, before=7, member=9, peer=ME)], ended=False
    )
    log = read_events(tmp_path)
    rounds = [one for one in log if one["type"] == "round"]
    assert {one["worker"] for one in log} == {9}
    assert [one["contributors"] for one in rounds] == [[0, 9], [0, 4, 9]]
    for name in ("agreement", "replaced"):
        assert [list(one[name]) for one in rounds] == [["0", "9"], ["0", "4", "9"]]
    assert next(one for one in log if one["type"] == "member_joined")["member"] == 4, "that is the other worker"
    assert [(one["before"], one["member"]) for one in log if one["type"] == "renumbered"] == [(4, 7), (7, 9)]


def test_summary_and_waterfall_count_one_worker_with_its_whole_history(tmp_path: Path) -> None:
    history = read_history(run_folder(tmp_path, [*BEFORE, *AFTER], ended=False))
    summary = summarize(CONFIG, history)
    assert (summary["local_workers"], summary["members_seen"]) == (1, 3)
    assert (summary["local_tokens"], summary["tokens"]) == (2000, 2000 + 2000 + 1500)
    assert summary["local_rounds"] == 2 and history.clock.starts == 1
    mine = [span for span in history.spans() if span.worker == 7]
    assert {span.sequence for span in mine} == {0, 1}
    assert {span.sequence for span in history.spans() if span.worker == 4} <= {1}


@pytest.mark.parametrize("live", [True, False])
def test_the_page_shows_one_worker_with_its_whole_history(tmp_path: Path, live: bool) -> None:
    """Live, the page has shown the worker under its earlier number before the log says that it has another."""
    run = Run(run_folder(tmp_path, BEFORE if live else [*BEFORE, *AFTER], ended=False), "run")
    if live:
        assert [one["worker"] for one in run.state()["workers"]] == [0, 4]
        append(tmp_path, AFTER)
    state = run.state()
    workers: dict[int, dict[str, Any]] = {one["worker"]: one for one in state["workers"]}
    assert {number: one["local"] for number, one in workers.items()} == {0: False, 4: False, 7: True}
    assert workers[7]["step"] == 20 and workers[4]["step"] == 15 and state["tokens"] == 5500
    assert run.series(None, 100, {7})["workers"]["7"]["step"] == [10.0, 20.0]
    assert [
        [one["worker"] for one in each["workers"] if not one["elsewhere"]] for each in run.rounds(None, 9)["rounds"]
    ] == [[7], [7]]
    assert {one["member"]: one["peer"] for one in state["members"]}[4] == OTHER
    assert state["events"] == len(BEFORE) + len(AFTER) and not state["problems"]
    assert 'diloco_worker_step{run="run",worker="7"} 20' in exposition([state])


def test_the_live_display_and_a_sink_go_on_with_one_worker(tmp_path: Path) -> None:
    """What a sink has been told under the earlier number stays: later points have the new one."""
    live, told = LiveHistory(run_folder(tmp_path, BEFORE, ended=False)), []
    told += [point for one in live.new_events() for point in points_of(one, live.history)]
    append(tmp_path, AFTER)
    again = [points_of(one, live.history) for one in live.new_events()]
    assert live.beginnings == 1 and len(again) == len(BEFORE) + len(AFTER)
    told += [point for points in again[len(BEFORE) :] for point in points]
    view = RunView(CONFIG, live.history)
    assert [worker.number for worker in view.local] == [7] and view.local[0].step == 20
    assert "worker 4 is worker 7 from now on" in live.history.notes.lines[-1]
    losses = [(point.worker, point.step) for point in told if point.name == "train/loss"]
    assert losses == [(4, 10), (0, 10), (7, 20), (0, 20), (4, 15)]
