"""Reads events.jsonl while a run writes it: each call returns the events that were appended since the last one.

Half a line at the end is left for the next call. A line that cannot be an event is counted and left out. A file that
has become shorter, or was replaced, is read from its beginning (`restarted`). One that cannot be read, or is gone,
changes nothing: `problem` says why. Nothing is ever written.
When a worker has got another number, the log is read again from its beginning, and all of its events have the new one.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from diloco.history.log import EVENTS_FILE, EVENTS_VERSION, Event
from diloco.history.renumbering import follow_numbers, is_renumbering

_DECODER = msgspec.json.Decoder()  # several times as fast as json
_SHALLOW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LONG_LINE = 8192
_OF_ALL_WORKERS = ("cosines", "members")
"""Fields of a round that every worker of this machine reports: large, and decoded once."""
_CHUNK_BYTES = 16 << 20
_LONGEST_LINE = 64 << 20
_MOST_WORKERS = 1 << 20
_LATEST = 1e11  # seconds since 1970: the year 5138


class EventTail:
    """The event log of one run."""

    def __init__(self, run: Path) -> None:
        self.path = run / EVENTS_FILE
        self.damaged_lines = 0
        self.newest_version = EVENTS_VERSION
        """The largest `v` that was read: above EVENTS_VERSION, a newer diloco wrote the log."""
        self.problem: str | None = None
        """Why the log could not be read at the last call."""
        self._offset = 0
        self._file_id: tuple[int, int] | None = None
        self._rounds: set[bytes] = set()  # whose large fields have been decoded
        self._events = 0  # read so far
        self._renumberings: dict[int, Event] = {}  # by their place among the events

    def read(self) -> tuple[list[Event], bool]:
        """New events, at most _CHUNK_BYTES of them, and whether the log was replaced and is read from its start."""
        try:
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe must not block
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise OSError("not a file")
                self.problem = None
                return self._read(file)
        except OSError as error:
            self.problem, self._file_id = error.strerror or str(error), None
            return [], False

    def _read(self, file: BinaryIO) -> tuple[list[Event], bool]:
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
            self.damaged_lines, end = self.damaged_lines + 1, len(data)
            data = b""
        self._offset += end
        lines = data[:end].split(b"\n")
        events = [event for line in lines if line and (event := self._parse(line)) is not None]
        first, self._events = self._events, self._events + len(events)
        found = {place: one for place, one in enumerate(events, first) if is_renumbering(one)}
        if first and not found.keys() <= self._renumberings.keys():  # what was read has numbers of before
            known = self._renumberings | found
            self._restart(file_id)
            self._renumberings = known
            return self._read(file)[0], True
        self._renumberings |= found
        later = [one for place, one in self._renumberings.items() if place >= self._events]
        return follow_numbers(events, later), restarted

    def _restart(self, file_id: tuple[int, int] | None) -> bool:
        was_read, self._offset, self._file_id = self._offset > 0, 0, file_id
        self.damaged_lines, self.newest_version = 0, EVENTS_VERSION
        self._events, self._renumberings = 0, {}
        self._rounds.clear()
        return was_read

    def _decode(self, line: bytes) -> Any:
        try:
            return self._decode_quickly(line)
        except msgspec.DecodeError:  # perhaps NaN, which is no JSON; this project writes null
            return json.loads(line, parse_constant=lambda _: None)

    def _decode_quickly(self, line: bytes) -> Any:
        if len(line) < _LONG_LINE:
            return _DECODER.decode(line)
        fields = _SHALLOW.decode(line)
        if bytes(fields.get("type", b"")) == b'"round"':
            sequence = bytes(fields.get("sequence", b""))
            if sequence in self._rounds:
                fields = {name: value for name, value in fields.items() if name not in _OF_ALL_WORKERS}
            elif bytes(fields.get("members", b"[]")) != b"[]":
                self._rounds.add(sequence)
        return {name: _DECODER.decode(value) for name, value in fields.items()}

    def _parse(self, line: bytes) -> Event | None:
        try:
            event = self._decode(line)
            known = (
                isinstance(event["type"], str)
                and isinstance(event["worker"], int)
                and -1 <= event["worker"] < _MOST_WORKERS
                and 0 <= event["time"] < _LATEST
            )
        except (msgspec.DecodeError, ValueError, TypeError, KeyError, RecursionError):
            known = False
        if not known:
            self.damaged_lines += 1
            return None
        if event["type"] == "resumed":  # rounds may be repeated
            self._rounds.clear()
        if isinstance(version := event.get("v"), int):
            self.newest_version = max(self.newest_version, version)
        return event  # type: ignore[no-any-return]
