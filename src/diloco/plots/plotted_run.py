"""What a figure is drawn from: the history of a run, and its logged steps in rows."""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from diloco.errors import ConfigError
from diloco.history.events import EVENTS_VERSION
from diloco.history.log import EVENTS_FILE
from diloco.history.rounds import RoundHistory
from diloco.history.run_history import LiveHistory, RunHistory


class LoggedStep(NamedTuple):
    """A logged step of a worker, or its end, which has no loss; nan where a number is not known."""

    step: int
    loss: float
    tokens: float
    bytes_sent: float
    elapsed_seconds: float
    sync_seconds: float


@dataclass(frozen=True)
class PlottedRun:
    """A run with its name in the figure."""

    name: str
    history: RunHistory

    @cached_property
    def steps(self) -> list[LoggedStep]:
        """The logged steps of this machine's workers, and the end of a worker as a step without a loss."""
        rows: list[LoggedStep] = []
        for worker in self.history.local_workers.values():
            columns = worker.columns.until(None)
            logged = columns["logged"] > 0
            values = [columns[name][logged] for name in LoggedStep._fields]
            rows += [LoggedStep(int(step), *map(float, rest)) for step, *rest in zip(*values, strict=True)]
        last = max((row.step for row in rows), default=0)
        for worker in self.history.local_workers.values():
            if worker.ended is not None and worker.ended.inner_steps > last:
                now = worker.progress
                counters = (now.tokens, now.bytes_sent, now.elapsed_seconds, now.sync_seconds)
                rows.append(LoggedStep(worker.ended.inner_steps, math.nan, *counters))
        return rows

    @cached_property
    def validations(self) -> dict[int, float]:
        """Validation losses by step; in a swarm every worker tells the same."""
        values = self.history.validations.until(None)
        return {int(step): float(loss) for step, loss in zip(values["step"], values["loss"], strict=True)}

    @cached_property
    def rounds(self) -> list[RoundHistory]:
        """The rounds with a mean or a failure: a last round, in which no worker had work, has neither."""
        return self.history.rounds.until(None)


def read_run(folder: Path, name: str) -> PlottedRun:
    """Raises ConfigError for a folder that is no run, or has nothing to plot."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    if not (folder / EVENTS_FILE).is_file():
        raise ConfigError(f"{folder} is not a run folder: it has no {EVENTS_FILE}")
    live = LiveHistory(folder)
    live.refresh()
    newest = live.reader.newest_version
    if newest > EVENTS_VERSION:
        raise ConfigError(
            f"{folder} was written by a newer version of diloco (events of version {newest}, this one reads "
            f"{EVENTS_VERSION}): update diloco"
        )
    run = PlottedRun(name, live.history)
    if not any(not math.isnan(row.elapsed_seconds) for row in run.steps):
        raise ConfigError(f"{folder} has no steps yet: there is nothing to plot before the first one is logged")
    return run
