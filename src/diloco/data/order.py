"""The batches of a worker: a pure function of (seed, shards, their progress, position).

There is no iterator state. Batch number `position` can be computed at any time, so a run resumes from one
integer. Windows hold sequence_length + 1 tokens (inputs and, one further, targets) and step by
sequence_length: neighbours share one token, so that every token but a shard's first is a target exactly once.

Progress is kept per shard, not per worker, so the number of workers may change in the middle of an epoch. Each
epoch of a shard has a fixed pseudo-random order of its windows; the windows already read are a prefix of that
order: `ShardProgress(epoch, consumed)`. A worker mixes its shards: while R windows remain in them, a permutation
of 0..R-1 gives the shard of each draw, and a draw takes the shard's next window. After R draws the next epoch of
all its shards begins. So every window is read exactly once in each epoch of its shard, however often the shard
changes owners. The orders are keyed permutations, computed and not stored, so they need no memory.

Paper (DiLoCo, Algorithm 1): worker i draws from its own shard D_i; the D_i are disjoint, which
`check_disjoint` checks.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from diloco.data.corpus import Corpus, Tokens
from diloco.errors import ConfigError, DataError

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

_COUNT_AT_ONCE = 1 << 16
_NETWORK_ROUNDS = 6
"""More than the four that make a Feistel network look random, because small ranges mix little per round."""


def worker_shards(shards: int, worker: int, workers: int) -> list[int]:
    """List the shards that worker `worker` of `workers` reads: worker, worker + workers, …"""
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
            f"{workers} workers over {corpus.shards} shards: shards {missing} have no reader and shards "
            f"{unknown} do not exist; every shard must have one reader"
        )


def count_windows(tokens: int, sequence_length: int) -> int:
    """Number of windows of sequence_length + 1 tokens, stepping by sequence_length, in `tokens` tokens."""
    return max(0, (tokens - 1) // sequence_length)


def _take_windows(tokens: Tokens, windows: Int64, sequence_length: int, mask_bit: int | None) -> Int64:
    """[n, sequence_length + 1] tokens of the given windows; a token t that is not learnt is −1 − t."""
    columns = np.arange(sequence_length + 1)
    taken = np.asarray(tokens[windows[:, None] * sequence_length + columns], np.int64)
    return taken if mask_bit is None else np.where(taken & mask_bit, ~(taken ^ mask_bit), taken)


class ShardProgress(NamedTuple):
    """`consumed` windows of epoch number `epoch` of a shard have been read. A pair in JSON."""

    epoch: int = 0
    consumed: int = 0


Progress = Mapping[int, ShardProgress]


class _PassPosition(NamedTuple):
    """A position within pass `number` over the shards: `taken` draws so far, `counts[i]` of them from shard i."""

    number: int
    taken: int
    counts: Int64


@final
class WorkerBatches:
    """The batches of a worker that reads `shards`, starting from their `progress`.

    Holds the mapped shards and one position: `batch` may be called in any order, and is fast in sequence.
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
        """`progress` has at least these shards; without it they are unread."""
        if batch_size < 1 or sequence_length < 1:
            raise ConfigError(f"a batch of {batch_size} × {sequence_length} tokens: both must be at least 1")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.shards = list(shards)
        self._seed = seed
        self._mask_bit = corpus.mask_bit
        self._tokens = [corpus.shard(shard) for shard in self.shards]
        self._windows = np.array([count_windows(len(tokens), sequence_length) for tokens in self._tokens], np.int64)
        self.sequences_per_epoch = int(self._windows.sum())
        if self.sequences_per_epoch < batch_size:
            raise DataError(
                f"the worker with shards {_shortened(self.shards)} has {self.sequences_per_epoch} sequences of "
                f"{sequence_length} tokens in its {len(self.shards)} of {corpus.shards} shards ({corpus.train_tokens} "
                f"training tokens in all), less than one batch of {batch_size}: give more text, or make the batch, "
                f"data.sequence_length, data.shards or the number of workers smaller{_labels_hint(corpus)}"
            )
        self._start = self._checked_progress({} if progress is None else progress, optional=progress is None)
        self._remaining = self._windows - np.array([start.consumed for start in self._start], np.int64)
        self._last_position = self._start_of_pass(0)

    def _checked_progress(self, progress: Progress, optional: bool) -> list[ShardProgress]:
        start = []
        for shard, windows in zip(self.shards, self._windows, strict=True):
            if shard not in progress and not optional:
                raise DataError(f"the progress of shard {shard} is missing: its former owner must report it")
            shard_progress = ShardProgress(*progress.get(shard, ()))
            if shard_progress.epoch < 0 or not 0 <= shard_progress.consumed <= windows:
                raise DataError(
                    f"the progress of shard {shard} is {shard_progress}, but it has {windows} windows of "
                    f"{self.sequence_length} tokens: the progress belongs to another corpus or data.sequence_length"
                )
            start.append(shard_progress)
        return start

    def batch(self, position: int) -> Int64:
        """[batch_size, sequence_length + 1] tokens of batch number `position`, counted from 0.

        In a corpus with a loss mask, a token t that is not learnt is −1 − t.
        """
        place = self._position_at(position)
        parts: list[Int64] = []
        missing = self.batch_size
        while missing:  # a batch may extend into the next epoch
            count = min(missing, self._pass_size(place.number) - place.taken)
            indices = self._shards_of_draws(place, count)
            parts.append(self._gather(place, indices))
            place = self._advanced(place, indices)
            missing -= count
            if missing:
                place = self._start_of_pass(place.number + 1)
        self._last_position = place
        return np.concatenate(parts)

    def progress(self, position: int) -> dict[int, ShardProgress]:
        """Return the progress of each shard after `position` batches."""
        place = self._position_at(position)
        progress = {}
        for shard, start, count in zip(self.shards, self._start, place.counts.tolist(), strict=True):
            consumed = count if place.number else start.consumed + count
            progress[shard] = ShardProgress(start.epoch + place.number, consumed)
        return progress

    # Pass 0 draws the rest of the epochs in progress, each later pass a whole epoch of all shards.

    def _pass_size(self, number: int) -> int:
        return self.sequences_per_epoch if number else int(self._remaining.sum())

    def _start_of_pass(self, number: int) -> _PassPosition:
        return _PassPosition(number, 0, np.zeros(len(self.shards), np.int64))

    def _position_at(self, position: int) -> _PassPosition:
        """Return the position after `position` batches, counted from the last one if that is in the same pass."""
        if position < 0:
            raise ValueError(f"batch position {position} is negative")
        number = 0
        taken = position * self.batch_size
        if taken > self._pass_size(0):  # exactly at its end a pass is still the current one
            number, taken = divmod(taken - self._pass_size(0) - 1, self.sequences_per_epoch)
            number += 1
            taken += 1
        place = self._last_position
        if place.number != number or place.taken > taken:
            place = self._start_of_pass(number)
        while place.taken < taken:
            place = self._advanced(place, self._shards_of_draws(place, min(_COUNT_AT_ONCE, taken - place.taken)))
        self._last_position = place
        return place

    def _shards_of_draws(self, place: _PassPosition, count: int) -> Int64:
        """Return the index in `self.shards` of each of the next draws: [count]."""
        if count == 0 or len(self.shards) == 1:
            return np.zeros(count, np.int64)
        key = [self._seed]
        for shard, start in zip(self.shards, self._start, strict=True):
            key += [shard, start.epoch + place.number, 0 if place.number else start.consumed]
        mixed = Permutation(self._pass_size(place.number), *key)
        slots = mixed(np.arange(place.taken, place.taken + count, dtype=np.int64))
        ends = np.cumsum(self._windows if place.number else self._remaining)
        return np.searchsorted(ends, slots, side="right").astype(np.int64)

    def _advanced(self, place: _PassPosition, indices: Int64) -> _PassPosition:
        counts = place.counts + np.bincount(indices, minlength=len(self.shards))
        return _PassPosition(place.number, place.taken + len(indices), counts)

    def _gather(self, place: _PassPosition, indices: Int64) -> Int64:
        """Read the tokens of the next draws: from each shard its next windows."""
        batch = np.empty((len(indices), self.sequence_length + 1), np.int64)
        for index in np.unique(indices):
            is_of_shard = indices == index
            start = self._start[index]
            first = int(place.counts[index]) + (0 if place.number else start.consumed)
            order = Permutation(int(self._windows[index]), self._seed, self.shards[index], start.epoch + place.number)
            windows = order(np.arange(first, first + int(is_of_shard.sum()), dtype=np.int64))
            batch[is_of_shard] = _take_windows(self._tokens[index], windows, self.sequence_length, self._mask_bit)
        return batch


