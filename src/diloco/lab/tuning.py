"""The search for a method's rates, which ends only where the best value has worse ones on both sides.

A search walks on ladders, one for each number that it tunes, such as the inner rate. It asks for the place where it
stands and for the next rungs above and below on every ladder, moves to the best place that it knows, and asks again,
until all neighbours of the best place have been measured. So no optimum lies at the edge of what was tried, unless a
ladder ends there.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from diloco.lab.arm import Arm

INNER_LRS = tuple(0.0005 * 2**rung for rung in range(9))
OUTER_LRS = (0.1, 0.15, 0.2, 0.3, 0.4, 0.55, 0.7, 1.0, 1.4, 2.0)
MOMENTA = (0.0, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)

Values = Mapping[str, float]
Place = tuple[int, ...]
"""The rung on each ladder."""


@final
@dataclass(frozen=True)
class Search:
    """One method whose numbers are tuned."""

    name: str
    ladders: Mapping[str, tuple[float, ...]]
    """The values of each number, in order."""
    start: Values
    """Where the search begins: the nearest rungs are taken."""
    arm_of: Callable[[Values], Arm]
    changes: Callable[[Values], Mapping[str, Any]]
    """The fields of `Scale` that these values are."""

    def first(self) -> Place:
        """Return the place that is nearest to the start."""
        return tuple(
            min(range(len(ladder)), key=lambda rung: abs(math.log((ladder[rung] + 0.01) / (self.start[name] + 0.01))))
            for name, ladder in self.ladders.items()
        )

    def values(self, place: Place) -> dict[str, float]:
        return {name: ladder[rung] for rung, (name, ladder) in zip(place, self.ladders.items(), strict=True)}

    def arm(self, place: Place) -> Arm:
        """Return the arm that measures a place. It is evaluated once, at its end."""
        return replace(self.arm_of(self.values(place)), eval_points=1)

    def unmeasured(self, losses: Mapping[Place, float]) -> list[Place]:
        """List the places to measure next: the best one so far and its neighbours, without those in `losses`."""
        place = best(losses) if losses else self.first()
        around = [place]
        for index, ladder in enumerate(self.ladders.values()):
            rungs = [rung for rung in (place[index] - 1, place[index] + 1) if 0 <= rung < len(ladder)]
            around += [(*place[:index], rung, *place[index + 1 :]) for rung in rungs]
        return [neighbour for neighbour in around if neighbour not in losses]

    def edges(self, place: Place) -> list[str]:
        """List the numbers that lie at an end of their ladder. A momentum of 0 does not count: nothing is below it."""
        ends = []
        for rung, (name, ladder) in zip(place, self.ladders.items(), strict=True):
            at_end = rung in (0, len(ladder) - 1)
            if at_end and ladder[rung]:
                ends.append(f"{name} {ladder[rung]:g}")
        return ends

    def described(self, place: Place) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.values(place).items())


def best(losses: Mapping[Place, float]) -> Place:
    """Return the place with the lowest loss; one that diverged is worse than all others."""
    return min(losses, key=lambda place: losses[place] if math.isfinite(losses[place]) else math.inf)
