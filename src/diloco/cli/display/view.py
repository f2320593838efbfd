"""What a run looks like at a moment, from its events: no terminal, no clock, no files."""

import math
from dataclasses import dataclass
from pathlib import Path

from diloco.training.config.run import RunConfig
from diloco.training.records.events import Event

_SAME_NEWS_SECONDS = 60.0


@dataclass
class MemberView:
    """A member of a swarm, here or elsewhere, as it was last heard of."""

    where: str = ""
    step: int = 0
    loss: float | None = None
    contributed: int | None = None
    """The last round that has its contribution."""
    state: str = ""


@dataclass
class WorkerView:
    """A worker as its last events show it."""

    step: int = 0
    loss: float | None = None
    tokens: int = 0
    elapsed_seconds: float = 0.0
    sync_seconds: float = 0.0
    bytes_sent: int = 0
    state: str = ""

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
        self.notes: list[str] = []
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
        self._told: dict[tuple[str, int, str], tuple[int, float]] = {}
        """Who told last what of which member, and when."""

    def update(self, event: Event) -> None:
        worker = self.workers.setdefault(event["worker"], WorkerView())
        handler = getattr(self, f"_on_{event['type']}", None)
        if handler is not None:
            handler(event, worker)

    def _on_worker_started(self, event: Event, worker: WorkerView) -> None:
        worker.state = "started"
        self.members = event["workers"]
        if self.config.engine != "swarm":
            self.expected_workers = event["workers"]
        self.parameters = event["parameters"]
        self.unigram_perplexity = event["unigram_perplexity"]

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
            self._failed.add(event["sequence"])  # every worker says so
            return
        if event["mean_norm"] is not None:  # a round in which nobody had work has no mean
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

    def _on_validation(self, event: Event, worker: WorkerView) -> None:
        del worker
        if event["perplexity"] is not None:  # it is not a number once training has diverged
            self._forget_validations(event["step"] - 1)
            self.validations.append((event["step"], event["perplexity"]))

    def _forget_validations(self, after: int) -> None:
        self.validations = [told for told in self.validations if told[0] <= after]

    def _on_checkpoint(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.checkpoint_step = event["step"]

    def _on_checkpoint_failed(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.notes.append(
            f"worker {event['worker']} could not write the checkpoint of step {event['step']}: {event['reason']}"
        )

    def _on_sample_skipped(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.notes.append(f"no sample: {event['reason']}")

    def _on_resumed(self, event: Event, worker: WorkerView) -> None:
        """What was seen beyond this step is taken back; workers that take no further part are gone."""
        worker.step = event["step"]
        if self.config.engine != "swarm":
            self.workers = {number: view for number, view in self.workers.items() if number < event["workers"]}
        self._forget_validations(event["step"])
        self._merged = {sequence for sequence in self._merged if sequence < event["rounds"]}
        self._failed = {sequence for sequence in self._failed if sequence < event["rounds"]}
        self.rounds, self.round_in_progress = len(self._merged), None
        first = event["worker"] == 0 or self.config.engine == "swarm"
        if first and event["workers_before"] is not None:  # else a note says that it begins again
            self.notes.append(f"going on from step {event['step']}")
        self.notes += [note for note in event["notes"] if note not in self.notes]

    # A swarm

    def _on_members(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.swarm = {one["member"]: MemberView(**_without(one, "member")) for one in event["present"]}
        self.members = sum(one.state not in ("left", "lost") for one in self.swarm.values())

    def _on_joined(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["step"], "joined"
        self._note(f"worker {event['worker']} begins at step {event['step']}, where the others are")

    def _on_member_joined(self, event: Event, worker: WorkerView) -> None:
        del worker
        if event["member"] not in self.workers and not event.get("already"):
            self._news(event, f"{_who(event)} has joined")

    def _on_member_left(self, event: Event, worker: WorkerView) -> None:
        del worker
        if event["member"] not in self.workers:  # those here are in the display, and in its end
            self._news(event, f"{_who(event)} has left")

    def _on_member_lost(self, event: Event, worker: WorkerView) -> None:
        """What exactly was tried is in the events."""
        del worker
        reason = event["reason"] if event["reason"].startswith("silent") else "it cannot be reached"
        self._news(event, f"{_who(event)} is lost ({reason}); training goes on without it")

    def _on_member_banned(self, event: Event, worker: WorkerView) -> None:
        del worker
        self._news(event, f"{_who(event)} is banned: {event['reason']}")

    def _on_member_expelled(self, event: Event, worker: WorkerView) -> None:
        del worker
        self._news(event, f"{_who(event)} is out: {event['reason']}")

    def _on_alone(self, event: Event, worker: WorkerView) -> None:
        del event
        worker.state = "alone"
        self._note("training alone at the moment: nobody else of the swarm answers")

    def _on_waiting(self, event: Event, worker: WorkerView) -> None:
        worker.state = "waiting"
        self._note(
            f"{event['present']} of {event['wanted']} workers are here (swarm.min_workers): waiting for the rest"
        )

    def _on_resync(self, event: Event, worker: WorkerView) -> None:
        worker.step = event["step"]
        self._note(f"worker {event['worker']} has taken over the others' state: {event['reason']}")

    def _on_sidecar_restarted(self, event: Event, worker: WorkerView) -> None:
        del worker
        self._note(f"the network process of worker {event['worker']} has died and was started again")

    def _on_shards_not_fetched(self, event: Event, worker: WorkerView) -> None:
        del worker
        shards = ", ".join(map(str, event["shards"][:8])) + (", …" if len(event["shards"]) > 8 else "")
        self._note(f"shards {shards} could not be fetched ({event['reason']}); they are asked for again later")

    def _news(self, event: Event, text: str) -> None:
        """Of a member: not again when another worker of this machine sees the same a little later."""
        what = (event["type"], event["member"], event["peer"])
        teller, told_at = self._told.get(what, (event["worker"], -math.inf))
        if teller == event["worker"] or event["time"] - told_at > _SAME_NEWS_SECONDS:
            self._told[what] = (event["worker"], event["time"])
            self.notes.append(printable(text))

    def _note(self, text: str) -> None:
        """Once, though several workers of this machine may tell of it."""
        text = printable(text)
        if text not in self.notes[-6:]:
            self.notes.append(text)

    def _on_worker_finished(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["inner_steps"], "done"

    def _on_worker_failed(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["inner_steps"], "failed"

    @property
    def rounds_failed(self) -> int:
        return len(self._failed)

    @property
    def step(self) -> int:
        """Of the slowest worker; in a swarm of the furthest one here, for the others are called or catch up."""
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
        if self.config.engine == "swarm":  # its position may have jumped: what counts is what it did itself
            taken = first.tokens // self.config.tokens_per_step
        return first.elapsed_seconds / taken * (self.config.steps - self.step) if taken else None


def _who(event: Event) -> str:
    where = f" ({event['label']})" if event.get("label") else ""
    return f"worker {event['member']}{where}"


def _without(values: Event, name: str) -> Event:
    return {key: value for key, value in values.items() if key != name}


def duration(seconds: float | None) -> str:
    """1:05, or 2:03:04 from an hour on."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def printable(text: str) -> str:
    """A model, or another member, may write any character, also those that a terminal obeys."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
