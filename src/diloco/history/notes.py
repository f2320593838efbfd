"""What happened in a run besides steps and rounds: the sentence that terminal and page say of an event."""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from diloco.history.events import (
    AloneEvent,
    CalledEvent,
    CheckFailedEvent,
    CheckpointEvent,
    CheckpointFailedEvent,
    CheckpointSkippedEvent,
    CorpusEvent,
    DivergedEvent,
    Event,
    EventsDelayedEvent,
    ExcludedEvent,
    FalseRangeEvent,
    InternalErrorEvent,
    JoinedEvent,
    LeaderPassedOverEvent,
    LossNotFiniteEvent,
    MalformedPostEvent,
    MemberBannedEvent,
    MemberEvent,
    MemberExpelledEvent,
    MemberJoinedEvent,
    MemberLeftEvent,
    MemberLostEvent,
    MemberReasonEvent,
    MicroBatchesEvent,
    MinorityEvent,
    ModelFailedEvent,
    ReducerPassedOverEvent,
    RenumberedEvent,
    ResumedEvent,
    ResyncEvent,
    RoundEndedEvent,
    RoundsLostEvent,
    SampleSkippedEvent,
    ShardsNotFetchedEvent,
    SidecarLostEvent,
    SidecarRestartedEvent,
    StateRefusedEvent,
    SwarmEvent,
    ThreadsEvent,
    TokensDoubtedEvent,
    TwoMeansEvent,
    UnusableDataEvent,
    WaitingEvent,
    WarmStartEvent,
    WorkerFailedEvent,
    WorkerFinishedEvent,
    WorkerStartedEvent,
)

Kind = Literal["good", "info", "warning", "bad"]
_LONGEST = 500
_MOST_NOTES = 2000
_COMPARED_NOTES = 32
_REPEAT_SECONDS = 60.0
_CORES = "cores: "
_NOTED_SHARE = 0.1  # of the parts: a few are replaced by chance
_PEER = re.compile(r"\b(?:12D3Koo|Qm)[1-9A-HJ-NP-Za-km-z]{30,60}\b")


_Reasoned = (
    MemberReasonEvent | CheckFailedEvent | InternalErrorEvent | ExcludedEvent | ResyncEvent | ShardsNotFetchedEvent
)


@dataclass(frozen=True)
class RunNote:
    """One line about a run."""

    time: float
    worker: int
    kind: Kind
    text: str
    subject: tuple[object, ...]
    """Notes of several workers with the same subject say the same."""
    counted: bool
    """The terminal shows it in its table, not on a line of its own."""


class RunNotes:
    """The notes of a run in the order of its events; what several workers of this machine tell is there once."""

    def __init__(self) -> None:
        self.notes: list[RunNote] = []
        self.lines: list[str] = []
        """The texts for the terminal."""
        self._workers = 1
        self._means = _MeanNotes()

    def update(self, event: Event, local_workers: Collection[int]) -> None:
        """Take in an event. `local_workers`: workers of this machine, whose coming and going needs no note."""
        if type(event) not in _NOTED:
            return
        if isinstance(event, WorkerStartedEvent):
            self._workers = event.workers or 1
            self._means = _MeanNotes(str(event.resolved.get("sync.merge", "mean")))
        if isinstance(event, MemberJoinedEvent | MemberLeftEvent) and event.member in local_workers:
            return
        if isinstance(event, ThreadsEvent) and event.workers < 2 and not self._has_note(_CORES):
            return  # a worker that has always had the machine to itself
        for kind, text in _sentences(event, self._workers):
            self._add(event, kind, text, counted=isinstance(event, _COUNTED))
        if isinstance(event, RoundEndedEvent):
            for text in self._means.texts(event):
                self._add(event, "warning", text, counted=False)

    @property
    def last(self) -> RunNote | None:
        """The latest note."""
        return self.notes[-1] if self.notes else None

    def since(self, last: RunNote | None) -> list[RunNote]:
        """Return the notes after `last` that the terminal shows on lines of their own. If the log was read anew, so
        that the same note may be about another worker number, these are the notes with a later time."""
        after = self.notes
        if last is not None:
            place = next((at for at in range(len(self.notes), 0, -1) if self.notes[at - 1] == last), None)
            after = self.notes[place:] if place is not None else [note for note in self.notes if note.time > last.time]
        return [note for note in after if not note.counted]

    def _has_note(self, beginning: str) -> bool:
        return any(note.text.startswith(beginning) for note in self.notes)

    def _add(self, event: Event, kind: Kind, text: str, *, counted: bool) -> None:
        text = printable(text)[:_LONGEST]
        subject: tuple[object, ...] = (text,)
        if isinstance(event, MemberEvent | RenumberedEvent):
            subject = (event.type, event.member, event.peer)
        note = RunNote(event.time, event.worker, kind, text, subject, counted)
        if self._is_repeated(note):
            return
        self.notes.append(note)
        del self.notes[:-_MOST_NOTES]
        if not note.counted:
            self.lines.append(text)

    def _is_repeated(self, note: RunNote) -> bool:
        """Return whether the latest notes have the same subject less than a minute ago, from another worker or with no
        note in between."""
        for earlier in reversed(self.notes[-_COMPARED_NOTES:]):
            if earlier.subject == note.subject:
                recent = note.time - earlier.time < _REPEAT_SECONDS
                return recent and (earlier.worker != note.worker or earlier is self.notes[-1])
        return False


