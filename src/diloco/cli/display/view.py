"""The current state of a run, from its events: no terminal, no clock, no files."""

from dataclasses import dataclass
from pathlib import Path

from diloco.cli.display.notes import RunNotes
from diloco.training.config.run import RunConfig
from diloco.training.records.events import Event

_DOING = {  # by a worker's state before its first step is over
    "validation": "measuring the validation loss before the first step",
    "first step": "taking the first step",
    "compiling": "compiling the model and taking the first step, which may take minutes",
    "started": "starting the workers",
    "joined": "taking the first step",
    "waiting": "waiting for more workers (swarm.min_workers)",
}


@dataclass
class MemberView:
    """A member of a swarm, local or remote, as last reported."""

    where: str = ""
    step: int = 0
    loss: float | None = None
    contributed: int | None = None
    """The last round that contains its contribution."""
    state: str = ""


@dataclass
class WorkerView:
    """A local worker, from its last events."""

    step: int = 0
    loss: float | None = None
    tokens: int = 0
    elapsed_seconds: float = 0.0
    sync_seconds: float = 0.0
    bytes_sent: int = 0
    state: str = ""
    first_step_seconds: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.elapsed_seconds if self.elapsed_seconds else 0.0

    @property
    def sync_share(self) -> float:
        return self.sync_seconds / self.elapsed_seconds if self.elapsed_seconds else 0.0


