"""The current state of a run, from its events: no terminal, no clock, no files."""

from pathlib import Path

from diloco.history.counts import RunCounts
from diloco.history.log import Event
from diloco.history.notes import RunNotes
from diloco.history.progress import DOING, seconds_left
from diloco.training.config.run import RunConfig


class RunView(RunCounts):
    """The counts, and what the display tells besides."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(elastic=config.engine == "swarm")
        self.config = config
        self.folder: Path | None = None
        self.stopping = False
        self.doing_seconds = 0.0
        """For how long the workers have been `doing` the same."""
        self.expected_workers = config.workers
        self._notes = RunNotes()

    def update(self, event: Event) -> None:
        super().update(event)
        if event["type"] == "worker_started" and not self.elastic:
            self.expected_workers = event["workers"]
        self._notes.update(event, self.workers)

    @property
    def notes(self) -> list[str]:
        """What happened besides steps and rounds, one line each."""
        return self._notes.lines

    @property
    def doing(self) -> str | None:
        """What the workers do before the first step is logged; None from then on."""
        if any(worker.has_logged for worker in self.workers.values()):
            return None
        if len(self.workers) < self.expected_workers:
            return "starting the workers"
        taken = [one.first_step_seconds for one in self.workers.values() if one.first_step_seconds is not None]
        if len(taken) == len(self.workers):
            interval = self.config.training.log_interval
            shown = f"every {interval} steps" if interval < self.config.steps else "at the end"
            return f"training: the first step took {max(taken):.1f} s, the loss is shown {shown}"
        state = next(one.state for one in self.workers.values() if one.first_step_seconds is None)
        return DOING.get(state, state or DOING["started"])

    @property
    def seconds_left(self) -> float | None:
        return seconds_left(self.workers.values(), self.config.steps, elastic=self.elastic)


def duration(seconds: float | None) -> str:
    """1:05, or 2:03:04 from an hour on."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
