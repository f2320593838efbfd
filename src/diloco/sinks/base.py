"""The sink contract: a sink copies the numbers in events.jsonl to an experiment tracker.

It runs in its own process (process.py), so it may be slow and it may raise: an event that it could not write is counted
and skipped. Steps may go back when a run is resumed from an earlier checkpoint.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar


@dataclass(frozen=True)
class Point:
    """One number of a run, named as in train/loss, of one worker or (None) of all workers together."""

    name: str
    value: float
    step: int
    time: float  # seconds since 1970
    worker: int | None = None

    @property
    def label(self) -> str:
        """The name with the worker, for a sink that keeps all workers in one list."""
        return self.name if self.worker is None else f"{self.name}/worker_{self.worker}"


class Sink(ABC):
    """A tracker that a run is copied to. `folder` is the sink's folder inside the run folder, and exists; the tracker's
    package is imported in `start`."""

    package: ClassVar[str]  # must be installed; also the name of an extra of diloco

    def __init__(self, run: Path, folder: Path) -> None:
        self.run = run
        self.folder = folder

    @abstractmethod
    def start(self, config: Mapping[str, object], *, resumed: bool) -> None:
        """Open the sink, with the run's options by dotted key; `resumed`: continue what was written before."""

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None: ...

    @abstractmethod
    def rewind(self, worker: int | None, step: int) -> None:
        """Make the later points of a worker void: it has gone back to `step`."""

    @abstractmethod
    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the summary of a run that has ended."""

    @abstractmethod
    def flush(self) -> None:
        """Make the written points survive a kill."""

    @abstractmethod
    def close(self) -> None: ...
