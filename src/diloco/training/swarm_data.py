"""What a worker of a swarm does about the others, who come and go while it trains. Nothing with a fixed membership.

It tells where it is, reads the shards that are its own at the moment, follows the others when its position jumps, and
bears with rounds that fail: a worker that is cut off from the network for a while goes on by itself, and says so.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from diloco.data.corpus import Corpus
from diloco.data.order import ShardProgress, check_disjoint, count_windows, worker_shards
from diloco.data.preparation.received_corpus import check_file
from diloco.engines.base import Connection
from diloco.errors import EngineError
from diloco.outer.loop import OuterLoop
from diloco.outer.rounds import RoundEvent
from diloco.training.batches import Reading, Texts, as_json
from diloco.training.config.run import RunConfig
from diloco.training.records.events import EventLog
from diloco.training.shard_claims import Fetching, Sharing, place_in, shards_of
from diloco.training.validation import Validation

if TYPE_CHECKING:
    from diloco.engines.swarm.node.status import MemberStatus, RunStatus

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3
_POLL_SECONDS = 0.1
_LIST_SECONDS = 10.0
_MOST_LISTED = 64
CUT_OFF_SECONDS = 3600.0
"""So long a worker of a swarm goes on although no round of its succeeds."""


@runtime_checkable
class Swarm(Protocol):
    """What engines/swarm/engine.py offers besides averaging."""

    @property
    def roster(self) -> tuple[int, ...]:
        """The numbers of all that are here."""

    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float) -> None: ...

    def fetch_file(self, name: str, path: Path) -> None: ...

    def status(self) -> "RunStatus":
        """Of all members (swarm/node/status.py)."""


def starting_shards(texts: Texts, engine: Connection, config: RunConfig) -> list[int]:
    """What a worker reads first: its share of the text, as far as it is here. In a swarm all that is here, if its share
    is less than a batch."""
    if texts.own is not None:
        return list(range(texts.own_place, texts.own.shards, texts.own_places))
    corpus = texts.shared
    if not engine.elastic:
        check_disjoint(corpus, engine.workers)
        return worker_shards(corpus.shards, engine.worker, engine.workers)
    here = [shard for shard in range(corpus.shards) if corpus.has(shard)]
    mine = shards_of(corpus.shards, *place_in(present(engine), engine.worker))
    share = [shard for shard in mine if shard in here]
    length = config.data.sequence_length
    windows = sum(count_windows(corpus.meta.shard_tokens[shard], length) for shard in share)
    return share if windows >= config.training.batch_size else here


def present(engine: Connection) -> tuple[int, ...]:
    """The members of the moment; this worker is one of them."""
    others = engine.roster if isinstance(engine, Swarm) else [member.worker for member in engine.members()]
    return tuple(sorted({*others, engine.worker}))


def _listed(one: "MemberStatus") -> dict[str, Any]:
    """A member as an event has it."""
    state = "left" if one.left else "lost" if not one.live else "training" if one.has_state else "joining"
    return {
        "member": one.number,
        "where": one.label,
        "step": one.position,
        "loss": one.loss if one.loss >= 0 else None,
        "contributed": one.contributed_round if one.contributed_round >= 0 else None,
        "state": state,
    }


class Company:
    """Of one worker with an elastic engine."""

    def __init__(
        self,
        config: RunConfig,
        texts: Texts,
        engine: Connection,
        reading: Reading,
        validation: Validation,
        outer: OuterLoop,
        events: EventLog,
    ) -> None:
        self._config, self._engine, self._events = config, engine, events
        self._swarm = engine if isinstance(engine, Swarm) else None
        self._reading, self._validation, self._outer = reading, validation, outer
        self._thread = threading.get_ident()
        length = config.data.sequence_length
        self.sharing = Sharing(texts.shared, length, engine.worker, own_text=texts.own is not None)
        self._fetching = Fetching(texts.shared, self._fetch, events.emit)
        self._corpus: Corpus = texts.shared
        self._lacking: list[int] = []
        self._note = b""
        self._failing_since: float | None = None
        self._refusals = 0  # of this worker's contributions, in a row
        self._last_step = time.monotonic()
        self._step_seconds = 0.0
        self._listed = 0.0
        outer.note, outer.on_resync = self._told, self._on_resync

    def begin(self, *, joined: bool, stopped: Callable[[], bool]) -> None:
        """Before the first inner step: the members of this moment share the text out. `joined`: with others' state."""
        outer, self._thread = self._outer, threading.get_ident()
        outer.end_at(self._config.steps)
        if joined:
            self._events.emit("joined", step=outer.inner_steps, rounds=outer.sequence)
        if outer.inner_steps == 0:
            self._wait_for_others(stopped)
        if joined:
            self.sharing.joined(outer.arrived_note)
            self.sharing.begin(present(self._engine), self._reading)
            self._events.emit("shards", shards=self._reading.shards)
        self._follow(present(self._engine))
        self._note = self.sharing.note(self._reading)
        self._last_step = time.monotonic()

    def _wait_for_others(self, stopped: Callable[[], bool]) -> None:
        """At the very beginning of a run, if its user wants so many to be there: that is for as long as it takes."""
        wanted, told = self._config.swarm.min_workers, -1
        while (here := len(present(self._engine))) < wanted and not stopped():
            if here != told:
                self._events.emit("waiting", present=here, wanted=wanted)
                told = here
            time.sleep(_POLL_SECONDS)

    # What is saved: how far the text has been read, also by others

    def state_dict(self) -> dict[str, Any]:
        self.sharing.note(self._reading)
        return {"read": as_json(self.sharing.known)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Whoever goes on alone has other shards than before."""
        self.sharing.learn({int(shard): ShardProgress(*read) for shard, read in state["read"].items()})
        known, mine = self.sharing.known, self._reading.progress()
        if not self.sharing.own_text and any(known.get(shard, read) != read for shard, read in mine.items()):
            self._reading.take(known)

    # Steps

    def before_step(self) -> None:
        if self._fetching.arrived.is_set():
            self._fetching.arrived.clear()
            if self.sharing.take(self._reading):
                self._events.emit("shards", shards=self._reading.shards)
        if self._lacking and self._fetching.may_try:
            self._lacking = self.sharing.missing()
            self._fetching.start(self._lacking)

    def after_step(self, loss: float | None, tokens: int) -> None:
        now = time.monotonic()
        self._step_seconds += 0.1 * (now - self._last_step - self._step_seconds)
        self._last_step = now
        if self._swarm is not None:  # which itself tells no more than twice a second
            self._swarm.progress(
                inner_steps=self._outer.inner_steps,
                tokens=tokens,
                loss=math.nan if loss is None else loss,
                step_seconds=self._step_seconds,
            )

    def list_members(self) -> None:
        """Who is in the swarm and where, for whoever looks at this machine's log; now and then."""
        now = time.monotonic()
        if self._swarm is None or now - self._listed < _LIST_SECONDS:
            return
        self._listed = now
        told = [one for one in self._swarm.status().members if one.number >= 0]
        self._events.emit("members", present=[_listed(one) for one in told[:_MOST_LISTED]])

    # Rounds

    def after_post(self, sequence: int) -> None:
        if self._engine.wanted(sequence):
            self._events.emit("called", sequence=sequence, step=self._outer.inner_steps)

    def after_round(self, event: RoundEvent) -> None:
        result = event.result
        if result is None:
            return
        self._refusals = self._refusals + 1 if self._engine.worker in result.refused else 0
        for member in result.members:
            if member.worker != self._engine.worker:
                self.sharing.heard(member.worker, member.note)
        if result.roster and tuple(sorted({*result.roster, self._engine.worker})) != self.sharing.roster:
            self._follow(result.roster)

    def _follow(self, roster: tuple[int, ...]) -> None:
        before = list(self._reading.shards)
        if self.sharing.follow(roster, self._reading) or self._reading.shards != before:
            self._events.emit("shards", shards=self._reading.shards)
        self._validation.share = place_in(self.sharing.roster, self._engine.worker)
        self._lacking = self.sharing.missing()
        self._fetching.start(self._lacking)

    def _fetch(self, name: str, path: Path) -> None:
        assert self._swarm is not None, "whoever lacks a shard is in a swarm that has it"
        self._swarm.fetch_file(name, path)
        check_file(self._corpus.meta, path)

    def _told(self) -> bytes:
        """In another thread, for a joiner, what was last told."""
        if threading.get_ident() == self._thread:
            self._note = self.sharing.note(self._reading)
        return self._note

    def _on_resync(self, reason: str, sequence: int) -> None:
        self.sharing.joined(self._outer.arrived_note)
        self._events.emit("resync", reason=reason, sequence=sequence, step=self._outer.inner_steps)

    @property
    def resyncs(self) -> int:
        """How often this worker took over the others' state after it had begun."""
        return self._outer.resyncs

    # Patience

    def check_progress(self, failures: list[str], loss: float | None) -> None:
        """Raise EngineError where to train on is of no use: the loss is not finite and the last rounds were without
        this worker's contribution, or no round has succeeded for CUT_OFF_SECONDS."""
        without = len(failures) or self._refusals
        if without >= FAILURES_IN_A_ROW and loss is not None and not math.isfinite(loss):
            raise EngineError(
                f"the last {without} rounds failed or refused this worker's contribution, and the loss is {loss}: "
                f"lower inner.lr ({self._config.inner.lr}) or check the data"
            )
        if not failures:
            self._failing_since = None
            return
        self._failing_since = self._failing_since or time.monotonic()
        seconds = time.monotonic() - self._failing_since
        if len(failures) >= FAILURES_IN_A_ROW and seconds > CUT_OFF_SECONDS:
            raise EngineError(
                f"no round has succeeded for {seconds / 60:.0f} minutes ({len(failures)} have failed, the last "
                f"because: {failures[-1]}). Check the network (diloco doctor); diloco train --resume goes on"
            )
