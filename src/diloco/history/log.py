"""events.jsonl: what happened in a run, one JSON object a line, append-only.

Every line has `v` (the schema's version), `time` (seconds since 1970), `worker` and `type`; events.py has the types and
their fields. A line is one system call on a file opened for appending, so that all workers of a machine can share the
file, and a reader never takes half a line for a whole one: a line still being written is read later, a line that was
cut is left out with a warning. Nothing but this module writes or reads the file.

In a swarm a worker that gets another number keeps its history: readers show all of its events under its last number.
The event `renumbered` has the number `before`, and is written under the new one, as are all later events of that
worker. What the log says of `before` from there on is about another worker. Torch-free.
"""

import errno
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from diloco.history.events import EVENTS_VERSION, Event, EventsDelayedEvent, event_fields, read_event

EVENTS_FILE = "events.jsonl"
_MOST_WAITING = 10_000
_CHUNK_BYTES = 16 << 20
_LONGEST_LINE = 64 << 20
_MOST_WORKERS = 1 << 20
_MOST_WARNINGS = 100
_LATEST = 1e11  # seconds since 1970: the year 5138
logger = logging.getLogger(__name__)
Line = dict[str, Any]
Decode = Callable[[bytes], Any]
"""The JSON of a line; raises ValueError, TypeError or RecursionError if it is none."""
_LISTS_OF_WORKERS = ("contributors", "roster", "disagreeing", "measured_by", "told_by", "withheld")
_TABLES_BY_WORKER = ("refused", "clipped", "replaced", "agreement", "doubtful")
_LISTS_OF_REPORTS = {"members": "worker", "confirmed": "worker", "present": "member"}
"""The field of each report that has its worker's number."""
_MOST_DIGITS = 9  # of a worker's number


