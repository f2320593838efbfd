"""Notes about a run, from its events: what happened besides steps and rounds, one line each."""

import math
from collections.abc import Collection

from diloco.training.config.run import RunConfig
from diloco.training.records.events import Event

_REPEAT_SECONDS = 60.0
_CORES = "cores: "


class RunNotes:
    """`lines` in the order of the events; what several local workers report is there once."""

    def __init__(self, config: RunConfig) -> None:
        self.lines: list[str] = []
        self._config = config
        self._local: Collection[int] = ()
        self._reported: dict[tuple[str, int, str], tuple[int, float]] = {}
        """(event type, member, peer) -> the local worker that reported it last, and when."""

    def update(self, event: Event, local_workers: Collection[int]) -> None:
        self._local = local_workers
        handler = getattr(self, f"_on_{event['type']}", None)
        if handler is not None:
            handler(event)

    def _on_resumed(self, event: Event) -> None:
        first = event["worker"] == 0 or self._config.engine == "swarm"
        if first and event["workers_before"] is not None:  # otherwise a note says that the run starts again
            self.lines.append(f"continuing from step {event['step']}")
        self.lines += [note for note in event["notes"] if note not in self.lines]

    def _on_corpus(self, event: Event) -> None:
        unreadable = [f"{count:,} {what}" for what, count in event.get("skipped", {}).items() if "unreadable" in what]
        if unreadable:
            self.lines.append(f"left out of the text: {', '.join(unreadable)} (data.on_bad_row = skip)")
        for worker in range(self._config.workers if "label_shards" in event else 0):
            self.lines.append(_labels_of(worker, self._config.workers, event))

    def _on_checkpoint_failed(self, event: Event) -> None:
        self.lines.append(
            f"worker {event['worker']} could not write the checkpoint of step {event['step']}: {event['reason']}"
        )

    def _on_sample_skipped(self, event: Event) -> None:
        self.lines.append(f"no sample: {event['reason']}")

    def _on_member_joined(self, event: Event) -> None:
        if event["member"] not in self._local and not event.get("already"):
            self._note_member(event, f"{_member_name(event)} has joined")

    def _on_member_left(self, event: Event) -> None:
        if event["member"] not in self._local:  # local workers are shown in the table
            self._note_member(event, f"{_member_name(event)} has left")

    def _on_member_lost(self, event: Event) -> None:
        """The full reason is in events.jsonl."""
        reason = event["reason"] if event["reason"].startswith("silent") else "it cannot be reached"
        self._note_member(event, f"{_member_name(event)} is lost ({reason}); training continues without it")

    def _on_member_banned(self, event: Event) -> None:
        self._note_member(event, f"{_member_name(event)} is banned: {event['reason']}")

    def _on_member_expelled(self, event: Event) -> None:
        self._note_member(event, f"{_member_name(event)} is excluded: {event['reason']}")

    def _on_excluded(self, event: Event) -> None:
        self._note(f"worker {event['worker']} is excluded from the swarm: {event['reason']}")

    def _on_sidecar_restarted(self, event: Event) -> None:
        self._note(f"the network process of worker {event['worker']} died and was restarted")

    def _on_shards_not_fetched(self, event: Event) -> None:
        shards = ", ".join(map(str, event["shards"][:8])) + (", …" if len(event["shards"]) > 8 else "")
        self._note(f"shards {shards} could not be fetched ({event['reason']}); trying again later")

    def _on_threads(self, event: Event) -> None:
        """Nothing while a worker has the machine to itself."""
        if event["workers"] > 1 or any(line.startswith(_CORES) for line in self.lines):
            threads = "1 thread" if event["threads"] == 1 else f"{event['threads']} threads"
            others = "1 worker has" if event["workers"] == 1 else f"{event['workers']} workers share"
            self._note(f"{_CORES}{others} this machine's {event['cores']} cores, {threads} each (--threads)")

    def _on_joined(self, event: Event) -> None:
        self._note(f"worker {event['worker']} starts at step {event['step']}, the position of the swarm")

    def _on_minority(self, event: Event) -> None:
        self._note(
            f"{event['here']} of {event['members']} members are here: training goes on, and no round ends until more "
            "than half are"
        )

    def _on_alone(self, event: Event) -> None:
        del event
        self._note("training alone at the moment: no other member answers")

    def _on_diverged(self, event: Event) -> None:
        self._note(f"worker {event['worker']} has diverged: it went on without the others, and fetches their state")
        if "rounds" in event:
            self._note(f"{event['rounds']} rounds and {event['tokens']:,} tokens of worker {event['worker']} are lost")

    def _on_waiting(self, event: Event) -> None:
        self._note(
            f"{event['present']} of {event['wanted']} workers are present (swarm.min_workers): waiting for the rest"
        )

    def _on_warm_start(self, event: Event) -> None:
        self._note(
            f"worker {event['worker']} waits for the end of the warm start, which one worker trains alone: it is at "
            f"step {event['step']} of {event['steps']}"
        )

    def _on_resync(self, event: Event) -> None:
        self._note(f"worker {event['worker']} has fetched the others' state: {event['reason']}")

    def _note_member(self, event: Event, text: str) -> None:
        """Add a note about a member, unless another local worker reported the same a little earlier."""
        what = (event["type"], event["member"], event["peer"])
        reporter, reported_at = self._reported.get(what, (event["worker"], -math.inf))
        if reporter == event["worker"] or event["time"] - reported_at > _REPEAT_SECONDS:
            self._reported[what] = (event["worker"], event["time"])
            self.lines.append(printable(text))

    def _note(self, text: str) -> None:
        """Add a note once, though several local workers may report it."""
        text = printable(text)
        if text not in self.lines[-6:]:
            self.lines.append(text)


def _labels_of(worker: int, workers: int, event: Event) -> str:
    """The labels that a worker reads, and its part of the training text."""
    tokens: list[int] = event["shard_tokens"]
    labels = [label for label, shard in event["label_shards"].items() if shard % workers == worker]
    named = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
    return f"worker {worker} reads {named}: {sum(tokens[worker::workers]) / max(1, sum(tokens)):.0%} of the text"


def _member_name(event: Event) -> str:
    where = f" ({event['label']})" if event.get("label") else ""
    return f"worker {event['member']}{where}"


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
