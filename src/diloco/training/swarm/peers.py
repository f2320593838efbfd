"""What a worker of a swarm does because members come and go while it trains.

It reports its progress, reads the shards that are its own at the moment, shares the text out again when the members
change, and tolerates failed rounds: a worker that is cut off from the network trains on alone, and says so.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from diloco.data.corpus import Corpus
from diloco.data.order import ShardProgress, count_windows
from diloco.data.preparation.received_corpus import check_file
from diloco.engines.base import Connection
from diloco.engines.first_rank import FirstRankEngine
from diloco.engines.note import MalformedNote, Note, read_note, write_note
from diloco.engines.rounds import RoundResult
from diloco.errors import EngineError, Excluded
from diloco.history.events import (
    CalledEvent,
    InternalErrorEvent,
    JoinedEvent,
    ListedMember,
    MembersEvent,
    ResyncEvent,
    ShardsEvent,
    TokensDoubtedEvent,
    WaitingEvent,
)
from diloco.history.log import EventLog
from diloco.outer.elastic import ElasticLoop
from diloco.outer.rounds import RoundEvent
from diloco.own_command import command
from diloco.training.batches import ShardReader, WorkerTexts, as_json
from diloco.training.config.run import RunConfig
from diloco.training.peers import FAILURES_IN_A_ROW, Peers
from diloco.training.swarm.shard_claims import ShardClaims, ShardFetcher, index_among, shards_of
from diloco.training.swarm.token_counts import TokenCounts
from diloco.training.swarm.validation import SwarmValidation

if TYPE_CHECKING:
    from diloco.swarm.protocol.status import MemberStatus, RunStatus

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_LIST_SECONDS = 10.0
_MOST_LISTED = 64
CUT_OFF_SECONDS = 3600.0
"""A worker without a successful round for this long gives up."""


@runtime_checkable
class SwarmConnection(Protocol):
    """The part of SwarmEngine that goes beyond averaging."""

    @property
    def roster(self) -> tuple[int, ...]:
        """Return the numbers of all live members."""

    def fetch_file(self, name: str, path: Path) -> None: ...

    def status(self) -> "RunStatus":
        """Return the status of all members, as the node reports it."""


def starting_shards(texts: WorkerTexts, engine: Connection, config: RunConfig) -> list[int]:
    """Return the shards that a worker of a swarm reads first: those of its share of the text that are on this machine,
    or all that are if its share is less than a batch."""
    if texts.own is not None:
        return list(range(texts.own_index, texts.own.shards, texts.own_readers))
    corpus = texts.shared
    local_shards = [shard for shard in range(corpus.shards) if corpus.has(shard)]
    mine = shards_of(corpus.shards, *index_among(present(engine), engine.worker))
    share = [shard for shard in mine if shard in local_shards]
    length = config.data.sequence_length
    windows = sum(count_windows(corpus.meta.shard_tokens[shard], length) for shard in share)
    return share if windows >= config.training.batch_size else local_shards


def swarm_of(engine: Connection) -> SwarmConnection | None:
    """Return the engine that is in a swarm, on the first rank of a worker; None on the others."""
    first = engine.first if isinstance(engine, FirstRankEngine) else engine
    return first if isinstance(first, SwarmConnection) else None


def present(engine: Connection) -> tuple[int, ...]:
    """Return the numbers of the present members as this rank knows them, this worker included."""
    swarm = swarm_of(engine)
    others = [member.worker for member in engine.members()] if swarm is None else swarm.roster
    return tuple(sorted({*others, engine.worker}))


def _listed(member: "MemberStatus") -> ListedMember:
    """Return a member, as a MembersEvent has it."""
    state = "left" if member.left else "lost" if not member.live else "training" if member.has_state else "joining"
    return ListedMember(
        member=member.number,
        where=member.label,
        step=member.position,
        loss=member.loss if member.loss >= 0 else None,
        contributed=member.contributed_round if member.contributed_round >= 0 else None,
        state=state,
        tokens=member.tokens,
        step_seconds=round(member.step_seconds, 4),
        latency_seconds=member.latency_seconds,
        silent_seconds=member.silent_seconds,
        link=member.link,
    )


def _read(note: bytes) -> Note:
    """Return a note of another machine; an empty one if it cannot be read, as the node has told already."""
    try:
        return read_note(note)
    except MalformedNote as problem:
        logger.warning("a note is passed over: %s", problem)
        return Note()


class SwarmPeers(Peers):
    """The other members, as one worker of a swarm deals with them.

    Each rank of a worker has one. The first of them reads the text for all (training/loop.py); what the others know of
    shards has no effect.
    """

    def __init__(
        self,
        config: RunConfig,
        texts: WorkerTexts,
        engine: Connection,
        reader: ShardReader,
        validation: SwarmValidation,
        outer: ElasticLoop,
        events: EventLog,
    ) -> None:
        self._config = config
        self._engine = engine
        self._events = events
        self._swarm = swarm_of(engine)
        self._reader = reader
        self._validation = validation
        self._outer = outer
        self._thread = threading.get_ident()
        length = config.data.sequence_length
        self.claims = ShardClaims(texts.shared, length, engine.worker, own_text=texts.own is not None)
        self._fetcher = ShardFetcher(texts.shared, self._fetch, events.emit)
        self._corpus: Corpus = texts.shared
        self._missing: list[int] = []
        self._note = b""
        self._noted_step = -1  # that of the validation figure in the note
        self._failing_since: float | None = None
        self._refusals = 0  # of this worker's contributions, in a row
        self._last_step = time.monotonic()
        self._step_seconds = 0.0
        self._tokens = 0
        self._loss = math.nan
        self._listed_at = 0.0
        self._stopped: Callable[[], bool] = lambda: False
        self.tokens = TokenCounts()
        outer.tells_progress = False  # this does, with the tokens of the run
        outer.note = self._write_note
        outer.on_resync = self._on_resync

    def begin(self, *, joined: bool, stopped: Callable[[], bool]) -> None:
        """Share the text out among the present members; at the first step, wait until min_workers are there."""
        outer = self._outer
        self._thread = threading.get_ident()
        self._stopped = stopped
        outer.end_at(self._config.steps)
        if joined:
            self._events.emit(JoinedEvent(step=outer.inner_steps, rounds=outer.sequence))
        self._wait_for_others()
        if joined:
            self._read_state_note()
            self.tokens.begin(self._engine.worker)
            self.claims.begin(present(self._engine), self._reader)
            self._events.emit(ShardsEvent(shards=self._reader.shards))
        self._follow(present(self._engine))
        self._write_note()
        self._last_step = time.monotonic()

    def _wait_for_others(self) -> None:
        """Wait at the first step, or after a warm start, in which others cannot join, until swarm.min_workers members
        are there, however long that takes."""
        if self._outer.inner_steps != self._config.sync.warm_start:
            return
        wanted = self._config.swarm.min_workers
        reported = -1  # present workers
        ranks = self._engine.ranks
        while True:
            present_workers = len(present(self._engine)) if ranks.rank == 0 else wanted
            waits = ranks.any(present_workers < wanted)
            if not waits or self._stopped():
                return
            if ranks.rank == 0 and present_workers != reported:
                self._events.emit(WaitingEvent(present=present_workers, wanted=wanted))
                reported = present_workers
            self._send_progress()  # joiners wait for the end of a warm start
            self._engine.wanted(self._outer.sequence)  # several ranks gather the state for joiners here
            time.sleep(_POLL_SECONDS)

    # Saved: how far all known readers have read the text

    def state_dict(self) -> dict[str, Any]:
        self.claims.note(self._reader)
        return {"read": as_json(self.claims.known), "token_counts": self.tokens.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the saved positions; a worker that resumes alone has other shards than before."""
        self.tokens.load_state_dict(state.get("token_counts", {}))  # an earlier version saved none
        self.claims.learn({int(shard): ShardProgress(*read) for shard, read in state["read"].items()})
        known = self.claims.known
        mine = self._reader.progress()
        if not self.claims.own_text and any(known.get(shard, read) != read for shard, read in mine.items()):
            self._reader.take(known)

    # Steps

    def before_step(self) -> None:
        if self._config.sync.warm_start:
            self._wait_for_others()
        if self._fetcher.arrived.is_set():
            self._fetcher.arrived.clear()
            if self.claims.take(self._reader):
                self._events.emit(ShardsEvent(shards=self._reader.shards))
        if self._missing and self._fetcher.may_try:
            self._missing = self.claims.missing()
            self._fetcher.start(self._missing)

    def after_step(self, loss: float | None, tokens: int) -> None:
        now = time.monotonic()
        self._step_seconds += 0.1 * (now - self._last_step - self._step_seconds)
        self._last_step = now
        if self._noted_step != self._validation.announced_step:  # a joiner gets the latest figure with the state
            self._write_note()
        self._tokens = tokens
        self._loss = math.nan if loss is None else loss
        self._send_progress()

    def _send_progress(self) -> None:
        if self._swarm is not None:  # the engine sends it at most twice a second
            self._engine.progress(
                inner_steps=self._outer.inner_steps,
                tokens=self.tokens.earlier + self._tokens,
                loss=self._loss,
                step_seconds=self._step_seconds,
                run_tokens=self.tokens.total,
            )

    def list_members(self) -> None:
        """Write the members to the event log every _LIST_SECONDS, for the display."""
        now = time.monotonic()
        if self._swarm is None or now - self._listed_at < _LIST_SECONDS:
            return
        self._listed_at = now
        members = [member for member in self._swarm.status().members if member.number >= 0]
        listed = [_listed(member) for member in members[:_MOST_LISTED]]
        self._events.emit(MembersEvent(present=listed, run_tokens=self.tokens.total))

    # Rounds

    def after_post(self, sequence: int) -> None:
        if self._engine.wanted(sequence):
            self._events.emit(CalledEvent(sequence=sequence, step=self._outer.inner_steps))

    def after_round(self, event: RoundEvent) -> None:
        result = event.result
        if result is None:
            return
        self._refusals = self._refusals + 1 if self._engine.worker in result.refused else 0
        self._guarded("what the members told with a round", self._take_in_round, event.key.sequence, result)
        self.claims.renumber(self._engine.worker)
        if result.roster and tuple(sorted({*result.roster, self._engine.worker})) != self.claims.roster:
            self._follow(result.roster)

    def _take_in_round(self, sequence: int, result: RoundResult) -> None:
        """Take in what the members of a round have reported and noted."""
        notes = {member.worker: _read(member.note) for member in result.members}
        contributed = {worker: notes[worker] for worker in result.contributors if worker in notes}
        most = self._most_tokens(sequence)
        for worker, tokens in self.tokens.after_round(contributed, most).items():
            self._events.emit(TokensDoubtedEvent(member=worker, round=sequence, tokens=tokens, most=most))
        notes.pop(self._engine.worker, None)
        for worker, note in notes.items():
            self.claims.read_note(worker, note)
        self._validation.after_round(sequence, result.members, notes)

    def _most_tokens(self, sequence: int) -> int:
        """Return the tokens of all steps of the schedule until this round is posted."""
        return self._outer.schedule.post_step(sequence) * self._config.tokens_per_step

    def _guarded(self, what: str, take_in: Callable[..., None], *received: object) -> None:
        """Take in what other machines have sent. A fault of this program in that does not end the training."""
        try:
            take_in(*received)
        except Exception as problem:
            logger.error("a fault of this worker's program, in reading %s", what, exc_info=problem)
            reason = f"{type(problem).__name__}: {problem}"[:200]
            self._events.emit(InternalErrorEvent(what=f"reading {what}", reason=reason))

    def _follow(self, roster: tuple[int, ...]) -> None:
        before = list(self._reader.shards)
        if self.claims.follow(roster, self._reader) or self._reader.shards != before:
            self._events.emit(ShardsEvent(shards=self._reader.shards))
        self._missing = self.claims.missing() if self._engine.ranks.rank == 0 else []
        self._fetcher.start(self._missing)

    def _fetch(self, name: str, path: Path) -> None:
        assert self._swarm is not None, "shards are missing only in a swarm"
        self._swarm.fetch_file(name, path)
        check_file(self._corpus.meta, path)

    def _write_note(self) -> bytes:
        """Return the note for a round; in another thread, which serves a joiner, the last one."""
        if threading.get_ident() == self._thread:
            note = self.claims.describe(self._reader, self._validation.note())
            self._note = write_note(self.tokens.in_note(note, self._outer.report.tokens))
            self._noted_step = self._validation.announced_step
        return self._note

    def _read_state_note(self) -> None:
        """Take in the note of the member that sent this worker its state: how far the shards have been read."""
        self._guarded("the note of a state", self._take_in_state_note, _read(self._outer.arrived_note))
        self._validation.record_absence()

    def _take_in_state_note(self, note: Note) -> None:
        self.claims.read_state_note(note)
        self.tokens.read_state_note(note, self._most_tokens(self._outer.sequence))

    def _on_resync(self, reason: str, sequence: int) -> None:
        self._read_state_note()
        self._events.emit(ResyncEvent(reason=reason, sequence=sequence, step=self._outer.inner_steps))

    def restart(self) -> None:
        self.tokens.begin(self._engine.worker)

    def _agree(self) -> None:
        notes = [_read(member.note) for member in self._outer.confirmed]
        self.tokens.agree(notes, self._most_tokens(self._outer.sequence))

    def tokens_by_worker(self) -> dict[str, int] | None:
        """Return the tokens of every worker, agreed on with all that have confirmed the end."""
        self._guarded("what the members told at the end", self._agree)
        return {str(worker): count for worker, count in sorted(self.tokens.by_worker.items())}

    @property
    def resyncs(self) -> int:  # type: ignore[override]
        return self._outer.counters.resyncs

    # Giving up

    def check_progress(self, failures: list[str], loss: float | None) -> None:
        """Raise Excluded if the swarm has excluded this worker, and EngineError if the loss is not finite and the last
        rounds were without this worker's contribution, or if no round has succeeded for CUT_OFF_SECONDS."""
        if self._engine.excluded is not None:
            raise Excluded(f"the swarm has excluded this worker: {self._engine.excluded}")
        rounds_without = len(failures) or self._refusals
        if rounds_without >= FAILURES_IN_A_ROW and loss is not None and not math.isfinite(loss):
            raise EngineError(
                f"the last {rounds_without} rounds failed or refused this worker's contribution, and the loss is "
                f"{loss}: lower inner.lr ({self._config.inner.lr}) or check the data"
            )
        if not failures:
            self._failing_since = None
            return
        self._failing_since = self._failing_since or time.monotonic()
        seconds = time.monotonic() - self._failing_since
        if len(failures) < FAILURES_IN_A_ROW:
            return
        if self._engine.ranks.any(seconds > CUT_OFF_SECONDS):  # each has a clock, and they must end together
            raise EngineError(
                f"no round has succeeded for {seconds / 60:.0f} minutes ({len(failures)} have failed, the last "
                f"because: {failures[-1]}). Check the network ({command('doctor')}) and continue with "
                f"{command('train', '--resume')}"
            )
