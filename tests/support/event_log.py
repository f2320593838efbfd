"""The lines of a run's event log as the tests read them: plain JSON, apart from the classes of the package."""

import json
from pathlib import Path
from typing import Any

from diloco.history.log import EVENTS_FILE
from diloco.history.renumbering import follow_numbers

Event = dict[str, Any]
"""A line of the log."""


def read_events(folder: Path) -> list[Event]:
    """All lines of a run's log, each under the last number of its worker."""
    text = (folder / EVENTS_FILE).read_text(encoding="utf-8") if (folder / EVENTS_FILE).exists() else ""
    return follow_numbers([json.loads(line) for line in text.splitlines() if line])
