"""The events of a run that a figure is drawn from: read, checked, and without what a resume has taken back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from diloco.errors import ConfigError
from diloco.history import resuming as history
from diloco.history.log import EVENTS_FILE, EVENTS_VERSION, Event, read_events

_READ = {
    "step": ("step",),
    "round": ("sequence", "step"),
    "round_posted": ("sequence", "step"),
    "validation": ("step",),
    "worker_finished": ("inner_steps",),
    "worker_failed": ("inner_steps",),
    "resumed": ("step", "workers"),
}
"""Whole numbers without which an event of a type says nothing."""


@dataclass(frozen=True)
class PlottedRun:
    """The events of a run, without those that a resume has taken back."""

    name: str
    events: Sequence[Event]

    @classmethod
    def of(cls, name: str, log: Sequence[Event]) -> "PlottedRun":
        return cls(name, history.current([event for event in log if _is_event(event)]))

    @cached_property
    def steps(self) -> list[Event]:
        """Logged steps, and the end of a worker as a step without a loss."""
        logged = [event for event in self.events if event["type"] == "step"]
        last = max((event["step"] for event in logged), default=0)
        ends = [event for event in self.events if event["type"] in ("worker_finished", "worker_failed")]
        return logged + [event | {"step": event["inner_steps"]} for event in ends if event["inner_steps"] > last]

    @cached_property
    def validations(self) -> dict[int, float]:
        """Validation losses by step; in a swarm every worker tells the same."""
        told = {event["step"]: event.get("loss") for event in self.events if event["type"] == "validation"}
        return {step: number(loss) for step, loss in sorted(told.items())}

    @cached_property
    def rounds(self) -> list[Event]:
        """With a mean or a failure: a last round, in which no worker had work, has neither."""
        return [
            event
            for event in self.events
            if event["type"] == "round" and not (event.get("mean_norm") is None and event.get("failure") is None)
        ]


def read_run(folder: Path, name: str) -> PlottedRun:
    """Raises ConfigError for a folder that is no run, or has nothing to plot."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    if not (folder / EVENTS_FILE).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {EVENTS_FILE}")
    log = read_events(folder)
    versions = [number(event.get("v")) for event in log if isinstance(event, dict)]
    newer = max((version for version in versions if math.isfinite(version)), default=1)
    if newer > EVENTS_VERSION:
        raise ConfigError(
            f"{folder} was written by a newer version of diloco (events of version {newer:g}, this one reads "
            f"{EVENTS_VERSION}): update diloco"
        )
    run = PlottedRun.of(name, log)
    if not any(event["type"] == "step" for event in run.steps):
        raise ConfigError(f"{folder} has no steps yet: there is nothing to plot before the first one is logged")
    return run


def _is_event(event: object) -> bool:
    """With the fields that are read of its type; what else is in a log is left out."""
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        return False
    whole = ("worker", *_READ.get(event["type"], ()))
    return math.isfinite(number(event.get("time"))) and all(type(event.get(name)) is int for name in whole)


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
