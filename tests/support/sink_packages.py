"""wandb and trackio as far as a sink sees them: they write down what they are told."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Session:
    """What both packages' `init` return."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.rows, self.metrics = options, list[tuple[int | None, dict[str, Any]]](), list[Any]()
        self.summary: dict[str, Any] = {}
        self.finished = False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics.append((name, step_metric))

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        json.dumps(row)
        self.rows.append((step, row))

    def finish(self) -> None:
        self.finished = True


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> list[Session]:
    """Put a stand-in in the package's place; returns the sessions that it opens."""
    sessions: list[Session] = []
    module: Any = ModuleType(name)

    def init(**options: Any) -> Session:
        sessions.append(Session(options))
        return sessions[-1]

    module.init = init
    module.Settings = dict
    monkeypatch.setitem(sys.modules, name, module)
    return sessions


def broken_packages(folder: Path) -> Path:
    """A folder for PYTHONPATH: a wandb that never comes back, and a trackio that cannot start."""
    folder.mkdir()
    (folder / "wandb.py").write_text(
        "import time\nSettings = dict\ndef init(**options):\n    while True:\n        time.sleep(60)\n"
    )
    (folder / "trackio.py").write_text("def init(**options):\n    raise ConnectionError('no such server')\n")
    return folder
