"""The lines of a run's event log as the tests read them: plain JSON, apart from the classes of the package."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from diloco.history.events import read_event
from diloco.history.log import EVENTS_FILE, follow_numbers
from diloco.history.run_history import RunHistory

Event = dict[str, Any]
"""A line of the log."""


def read_events(folder: Path) -> list[Event]:
    """All whole lines of a run's log so far, each under the last number of its worker; a kill may have cut one."""
    path = folder / EVENTS_FILE
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    return follow_numbers([event for line in lines if (event := _event(line)) is not None])


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "type" in event else None


def history_of(lines: Iterable[Mapping[str, Any]], *, elastic: bool = False) -> RunHistory:
    """The history of events as lines of a log have them, in their order."""
    history = RunHistory(elastic=elastic)
    for line in follow_numbers([dict(line) for line in lines]):
        history.update(read_event(line))
    return history
