"""What a run has done so far, counted from its events: for the terminal, its report and Prometheus. Torch-free.

    counts = RunCounts()
    for event in reader.new_events():
        counts.update(event)

Each event is counted as it comes; what a resume takes back is no longer counted. A round counts once, however many
workers of this machine tell of it: it is *merged* if a worker got its mean, and *failed* if a worker got none, so that
it can be both. The final report (training/records/summary.py) and the page (dashboard/) count the same things;
tests/unit/training/test_training_counts.py holds them against each other.
"""

from dataclasses import dataclass, fields

from diloco.history.log import Event
from diloco.history.progress import WorkerProgress


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
class WorkerView(WorkerProgress):
    """A local worker, from its last events."""

    state: str = ""
    first_step_seconds: float | None = None
    has_logged: bool = False
    """A step was logged in this start of the run."""


class RunCounts:
    """The sum of the events so far."""

    def __init__(self, *, elastic: bool = False) -> None:
        """`elastic`: a swarm's run, in which positions jump; also learnt from `worker_started`."""
        self.elastic = elastic
        self.parameters = 0
        self.tokens_per_step = 0
        self.steps: int | None = None
        """Of the whole run, where that is known."""
        self.unigram_perplexity: float | None = None
        self.workers: dict[int, WorkerView] = {}
        self.validations: list[tuple[int, float]] = []
        self.checkpoint_step = 0
        self._merged: set[int] = set()
        self._failed: set[int] = set()
        self._told = (0, 0)  # merged and failed rounds, as the workers themselves have counted them
        self.refused = 0
        self.members = 0
        self.swarm: dict[int, MemberView] = {}
        self.round_in_progress: int | None = None
        self.last_round_seconds: float | None = None
        self.similarity: float | None = None
        self.codec_error: float | None = None

    def update(self, event: Event) -> None:
        worker = self.workers.setdefault(event["worker"], WorkerView())
        worker.update(event)
        handler = getattr(self, f"_on_{event['type']}", None)
        if handler is not None:
            handler(event, worker)
        elif event["type"] in ("alone", "waiting", "warm_start"):
            worker.state = event["type"]

    def _on_worker_started(self, event: Event, worker: WorkerView) -> None:
        worker.state, worker.first_step_seconds, worker.has_logged = "started", None, False
        self.members = event["workers"]
        options = event.get("resolved") or {}
        self.elastic |= options.get("engine") == "swarm"
        self.steps, self.tokens_per_step = options.get("steps"), event.get("tokens_per_step", 0)
        self.parameters = event["parameters"]
        self.unigram_perplexity = event["unigram_perplexity"]

    def _on_starting(self, event: Event, worker: WorkerView) -> None:
        worker.state = event["doing"]

    def _on_first_step(self, event: Event, worker: WorkerView) -> None:
        worker.state, worker.first_step_seconds = "training", event["seconds"]

    def _on_step(self, event: Event, worker: WorkerView) -> None:
        worker.state, worker.has_logged = "training", True
        self._tell(event["rounds"], 0)

    def _on_round_posted(self, event: Event, worker: WorkerView) -> None:
        worker.state = "in a round"
        self.round_in_progress = event["sequence"]

    def _on_round(self, event: Event, worker: WorkerView) -> None:
        worker.state = "training"
        if self.round_in_progress == event["sequence"]:
            self.round_in_progress = None
        if event["failure"] is not None:
            self._failed.add(event["sequence"])  # every worker reports it
            return
        if event["mean_norm"] is not None:  # a round without work has no mean
            self._merged.add(event["sequence"])
        self.members = len(event["members"])
        self.refused += len(event["refused"]) if event["worker"] == min(self.workers) else 0
        for member in event["members"]:
            if (told := self.workers.get(member.get("worker", -1))) is not None:
                told.report(member["report"], elsewhere=False, time=event["time"])
        for member in event["members"] if self.elastic else ():
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
        del worker
        if not self.elastic:
            self.workers = {number: view for number, view in self.workers.items() if number < event["workers"]}
        self._forget_validations(event["step"])
        self._merged = {sequence for sequence in self._merged if sequence < event["rounds"]}
        self._failed = {sequence for sequence in self._failed if sequence < event["rounds"]}
        self.round_in_progress, self._told = None, (0, 0)

    # Events of a swarm

    def _on_members(self, event: Event, worker: WorkerView) -> None:
        del worker
        known = {one.name for one in fields(MemberView)}
        self.swarm = {
            one["member"]: MemberView(**{name: value for name, value in one.items() if name in known})
            for one in event["present"]
        }
        self.members = sum(one.state not in ("left", "lost") for one in self.swarm.values())

    def _on_joined(self, event: Event, worker: WorkerView) -> None:
        del event
        worker.state = "joined"

    def _on_renumbered(self, event: Event, worker: WorkerView) -> None:
        """The same worker, under the number of this event; the earlier one is another member's."""
        self.workers[event["worker"]] = self.workers.pop(event["before"], worker)
        self.swarm.pop(event["before"], None)

    def _on_worker_finished(self, event: Event, worker: WorkerView) -> None:
        worker.state = "done"
        self._tell(event.get("rounds", 0), event.get("rounds_failed", 0))

    def _on_worker_failed(self, event: Event, worker: WorkerView) -> None:
        self._on_worker_finished(event, worker)
        worker.state = "failed"

    def _tell(self, merged: int, failed: int) -> None:
        self._told = (max(self._told[0], merged), max(self._told[1], failed))

    @property
    def rounds(self) -> int:
        """Merged rounds of the whole run, also those before a worker of this machine joined it."""
        return max(len(self._merged), self._told[0])

    @property
    def rounds_failed(self) -> int:
        return max(len(self._failed), self._told[1])

    @property
    def step(self) -> int:
        """The step of the slowest worker; in a swarm, of the furthest local one."""
        steps = [worker.step for worker in self.workers.values()]
        return (max if self.elastic else min)(steps, default=0)

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