class _MeanNotes:
    """The notes about how the means of a start of the run were made, and about workers that disagree with them.

    A note is written when something changes, from the event of the first worker that has the round.
    """

    def __init__(self, configured: str = "mean") -> None:
        self._configured = configured
        self._used = configured
        self._disagreeing: set[int] = set()
        self._replaced: set[int] = set()
        self._last_round = -1

    def texts(self, event: RoundEndedEvent) -> Iterator[str]:
        """Yield the texts of the notes about a round."""
        sequence = event.sequence
        count = len(event.contributors)
        if event.mean_norm is None or sequence <= self._last_round:
            return
        self._last_round = sequence
        if (used := str(event.merge or self._configured)) != self._used:
            self._used = used
            if used == self._configured:
                yield f"round {sequence} has {count} contributions: means are {used} again"
            else:
                yield (
                    f"round {sequence} has {count} contributions: its mean is a plain one, since sync.merge = "
                    f"{self._configured} needs four; so are the next ones until there are four"
                )
        disagreeing = set(event.disagreeing)
        for worker in sorted(disagreeing - self._disagreeing):
            cosine = event.agreement.get(str(worker))
            yield (
                f"worker {worker}: its outer gradients point elsewhere than the others' "
                f"({'' if cosine is None else f'cosine {cosine:.2f} in round {sequence}; '}other data, a fault, or not "
                "honest). sync.merge = clipped bounds what one worker can do"
            )
        self._disagreeing = disagreeing
        yield from self._replacements(sequence, {int(worker): share for worker, share in event.replaced.items()})

    def _replacements(self, sequence: int, shares: dict[int, float]) -> Iterator[str]:
        """Yield a note about a worker once, and again only after its share has been below half of _NOTED_SHARE."""
        if not shares:  # a plain mean, or one that this worker got after the round
            return
        bounds = {worker: _NOTED_SHARE / 2 if worker in self._replaced else _NOTED_SHARE for worker in shares}
        replaced = {worker for worker, share in shares.items() if share >= bounds[worker]}
        for worker in sorted(replaced - self._replaced):
            yield (
                f"worker {worker}: in {shares[worker]:.0%} of the parts of round {sequence} its outer gradient points "
                "against the others' or is next to nothing, and counts as their mean (sync.merge = clipped): other "
                "data, a fault, or not honest"
            )
        self._replaced = replaced


def reason_of(event: _Reasoned) -> str:
    """Return the reason of an event, in which the member is `it` and another peer's id of 52 characters is
    shortened."""
    reason = event.reason
    if isinstance(event, MemberReasonEvent) and event.peer:
        reason = reason.replace(event.peer, "it")
    reason = reason.removesuffix(" a moment ago")  # of an earlier version: a note is read at any time
    return _PEER.sub(lambda match: f"peer …{match[0][-6:]}", reason)


def printable(text: str) -> str:
    """Return the text without control characters, which a terminal would obey."""
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )


def _sentences(event: Event, workers: int) -> Iterator[tuple[Kind, str]]:
    if isinstance(event, CorpusEvent):
        yield from _corpus(event, workers)
    elif isinstance(event, ResumedEvent):
        yield from _resumed(event)
    elif isinstance(event, RoundEndedEvent):
        yield from _round(event)
    elif isinstance(event, DivergedEvent):
        yield from _diverged(event)
    elif isinstance(event, MemberJoinedEvent) and event.already:  # it was there before, and has not joined now
        return
    elif type(event) in _SENTENCES:
        kind, sentence = _SENTENCES[type(event)]
        yield kind, sentence(event)


