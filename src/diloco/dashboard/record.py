"""A run, folded from its events: columns of numbers for each worker, rounds, members, and what else happened.

It keeps numbers and short texts instead of events, so that a run of a hundred thousand events stays small. Everything
carries its time: the state at any moment of the run is computed from the same record (snapshot.py). Steps that a
resume has taken back are left out, as in history/resuming.py.
"""

import logging
from typing import Any

from diloco.dashboard.columns import Columns, count, finite
from diloco.dashboard.members import Members
from diloco.dashboard.rounds import Rounds
from diloco.history.log import Event
from diloco.history.notes import RunNotes
from diloco.history.progress import WorkerProgress
from diloco.history.resuming import RunClock

logger = logging.getLogger(__name__)
_MOST_SAMPLES = 200
_OF_ANOTHER_VERSION = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError)
"""What an event of another version raises, or one that is made up."""


class Worker:
    """A worker of this machine (`local`), or of another one, as its reports with the rounds tell."""

    def __init__(self) -> None:
        self.local = False
        self.started: dict[str, Any] = {}
        self.ended: Event | None = None
        self.progress = WorkerProgress()
        self.columns = Columns(
            "time", "step", "loss", "tokens", "elapsed_seconds", "sync_seconds", "bytes_sent", "rounds",
            "tokens_per_second", "position_seconds", "learning_rate", "gradient_norm", "logged", "start",
        )  # fmt: skip
        """A row whenever its counters changed; `logged` is 1 where a step or a report told the loss."""
        self.starts = 0
        """How often it began to count: its rows of one `start` are without a pause."""
        self.states: list[tuple[float, str]] = []
        self.not_finite: list[tuple[float, bool]] = []
        """When its loss became no number, or a number again."""

    def count(self, time: float, *, logged: bool = False, event: Event | None = None) -> None:
        """Add a row with the counters as they are now."""
        now, told = self.progress, event or {}
        self.columns.append(
            {
                "time": time,
                "step": now.step,
                "loss": now.loss,
                "tokens": now.tokens,
                "elapsed_seconds": now.elapsed_seconds,
                "sync_seconds": now.sync_seconds,
                "bytes_sent": now.bytes_sent,
                "rounds": now.rounds,
                "tokens_per_second": now.tokens_per_second,
                "position_seconds": now.seconds_until(now.step + 1),
                "learning_rate": told.get("learning_rate"),
                "gradient_norm": told.get("gradient_norm"),
                "logged": int(logged),
                "start": self.starts,
            }
        )


