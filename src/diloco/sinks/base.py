"""The sink contract: where else a run is written to. A sink reads what events.jsonl says, and nothing else.

It runs in a process of its own (process.py), so it may be slow, and it may raise: an event that it could not write is
counted and left out. It must cope with steps that go back, after a run was resumed from an earlier checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Point:
    """One number of a run: its name as in train/loss, and whose it is (None: of all workers together)."""

    name: str
    value: float
    step: int
    time: float  # seconds since 1970
    worker: int | None = None

    @property
    def label(self) -> str:
        """The name, for a sink that keeps all workers in one list."""
        return self.name if self.worker is None else f"{self.name}/worker_{self.worker}"


class Sink(ABC):
    """`folder` is this sink's own, inside the run folder; it exists. The package is imported in `start`."""

    package: ClassVar[str]  # what must be installed; diloco has an extra of that name

    def __init__(self, run: Path, folder: Path) -> None:
        self.run, self.folder = run, folder

    @abstractmethod
    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        """Open it, with the run's options by dotted key; `again`: something was written before, go on with it."""

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None: ...

    @abstractmethod
    def rewind(self, worker: int | None, step: int) -> None:
        """A worker has gone back to `step`: what was written for it from there on no longer counts."""

    @abstractmethod
    def finish(self, summary: Mapping[str, object]) -> None:
        """The run has ended, with these numbers."""

    @abstractmethod
    def flush(self) -> None:
        """What was written must survive a kill."""

    @abstractmethod
    def close(self) -> None: ...
