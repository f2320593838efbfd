"""events.jsonl: what happened in a run, one JSON object a line, append-only.

The single source for the terminal display, the summary, plots and sinks. Every line has `v` (the schema's version),
`time` (seconds since 1970), `worker` and `type`; docs/events.md lists the types and their fields. A line is one system
call on a file opened for appending, so that all workers of a machine can share the file, and a reader never takes half
a line for a whole one: a line still being written is read later, a line that was cut is left out with a warning.
"""

import errno
import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from diloco.history.renumbering import follow_numbers

EVENTS_VERSION = 1
EVENTS_FILE = "events.jsonl"

Event = dict[str, Any]
logger = logging.getLogger(__name__)


_MOST_WAITING = 10_000


class EventLog:
    """Writes one worker's events, from any thread. A full disk does not end training: what cannot be written waits, and
    is written with the next event that can be (then `events_delayed` tells of it)."""

    def __init__(self, run_folder: Path, worker: int) -> None:
        self.worker = worker
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._delayed, self._since, self._reason = 0, 0.0, ""
        self._cut = False  # the last line was written in part
        self._file = os.open(run_folder / EVENTS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, type_: str, **fields: object) -> None:
        """Append one event. Numbers that JSON does not know (nan, inf) become null."""
        with self._lock:
            self._waiting.append(self._line(type_, fields))
            self._write_waiting()

    def _line(self, type_: str, fields: dict[str, object]) -> bytes:
        event = {"v": EVENTS_VERSION, "time": round(time.time(), 4), "worker": self.worker, "type": type_}
        plain = {name: _plain(value) for name, value in fields.items()}
        return (json.dumps(event | plain, allow_nan=False) + "\n").encode()

    def _write_waiting(self) -> None:
        while self._waiting:
            try:
                self._write(self._waiting[0])
            except OSError as error:
                if not self._delayed:
                    self._since, self._reason = time.time(), error.strerror or str(error)
                    logger.error("events cannot be written: %s; training goes on, and they wait", error)
                self._delayed += 1
                return
            self._waiting.popleft()
        if self._delayed:
            told = {"events": self._delayed, "reason": self._reason, "seconds": time.time() - self._since}
            logger.warning("events can be written again: %d had to wait", self._delayed)
            self._delayed = 0
            self._waiting.append(self._line("events_delayed", told))
            self._write_waiting()

    def _write(self, line: bytes) -> None:
        """One line in one system call. After a part of it was written, it is written again on a line of its own."""
        data = b"\n" + line if self._cut else line
        written = os.write(self._file, data)
        self._cut = 0 < written < len(data)
        if written < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Writes what waits, if it can be written by now."""
        with self._lock:
            self._write_waiting()
            os.close(self._file)


class NoEvents(EventLog):
    """The log of the other ranks of a worker: its first rank writes the events."""

    def __init__(self) -> None:
        self.worker = -1

    def emit(self, type_: str, **fields: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def end_cut_line(run_folder: Path) -> None:
    """Before a resumed run writes: end a line that a kill has cut, so that new events start on their own line."""
    path = run_folder / EVENTS_FILE
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.write(b"\n")


def _plain(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


class EventReader:
    """Reads what was appended since the last call; half a line at the end is left for the next one."""

    def __init__(self, run_folder: Path) -> None:
        self._path = run_folder / EVENTS_FILE
        self._offset = 0

    def skip(self) -> None:
        """Leave out what is there already."""
        self._offset = self._path.stat().st_size if self._path.exists() else 0

    def new_events(self) -> Iterator[Event]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._offset += end
        for line in data[:end].splitlines():
            if not line:
                continue
            try:
                event = json.loads(line)
            except (ValueError, RecursionError):
                event = None
            if _is_event(event):
                yield event
            else:  # a kill or a full disk can cut a line; the next event is then on the same line
                _warn_once(self._path, line)


def _is_event(event: object) -> bool:
    """Whether it has what every line has; readers rely on that, and on nothing else."""
    return (
        isinstance(event, dict)
        and isinstance(event.get("type"), str)
        and isinstance(event.get("worker"), int)
        and isinstance(event.get("time"), int | float)
    )


@lru_cache(maxsize=256)
def _warn_once(path: Path, line: bytes) -> None:
    """Once, though display, summary and report all read the file."""
    logger.warning("%s: a damaged line is left out: %.80r", path, line)


def read_events(run_folder: Path) -> list[Event]:
    """All events of a run so far, each under the last number of its worker."""
    return follow_numbers(list(EventReader(run_folder).new_events()))
