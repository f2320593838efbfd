"""Which shards of the text a worker of a swarm reads while others come and go, and what they tell each other of it.

The i-th of n members reads shards i, i + n, … When the members of a round are not those of the round before, all share
the text out anew, and each shard goes on where its reader had come when it posted that round: a note that travels with
every round says so. A shard whose file is not here is fetched from whoever has it, beside training; until then the
worker reads what it has. Members with text of their own tell so, and take no part.

What is told comes from others: a note that makes no sense is passed over, and the shards that it may have been about
are read from where they were last known to be. Text may be read twice then; nothing else can go wrong.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from diloco.data.corpus import Corpus, shard_name
from diloco.data.order import ShardProgress, count_windows, worker_shards
from diloco.errors import DataError, DiLoCoError
from diloco.training.batches import ShardReader

logger = logging.getLogger(__name__)

_MOST_SHARDS, _MOST_APART = 256, 256
"""In a note, of which a round takes 16 KiB; a shard that is not told is read from where it was last known to be."""

RETRY_SECONDS = 30.0
Fetch = Callable[[str, Path], None]
"""A file of the corpus, by its name, from any member that has it; raises DiLoCoError."""


def index_among(roster: Iterable[int], worker: int) -> tuple[int, int]:
    """Where a worker stands among the members, and how many there are; it is one of them, told of or not."""
    numbers = sorted({*roster, worker})
    return numbers.index(worker), len(numbers)


def shards_of(shards: int, place: int, places: int) -> list[int]:
    """Where there are more members than shards, some read the same one."""
    return worker_shards(shards, place, places) if places <= shards else [place % shards]


class ShardClaims:
    """Of one worker. All in the thread that trains."""

    def __init__(self, corpus: Corpus, sequence_length: int, worker: int, *, own_text: bool) -> None:
        self._corpus, self._length, self._worker, self.own_text = corpus, sequence_length, worker, own_text
        self.known: dict[int, ShardProgress] = {}
        """How far each shard has been read, as far as anybody has told."""
        self._apart: set[int] = {worker} if own_text else set()  # members with text of their own
        self.roster: tuple[int, ...] = (worker,)

    # What is told

    def note(self, reader: ShardReader) -> bytes:
        """With a round, and with the state for a joiner: how far the shards have been read, this worker's own first."""
        mine = {} if self.own_text else reader.progress()
        self.learn(mine)
        told = [*mine, *(shard for shard in self.known if shard not in mine)][:_MOST_SHARDS]
        read = {str(shard): list(self.known[shard]) for shard in told}
        return json.dumps({"read": read, "apart": sorted(self._apart)[:_MOST_APART]}, separators=(",", ":")).encode()

    def heard(self, worker: int, note: bytes) -> None:
        """What another worker has told. Only itself is believed to have text of its own."""
        values = _unpacked(note)
        self.learn(_progress(values.get("read")))
        apart = values.get("apart")
        if isinstance(apart, list) and worker in apart:
            self._apart.add(worker)

    def joined(self, note: bytes) -> None:
        """What the source of this worker's state has told."""
        values = _unpacked(note)
        self.learn(_progress(values.get("read")))
        apart = values.get("apart")
        if isinstance(apart, list):
            self._apart |= {one for one in apart if isinstance(one, int) and one != self._worker}

    def learn(self, progress: Mapping[int, ShardProgress]) -> None:
        """Believe whoever is further; never more than there is."""
        for shard, read in progress.items():
            if 0 <= shard < self._corpus.shards:
                windows = count_windows(self._corpus.meta.shard_tokens[shard], self._length)
                if 0 <= read.consumed <= windows and 0 <= read.epoch < 1 << 40:
                    self.known[shard] = max(self.known.get(shard, read), read)

    # Who reads what

    def shards(self) -> list[int]:
        """Of this worker, by the roster as it is."""
        return shards_of(self._corpus.shards, *index_among(set(self.roster) - self._apart, self._worker))

    def begin(self, roster: tuple[int, ...], reader: ShardReader) -> None:
        """Before the first step: each shard goes on where it was when this worker joined."""
        self.roster = tuple(sorted({*roster, self._worker}))
        if not self.own_text and not self.take(reader) and self.known:
            reader.take(self.known)

    def follow(self, roster: tuple[int, ...], reader: ShardReader) -> bool:
        """After a round. Whether this worker reads other shards from here on than before."""
        self.roster = tuple(sorted({*roster, self._worker}))
        return not self.own_text and self.take(reader)

    def take(self, reader: ShardReader) -> bool:
        """Read the shards that are this worker's and here; those that it has if none of its own is."""
        mine = self.shards()
        here = [shard for shard in mine if self._corpus.has(shard)]
        if not here or here == reader.shards:
            return False
        before = reader.shards, reader.progress()
        self.learn(before[1])
        try:
            reader.take(self.known, shards=here)
        except DataError as error:  # too little text in what is here: until the rest has come, the old shards
            logger.info("shards %s are not enough yet: %s", here, error)
            reader.take({**self.known, **before[1]}, shards=before[0])
            return False
        return True

    def missing(self) -> list[int]:
        return [] if self.own_text else [shard for shard in self.shards() if not self._corpus.has(shard)]


class ShardFetcher:
    """Shards that are to come, one after another in a thread; what does not come is asked for again after a while."""

    def __init__(self, corpus: Corpus, fetch: Fetch, tell: Callable[..., None]) -> None:
        self._corpus, self._fetch, self._tell = corpus, fetch, tell
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self._failure = ""
        self.arrived = threading.Event()

    @property
    def may_try(self) -> bool:
        """It is not at it, and has not failed a moment ago."""
        busy = self._thread is not None and self._thread.is_alive()
        return not busy and time.monotonic() >= self._not_before

    def start(self, shards: Sequence[int]) -> None:
        """Unless it is at it already."""
        if shards and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self._run, args=(shards,), name="diloco-shards", daemon=True)
            self._thread.start()

    def _run(self, shards: Sequence[int]) -> None:
        failed, reason = [], ""
        for shard in shards:
            name = shard_name(shard)
            try:
                self._fetch(name, self._corpus.folder / name)
            except (DiLoCoError, OSError) as error:
                failed.append(shard)
                reason = str(error)
                logger.warning("shard %d could not be fetched: %s", shard, reason)
            else:
                self._say("shard_fetched", shard=shard)
                self.arrived.set()
        self._not_before = time.monotonic() + RETRY_SECONDS
        if failed and reason != self._failure:  # said once, not every time
            self._say("shards_not_fetched", shards=failed, reason=reason)
        self._failure = reason

    def _say(self, type_: str, **fields: object) -> None:
        try:
            self._tell(type_, **fields)
        except OSError as error:
            logger.error("the event '%s' was not written: %s", type_, error)


def _unpacked(note: bytes) -> Mapping[str, object]:
    try:
        values = json.loads(note) if note else {}
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        logger.warning("a note that makes no sense is passed over: %.80r", note)
        return {}
    return values


def _progress(values: object) -> dict[int, ShardProgress]:
    told: dict[int, ShardProgress] = {}
    for shard, read in values.items() if isinstance(values, dict) else ():
        match read:
            case [int() as epoch, int() as consumed] if str(shard).isdecimal():
                told[int(shard)] = ShardProgress(epoch, consumed)
    return told
