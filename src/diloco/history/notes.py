"""What happened in a run besides steps and rounds: the sentence that terminal and page say of an event. Torch-free."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Literal

from diloco.history.log import Event

Kind = Literal["good", "info", "warning", "bad"]
_LONGEST = 500
_MOST_NOTES = 2000
_COMPARED = 32
_REPEAT_SECONDS = 60.0
_CORES = "cores: "
_TOLD_SHARE = 0.1  # of the parts: a few are replaced by chance
_PEER = re.compile(r"\b(?:12D3Koo|Qm)[1-9A-HJ-NP-Za-km-z]{30,60}\b")
_COUNTED = frozenset(
    ("checkpoint", "worker_finished", "worker_failed", "swarm", "called", "round", "sidecar_lost")
)  # fmt: skip
"""Events that the terminal shows in its table, as a count or as an error: they have no line of their own there."""


@dataclass(frozen=True)
class Note:
    """One line about a run."""

    time: float
    worker: int
    kind: Kind
    text: str
    subject: tuple[object, ...]
    """Two workers that tell of the same subject tell the same."""
    counted: bool


class RunNotes:
    """The notes of a run in the order of its events; what several workers of this machine tell is there once."""

    def __init__(self) -> None:
        self.notes: list[Note] = []
        self.lines: list[str] = []
        """The texts for the terminal."""
        self._workers = 1
        self._means = _Means()

    def update(self, event: Event, local_workers: Collection[int]) -> None:
        """`local_workers`: workers of this machine, whose coming and going is known without a note."""
        if event["type"] not in _TYPES:
            return
        if event["type"] == "worker_started":
            self._workers = int(event.get("workers") or 1)
            self._means = _Means(str((event.get("resolved") or {}).get("sync.merge", "mean")))
        if event["type"] in ("member_joined", "member_left") and event["member"] in local_workers:
            return
        if event["type"] == "threads" and event["workers"] < 2 and not self._have(_CORES):
            return  # a worker that has the machine to itself, as before
        for kind, text in _sentences(event, self._workers):
            self._add(event, kind, text, counted=event["type"] in _COUNTED)
        for text in self._means.changes(event) if event["type"] == "round" else ():
            self._add(event, "warning", text, counted=False)

    def _have(self, beginning: str) -> bool:
        return any(note.text.startswith(beginning) for note in self.notes)

    def _add(self, event: Event, kind: Kind, text: str, *, counted: bool) -> None:
        text = printable(text)[:_LONGEST]
        member = (event["type"], event["member"], event["peer"]) if "peer" in event and "member" in event else None
        note = Note(event["time"], event["worker"], kind, text, member or (text,), counted)
        if self._is_repeated(note):
            return
        self.notes.append(note)
        del self.notes[:-_MOST_NOTES]
        if not note.counted:
            self.lines.append(text)

    def _is_repeated(self, note: Note) -> bool:
        """The same within a minute: by another worker, or with nothing in between."""
        for earlier in reversed(self.notes[-_COMPARED:]):
            if earlier.subject == note.subject:
                late = note.time - earlier.time >= _REPEAT_SECONDS
                return not late and (earlier.worker != note.worker or earlier is self.notes[-1])
        return False


class _Means:
    """How the means of a start of the run were made: told when it changes, by the first worker that has the round."""

    def __init__(self, wanted: str = "mean") -> None:
        self._wanted = self._made = wanted
        self._disagreeing: set[int] = set()
        self._replaced: set[int] = set()
        self._last = -1

    def changes(self, event: Event) -> Iterator[str]:
        sequence, count = event["sequence"], len(event.get("contributors") or ())
        if event.get("mean_norm") is None or sequence <= self._last:
            return
        self._last = sequence
        if (made := str(event.get("merge") or self._wanted)) != self._made:
            self._made = made
            if made == self._wanted:
                yield f"round {sequence} has {count} contributions: means are {made} again"
            else:
                yield (
                    f"round {sequence} has {count} contributions: its mean is a plain one, since sync.merge = "
                    f"{self._wanted} needs four; so are the next ones until there are four"
                )
        disagreeing, cosines = set(event.get("disagreeing") or ()), event.get("agreement") or {}
        for worker in sorted(disagreeing - self._disagreeing):
            cosine = cosines.get(str(worker))
            yield (
                f"worker {worker}: its outer gradients point elsewhere than the others' "
                f"({'' if cosine is None else f'cosine {cosine:.2f} in round {sequence}; '}other data, a fault, or not "
                "honest). sync.merge = clipped bounds what one worker can do"
            )
        self._disagreeing = disagreeing
        yield from self._replacements(
            sequence, {int(one): share for one, share in (event.get("replaced") or {}).items()}
        )

    def _replacements(self, sequence: int, shares: dict[int, float]) -> Iterator[str]:
        """Told once of a worker, and again only after its share has been below half of what is told."""
        if not shares:  # a plain mean, or one that the telling worker got after the round
            return
        least = {worker: _TOLD_SHARE / 2 if worker in self._replaced else _TOLD_SHARE for worker in shares}
        replaced = {worker for worker, share in shares.items() if share >= least[worker]}
        for worker in sorted(replaced - self._replaced):
            yield (
                f"worker {worker}: in {shares[worker]:.0%} of the parts of round {sequence} its outer gradient points "
                "against the others' or is next to nothing, and counts as their mean (sync.merge = clipped): other "
                "data, a fault, or not honest"
            )
        self._replaced = replaced


def reason_of(event: Event) -> str:
    """Why, without the ids of peers, which are 52 characters long: the member itself is `it`."""
    reason = str(event.get("reason") or "")
    if peer := str(event.get("peer") or ""):
        reason = reason.replace(peer, "it")
    reason = reason.removesuffix(" a moment ago")  # of an earlier version: a note is read at any time
    return _PEER.sub(lambda found: f"peer …{found[0][-6:]}", reason)


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _sentences(event: Event, workers: int) -> Iterator[tuple[Kind, str]]:
    if event["type"] == "corpus":
        yield from _corpus(event, workers)
    elif event["type"] == "resumed":
        yield from _resumed(event)
    elif event["type"] == "round":
        yield from _round(event)
    elif event["type"] == "diverged":
        yield from _diverged(event)
    elif event["type"] in _SENTENCES and not event.get("already"):  # a member that was there before has not joined
        kind, sentence = _SENTENCES[event["type"]]
        yield kind, sentence(event)


def _corpus(event: Event, workers: int) -> Iterator[tuple[Kind, str]]:
    unreadable = [f"{count:,} {what}" for what, count in event.get("skipped", {}).items() if "unreadable" in what]
    if unreadable:
        yield "warning", f"left out of the text: {', '.join(unreadable)} (data.on_bad_row = skip)"
    for worker in range(workers if "label_shards" in event else 0):
        tokens: list[int] = event["shard_tokens"]
        labels = [label for label, shard in event["label_shards"].items() if shard % workers == worker]
        named = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
        read = sum(tokens[worker::workers]) / max(1, sum(tokens))
        yield "info", f"worker {worker} reads {named}: {read:.0%} of the text"


def _resumed(event: Event) -> Iterator[tuple[Kind, str]]:
    if event.get("workers_before") is not None:  # otherwise one of its notes says that the run starts again
        yield "info", f"continuing from step {event['step']}"
    for note in event.get("notes") or ():
        yield "warning", str(note)


def _round(event: Event) -> Iterator[tuple[Kind, str]]:
    if event.get("failure") is not None:
        yield "bad", f"round {event['sequence']} failed: {event['failure']}"
    elif refused := event.get("refused"):
        reasons = "; ".join(f"worker {worker}: {reason}" for worker, reason in refused.items())
        yield "warning", f"round {event['sequence']} refused {reasons}"


def _diverged(event: Event) -> Iterator[tuple[Kind, str]]:
    worker = f"worker {event['worker']}"
    yield "warning", f"{worker} has diverged: it went on without the others, and takes over their state"
    if "rounds" in event:
        yield "bad", f"{event['rounds']} rounds and {event['tokens']:,} tokens of {worker} are lost"


def _name(event: Event) -> str:
    where = f" ({event['label']})" if event.get("label") else ""
    return f"worker {event['member']}{where}"


def _shards(event: Event) -> str:
    shards = ", ".join(map(str, event["shards"][:8])) + (", …" if len(event["shards"]) > 8 else "")
    return f"shards {shards} could not be fetched ({reason_of(event)}); trying again later"


def _threads(event: Event) -> str:
    threads = "1 thread" if event["threads"] == 1 else f"{event['threads']} threads"
    others = "1 worker has" if event["workers"] == 1 else f"{event['workers']} workers share"
    return f"{_CORES}{others} this machine's {event['cores']} cores, {threads} each (--threads)"


def _micro_batches(event: Event) -> str:
    rows = f"{event['rows']} sequence{'s' * (event['rows'] != 1)}"
    parts = f"{event['accumulation']} micro-batch{'es' * (event['accumulation'] != 1)}"
    how = "found by trying" if event["tried"] else "by an estimate"
    return f"a step is computed in {parts} of {rows}: the most that fit the GPU's memory, {how}"


_SENTENCES: dict[str, tuple[Kind, Callable[[Event], str]]] = {
    "checkpoint": ("info", lambda e: f"checkpoint of step {e['step']}"),
    "checkpoint_failed": (
        "bad",
        lambda e: f"worker {e['worker']} could not write the checkpoint of step {e['step']}: {e['reason']}",
    ),
    "checkpoint_skipped": ("warning", lambda e: f"the checkpoint of step {e['step']} was left out: {e['reason']}"),
    "events_delayed": (
        "warning",
        lambda e: f"worker {e['worker']} could not write its events for {e['seconds']:.0f} s ({e['reason']})",
    ),
    "model_failed": ("bad", lambda e: f"the model of step {e['step']} could not be written: {e['reason']}"),
    "sample_skipped": ("warning", lambda e: f"no sample: {e['reason']}"),
    "worker_finished": ("good", lambda e: f"worker {e['worker']} has ended after step {e['inner_steps']}"),
    "loss_not_finite": (
        "bad",
        lambda e: f"the loss of worker {e['worker']} is {e['loss']} at step {e['step']}: the run stops",
    ),
    "worker_failed": ("bad", lambda e: f"worker {e['worker']} failed: {e.get('error')}"),
    "threads": ("info", _threads),
    "micro_batches": ("info", _micro_batches),
    "swarm": ("info", lambda e: f"worker {e['worker']} {'founded' if e.get('founded') else 'is in'} the swarm"),
    "waiting": (
        "info",
        lambda e: f"{e['present']} of {e['wanted']} workers are present (swarm.min_workers): waiting for the rest",
    ),
    "warm_start": (
        "info",
        lambda e: (
            f"worker {e['worker']} waits for the end of the warm start, which one worker trains alone: it is at "
            f"step {e['step']} of {e['steps']}"
        ),
    ),
    "joined": ("good", lambda e: f"worker {e['worker']} starts at step {e['step']}, the position of the swarm"),
    "member_joined": ("good", lambda e: f"{_name(e)} has joined"),
    "member_left": ("info", lambda e: f"{_name(e)} has left"),
    "member_lost": ("bad", lambda e: f"{_name(e)} is lost ({reason_of(e)}); training continues without it"),
    "member_banned": ("bad", lambda e: f"{_name(e)} is banned: {reason_of(e)}"),
    "member_expelled": ("bad", lambda e: f"{_name(e)} is excluded: {reason_of(e)}"),
    "leader_passed_over": ("bad", lambda e: f"{_name(e)} lets round {e['round']} wait: the next worker leads"),
    "reducer_passed_over": (
        "bad",
        lambda e: f"{_name(e)} did not send its means in round {e['round']}: it reduces nothing for some time",
    ),
    "two_means": (
        "bad",
        lambda e: (
            f"round {e['round']} has ended in two ways, led by worker {' and '.join(map(str, e['leaders']))}: "
            "the smaller side takes over the state of the larger one"
        ),
    ),
    "rounds_lost": (
        "bad",
        lambda e: (
            f"{_name(e)} went on without the others and has taken over their state: {e['rounds']} rounds and "
            f"{e['tokens']:,} tokens of it are lost"
        ),
    ),
    "tokens_doubted": (
        "warning",
        lambda e: (
            f"{_name(e)} says that it has trained on {e['tokens']:,} tokens, and all steps so far have {e['most']:,}: "
            "that many count"
        ),
    ),
    "check_failed": (
        "warning",
        lambda e: f"worker {e['worker']} could not check the mean of round {e['round']}: {reason_of(e)}",
    ),
    "internal_error": (
        "bad",
        lambda e: (
            f"worker {e['worker']}: {e['what']} fails: {reason_of(e)}"
            if str(e["reason"]).startswith("OSError")
            else f"worker {e['worker']} has a fault in its program, in {e['what']}: {reason_of(e)}. Its log has the "
            "traceback; please report it"
        ),
    ),
    "state_refused": ("bad", lambda e: f"the state of {_name(e)} is not taken over: {reason_of(e)}"),
    "excluded": ("bad", lambda e: f"worker {e['worker']} is excluded from the swarm: {reason_of(e)}"),
    "renumbered": (
        "info",
        lambda e: f"worker {e['before']} is worker {e['member']} from now on: after a split two had the same number",
    ),
    "alone": ("warning", lambda _: "training alone at the moment: no other member answers"),
    "called": ("warning", lambda e: f"worker {e['worker']} was slow in round {e['sequence']} and posted what it had"),
    "minority": (
        "warning",
        lambda e: (
            f"{e['here']} of {e['members']} members are here: training goes on, and no round ends until more than "
            "half are"
        ),
    ),
    "resync": ("warning", lambda e: f"worker {e['worker']} has fetched the others' state: {reason_of(e)}"),
    "sidecar_lost": ("bad", lambda e: f"the network process of worker {e['worker']} died: {e['reason']}"),
    "sidecar_restarted": (
        "warning",
        lambda e: f"the network process of worker {e['worker']} died and was restarted",
    ),
    "shards_not_fetched": ("warning", _shards),
}
_TYPES = frozenset(("worker_started", "corpus", "resumed", "round", "diverged", *_SENTENCES))
