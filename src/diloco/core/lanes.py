"""Which rank of each worker holds which elements of the model: the lanes.

A worker of R ranks holds each parameter in R runs of whole rows, as FSDP2 cuts them (Shard(0): ⌈rows / R⌉ each, the
last ones shorter or empty). Cut a parameter's flat (row-major) order wherever any worker changes ranks: each piece then
has one owner in every worker. A *lane* is all pieces with the same owners: one rank of each worker, which average these
elements among themselves, in parallel with all other lanes. With equal workers, lane r is rank r of every worker and
its whole shard. With a worker of one rank and one of two there are two lanes, and the single rank is in both.

Lanes follow from the shapes and the workers' sizes alone, so every rank computes the same lanes.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flat order of a tensor of `whole` shape: some of its rows."""

    name: str
    whole: Shape
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return ((self.stop - self.start) // math.prod(self.whole[1:]), *self.whole[1:]) if self.whole else ()

    @property
    def offsets(self) -> tuple[int, ...]:
        """The index of its first element in the whole tensor."""
        return (self.start // math.prod(self.whole[1:]), *(0 for _ in self.whole[1:])) if self.whole else ()

    def __str__(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class LaneLayout:
    """The pieces of one lane. `owners[i]` is the rank of worker i that holds them."""

    owners: tuple[int, ...]
    pieces: tuple[Piece, ...]


def shard_bounds(shape: Shape, ranks: int) -> list[int]:
    """Return the bounds of the ranks' shards: rank r holds the flat elements [bounds[r], bounds[r + 1])."""
    rows = shape[0] if shape else 1
    row = math.prod(shape[1:])
    chunk = -(-rows // ranks)
    return [min(rank * chunk, rows) * row for rank in range(ranks + 1)]


def make_lanes(shapes: Mapping[str, Shape], sizes: Sequence[int]) -> list[LaneLayout]:
    """Make the lanes of workers with sizes[i] ranks each, in the order of owners; the first is rank 0 of every
    worker.

    Every rank is in at least one lane: a rank without any elements (the model is small) is in a lane without pieces,
    where it still receives the headers of the rounds.
    """
    pieces: dict[tuple[int, ...], list[Piece]] = {}
    for rank in range(max(sizes)):
        pieces[tuple(min(rank, size - 1) for size in sizes)] = []
    for name, shape in shapes.items():
        bounds = [shard_bounds(shape, size) for size in sizes]
        cuts = sorted({cut for worker in bounds for cut in worker})
        for start, stop in pairwise(cuts):
            owners = tuple(bisect_right(worker, start) - 1 for worker in bounds)
            pieces.setdefault(owners, []).append(Piece(name, shape, start, stop))
    return [LaneLayout(owners, tuple(pieces[owners])) for owners in sorted(pieces)]
