"""Which token windows a worker sees, and when: a pure function of (seed, shards, their progress, position).

There is no iterator state. Batch number `position` can be computed at any time, so a run resumes from one
integer. Windows hold sequence_length + 1 tokens (inputs and, one further, targets) and step by
sequence_length: neighbours share one token, so that every token but a shard's first is a target exactly once.

Progress belongs to the shard, not to the worker, so that the number of workers may change in the middle of an
epoch. Each epoch of a shard has a fixed pseudo-random order of its windows, and what has been read of it is a
prefix of that order: `ShardProgress(epoch, consumed)`. A worker mixes its shards: while R windows remain in
them, a permutation of 0..R-1 says from which shard each draw comes, and a draw takes the shard's next window.
When all R are drawn, the next epoch of all its shards begins. So whoever owns a shard, and however often that
changes, every window is read exactly once in each epoch of its shard. The orders are keyed permutations,
computed and not stored, so they cost no memory however long the corpus.

Paper (DiLoCo, Algorithm 1): worker i draws from its own shard D_i; the D_i are disjoint, which
`check_disjoint` checks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from diloco.data.corpus import Corpus, Tokens
from diloco.data.permutation import Permutation
from diloco.errors import ConfigError, DataError

Int64 = NDArray[np.int64]

_COUNT_AT_ONCE = 1 << 16


def worker_shards(shards: int, worker: int, workers: int) -> list[int]:
    """The shards that worker `worker` of `workers` reads: worker, worker + workers, …"""
    if workers > shards:
        raise ConfigError(
            f"{workers} workers cannot share {shards} shards (data.shards): each worker needs a shard of its "
            f"own; use at most {shards} workers, or --data.shards {workers} or more"
        )
    if not 0 <= worker < workers:
        raise ConfigError(f"worker {worker} does not exist: with {workers} workers they are 0 to {workers - 1}")
    return list(range(worker, shards, workers))


Assignment = Callable[[int, int, int], Sequence[int]]


def check_disjoint(corpus: Corpus, workers: int, assignment: Assignment = worker_shards) -> None:
    """Raise DataError unless every shard of the corpus belongs to exactly one worker."""
    owner: dict[int, int] = {}
    for worker in range(workers):
        for shard in assignment(corpus.shards, worker, workers):
            if shard in owner:
                raise DataError(
                    f"shard {shard} is read by workers {owner[shard]} and {worker}: shards must be disjoint"
                )
            owner[shard] = worker
    missing = sorted(set(range(corpus.shards)) - owner.keys())
    unknown = sorted(owner.keys() - set(range(corpus.shards)))
    if missing or unknown:
        raise DataError(
            f"{workers} workers over {corpus.shards} shards: shards {missing} are read by nobody and shards "
            f"{unknown} do not exist; every shard must have one reader"
        )


def count_windows(tokens: int, sequence_length: int) -> int:
    """Windows of sequence_length + 1 tokens, stepping by sequence_length, that fit into so many tokens."""
    return max(0, (tokens - 1) // sequence_length)


def _take_windows(tokens: Tokens, windows: Int64, sequence_length: int) -> Int64:
    """[n, sequence_length + 1] tokens of the given windows."""
    columns = np.arange(sequence_length + 1)
    return np.asarray(tokens[windows[:, None] * sequence_length + columns], np.int64)


class ShardProgress(NamedTuple):
    """What has been read of a shard: `consumed` windows of its epoch number `epoch`. JSON keeps it as a pair."""

    epoch: int = 0
    consumed: int = 0


Progress = Mapping[int, ShardProgress]


def merge_progress(parts: Iterable[Progress]) -> dict[int, ShardProgress]:
    """The progress of all workers together, for whoever owns the shards next."""
    union: dict[int, ShardProgress] = {}
    for part in parts:
        if shared := sorted(union.keys() & part.keys()):
            raise DataError(f"the progress of shards {shared} is told by two workers: their shards were not disjoint")
        union.update(part)
    return union


class _Draws(NamedTuple):
    """How far one pass over the shards has come: of pass `number`, `taken` draws, so many from each shard."""

    number: int
    taken: int
    counts: Int64


@final
class WorkerBatches:
    """The batches of the owner of some shards, from the moment it got them with the given progress.

    Holds maps of the shards and one position: `batch` may be called in any order, and is quick in sequence.
    """

    def __init__(
        self,
        corpus: Corpus,
        sequence_length: int,
        batch_size: int,
        shards: Sequence[int],
        seed: int,
        progress: Progress | None = None,
    ) -> None:
        """`progress` has at least these shards; without it they are as yet unread."""
        if batch_size < 1 or sequence_length < 1:
            raise ConfigError(f"a batch of {batch_size} × {sequence_length} tokens: both must be at least 1")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.shards = list(shards)
        self._seed = seed
        self._tokens = [corpus.shard(shard) for shard in self.shards]
        self._windows = np.array([count_windows(len(tokens), sequence_length) for tokens in self._tokens], np.int64)
        self.sequences_per_epoch = int(self._windows.sum())
        if self.sequences_per_epoch < batch_size:
            raise DataError(
                f"the worker with shards {_abridged(self.shards)} has {self.sequences_per_epoch} sequences of "
                f"{sequence_length} tokens in its {len(self.shards)} of {corpus.shards} shards ({corpus.train_tokens} "
                f"training tokens in all), less than one batch of {batch_size}: give more text, or make the batch, "
                "data.sequence_length, data.shards or the number of workers smaller"
            )
        self._start = self._checked({} if progress is None else progress, optional=progress is None)
        self._left = self._windows - np.array([start.consumed for start in self._start], np.int64)
        self._reached = self._before(0)

    def _checked(self, progress: Progress, optional: bool) -> list[ShardProgress]:
        start = []
        for shard, windows in zip(self.shards, self._windows, strict=True):
            if shard not in progress and not optional:
                raise DataError(f"nothing is known of the progress of shard {shard}: its former owner must tell it")
            told = ShardProgress(*progress.get(shard, ()))
            if told.epoch < 0 or not 0 <= told.consumed <= windows:
                raise DataError(
                    f"shard {shard} is said to be at {told}, but has {windows} windows of {self.sequence_length} "
                    "tokens: the progress belongs to another corpus or data.sequence_length"
                )
            start.append(told)
        return start

    def batch(self, position: int) -> Int64:
        """[batch_size, sequence_length + 1] tokens of the batch that follows `position` earlier ones."""
        draws = self._at(position)
        parts: list[Int64] = []
        missing = self.batch_size
        while missing:  # a batch may reach into the next epoch
            count = min(missing, self._size(draws.number) - draws.taken)
            owners = self._owners(draws, count)
            parts.append(self._gather(draws, owners))
            draws = self._after(draws, owners)
            missing -= count
            if missing:
                draws = self._before(draws.number + 1)
        self._reached = draws
        return np.concatenate(parts)

    def progress(self, position: int) -> dict[int, ShardProgress]:
        """What has been read of each shard when `position` batches are taken."""
        draws = self._at(position)
        told = {}
        for shard, start, count in zip(self.shards, self._start, draws.counts.tolist(), strict=True):
            consumed = count if draws.number else start.consumed + count
            told[shard] = ShardProgress(start.epoch + draws.number, consumed)
        return told

    # Draws are counted in passes: pass 0 takes what is left of the epochs in progress, each later one a whole epoch.

    def _size(self, number: int) -> int:
        return self.sequences_per_epoch if number else int(self._left.sum())

    def _before(self, number: int) -> _Draws:
        return _Draws(number, 0, np.zeros(len(self.shards), np.int64))

    def _at(self, position: int) -> _Draws:
        """After so many batches; counts on from where the last batch ended if that helps."""
        if position < 0:
            raise ValueError(f"batch position {position} is negative")
        number, taken = 0, position * self.batch_size
        if taken > self._size(0):  # at the very end of a pass the next has not begun
            number, taken = divmod(taken - self._size(0) - 1, self.sequences_per_epoch)
            number, taken = number + 1, taken + 1
        draws = self._reached
        if draws.number != number or draws.taken > taken:
            draws = self._before(number)
        while draws.taken < taken:
            draws = self._after(draws, self._owners(draws, min(_COUNT_AT_ONCE, taken - draws.taken)))
        self._reached = draws
        return draws

    def _owners(self, draws: _Draws, count: int) -> Int64:
        """[count]: which of the worker's shards each of the next draws comes from, by index."""
        if count == 0 or len(self.shards) == 1:
            return np.zeros(count, np.int64)
        key = [
            (shard, start.epoch + draws.number, 0 if draws.number else start.consumed)
            for shard, start in zip(self.shards, self._start, strict=True)
        ]
        mixed = Permutation(self._size(draws.number), self._seed, *(number for part in key for number in part))
        slots = mixed(np.arange(draws.taken, draws.taken + count, dtype=np.int64))
        ends = np.cumsum(self._windows if draws.number else self._left)
        return np.searchsorted(ends, slots, side="right").astype(np.int64)

    def _after(self, draws: _Draws, owners: Int64) -> _Draws:
        counts = draws.counts + np.bincount(owners, minlength=len(self.shards))
        return _Draws(draws.number, draws.taken + len(owners), counts)

    def _gather(self, draws: _Draws, owners: Int64) -> Int64:
        """The tokens of the draws that follow: from each shard its next windows."""
        batch = np.empty((len(owners), self.sequence_length + 1), np.int64)
        for index in np.unique(owners):
            here = owners == index
            start = self._start[index]
            first = int(draws.counts[index]) + (0 if draws.number else start.consumed)
            order = Permutation(int(self._windows[index]), self._seed, self.shards[index], start.epoch + draws.number)
            windows = order(np.arange(first, first + int(here.sum()), dtype=np.int64))
            batch[here] = _take_windows(self._tokens[index], windows, self.sequence_length)
        return batch