class RunRecord:
    """`update` with every event, in the order of the log."""

    def __init__(self) -> None:
        self.events = 0
        self.clock = RunClock()
        self.workers: dict[int, Worker] = {}
        self.validations = Columns("time", "step", "loss", "perplexity", "measured")
        """`time`: when it was told; `measured`: when a worker measured its share."""
        self._measured: dict[int, float] = {}
        self.rounds = Rounds()
        self.members = Members()
        self.notes = RunNotes()
        self._here: set[int] = set()
        self.samples: list[dict[str, Any]] = []
        self.resolved: dict[str, Any] = {}
        self.parameters = 0
        self.trainable_parameters = 0
        self.tokens_per_step = 0
        self.unigram_perplexity: float | None = None
        self.refused_events = 0
        """Events whose fields are not those of this version."""

    def update(self, event: Event) -> None:
        self.events += 1
        self.clock.update(event)
        try:
            handler = getattr(self, f"_on_{event['type']}", None)
            if handler is not None:
                handler(event)
            self.members.update(event)
            self.notes.update(event, self._here)
        except _OF_ANOTHER_VERSION:
            self.refused_events += 1
            logger.debug("an event was left out: %.200r", event, exc_info=True)

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
        worker.starts += 1
        worker.progress.update(event)
        worker.started = {key: event.get(key) for key in ("device", "precision", "threads", "ranks")}
        worker.started |= {"workers": count(event.get("workers") or 0)}
        worker.states.append((event["time"], "starting"))
        self.parameters = count(event.get("parameters") or 0)
        self.trainable_parameters = count(event.get("trainable_parameters") or self.parameters)
        self.tokens_per_step = count(event.get("tokens_per_step") or 0)
        self.unigram_perplexity = finite(event.get("unigram_perplexity"))
        self.resolved = dict(event.get("resolved") or {})
        self.rounds.began(event["worker"], event["time"])

    def _on_starting(self, event: Event) -> None:
        self.worker(event).states.append((event["time"], str(event["doing"])))
        self.rounds.began(event["worker"], event["time"])

    def _on_first_step(self, event: Event) -> None:
        worker = self.worker(event)
        worker.progress.update(event)
        worker.states.append((event["time"], "training"))

    def _on_step(self, event: Event) -> None:
        worker = self.worker(event)
        worker.progress.update(event)
        worker.count(event["time"], logged=True, event=event)
        diverged = worker.progress.loss is None
        if diverged != (bool(worker.not_finite) and worker.not_finite[-1][1]):
            worker.not_finite.append((event["time"], diverged))
        _set_state(worker, event["time"], "training")

    def _on_round_posted(self, event: Event) -> None:
        self.rounds.posted(event)
        worker = self.worker(event)
        worker.progress.update(event)
        worker.count(event["time"])
        _set_state(worker, event["time"], "in a round")

    def _on_round(self, event: Event) -> None:
        first = self.rounds.ended(event)
        own = self.worker(event)
        own.progress.update(event)
        for member in (event.get("members") or ()) if first else ():
            worker = self._numbered(count(member["worker"]))
            report = member.get("report") or {}
            before = worker.progress.step
            worker.progress.report(report, elsewhere=not worker.local, time=event["time"])
            if not worker.local and worker.progress.step > before:
                worker.count(event["time"], logged=True)
        own.count(event["time"])
        _set_state(own, event["time"], "training")

    def _on_evaluation(self, event: Event) -> None:
        """A validation is told with the next round: its place on the curve is where the first worker measured it."""
        self._measured.setdefault(count(event["step"]), event["time"])

    def _on_validation(self, event: Event) -> None:
        if (self.validations.last("step") or -1.0) >= count(event["step"]):
            self.validations.drop("step", event["step"] - 1)
        measured = self._measured.get(event["step"], event["time"])
        self.validations.append(event | {"measured": measured})

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
        worker.progress.update(event)
        worker.count(event["time"])

    def _on_swarm(self, event: Event) -> None:
        worker = self.worker(event)
        worker.states.append((event["time"], "starting" if event.get("founded") else "joining"))

    def _on_state_arriving(self, event: Event) -> None:
        share = event["received_bytes"] / max(1, event["all_bytes"])
        self.worker(event).states.append((event["time"], f"joining: {share:.0%}"))

    def _on_joined(self, event: Event) -> None:
        worker = self.worker(event)
        worker.ended = None
        worker.starts += 1
        worker.progress.update(event)
        worker.count(event["time"])
        worker.states.append((event["time"], "joined"))

    def _on_resync(self, event: Event) -> None:
        worker = self.worker(event)
        worker.progress.update(event)
        worker.count(event["time"])

    def _on_resumed(self, event: Event) -> None:
        """Forget what was taken back: of this worker, of workers no longer in the run, of all in a restarted swarm."""
        step = event["step"]
        if event["workers"]:
            self.workers = {number: one for number, one in self.workers.items() if number < event["workers"]}
        for number, worker in self.workers.items():
            if number == event["worker"] or number >= event["workers"]:
                worker.columns.drop("step", step)
                worker.progress.restore({name: worker.columns.last(name) for name in worker.columns.names})
                worker.ended = None
                worker.not_finite.append((event["time"], False))
        if event["worker"] == min(self.workers, default=0) or not event["workers"]:
            self.validations.drop("step", step)
            self._measured = {at: time for at, time in self._measured.items() if at <= step}
            self.rounds.forget(step)
        if event["worker"] in self.workers:
            self.worker(event).progress.update(event)
            self.worker(event).count(event["time"])
        self.rounds.began(event["worker"], event["time"])


def _set_state(worker: Worker, time: float, state: str) -> None:
    if not worker.states or worker.states[-1][1] != state:
        worker.states.append((time, state))
