"""A run, folded from its events: columns of numbers for each worker, rounds, members, and what else happened.

It keeps numbers and short texts instead of events, so that a run of a hundred thousand events stays small. Everything
carries its time: the state at any moment of the run is computed from the same record (snapshot.py). Steps that a
resume has taken back are left out, as in training/records/history.py.
"""

import logging
from typing import Any

from diloco.dashboard.columns import Columns, count, finite
from diloco.dashboard.members import Members
from diloco.dashboard.rounds import Rounds
from diloco.training.records.events import Event
from diloco.training.records.notes import RunNotes

logger = logging.getLogger(__name__)
_MOST_SAMPLES = 200
_OF_ANOTHER_VERSION = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What an event of another version raises, or one that is made up."""
_COUNTED = ("tokens", "elapsed_seconds", "sync_seconds", "bytes_sent", "rounds")


class Worker:
    """A worker of this machine (`local`), or of another one, as its reports with the rounds tell."""

    def __init__(self) -> None:
        self.local = False
        self.started: dict[str, Any] = {}
        self.ended: Event | None = None
        self.columns = Columns(
            "time", "step", "loss", "tokens", "elapsed_seconds", "sync_seconds", "bytes_sent", "learning_rate",
            "gradient_norm", "rounds",
        )  # fmt: skip
        self.states: list[tuple[float, str]] = []


class RunRecord:
    """`update` with every event, in the order of the log."""

    def __init__(self) -> None:
        self.events = 0
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.workers: dict[int, Worker] = {}
        self.validations = Columns("time", "step", "loss", "perplexity")
        self.rounds = Rounds()
        self.members = Members()
        self.notes = RunNotes()
        self.pauses: list[tuple[float, float]] = []
        """When the run was started again, and for how many seconds nothing had run."""
        self._starting: set[tuple[int, str]] = set()
        self._here: set[int] = set()
        self.samples: list[dict[str, Any]] = []
        self.resolved: dict[str, Any] = {}
        self.parameters = 0
        self.tokens_per_step = 0
        self.unigram_perplexity: float | None = None
        self.refused_events = 0
        """Events whose fields are not those of this version."""

    def update(self, event: Event) -> None:
        self.events += 1
        time = event["time"]
        if event["type"] in ("swarm", "worker_started"):
            self._started((event["worker"], event["type"]), time)
        self.first_time = time if self.first_time is None else min(self.first_time, time)
        self.last_time = time if self.last_time is None else max(self.last_time, time)
        try:
            handler = getattr(self, f"_on_{event['type']}", None)
            if handler is not None:
                handler(event)
            self.members.update(event)
            self.notes.update(event, self._here)
        except _OF_ANOTHER_VERSION:
            self.refused_events += 1
            logger.debug("an event was left out: %.200r", event, exc_info=True)

    def _started(self, what: tuple[int, str], time: float) -> None:
        """A worker that starts a second time begins another start of the run, as in training/records/history.py."""
        if what in self._starting and self.last_time is not None:
            self.pauses.append((time, max(0.0, time - self.last_time)))
            self._starting.clear()
        self._starting.add(what)

    def seconds(self, until: float | None) -> float | None:
        """From the first event on, without the pauses in which nothing ran."""
        end = self.last_time if until is None else until
        if end is None or self.first_time is None:
            return None
        return max(0.0, end - self.first_time - sum(taken for at, taken in self.pauses if at <= end))

    def worker(self, event: Event) -> Worker:
        """The worker that wrote the event: one of this machine."""
        worker = self._numbered(event["worker"])
        worker.local = True
        self._here.add(event["worker"])
        return worker

    def _numbered(self, number: int) -> Worker:
        worker = self.workers.get(number)
        if worker is None:
            worker = self.workers[number] = Worker()
        return worker

    def usual_workers(self, contributors: list[int]) -> int:
        """As many workers a data-parallel run would have had: all, or in a swarm as many as a round had on average."""
        usual = sum(contributors) / len(contributors) if contributors else 1.0
        if self.resolved.get("engine") != "swarm":
            usual = max((one.started.get("workers") or 0 for one in self.workers.values()), default=0) or usual
        return max(1, round(usual))

    def _on_worker_started(self, event: Event) -> None:
        worker = self.worker(event)
        worker.ended = None
        worker.started = {key: event.get(key) for key in ("device", "precision", "threads", "ranks")}
        worker.started |= {"workers": count(event.get("workers") or 0)}
        worker.states.append((event["time"], "starting"))
        self.parameters = count(event.get("parameters") or 0)
        self.tokens_per_step = count(event.get("tokens_per_step") or 0)
        self.unigram_perplexity = finite(event.get("unigram_perplexity"))
        self.resolved = dict(event.get("resolved") or {})
        self.rounds.began(event["worker"], event["time"])

    def _on_starting(self, event: Event) -> None:
        self.worker(event).states.append((event["time"], str(event["doing"])))
        self.rounds.began(event["worker"], event["time"])

    def _on_first_step(self, event: Event) -> None:
        self.worker(event).states.append((event["time"], "training"))

    def _on_step(self, event: Event) -> None:
        worker = self.worker(event)
        worker.columns.append(event)
        _set_state(worker, event["time"], "training")

    def _on_round_posted(self, event: Event) -> None:
        self.rounds.posted(event)
        _set_state(self.worker(event), event["time"], "in a round")

    def _on_round(self, event: Event) -> None:
        first = self.rounds.ended(event)
        _set_state(self.worker(event), event["time"], "training")
        for member in (event.get("members") or ()) if first else ():
            worker = self._numbered(count(member["worker"]))
            report = member.get("report") or {}
            if not worker.local and (report.get("inner_steps") or 0) > (worker.columns.last("step") or -1):
                worker.columns.append(report | {"time": event["time"], "step": report.get("inner_steps")})

    def _on_validation(self, event: Event) -> None:
        if (self.validations.last("step") or -1.0) >= count(event["step"]):
            self.validations.drop("step", event["step"] - 1)
        self.validations.append(event)

    def _on_sample(self, event: Event) -> None:
        self.samples.append({name: event.get(name) for name in ("time", "worker", "step", "prompt", "text")})
        del self.samples[:-_MOST_SAMPLES]

    def _on_worker_finished(self, event: Event) -> None:
        self._ended(event, "done")

    def _on_worker_failed(self, event: Event) -> None:
        self._ended(event, "failed")

    def _ended(self, event: Event, state: str) -> None:
        worker = self.worker(event)
        worker.ended = {key: value for key, value in event.items() if key not in ("members", "confirmed")}
        worker.states.append((event["time"], state))
        self.members.agreed(event)
        columns = worker.columns
        counted = {name: event.get(name) for name in _COUNTED}
        if (columns.last("step") or -1) < (event.get("inner_steps") or 0):
            columns.append(
                counted | {"time": event["time"], "step": event["inner_steps"], "loss": columns.last("loss")}
            )
        elif len(columns):
            columns.amend(counted)  # the last step is logged already, without the rounds after it

    def _on_swarm(self, event: Event) -> None:
        worker = self.worker(event)
        worker.states.append((event["time"], "starting" if event.get("founded") else "joining"))

    def _on_state_arriving(self, event: Event) -> None:
        share = event["received_bytes"] / max(1, event["all_bytes"])
        self.worker(event).states.append((event["time"], f"joining: {share:.0%}"))

    def _on_joined(self, event: Event) -> None:
        worker = self.worker(event)
        worker.ended = None
        worker.states.append((event["time"], "joined"))

    def _on_resumed(self, event: Event) -> None:
        """Forget what was taken back: of this worker, of workers no longer in the run, of all in a restarted swarm."""
        step = event["step"]
        if event["workers"]:
            self.workers = {number: one for number, one in self.workers.items() if number < event["workers"]}
        for number, worker in self.workers.items():
            if number == event["worker"] or number >= event["workers"]:
                worker.columns.drop("step", step)
                worker.ended = None
        if event["worker"] == min(self.workers, default=0) or not event["workers"]:
            self.validations.drop("step", step)
            self.rounds.forget(step)
        self.rounds.began(event["worker"], event["time"])


def _set_state(worker: Worker, time: float, state: str) -> None:
    if not worker.states or worker.states[-1][1] != state:
        worker.states.append((time, state))
