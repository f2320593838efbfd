"""Which rank of a worker holds which elements of a fragment.

The ranks of a worker cut every tensor by rows (`lanes.shard_bounds`). In the fragment's flat order, which all workers
have in common, a rank therefore holds several *runs* of elements, one of each tensor; its own order is its runs, one
after another. Since both orders ascend together, what a rank holds of any interval of the fragment is one interval of
its own order.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

from diloco.core.lanes import Shape, shard_bounds


class Placement:
    """The runs of all ranks, in a fragment of tensors of these shapes in this order."""

    def __init__(self, shapes: Sequence[Shape], ranks: int) -> None:
        self.ranks = ranks
        self.numel = sum(map(math.prod, shapes))
        self._starts: list[list[int]] = [[] for _ in range(ranks)]
        lengths: list[list[int]] = [[] for _ in range(ranks)]
        first = 0
        for shape in shapes:
            bounds = shard_bounds(shape, ranks)
            for rank in range(ranks):
                if bounds[rank] < bounds[rank + 1]:
                    self._starts[rank].append(first + bounds[rank])
                    lengths[rank].append(bounds[rank + 1] - bounds[rank])
            first += math.prod(shape)
        self._own_starts = [[0, *accumulate(of_rank)] for of_rank in lengths]

    def held(self, rank: int) -> int:
        """Return the number of elements that a rank holds."""
        return self._own_starts[rank][-1]

    def before(self, rank: int, position: int) -> int:
        """Return the number of elements that a rank holds before this position of the fragment."""
        index = bisect_right(self._starts[rank], position) - 1
        if index < 0:
            return 0
        own = self._own_starts[rank]
        return min(own[index] + position - self._starts[rank][index], own[index + 1])

    def own_interval(self, rank: int, start: int, stop: int) -> tuple[int, int]:
        """Return the interval of a rank's own order that is [start, stop) of the fragment."""
        return self.before(rank, start), self.before(rank, stop)

    def runs(self, rank: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the intervals of the fragment that are [start, stop) of a rank's own order."""
        own = self._own_starts[rank]
        index = bisect_right(own, start) - 1
        last = bisect_left(own, stop)
        for place in range(index, last):
            first = max(start, own[place])
            after = min(stop, own[place + 1])
            begin = self._starts[rank][place] - own[place]
            yield begin + first, begin + after
