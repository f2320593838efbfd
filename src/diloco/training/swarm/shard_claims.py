"""Which shards of the text a worker of a swarm reads while members come and go.

The i-th of n members reads shards i, i + n, … When the members of a round differ from those of the round before, the
shards are shared out again, and each continues where its reader was when it posted that round: every contribution
carries a note with these positions. A shard whose file is not on this machine is fetched from a member beside training;
until it has arrived the worker reads the shards it has. Members with their own text say so in the note and get none.

Notes come from other machines (engines/note.py): positions that no shard has are ignored, and its shard is read from
its last known position. Some text may then be read twice; nothing else can go wrong.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from diloco.data.corpus import Corpus, shard_name
from diloco.data.order import ShardProgress, count_windows, worker_shards
from diloco.engines.note import MOST_SHARDS, Note, ValidationFigure, write_note
from diloco.errors import DataError, DiLoCoError
from diloco.history.events import Emit, Event, ShardFetchedEvent, ShardsNotFetchedEvent
from diloco.training.batches import ShardReader

logger = logging.getLogger(__name__)

RETRY_SECONDS = 30.0
Fetch = Callable[[str, Path], None]
"""Fetches a file of the corpus, by its name, from any member that has it; raises DiLoCoError."""


def index_among(roster: Iterable[int], worker: int) -> tuple[int, int]:
    """Return the index of a worker among the members, and how many there are; the worker itself always counts."""
    numbers = sorted({*roster, worker})
    return numbers.index(worker), len(numbers)


def shards_of(shards: int, index: int, members: int) -> list[int]:
    """Return the shards of the member with this index; with more members than shards, some read the same one."""
    return worker_shards(shards, index, members) if members <= shards else [index % shards]


class ShardClaims:
    """The shards of one worker. Used in the training thread only."""

    def __init__(self, corpus: Corpus, sequence_length: int, worker: int, *, own_text: bool) -> None:
        self._corpus = corpus
        self._length = sequence_length
        self._worker = worker
        self.own_text = own_text
        self.known: dict[int, ShardProgress] = {}
        """How far each shard has been read, as far as this worker knows."""
        self._apart: set[int] = {worker} if own_text else set()  # members with their own text
        self.roster: tuple[int, ...] = (worker,)

    # Notes

    def note(self, reader: ShardReader) -> bytes:
        """Return the note of `describe`, written."""
        return write_note(self.describe(reader))

    def describe(self, reader: ShardReader, validation: ValidationFigure | None = None) -> Note:
        """Return how far the shards have been read, this worker's own first; for a round, and for the state of a
        joiner.

        `validation`: the latest figure, which goes with it.
        """
        mine = {} if self.own_text else reader.progress()
        self.learn(mine)
        listed = [*mine, *(shard for shard in self.known if shard not in mine)][:MOST_SHARDS]
        return Note({shard: self.known[shard] for shard in listed}, frozenset(self._apart), validation)

    def read_note(self, worker: int, note: Note) -> None:
        """Take in another worker's note of a round. It can say that it has its own text, but not that others have."""
        self.learn({shard: ShardProgress(*read) for shard, read in note.read.items()})
        if worker in note.apart:
            self._apart.add(worker)

    def read_state_note(self, note: Note) -> None:
        """Take in the note of the member that sent this worker its state."""
        self.learn({shard: ShardProgress(*read) for shard, read in note.read.items()})
        self._apart |= note.apart - {self._worker}

    def learn(self, progress: Mapping[int, ShardProgress]) -> None:
        """Keep the furthest position of each shard; positions beyond its end are ignored."""
        for shard, read in progress.items():
            if 0 <= shard < self._corpus.shards:
                windows = count_windows(self._corpus.meta.shard_tokens[shard], self._length)
                if 0 <= read.consumed <= windows and 0 <= read.epoch < 1 << 40:
                    self.known[shard] = max(self.known.get(shard, read), read)

    # Shards of this worker

    def renumber(self, worker: int) -> None:
        """Take over this worker's number, which may have changed since the last round."""
        if self.own_text:
            self._apart = self._apart - {self._worker} | {worker}
        self._worker = worker

    def shards(self) -> list[int]:
        """Return the shards of this worker, by the present roster."""
        return shards_of(self._corpus.shards, *index_among(set(self.roster) - self._apart, self._worker))

    def begin(self, roster: tuple[int, ...], reader: ShardReader) -> None:
        """Continue each shard from its position when this worker joined; called before the first step."""
        self.roster = tuple(sorted({*roster, self._worker}))
        if not self.own_text and not self.take(reader) and self.known:
            reader.take(self.known)

    def follow(self, roster: tuple[int, ...], reader: ShardReader) -> bool:
        """Follow the members of a round; return whether this worker now reads other shards than before."""
        self.roster = tuple(sorted({*roster, self._worker}))
        return not self.own_text and self.take(reader)

    def take(self, reader: ShardReader) -> bool:
        """Switch to those of this worker's shards that are on this machine. Returns whether anything changed."""
        mine = self.shards()
        local_shards = [shard for shard in mine if self._corpus.has(shard)]
        if not local_shards or local_shards == reader.shards:
            return False
        shards_before = reader.shards
        progress_before = reader.progress()
        self.learn(progress_before)
        try:
            reader.take(self.known, shards=local_shards)
        except DataError as error:  # too little text is here: keep the old shards until the rest has arrived
            logger.info("shards %s are not enough yet: %s", local_shards, error)
            reader.take({**self.known, **progress_before}, shards=shards_before)
            return False
        return True

    def missing(self) -> list[int]:
        """Return the shards to fetch: this worker's own first, then those of the next member, so that each is on two
        machines."""
        index, members = index_among(set(self.roster) - self._apart, self._worker)
        wanted = [*self.shards(), *shards_of(self._corpus.shards, (index + 1) % members, members)]
        return [] if self.own_text else [shard for shard in dict.fromkeys(wanted) if not self._corpus.has(shard)]


class ShardFetcher:
    """Fetches missing shards one after another in a thread; those that failed can be tried again after a while."""

    def __init__(self, corpus: Corpus, fetch: Fetch, emit: Emit) -> None:
        self._corpus = corpus
        self._fetch = fetch
        self._emit_event = emit
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self._failure = ""
        self.arrived = threading.Event()

    @property
    def may_try(self) -> bool:
        """Return whether it is idle and its last failure is RETRY_SECONDS ago."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and time.monotonic() >= self._not_before

    def start(self, shards: Sequence[int]) -> None:
        """Fetch these, unless a fetch is running."""
        if shards and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, args=(shards,), name="diloco-shards", daemon=True)
            self._thread.start()

    def _run(self, shards: Sequence[int]) -> None:
        failed = []
        reason = ""
        for shard in shards:
            name = shard_name(shard)
            try:
                self._fetch(name, self._corpus.folder / name)
            except (DiLoCoError, OSError) as error:
                failed.append(shard)
                reason = str(error)
                logger.warning("shard %d could not be fetched: %s", shard, reason)
            else:
                self._emit(ShardFetchedEvent(shard=shard))
                self.arrived.set()
        self._not_before = time.monotonic() + RETRY_SECONDS
        if failed and reason != self._failure:  # the same reason is reported once
            self._emit(ShardsNotFetchedEvent(shards=failed, reason=reason))
        self._failure = reason

    def _emit(self, event: Event) -> None:
        try:
            self._emit_event(event)
        except OSError as error:
            logger.error("the event '%s' was not written: %s", event.type, error)