class RunView:
    """The sum of the events so far."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.folder: Path | None = None
        self.stopping = False
        self.expected_workers = config.workers
        self.parameters = 0
        self.unigram_perplexity: float | None = None
        self.workers: dict[int, WorkerView] = {}
        self.validations: list[tuple[int, float]] = []
        self._notes = RunNotes(config)
        self.checkpoint_step = 0
        self.rounds = 0
        self._merged: set[int] = set()
        self._failed: set[int] = set()
        self.refused = 0
        self.members = 0
        self.swarm: dict[int, MemberView] = {}
        self.round_in_progress: int | None = None
        self.last_round_seconds: float | None = None
        self.similarity: float | None = None
        self.codec_error: float | None = None

    def update(self, event: Event) -> None:
        worker = self.workers.setdefault(event["worker"], WorkerView())
        handler = getattr(self, f"_on_{event['type']}", None)
        if handler is not None:
            handler(event, worker)
        elif event["type"] in ("alone", "waiting"):
            worker.state = event["type"]
        self._notes.update(event, self.workers)

    @property
    def notes(self) -> list[str]:
        """What happened besides steps and rounds, one line each."""
        return self._notes.lines

    def _on_worker_started(self, event: Event, worker: WorkerView) -> None:
        worker.state, worker.tokens, worker.elapsed_seconds, worker.first_step_seconds = "started", 0, 0.0, None
        self.members = event["workers"]
        if self.config.engine != "swarm":
            self.expected_workers = event["workers"]
        self.parameters = event["parameters"]
        self.unigram_perplexity = event["unigram_perplexity"]

    def _on_starting(self, event: Event, worker: WorkerView) -> None:
        worker.state = event["doing"]

    def _on_first_step(self, event: Event, worker: WorkerView) -> None:
        worker.state, worker.first_step_seconds = "training", event["seconds"]

    def _on_step(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.loss, worker.tokens = event["step"], event["loss"], event["tokens"]
        worker.elapsed_seconds, worker.sync_seconds = event["elapsed_seconds"], event["sync_seconds"]
        worker.bytes_sent, worker.state = event["bytes_sent"], "training"
        if self.config.mode == "data-parallel":
            self.rounds = event["rounds"]

    def _on_round_posted(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["step"], "in a round"
        self.round_in_progress = event["sequence"]

    def _on_round(self, event: Event, worker: WorkerView) -> None:
        worker.state = "training"
        worker.bytes_sent += event["bytes_sent"]
        if self.round_in_progress == event["sequence"]:
            self.round_in_progress = None
        if event["failure"] is not None:
            self._failed.add(event["sequence"])  # every worker reports it
            return
        if event["mean_norm"] is not None:  # a round without work has no mean
            self._merged.add(event["sequence"])
            self.rounds = len(self._merged)
        self.members = len(event["members"])
        self.refused += len(event["refused"]) if event["worker"] == min(self.workers) else 0
        for member in event["members"] if self.config.engine == "swarm" else ():
            seen = self.swarm.setdefault(member["worker"], MemberView())
            seen.step = max(seen.step, member["report"]["inner_steps"])
            if member["worker"] in event["contributors"]:
                seen.contributed = event["sequence"]
        self.last_round_seconds = event["seconds"]
        self.similarity = event["similarity"]
        self.codec_error = event.get("codec_error")  # events of an earlier version have none

    def _on_validation(self, event: Event, worker: WorkerView) -> None:
        del worker
        if event["perplexity"] is not None:  # null once training has diverged
            self._forget_validations(event["step"] - 1)
            self.validations.append((event["step"], event["perplexity"]))

    def _forget_validations(self, after: int) -> None:
        self.validations = [entry for entry in self.validations if entry[0] <= after]

    def _on_checkpoint(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.checkpoint_step = event["step"]

    def _on_resumed(self, event: Event, worker: WorkerView) -> None:
        """Forget everything after this step, and workers that are no longer part of the run."""
        worker.step = event["step"]
        if self.config.engine != "swarm":
            self.workers = {number: view for number, view in self.workers.items() if number < event["workers"]}
        self._forget_validations(event["step"])
        self._merged = {sequence for sequence in self._merged if sequence < event["rounds"]}
        self._failed = {sequence for sequence in self._failed if sequence < event["rounds"]}
        self.rounds, self.round_in_progress = len(self._merged), None

    # Events of a swarm

    def _on_members(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.swarm = {one["member"]: MemberView(**_without(one, "member")) for one in event["present"]}
        self.members = sum(one.state not in ("left", "lost") for one in self.swarm.values())

    def _on_joined(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["step"], "joined"

    def _on_resync(self, event: Event, worker: WorkerView) -> None:
        worker.step = event["step"]

    def _on_worker_finished(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["inner_steps"], "done"

    def _on_worker_failed(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["inner_steps"], "failed"

    @property
    def doing(self) -> str | None:
        """What the workers do before the first step is logged; None from then on."""
        if any(worker.tokens for worker in self.workers.values()):
            return None
        if len(self.workers) < self.expected_workers:
            return "starting the workers"
        taken = [one.first_step_seconds for one in self.workers.values() if one.first_step_seconds is not None]
        if len(taken) == len(self.workers):
            interval = self.config.training.log_interval
            return f"training: the first step took {max(taken):.1f} s, the loss is shown every {interval} steps"
        state = next(one.state for one in self.workers.values() if one.first_step_seconds is None)
        return _DOING.get(state, state or "starting the workers")

    @property
    def rounds_failed(self) -> int:
        return len(self._failed)

    @property
    def step(self) -> int:
        """The step of the slowest worker; in a swarm, of the furthest local one."""
        steps = [worker.step for worker in self.workers.values()]
        return (max if self.config.engine == "swarm" else min)(steps, default=0)

    @property
    def loss(self) -> float | None:
        losses = [worker.loss for worker in self.workers.values() if worker.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def tokens_per_second(self) -> float:
        return sum(worker.tokens_per_second for worker in self.workers.values())

    @property
    def sync_share(self) -> float:
        shares = [worker.sync_share for worker in self.workers.values()]
        return sum(shares) / len(shares) if shares else 0.0

    @property
    def seconds_left(self) -> float | None:
        first = max(self.workers.values(), key=lambda worker: worker.elapsed_seconds, default=WorkerView())
        taken = self.step
        if self.config.engine == "swarm":  # the position may have jumped: count only its own steps
            taken = first.tokens // self.config.tokens_per_step
        return first.elapsed_seconds / taken * (self.config.steps - self.step) if taken else None


def _without(values: Event, name: str) -> Event:
    return {key: value for key, value in values.items() if key != name}


def duration(seconds: float | None) -> str:
    """1:05, or 2:03:04 from an hour on."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
