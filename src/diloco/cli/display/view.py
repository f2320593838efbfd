"""The current state of a run as the terminal shows it, from its history: no terminal, no clock, no files."""

from pathlib import Path

from diloco.history.figures import RunFigures
from diloco.history.run_history import RunHistory
from diloco.history.workers import DOING
from diloco.training.config.run import RunConfig


class RunView(RunFigures):
    """The figures of a run now, and what the display tells besides."""

    def __init__(self, config: RunConfig, history: RunHistory) -> None:
        super().__init__(history, elastic=config.engine == "swarm")
        self.config = config
        self.folder: Path | None = None
        self.stopping = False
        self.doing_seconds = 0.0
        """The seconds for which the workers have been `doing` the same."""

    @property
    def time_left(self) -> float | None:
        """The seconds until the run's last step."""
        return self.seconds_left(self.config.steps)

    @property
    def sync_share(self) -> float:
        """The share of the time that was spent on rounds, averaged over the workers of this machine."""
        shares = [worker.progress.sync_share for worker in self.history.local_workers.values()]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def workers_here(self) -> int:
        """The number of workers that this machine is to have."""
        started = self.history.started
        return self.config.workers if started is None or self.elastic else started.workers

    @property
    def doing(self) -> str | None:
        """The words for what the workers do before the first step is logged; None from then on."""
        workers = self.history.local_workers.values()
        if any(worker.has_logged for worker in workers):
            return None
        if len(workers) < self.workers_here:
            return DOING["starting"]
        taken = [worker.first_step_seconds for worker in workers if worker.first_step_seconds is not None]
        if len(taken) == len(workers):
            interval = self.config.training.log_interval
            shown = f"every {interval} steps" if interval < self.config.steps else "at the end"
            return f"training: the first step took {max(taken):.1f} s, the loss is shown {shown}"
        state = next(worker.state for worker in workers if worker.first_step_seconds is None)
        return DOING.get(state, state or DOING["starting"])


def duration(seconds: float | None) -> str:
    """1:05, or 2:03:04 from an hour on."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