def _abridged(shards: Sequence[int]) -> str:
    return ", ".join(map(str, shards[:4])) + (", …" if len(shards) > 4 else "")


def validation_batches(
    corpus: Corpus,
    sequence_length: int,
    batch_size: int,
    worker: int = 0,
    workers: int = 1,
    limit: int | None = None,
) -> Iterator[Int64]:
    """Arrays of [≤ batch_size, sequence_length + 1] tokens: validation windows i, i + k, … for worker i of k.

    `limit` bounds the windows of all workers together, spread evenly over the split: what is measured depends
    neither on the number of workers nor on the batch size. With fewer windows than workers some get none.
    """
    tokens = corpus.validation()
    windows = count_windows(len(tokens), sequence_length)
    if windows == 0:
        raise DataError(
            f"the validation split has {len(tokens)} tokens, less than one window of {sequence_length + 1} "
            "(data.sequence_length + 1); use more text, more data.validation_fraction or a shorter sequence"
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit of validation windows is {limit}, but must be at least 1 (or None for all)")
    if batch_size < 1 or not 0 <= worker < workers:
        raise ConfigError(f"validation batches of {batch_size} for worker {worker} of {workers}: there are none such")
    used = windows if limit is None else min(limit, windows)
    own = np.arange(worker, used, workers, dtype=np.int64) * windows // used
    return (
        _take_windows(tokens, own[start : start + batch_size], sequence_length)
        for start in range(0, len(own), batch_size)
    )
