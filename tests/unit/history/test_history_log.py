"""events.jsonl: whole lines, from any number of processes, and nothing that JSON does not know."""

import errno
import json
import logging
import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from diloco.errors import WorkerFailed
from diloco.history.events import EVENTS_VERSION, Event, EventsDelayedEvent, SampleEvent, StepEvent
from diloco.history.log import EVENTS_FILE, EventLog, EventReader, end_cut_line, read_events
from diloco.training.config.run import RunConfig
from diloco.training.processes.start import _DiskWatch, summarize_run

_WRITERS = 4
_EVENTS = 400


def sample(text: str) -> SampleEvent:
    return SampleEvent(text=text)


def told(event: Event) -> str:
    assert isinstance(event, SampleEvent)
    return event.text


def steps_of(events: Sequence[Event]) -> list[int]:
    return [event.step for event in events if isinstance(event, StepEvent)]


def _write_many(folder: Path, worker: int) -> None:
    log = EventLog(folder, worker)
    for number in range(_EVENTS):
        log.emit(StepEvent(step=number, extra={"padding": "x" * (number % 50) * 200}))  # up to two and a half pages
    log.close()


def test_lines_from_several_processes_at_once_are_whole_and_in_each_writers_order(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(tmp_path, worker)) for worker in range(_WRITERS)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    lines = (tmp_path / EVENTS_FILE).read_bytes().split(b"\n")
    assert lines.pop() == b""
    events = [json.loads(line) for line in lines]
    assert len(events) == _WRITERS * _EVENTS
    for worker in range(_WRITERS):
        mine = [event for event in events if event["worker"] == worker]
        assert [event["step"] for event in mine] == list(range(_EVENTS))
        assert all(len(event["padding"]) == event["step"] % 50 * 200 for event in mine)


def test_every_line_has_the_version_the_time_the_worker_and_the_type(tmp_path: Path) -> None:
    before = time.time()
    EventLog(tmp_path, 3).emit(SampleEvent(text="a\nb\u2028c\r"))
    event = json.loads((tmp_path / EVENTS_FILE).read_text())
    assert event["v"] == EVENTS_VERSION == 1
    assert before - 1 <= event["time"] <= time.time() + 1
    assert (event["worker"], event["type"], event["text"]) == (3, "sample", "a\nb\u2028c\r")


def test_numbers_that_json_does_not_know_become_null_at_any_depth(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0)
    more = {"more": [math.inf, {"deep": (-math.inf, 1.5)}], "members": {1: math.nan}}
    log.emit(StepEvent(step=1, loss=math.nan, extra=more))
    line = (tmp_path / EVENTS_FILE).read_text()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert event["loss"] is None
    assert event["more"] == [None, {"deep": [None, 1.5]}]
    assert event["members"] == {"1": None}


def test_a_reader_never_returns_half_a_line_and_returns_it_once_it_is_whole(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.read()[0] == []  # there is no file yet
    line = b'{"v": 1, "time": 0, "worker": 0, "type": "step", "step": 5}\n'
    with (tmp_path / EVENTS_FILE).open("ab", buffering=0) as file:
        for cut in range(1, len(line)):
            file.write(line[:cut])
            assert reader.read()[0] == []
            file.write(line[cut:])
            assert [event.type for event in reader.read()[0]] == ["step"]
        assert reader.read()[0] == []


def test_a_reader_returns_only_what_is_new(tmp_path: Path) -> None:
    log, reader = EventLog(tmp_path, 0), EventReader(tmp_path)
    log.emit(sample("first"))
    assert [told(event) for event in reader.read()[0]] == ["first"]
    log.emit(sample("second"))
    log.emit(sample("third"))
    assert [told(event) for event in reader.read()[0]] == ["second", "third"]
    assert [told(event) for event in read_events(tmp_path)] == ["first", "second", "third"]


def test_a_line_that_was_cut_for_ever_is_left_out_with_a_warning_and_the_rest_is_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = EventLog(tmp_path, 0)
    log.emit(sample("before"))
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write('{"v": 1, "ti')  # its writer was killed here
    log.emit(sample("swallowed"))
    log.emit(sample("after"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert [told(event) for event in read_events(tmp_path)] == ["before", "after"]
    assert caplog.text.count("damaged line") == 1


@pytest.mark.parametrize("cut", ["", '{"v": 1, "ti'])
def test_what_is_written_after_a_kill_does_not_stand_on_the_cut_line(tmp_path: Path, cut: str) -> None:
    EventLog(tmp_path, 0).emit(sample("before"))
    with (tmp_path / EVENTS_FILE).open("a") as file:
        file.write(cut)
    end_cut_line(tmp_path)
    EventLog(tmp_path, 0).emit(sample("after"))
    assert [told(event) for event in read_events(tmp_path)] == ["before", "after"]
    assert (tmp_path / EVENTS_FILE).read_text().count("\n") == (3 if cut else 2)


class FullDisk:
    """os.write on a disk that has so many bytes left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self._write = 10**9, os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(file, data[: self.left])
        self.left -= written
        return written


def test_events_wait_for_room_on_a_full_disk_and_none_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, log = FullDisk(monkeypatch), EventLog(tmp_path, 0)
    log.emit(StepEvent(step=1))
    disk.left = 30  # a part of the next line
    for step in range(2, 6):
        log.emit(StepEvent(step=step))
    assert steps_of(read_events(tmp_path)) == [1]
    disk.left = 10**9
    log.emit(StepEvent(step=6))
    *steps, last = read_events(tmp_path)
    assert steps_of(steps) == [1, 2, 3, 4, 5, 6]
    assert isinstance(last, EventsDelayedEvent)
    assert (last.events, last.reason) == (4, "No space left on device")
    disk.left = 0
    log.emit(StepEvent(step=7))
    disk.left = 10**9
    log.close()
    assert steps_of(read_events(tmp_path))[-1] == 7


def test_a_full_disk_is_told_once_with_the_last_step_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    EventLog(tmp_path, 0).emit(StepEvent(step=120))
    notes: list[str] = []
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr("diloco.training.processes.start.time.monotonic", lambda: next(clock))
    watch = _DiskWatch(tmp_path, notes.append)
    watch.look()
    assert notes == []
    monkeypatch.setattr("diloco.training.processes.start.disk_is_full", lambda _: True)
    watch.look()
    watch.look()
    assert len(notes) == 1 and "is full: the last event written is of step 120. Training goes on" in notes[0]


def test_a_summary_that_cannot_be_written_is_told_with_step_and_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    EventLog(tmp_path, 0).emit(StepEvent(step=120))
    monkeypatch.setattr("diloco.training.processes.start.write_summary", full)
    with pytest.raises(WorkerFailed, match=r"come to their end.*\(No space left on device\).*step 120.*no checkpoint"):
        summarize_run(tmp_path, RunConfig(), None)
