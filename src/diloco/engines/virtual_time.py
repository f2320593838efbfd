"""Workers of given speeds in one thread: inner steps in the order in which they would end on real machines.

No clock is read, so a replay gives the same result every time. For asynchronous workers (engines/asynchronous), whose
result depends on the order of their arrivals.
"""

import heapq
from collections.abc import Callable, Sequence


def replay(
    step: Callable[[int], object], seconds: Sequence[float], until: float, taken: Sequence[int] | None = None
) -> None:
    """Call `step(worker)` for every inner step that ends by virtual time `until`, in the order of their ends.

    Worker i's n-th step ends at n · seconds[i]; of two that end together the lower worker's comes first. `taken`: the
    steps that each worker has taken before.
    """
    before = list(taken) if taken is not None else [0] * len(seconds)
    ends = [((count + 1) * seconds[worker], worker, count + 1) for worker, count in enumerate(before)]
    heapq.heapify(ends)
    while ends and ends[0][0] <= until:
        _, worker, count = heapq.heappop(ends)
        step(worker)
        heapq.heappush(ends, ((count + 1) * seconds[worker], worker, count + 1))
