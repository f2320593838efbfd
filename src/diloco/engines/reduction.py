"""The reduction that every engine shares: from encoded contributions to an encoded mean.

A fragment's parts go through the network in waves, each worker reducing a run of each wave. Parts and their owners
decide only which worker does the work and how many bytes travel, never a bit of the mean: a part is encoded by itself,
and its mean is accumulated in worker order wherever that is done.

On a CPU threads work on rows of one tensor side by side (`for_each`), each on one core. torch's own threads share out a
single operation, which for the few parts that fit into a cache costs more than it gains. Here each thread takes some
rows through all operations. There are as many threads as torch may use.
"""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import combinations_with_replacement

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import EncodedVector, scratch
from diloco.core.config import Merge
from diloco.core.fragments import span_elements
from diloco.core.merges import MERGES
from diloco.core.merging import Decision, inner_products, num_products, weighted_mean
from diloco.engines.header import HEADER_BYTES
from diloco.engines.rounds import Comparison, Member, RoundPhases, RoundResult

_WAVES_WANTED = 16  # few, as each one's messages cost time of their own, but so many that one is small beside the model
_MIN_WAVE_BYTES_PER_WORKER = 1 << 19
WAVES_AHEAD = 4
"""The waves that travel at a time (torch_distributed.py), a quarter of a large vector: with a sixteenth, a round takes
twice as long at 200 Mbit/s and 50 ms each way."""
_PRODUCTS_OF_FOUR = 10
_LEAST_ELEMENTS = 1 << 17  # for one of several threads


def run_ends(members: Iterable[Member]) -> bool:
    """Whether a fixed set of workers ends, from a round's headers: one stops early, or all have taken their steps."""
    reports = [member.report for member in members]
    return any(report.stopping for report in reports) or all(report.done for report in reports)


