"""Dynamic local updates: a slow worker takes fewer inner steps in a round, so that all arrive together.

Asynchronous Local-SGD (arXiv 2401.09135, §5.2) gives worker i, whose speed is s_i inner steps a second,

    H_i = floor(H · s_i / max_j s_j),  at least 1

inner steps. Here the rounds stay synchronous: every worker posts every round, and the mean weighs a contribution by the
work behind it. All compute H_i from the same numbers, which the headers of a round tell (`Report.step_seconds`).

The steps are spread evenly over the round's H positions in the schedule: after its n-th of H_i steps a worker is at
position floor(n · H / H_i) of the round. So learning rate, fragments and overlap follow the schedule that all share.
"""

import math
from collections.abc import Mapping

_ALIKE = 1.02
"""Speeds within 2 % count as equal: they are measured, and a step left out for a per mille would be wasted time."""
MOST_TIMES_FASTER = 10.0
"""In a swarm a worker counts as at most so many times faster than the (lower) median: it may claim any speed."""


def speed_share(step_seconds: Mapping[int, float], worker: int, *, trusted: bool = True) -> float:
    """s_i / max_j s_j of `worker`, from the seconds that an inner step takes each worker; 1 if its own is not known.

    `trusted`: any speed is believed, else up to MOST_TIMES_FASTER.
    """
    known = {one: seconds for one, seconds in step_seconds.items() if math.isfinite(seconds) and seconds > 0}
    if worker not in known:
        return 1.0
    ordered = sorted(known.values())
    fastest = ordered[0]
    if not trusted:
        fastest = max(fastest, ordered[(len(ordered) - 1) // 2] / MOST_TIMES_FASTER)
    return min(1.0, fastest / known[worker])


def num_steps(positions: int, share: float) -> int:
    """H_i: the inner steps that a worker takes for this many positions of the schedule."""
    return max(1, math.floor(positions * min(1.0, _ALIKE * share)))