def _corpus(event: CorpusEvent, workers: int) -> Iterator[tuple[Kind, str]]:
    unreadable = [f"{count:,} {what}" for what, count in event.skipped.items() if "unreadable" in what]
    if unreadable:
        yield "warning", f"left out of the text: {', '.join(unreadable)} (data.on_bad_row = skip)"
    if event.label_shards is None:
        return
    tokens = event.shard_tokens
    for worker in range(workers):
        labels = [label for label, shard in event.label_shards.items() if shard % workers == worker]
        named = ", ".join(labels[:6]) + (f" and {len(labels) - 6} more" if len(labels) > 6 else "")
        read = sum(tokens[worker::workers]) / max(1, sum(tokens))
        yield "info", f"worker {worker} reads {named}: {read:.0%} of the text"


def _resumed(event: ResumedEvent) -> Iterator[tuple[Kind, str]]:
    if event.workers_before is not None:  # otherwise one of its notes says that the run starts again
        yield "info", f"continuing from step {event.step}"
    for note in event.notes:
        yield "warning", note


def _round(event: RoundEndedEvent) -> Iterator[tuple[Kind, str]]:
    if event.failure is not None:
        yield "bad", f"round {event.sequence} failed: {event.failure}"
    elif event.refused:
        reasons = "; ".join(f"worker {worker}: {reason}" for worker, reason in event.refused.items())
        yield "warning", f"round {event.sequence} refused {reasons}"


def _diverged(event: DivergedEvent) -> Iterator[tuple[Kind, str]]:
    worker = f"worker {event.worker}"
    yield "warning", f"{worker} has diverged: it went on without the others, and takes over their state"
    if event.rounds is not None:
        yield "bad", f"{event.rounds} rounds and {event.tokens or 0:,} tokens of {worker} are lost"


def _name(event: MemberEvent) -> str:
    where = f" ({event.label})" if event.label else ""
    return f"worker {event.member}{where}"


def _shards(event: ShardsNotFetchedEvent) -> str:
    shards = ", ".join(map(str, event.shards[:8])) + (", …" if len(event.shards) > 8 else "")
    return f"shards {shards} could not be fetched ({reason_of(event)}); trying again later"


def _threads(event: ThreadsEvent) -> str:
    threads = "1 thread" if event.threads == 1 else f"{event.threads} threads"
    others = "1 worker has" if event.workers == 1 else f"{event.workers} workers share"
    return f"{_CORES}{others} this machine's {event.cores} cores, {threads} each (--threads)"


def _micro_batches(event: MicroBatchesEvent) -> str:
    rows = f"{event.rows} sequence{'s' * (event.rows != 1)}"
    parts = f"{event.accumulation} micro-batch{'es' * (event.accumulation != 1)}"
    how = "found by trying" if event.tried else "by an estimate"
    return f"a step is computed in {parts} of {rows}: the most that fit the GPU's memory, {how}"