def reduce_parts(
    codec: Codec,
    encoded: Sequence[Tensor],
    weights: Sequence[float],
    part: int,
    out: Tensor,
    *,
    scales: Sequence[float] = (),
    merge: Merge = "mean",
    squares: list[float] | None = None,
    first_part: int = 0,
    batch_elements: int | None = None,
) -> Comparison:
    """Encode into `out` the weighted mean of encoded parts of `part` elements (each tensor is [rows, part_bytes]).

    Accumulated in fp32 in the order given, a few parts at a time. `out` may be one of `encoded`, if means have the
    codec of contributions.
    `scales` and `merge` as in Decision.
    `squares`: the squared norms of the contributions are added to these.
    With more than four contributions only some of the parts, which are numbered from `first_part`, are in the inner
    products of the returned comparison: it costs no more than with four.
    `batch_elements`: how many to process at a time, if not as many as fit into a cache.
    """
    at_once = batch_elements or span_elements(out.device) * 4 // max(4, len(encoded))
    threads = torch.get_num_threads() if out.device.type == "cpu" else 1
    batch = max(1, min(at_once // part, max(-(-len(out) // threads), _LEAST_ELEMENTS // part)))
    batches = [slice(first, min(first + batch, len(out))) for first in range(0, len(out), batch)]
    every = -(-num_products(len(encoded)) // _PRODUCTS_OF_FOUR)
    reduction = _Reduction(codec, encoded, weights, part, out, scales, merge, squares is not None)

    def reduce(rows: slice) -> None:
        reduction.reduce(rows, with_products=len(encoded) > 1 and (first_part + rows.start) // batch % every == 0)

    if len(batches) > 1 and out.device.type == "cpu":
        for_each(reduce, batches)
    else:
        for rows in batches:
            reduce(rows)
    if squares is not None:
        squares[:] = [before + more for before, more in zip(squares, reduction.sum_squares(), strict=True)]
    return reduction.comparison()


@dataclass(frozen=True)
class _Reduction:
    """One call of reduce_parts, whose arguments are the fields, and what it counts."""

    codec: Codec
    encoded: Sequence[Tensor]
    weights: Sequence[float]
    part: int
    out: Tensor
    scales: Sequence[float]
    merge: Merge
    with_squares: bool
    """Whether `squares` are wanted."""
    products: dict[int, Tensor] = field(default_factory=dict)
    """The key is the first row, so that their order is that of the rows, not of the threads."""
    squares: dict[tuple[int, int], float] = field(default_factory=dict)
    """The key is the first row and the contribution."""
    replaced: list[Tensor] = field(default_factory=list)
    """For some parts each, in how many of them each contribution counted as the mean of the others."""

    def reduce(self, rows: slice, *, with_products: bool) -> None:
        """Encode into `out` the mean of these parts."""
        all_at_once = with_products or self.merge != "mean"
        shape = (rows.stop - rows.start, self.part)
        count = len(self.encoded) if all_at_once else min(len(self.encoded), 2)
        terms = [scratch(f"term {index}", shape, self.out.device) for index in range(count)]
        values = self._decode(rows, terms, self.with_squares and not with_products)
        mean = terms[0]
        if all_at_once:
            values = iter(list(values))
        if with_products:
            sums = inner_products(terms)
            self.products[rows.start] = sums
            if self.with_squares:
                pairs = zip(combinations_with_replacement(range(count), 2), sums.tolist(), strict=True)
                self.squares.update({(rows.start, i): product for (i, j), product in pairs if i == j})
        if self.merge != "mean":
            self.replaced.append(MERGES[self.merge](terms, self.weights, mean, self.scales))
        else:
            weighted_mean(values, self.weights, mean, self.scales)
        self.codec.for_means.encode(mean, self.out[rows])

    def _decode(self, rows: slice, terms: Sequence[Tensor], with_squares: bool) -> Iterator[Tensor]:
        """Decode each contribution; with fewer terms than contributions, each takes the last one's memory."""
        for index, data in enumerate(self.encoded):
            term = terms[min(index, len(terms) - 1)]
            self.codec.decode(data[rows], term)
            if with_squares:
                self.squares[rows.start, index] = float(torch.linalg.vector_norm(term)) ** 2
            yield term

    def sum_squares(self) -> list[float]:
        squares = sorted(self.squares.items())
        return [sum(square for (_, i), square in squares if i == index) for index in range(len(self.encoded))]

    def comparison(self) -> Comparison:
        empty = Comparison.empty(len(self.encoded))
        products = empty.products
        replaced = empty.replaced
        if self.products:
            sums = torch.stack([self.products[row] for row in sorted(self.products)])
            products = tuple(sums.double().sum(0).tolist())
        if self.replaced:
            replaced = tuple(torch.stack(self.replaced).sum(0).tolist())
        return Comparison(products, replaced, len(self.out))


@dataclass(frozen=True)
class Wave:
    """Consecutive parts from `first`; worker j reduces `counts[j]` of them, in order."""

    first: int
    counts: tuple[int, ...]

    @property
    def num_parts(self) -> int:
        return sum(self.counts)

    def rows(self, worker: int) -> slice:
        """Return the parts that a worker reduces."""
        first = self.first + sum(self.counts[:worker])
        return slice(first, first + self.counts[worker])

    def split(self, data: Tensor) -> list[Tensor]:
        """Return the parts that each worker reduces, as views of all parts."""
        return list(torch.split_with_sizes(data[self.first : self.first + self.num_parts], self.counts))


def waves(vector: EncodedVector, workers: int) -> Iterator[Wave]:
    """Cut all parts of a vector into waves, shared out as evenly as whole parts allow."""
    num_parts, part_bytes = vector.shape
    per_worker = max(-(-num_parts // (_WAVES_WANTED * workers)), _MIN_WAVE_BYTES_PER_WORKER // part_bytes, 1)
    for first in range(0, num_parts, per_worker * workers):
        count = min(per_worker * workers, num_parts - first)
        yield Wave(first, tuple(count // workers + (j < count % workers) for j in range(workers)))


def traffic(vector: EncodedVector, workers: int, worker: int) -> tuple[int, int]:
    """Count the bytes that a worker sends and receives for one mean: a reduce-scatter and an all-gather of encoded
    parts."""
    own = sum(wave.counts[worker] for wave in waves(vector, workers))
    others = vector.shape[0] - own
    copies = own * (workers - 1)  # of what this worker reduces: every other worker's contribution to it, and its mean
    contribution = vector.shape[1]
    mean = vector.mean.shape[1]
    return others * contribution + copies * mean, copies * contribution + others * mean


def result_of(
    decision: Decision,
    contribution: EncodedVector,
    mean: EncodedVector,
    members: tuple[Member, ...],
    worker: int,
    *,
    resync: bool,
    seconds: float,
    comparison: Comparison,
    phases: RoundPhases,
) -> RoundResult:
    """Make the result of a round for a worker of a fixed set, all of whose `members` have exchanged headers and
    parts."""
    sent, received = traffic(contribution, len(members), worker) if decision.total_weight > 0 else (0, 0)
    headers = HEADER_BYTES * (len(members) - 1)
    return RoundResult(
        mean=mean,
        bytes_sent=sent + headers,
        bytes_received=received + headers,
        seconds=seconds,
        members=members,
        resync=resync,
        comparison=comparison,
        phases=phases,
        **decision.summary_fields(),
    )


# Threads

_START_SECONDS = 60.0  # for threads to begin; far more than they need
_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_pools.clear)  # a child process has none of its parent's threads


def for_each(work: Callable[[slice], None], batches: Sequence[slice]) -> None:
    """Call `work` for all batches of rows, which must not depend on each other; raises the first error."""
    if min(torch.get_num_threads(), len(batches)) <= 1:
        for rows in batches:
            work(rows)
        return
    list(_pool(torch.get_num_threads()).map(work, batches))  # asked for the results, it raises the first error


def _pool(threads: int) -> ThreadPoolExecutor:
    with _lock:
        if threads not in _pools:
            started = threading.Barrier(threads + 1, timeout=_START_SECONDS)

            def begin() -> None:
                torch.set_num_threads(1)  # of this thread; and the default of threads that start later
                started.wait()

            pool = ThreadPoolExecutor(threads, "diloco-reduce", begin)
            for _ in range(threads):  # a thread starts with a task if no other is idle
                pool.submit(lambda: None)
            started.wait()
            torch.set_num_threads(threads)  # the default again
            _pools[threads] = pool
        return _pools[threads]