class EventLog:
    """Writes one worker's events, from any thread. A full disk does not end training: what cannot be written waits, and
    is written with the next event that can be (then an EventsDelayedEvent tells of it)."""

    def __init__(self, run_folder: Path, worker: int) -> None:
        self.worker = worker
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._delayed = 0
        self._since = 0.0
        self._reason = ""
        self._cut = False  # the last line was written in part
        self._file = os.open(run_folder / EVENTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, event: Event) -> None:
        """Append one event, with the time and this worker's number."""
        with self._lock:
            self._waiting.append(self._line(event))
            self._write_waiting()

    def _line(self, event: Event) -> bytes:
        line = {"v": EVENTS_VERSION, "time": round(time.time(), 4), "worker": self.worker, "type": event.type}
        return (json.dumps(line | event_fields(event), allow_nan=False) + "\n").encode()

    def _write_waiting(self) -> None:
        while self._waiting:
            try:
                self._write(self._waiting[0])
            except OSError as error:
                if not self._delayed:
                    self._since = time.time()
                    self._reason = error.strerror or str(error)
                    logger.error("events cannot be written: %s; training goes on, and they wait", error)
                self._delayed += 1
                return
            self._waiting.popleft()
        if self._delayed:
            delay = EventsDelayedEvent(events=self._delayed, reason=self._reason, seconds=time.time() - self._since)
            logger.warning("events can be written again: %d had to wait", self._delayed)
            self._delayed = 0
            self._waiting.append(self._line(delay))
            self._write_waiting()

    def _write(self, line: bytes) -> None:
        """Write one line in one system call. A line that was written in part comes again on a line of its own."""
        data = b"\n" + line if self._cut else line
        written = os.write(self._file, data)
        self._cut = 0 < written < len(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Write what waits, if it can be written by now."""
        with self._lock:
            self._write_waiting()
            os.close(self._file)


class NoEvents(EventLog):
    """The log of the other ranks of a worker: its first rank writes the events."""

    def __init__(self) -> None:
        self.worker = -1

    def emit(self, event: Event) -> None:
        """Write nothing."""

    def close(self) -> None:
        """Close nothing."""


def end_cut_line(run_folder: Path) -> None:
    """End a line that a kill has cut, before a resumed run writes: new events then start on their own line."""
    path = run_folder / EVENTS_FILE
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def decode_line(line: bytes) -> Any:
    """Return the JSON of a line; NaN and Infinity, which are no JSON and which this project never writes, are null."""
    return json.loads(line, parse_constant=lambda _: None)


class EventReader:
    """Reads the events of a run that were appended since the last call, each under the last number of its worker.

    Half a line at the end is left for the next call. A line that cannot be an event is counted and left out. A file
    that has become shorter, or was replaced, is read from its beginning, and so is one in which a worker has got
    another number. A file that cannot be read, or is gone, changes nothing: `problem` says why.
    """

    def __init__(self, run_folder: Path, decoder: Callable[[], Decode] = lambda: decode_line) -> None:
        """`decoder` makes the function that decodes the lines, anew each time that the file is read from its
        beginning."""
        self.path = run_folder / EVENTS_FILE
        self.damaged_lines = 0
        self.newest_version = EVENTS_VERSION
        """The largest `v` that was read: above EVENTS_VERSION, a newer diloco wrote the log."""
        self.problem: str | None = None
        """Why the log could not be read at the last call."""
        self._decoder = decoder
        self._decode = decoder()
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._lines = 0  # read so far
        self._renumberings: dict[int, Line] = {}  # by their place among the lines

    def skip(self) -> None:
        """Leave out what is there already."""
        if self.path.exists():
            status = self.path.stat()
            self._offset = status.st_size
            self._file_id = (status.st_dev, status.st_ino)

    def read(self) -> tuple[list[Event], bool]:
        """Return new events, at most _CHUNK_BYTES of them, and whether the log is read from its beginning again."""
        lines, restarted = self._new_lines()
        return [read_event(line) for line in lines], restarted

    def _new_lines(self) -> tuple[list[Line], bool]:
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not block
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError("not a file")
                self.problem = None
                return self._read(file)
        except OSError as error:
            self.problem = error.strerror or str(error)
            self._file_id = None
            return [], False

    def _read(self, file: BinaryIO) -> tuple[list[Line], bool]:
        status = os.fstat(file.fileno())
        file_id = (status.st_dev, status.st_ino)
        restarted = self._restart(file_id) if file_id != self._file_id or status.st_size < self._offset else False
        if status.st_size == self._offset:
            return [], restarted
        file.seek(self._offset)
        data = file.read(_CHUNK_BYTES)
        while b"\n" not in data and len(data) < _LONGEST_LINE and (more := file.read(_CHUNK_BYTES)):
            data += more
        end = data.rfind(b"\n") + 1
        if not end and len(data) >= _LONGEST_LINE:
            self.damaged_lines += 1
            end = len(data)
            data = b""
        self._offset += end
        lines = [line for text in data[:end].split(b"\n") if text and (line := self._parse(text)) is not None]
        first = self._lines
        self._lines += len(lines)
        renumberings = {place: line for place, line in enumerate(lines, first) if is_renumbering(line)}
        if first and not renumberings.keys() <= self._renumberings.keys():  # the lines read before have older numbers
            all_renumberings = self._renumberings | renumberings
            self._restart(file_id)
            self._renumberings = all_renumberings
            return self._read(file)[0], True
        self._renumberings |= renumberings
        later = [line for place, line in self._renumberings.items() if place >= self._lines]
        return follow_numbers(lines, later), restarted

    def _restart(self, file_id: tuple[int, int] | None) -> bool:
        was_read = self._offset > 0
        self._offset = 0
        self._file_id = file_id
        self.damaged_lines = 0
        self.newest_version = EVENTS_VERSION
        self._lines = 0
        self._renumberings = {}
        self._decode = self._decoder()
        return was_read

    def _parse(self, text: bytes) -> Line | None:
        try:
            line = self._decode(text)
            valid = (
                isinstance(line["type"], str)
                and isinstance(line["worker"], int)
                and -1 <= line["worker"] < _MOST_WORKERS
                and 0 <= line["time"] < _LATEST
            )
        except (ValueError, TypeError, KeyError, RecursionError):
            valid = False
        if not valid:  # a kill or a full disk can cut a line; the next event is then on the same line
            self.damaged_lines += 1
            if self.damaged_lines <= _MOST_WARNINGS:
                _warn_once(self.path, text[:200])
            return None
        if isinstance(version := line.get("v"), int):
            self.newest_version = max(self.newest_version, version)
        return line  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _warn_once(path: Path, line: bytes) -> None:
    """Warn once of a line, though display, summary and report all read the file."""
    logger.warning("%s: a damaged line is left out: %.80r", path, line)


def read_events(run_folder: Path) -> list[Event]:
    """Return all events of a run so far."""
    reader = EventReader(run_folder)
    events: list[Event] = []
    while True:
        more, restarted = reader.read()
        if restarted:
            events = []
        if not more:
            return events
        events += more


# A worker's last number


@dataclass(frozen=True)
class LastNumber:
    """The last number of a worker in this log, and its peer's name."""

    number: int
    peer: str


LastNumbers = dict[int, LastNumber]
"""The last number of each worker, by the number that it has at one place of the log."""


def follow_numbers(log: Sequence[Line], later: Sequence[Line] = ()) -> list[Line]:
    """Return the events of a log, each under the last number of its worker. `later` are `renumbered` events after
    these."""
    followed = list(log)
    numbers = LastNumbers()
    for event in reversed(later):
        _go_back_before(event, numbers)
    for index in range(len(followed) - 1, -1, -1):
        event = followed[index]
        if numbers and isinstance(event, dict):  # a log may hold other JSON
            followed[index] = _with_last_numbers(event, numbers)
        if is_renumbering(event):
            _go_back_before(event, numbers)
    return followed


def is_renumbering(event: object) -> bool:
    """Return whether a line of the log is a whole `renumbered` event."""
    if not isinstance(event, dict) or event.get("type") != "renumbered":
        return False
    return isinstance(event.get("before"), int) and isinstance(event.get("worker"), int)


def _go_back_before(renumbered: Line, numbers: LastNumbers) -> None:
    """Change the last numbers by the number after this event into those by the number before it."""
    after = numbers.pop(renumbered["worker"], LastNumber(renumbered["worker"], ""))
    numbers[renumbered["before"]] = LastNumber(after.number, str(renumbered.get("peer") or ""))


def _with_last_numbers(event: Line, numbers: LastNumbers) -> Line:
    """Return the event with the last numbers, wherever it names a worker of this log."""

    def last(number: Any) -> Any:
        return numbers[number].number if isinstance(number, int) and number in numbers else number

    changed: Line = {"worker": last(event.get("worker"))}
    for name in _LISTS_OF_WORKERS:
        if isinstance(event.get(name), list):
            changed[name] = [last(number) for number in event[name]]
    for name in _TABLES_BY_WORKER:
        if isinstance(event.get(name), dict):
            changed[name] = {
                str(last(int(key)) if key.isdecimal() and len(key) <= _MOST_DIGITS else key): value
                for key, value in event[name].items()
            }
    for name, key in _LISTS_OF_REPORTS.items():
        if isinstance(event.get(name), list):
            changed[name] = [
                report | {key: last(report.get(key))} if isinstance(report, dict) else report for report in event[name]
            ]
    if event.get("type") != "renumbered" and isinstance(event.get("member"), int):
        renumbered = numbers.get(event["member"])  # two workers had this number: the peer tells which one is meant
        if renumbered is not None and renumbered.peer and renumbered.peer == event.get("peer"):
            changed["member"] = renumbered.number
    return event | changed