_SENTENCES: dict[type[Event], tuple[Kind, Callable[[Any], str]]] = {
    CheckpointEvent: ("info", lambda e: f"checkpoint of step {e.step}"),
    CheckpointFailedEvent: (
        "bad",
        lambda e: f"worker {e.worker} could not write the checkpoint of step {e.step}: {e.reason}",
    ),
    CheckpointSkippedEvent: ("warning", lambda e: f"the checkpoint of step {e.step} was left out: {e.reason}"),
    EventsDelayedEvent: (
        "warning",
        lambda e: f"worker {e.worker} could not write its events for {e.seconds:.0f} s ({e.reason})",
    ),
    ModelFailedEvent: ("bad", lambda e: f"the model of step {e.step} could not be written: {e.reason}"),
    SampleSkippedEvent: ("warning", lambda e: f"no sample: {e.reason}"),
    WorkerFinishedEvent: ("good", lambda e: f"worker {e.worker} has ended after step {e.inner_steps}"),
    LossNotFiniteEvent: (
        "bad",
        lambda e: f"the loss of worker {e.worker} is {e.loss} at step {e.step}: the run stops",
    ),
    WorkerFailedEvent: ("bad", lambda e: f"worker {e.worker} failed: {e.error}"),
    ThreadsEvent: ("info", _threads),
    MicroBatchesEvent: ("info", _micro_batches),
    SwarmEvent: ("info", lambda e: f"worker {e.worker} {'founded' if e.founded else 'is in'} the swarm"),
    WaitingEvent: (
        "info",
        lambda e: f"{e.present} of {e.wanted} workers are present (swarm.min_workers): waiting for the rest",
    ),
    WarmStartEvent: (
        "info",
        lambda e: (
            f"worker {e.worker} waits for the end of the warm start, which one worker trains alone: it is at "
            f"step {e.step} of {e.steps}"
        ),
    ),
    JoinedEvent: ("good", lambda e: f"worker {e.worker} starts at step {e.step}, the position of the swarm"),
    MemberJoinedEvent: ("good", lambda e: f"{_name(e)} has joined"),
    MemberLeftEvent: ("info", lambda e: f"{_name(e)} has left"),
    MemberLostEvent: ("bad", lambda e: f"{_name(e)} is lost ({reason_of(e)}); training continues without it"),
    MemberBannedEvent: ("bad", lambda e: f"{_name(e)} is banned: {reason_of(e)}"),
    MemberExpelledEvent: ("bad", lambda e: f"{_name(e)} is excluded: {reason_of(e)}"),
    LeaderPassedOverEvent: ("bad", lambda e: f"{_name(e)} lets round {e.round} wait: the next worker leads"),
    MalformedPostEvent: (
        "bad",
        lambda e: f"what worker {e.member} has put into the bucket for round {e.round} cannot be read: {reason_of(e)}",
    ),
    FalseRangeEvent: (
        "bad",
        lambda e: (
            f"round {e.round}: a part of the mean"
            + (f", by worker {e.member}," if e.member is not None else "")
            + f" was wrong and is replaced: {reason_of(e)}"
        ),
    ),
    UnusableDataEvent: (
        "bad",
        lambda e: (
            f"round {e.round} is without worker {e.member}, whose contribution in the bucket is not what it has posted "
            f"(told by worker {e.told_by})"
        ),
    ),
    ReducerPassedOverEvent: (
        "bad",
        lambda e: f"{_name(e)} did not send its means in round {e.round}: it reduces nothing for some time",
    ),
    TwoMeansEvent: (
        "bad",
        lambda e: (
            f"round {e.round} has ended in two ways, led by worker {' and '.join(map(str, e.leaders))}: "
            "the smaller side takes over the state of the larger one"
        ),
    ),
    RoundsLostEvent: (
        "bad",
        lambda e: (
            f"{_name(e)} went on without the others and has taken over their state: {e.rounds} rounds and "
            f"{e.tokens:,} tokens of it are lost"
        ),
    ),
    TokensDoubtedEvent: (
        "warning",
        lambda e: (
            f"worker {e.member} says that it has trained on {e.tokens:,} tokens, and all steps so far have {e.most:,}: "
            "that many count"
        ),
    ),
    CheckFailedEvent: (
        "warning",
        lambda e: f"worker {e.worker} could not check the mean of round {e.round}: {reason_of(e)}",
    ),
    InternalErrorEvent: (
        "bad",
        lambda e: (
            f"worker {e.worker}: {e.what} fails: {reason_of(e)}"
            if str(e.reason).startswith("OSError")
            else f"worker {e.worker} has a fault in its program, in {e.what}: {reason_of(e)}. Its log has the "
            "traceback; please report it"
        ),
    ),
    StateRefusedEvent: ("bad", lambda e: f"the state of {_name(e)} is not taken over: {reason_of(e)}"),
    ExcludedEvent: ("bad", lambda e: f"worker {e.worker} is excluded from the swarm: {reason_of(e)}"),
    RenumberedEvent: (
        "info",
        lambda e: f"worker {e.before} is worker {e.member} from now on: after a split two had the same number",
    ),
    AloneEvent: ("warning", lambda _: "training alone at the moment: no other member answers"),
    CalledEvent: ("warning", lambda e: f"worker {e.worker} was slow in round {e.sequence} and posted what it had"),
    MinorityEvent: (
        "warning",
        lambda e: (
            f"{e.here} of {e.members} members are here: training goes on, and no round ends until more than half are"
        ),
    ),
    ResyncEvent: ("warning", lambda e: f"worker {e.worker} has fetched the others' state: {reason_of(e)}"),
    SidecarLostEvent: ("bad", lambda e: f"the network process of worker {e.worker} died: {e.reason}"),
    SidecarRestartedEvent: (
        "warning",
        lambda e: f"the network process of worker {e.worker} died and was restarted",
    ),
    ShardsNotFetchedEvent: ("warning", _shards),
}
_COUNTED = (
    CheckpointEvent,
    WorkerFinishedEvent,
    WorkerFailedEvent,
    SwarmEvent,
    CalledEvent,
    RoundEndedEvent,
    SidecarLostEvent,
)
"""Events that the terminal shows in its table, as a count or as an error: they have no line of their own there."""
_NOTED = frozenset((WorkerStartedEvent, CorpusEvent, ResumedEvent, RoundEndedEvent, DivergedEvent, *_SENTENCES))
