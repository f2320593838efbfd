"""What a display shows before the first step is logged: what the workers do, and no zeros."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from diloco.cli.display import live
from diloco.cli.display.live import Display, RunView, plain_line, render
from diloco.core.config import SyncConfig
from diloco.history.log import EVENTS_FILE
from diloco.history.run_history import LiveHistory
from diloco.training.config.run import RunConfig
from support.event_log import Event, history_of

CONFIG = RunConfig(steps=40, sync=SyncConfig(num_inner_steps=10, codec="int8"))


def event(type_: str, worker: int = 0, **fields: Any) -> Event:
    return {"v": 1, "time": 0.0, "worker": worker, "type": type_, **fields}


def both(type_: str, **fields: Any) -> list[Event]:
    return [event(type_, worker, **fields) for worker in (0, 1)]


STARTED = both("worker_started", workers=2, parameters=1_630_000, unigram_perplexity=321.0)
FIRST_STEPS = both("first_step", seconds=3.21)
SECONDS = {"elapsed_seconds": 1.0, "sync_seconds": 0.1}
LOGGED = both("step", step=10, loss=4.0, tokens=100, rounds=1, bytes_sent=5, **SECONDS)


def starting(doing: str) -> list[Event]:
    return [*STARTED, *both("starting", doing=doing)]


def view_of(events: list[Event]) -> RunView:
    return RunView(CONFIG, history_of(events))


def picture(view: RunView) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(render(view))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("events", "doing"),
    [
        ([], "starting the workers"),
        (STARTED[:1], "starting the workers"),
        (starting("validation"), "measuring the validation loss before the first step"),
        (starting("first step"), "taking the first step"),
        (starting("compiling"), "compiling the model"),
        ([*starting("first step"), FIRST_STEPS[0]], "taking the first step"),
        ([*starting("compiling"), *FIRST_STEPS], "the first step took 3.2 s, the loss is shown every 10 steps"),
        ([*STARTED, *LOGGED, *starting("first step")], "taking the first step"),
    ],
)
def test_before_the_first_logged_step_the_display_says_what_the_workers_do(events: list[Event], doing: str) -> None:
    view = view_of(events)
    for shown in (picture(view), plain_line(view)):
        assert doing in shown and "/40" in shown
        assert "0 tokens/s" not in shown and "0.0%" not in shown, f"zeros:\n{shown}"


def test_once_a_step_is_logged_the_numbers_are_shown() -> None:
    view = view_of([*starting("first step"), *FIRST_STEPS, *LOGGED])
    assert view.doing is None and "200 tokens/s" in plain_line(view) and "200 tokens/s" in picture(view)


def test_without_a_terminal_what_the_workers_do_is_told_when_it_changes(tmp_path: Path) -> None:
    log = tmp_path / EVENTS_FILE
    console = Console(file=io.StringIO(), width=200)
    with Display(console, CONFIG) as display:
        history = LiveHistory(tmp_path)
        poll = display.follow(history)
        for events in (starting("validation"), both("starting", doing="compiling")):
            with log.open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in events)
            history.refresh()
            poll()
            poll()
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert told.count("measuring the validation loss") == told.count("compiling the model") == 1


def test_a_run_shorter_than_the_interval_of_its_log_shows_its_last_loss(tmp_path: Path) -> None:
    short = replace(CONFIG, steps=7)
    last = both("step", step=7, loss=4.0, tokens=100, rounds=1, bytes_sent=5, **SECONDS)
    console = Console(file=io.StringIO(), width=200)
    with Display(console, short) as display:
        history = LiveHistory(tmp_path)
        poll = display.follow(history)
        for events in ([*STARTED, *FIRST_STEPS], last):
            with (tmp_path / EVENTS_FILE).open("a") as file:
                file.writelines(json.dumps(one) + "\n" for one in events)
            history.refresh()
            poll()
    assert isinstance(console.file, io.StringIO)
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("step")]
    assert told[0] == "step 0/7  training: the first step took 3.2 s, the loss is shown at the end"
    assert len(told) == 2 and told[1].startswith("step 7/7  loss 4.000"), "the loss, once"


def test_shared_cores_are_noted_and_a_worker_alone_says_nothing() -> None:
    alone = event("threads", threads=2, cores=2, workers=1)
    assert view_of([alone]).history.notes.lines == []
    shared = event("threads", threads=1, cores=2, workers=2)
    assert view_of([alone, shared, event("threads", 1, threads=1, cores=2, workers=2)]).history.notes.lines == [
        "cores: 2 workers share this machine's 2 cores, 1 thread each (--threads)"
    ]
    assert (
        view_of([shared, alone]).history.notes.lines[-1]
        == "cores: 1 worker has this machine's 2 cores, 2 threads each (--threads)"
    )


def test_without_a_terminal_the_start_is_told_before_any_worker_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starting the workers takes ten seconds and more: a line at once, and others with the seconds."""
    now = [100.0]
    monkeypatch.setattr(live.time, "monotonic", lambda: now[0])
    console = Console(file=io.StringIO(), width=200)
    with Display(console, CONFIG) as display:
        history = LiveHistory(tmp_path)
        poll = display.follow(history)
        for _ in range(25):
            poll()
            now[0] += 1.0
    assert isinstance(console.file, io.StringIO)
    told = [line for line in console.file.getvalue().splitlines() if line.startswith("step")]
    assert told == [
        "step 0/40  starting the workers",
        "step 0/40  starting the workers (10 s so far)",
        "step 0/40  starting the workers (20 s so far)",
    ]


def test_after_a_resume_the_workers_are_starting_and_no_speed_of_an_earlier_start_is_told(tmp_path: Path) -> None:
    with (tmp_path / EVENTS_FILE).open("w") as file:
        file.writelines(json.dumps(one) + "\n" for one in [*STARTED, *FIRST_STEPS, *LOGGED])
    console = Console(file=io.StringIO(), width=200)
    with Display(console, CONFIG) as display:
        history = LiveHistory(tmp_path)
        history.refresh()
        poll = display.follow(history, resumed=True)
        poll()
        with (tmp_path / EVENTS_FILE).open("a") as file:
            again = [one | {"time": one["time"] + 1000} for one in starting("first step")]
            file.writelines(json.dumps(one) + "\n" for one in again)
        history.refresh()
        poll()
    assert isinstance(console.file, io.StringIO)
    told = [line.partition("  ")[2] for line in console.file.getvalue().splitlines() if line.startswith("step")]
    assert told == ["starting the workers", "taking the first step"]


def test_in_a_terminal_the_start_moves_and_has_its_seconds() -> None:
    view = view_of(starting("validation"))
    pictures = []
    for view.doing_seconds in (0.0, 0.25, 12.0):
        pictures.append(picture(view))
    assert pictures[0] != pictures[1] and "(12 s so far)" in pictures[2]
