"""Which token windows a worker sees, and when: a pure function of (seed, worker, position).

There is no iterator state. Batch number `position` can be computed at any time, so a run resumes from one
integer. A worker's sequences are the windows of its own shards; an epoch visits each of them exactly once in
a pseudo-random order that differs between seeds, workers and epochs. The order is a keyed permutation,
computed and not stored, so it costs no memory however long the corpus. Windows hold sequence_length + 1
tokens (inputs and, one further, targets) and step by sequence_length: neighbours share one token, so that
every token but a shard's first is a target exactly once.

Paper (DiLoCo, Algorithm 1): worker i draws from its own shard D_i; the D_i are disjoint, which
`check_disjoint` checks.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from diloco.data.corpus import Corpus, Tokens
from diloco.data.permutation import Permutation
from diloco.errors import ConfigError, DataError

Int64 = NDArray[np.int64]


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


@final
class WorkerBatches:
    """The batches of one worker. Holds nothing but maps of its shards: `batch` may be called in any order."""

    def __init__(
        self, corpus: Corpus, sequence_length: int, batch_size: int, worker: int, workers: int, seed: int
    ) -> None:
        if batch_size < 1 or sequence_length < 1:
            raise ConfigError(f"a batch of {batch_size} × {sequence_length} tokens: both must be at least 1")
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self._key = (seed, worker)
        self.shards = worker_shards(corpus.shards, worker, workers)
        self._tokens = [corpus.shard(shard) for shard in self.shards]
        windows = [count_windows(len(tokens), sequence_length) for tokens in self._tokens]
        self._ends = np.cumsum(windows)
        self.sequences_per_epoch = int(self._ends[-1])
        if self.sequences_per_epoch < batch_size:
            raise DataError(
                f"worker {worker} of {workers} has {self.sequences_per_epoch} sequences of {sequence_length} "
                f"tokens in its {len(self.shards)} of {corpus.shards} shards ({corpus.train_tokens} training "
                f"tokens in all), less than one batch of {batch_size}: give more text, or make the batch, "
                "data.sequence_length, data.shards or the number of workers smaller"
            )

    def batch(self, position: int) -> Int64:
        """[batch_size, sequence_length + 1] tokens of the batch that follows `position` earlier ones."""
        if position < 0:
            raise ValueError(f"batch position {position} is negative")
        first = position * self.batch_size
        sequences = np.arange(first, first + self.batch_size, dtype=np.int64)
        epochs, offsets = np.divmod(sequences, self.sequences_per_epoch)
        chosen = np.empty_like(sequences)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):  # a batch may reach into the next epoch
            here = epochs == epoch
            chosen[here] = Permutation(self.sequences_per_epoch, *self._key, epoch)(offsets[here])
        return self._gather(chosen)

    def epoch(self, position: int) -> int:
        """How many times the worker has seen all of its sequences when `position` batches are taken."""
        return position * self.batch_size // self.sequences_per_epoch

    def _gather(self, sequences: Int64) -> Int64:
        """Tokens of sequences numbered through all shards of this worker."""
        batch = np.empty((len(sequences), self.sequence_length + 1), np.int64)
        shard_of = np.searchsorted(self._ends, sequences, side="right")
        for shard in np.unique(shard_of):
            here = shard_of == shard
            first = self._ends[shard - 1] if shard else 0
            batch[here] = _take_windows(self._tokens[shard], sequences[here] - first, self.sequence_length)
        return batch


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