def _labels_hint(corpus: Corpus) -> str:
    if corpus.meta.partition != "labels":
        return ""
    return f" (data.partition = labels: {len(corpus.meta.label_tokens)} labels, each in one shard)"


def _shortened(shards: Sequence[int]) -> str:
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

    `limit` bounds the windows of all workers together, spread evenly over the split: the result depends neither on
    the number of workers nor on the batch size. With fewer windows than workers some get none.
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
        raise ConfigError(f"validation batches of {batch_size} for worker {worker} of {workers}: both must exist")
    used = windows if limit is None else min(limit, windows)
    own_windows = np.arange(worker, used, workers, dtype=np.int64) * windows // used
    return (
        _take_windows(tokens, own_windows[start : start + batch_size], sequence_length, corpus.mask_bit)
        for start in range(0, len(own_windows), batch_size)
    )


def check_validation(corpus: Corpus, sequence_length: int, limit: int | None = None) -> None:
    """Raise DataError unless there is something to validate on: a window and, with a loss mask, a token to learn."""
    batches = validation_batches(corpus, sequence_length, 64, limit=limit)
    if corpus.meta.masked and not any((batch[:, 1:] >= 0).any() for batch in batches):
        raise DataError(
            f"no answer is in the validation windows of {sequence_length} tokens (data.sequence_length), so there is "
            "no validation loss: use more data, more data.validation_fraction or longer sequences"
        )


# The order of the windows


@final
class Permutation:
    """A pseudo-random permutation of 0..size-1 that is computed element by element, in any order: no table.

    It belongs to `key`, any tuple of integers. A balanced Feistel network permutes 0..4^h-1, the smallest such range
    that holds `size`, because each of its rounds can be inverted whatever the mixing function. A value outside
    0..size-1 is permuted again until it is inside ("cycle walking"): it follows a cycle of the network, so no two
    inputs give the same output. Good enough to shuffle data; not cryptographic.
    """

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        # A hash makes the round keys unrelated even for neighbouring seeds, workers and epochs.
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * _NETWORK_ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, indices: Int64) -> Int64:
        """Return the images of `indices`, all of which lie in 0..size-1."""
        values = self._network(indices.astype(np.uint64).ravel())
        outside = values >= self.size
        while outside.any():  # the range is at most four times the size: a few turns
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64).reshape(indices.shape)

    def _network(self, values: UInt64) -> UInt64:
        left = values >> self._half_bits
        right = values & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(values: UInt64) -> UInt64:
    """Spread every input bit over all output bits: multiply by an odd constant and fold, twice."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))
