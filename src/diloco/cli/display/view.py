"""The current state of a run, from its events: no terminal, no clock, no files."""

import math
from dataclasses import dataclass
from pathlib import Path

from diloco.training.config.run import RunConfig
from diloco.training.records.events import Event

_REPEAT_SECONDS = 60.0


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
        self._reported: dict[tuple[str, int, str], tuple[int, float]] = {}
        """(event type, member, peer) -> the local worker that reported it last, and when."""

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

    def _on_checkpoint_failed(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.notes.append(
            f"worker {event['worker']} could not write the checkpoint of step {event['step']}: {event['reason']}"
        )

    def _on_sample_skipped(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.notes.append(f"no sample: {event['reason']}")

    def _on_resumed(self, event: Event, worker: WorkerView) -> None:
        """Forget everything after this step, and workers that are no longer part of the run."""
        worker.step = event["step"]
        if self.config.engine != "swarm":
            self.workers = {number: view for number, view in self.workers.items() if number < event["workers"]}
        self._forget_validations(event["step"])
        self._merged = {sequence for sequence in self._merged if sequence < event["rounds"]}
        self._failed = {sequence for sequence in self._failed if sequence < event["rounds"]}
        self.rounds, self.round_in_progress = len(self._merged), None
        first = event["worker"] == 0 or self.config.engine == "swarm"
        if first and event["workers_before"] is not None:  # otherwise a note says that the run starts again
            self.notes.append(f"continuing from step {event['step']}")
        self.notes += [note for note in event["notes"] if note not in self.notes]

    # Events of a swarm

    def _on_members(self, event: Event, worker: WorkerView) -> None:
        del worker
        self.swarm = {one["member"]: MemberView(**_without(one, "member")) for one in event["present"]}
        self.members = sum(one.state not in ("left", "lost") for one in self.swarm.values())

    def _on_joined(self, event: Event, worker: WorkerView) -> None:
        worker.step, worker.state = event["step"], "joined"
        self._note(f"worker {event['worker']} starts at step {event['step']}, the position of the swarm")

    def _on_member_joined(self, event: Event, worker: WorkerView) -> None:
        del worker
        if event["member"] not in self.workers and not event.get("already"):
            self._note_member(event, f"{_member_name(event)} has joined")

    def _on_member_left(self, event: Event, worker: WorkerView) -> None:
        del worker
        if event["member"] not in self.workers:  # local workers are shown in the table
            self._note_member(event, f"{_member_name(event)} has left")

    def _on_member_lost(self, event: Event, worker: WorkerView) -> None:
        """The full reason is in events.jsonl."""
        del worker
        reason = event["reason"] if event["reason"].startswith("silent") else "it cannot be reached"
        self._note_member(event, f"{_member_name(event)} is lost ({reason}); training continues without it")

    def _on_member_banned(self, event: Event, worker: WorkerView) -> None:
        del worker
        self._note_member(event, f"{_member_name(event)} is banned: {event['reason']}")

    def _on_member_expelled(self, event: Event, worker: WorkerView) -> None:
        del worker
        self._note_member(event, f"{_member_name(event)} is excluded: {event['reason']}")

    def _on_alone(self, event: Event, worker: WorkerView) -> None:
        del event
        worker.state = "alone"
        self._note("training alone at the moment: no other member answers")

    def _on_waiting(self, event: Event, worker: WorkerView) -> None:
        worker.state = "waiting"
        self._note(
            f"{event['present']} of {event['wanted']} workers are present (swarm.min_workers): waiting for the rest"
        )

    def _on_resync(self, event: Event, worker: WorkerView) -> None:
        worker.step = event["step"]
        self._note(f"worker {event['worker']} has fetched the others' state: {event['reason']}")

    def _on_sidecar_restarted(self, event: Event, worker: WorkerView) -> None:
        del worker
        self._note(f"the network process of worker {event['worker']} died and was restarted")

    def _on_shards_not_fetched(self, event: Event, worker: WorkerView) -> None:
        del worker
        shards = ", ".join(map(str, event["shards"][:8])) + (", …" if len(event["shards"]) > 8 else "")
        self._note(f"shards {shards} could not be fetched ({event['reason']}); trying again later")

    def _note_member(self, event: Event, text: str) -> None:
        """Add a note about a member, unless another local worker reported the same a little earlier."""
        what = (event["type"], event["member"], event["peer"])
        reporter, reported_at = self._reported.get(what, (event["worker"], -math.inf))
        if reporter == event["worker"] or event["time"] - reported_at > _REPEAT_SECONDS:
            self._reported[what] = (event["worker"], event["time"])
            self.notes.append(printable(text))

    def _note(self, text: str) -> None:
        """Add a note once, though several local workers may report it."""
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


def _member_name(event: Event) -> str:
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
    """The text without control characters, which a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
