"""What a chaos run (chaos.py) does to its workers, and when: drawn from a seed before it begins."""

import random
from dataclasses import dataclass

MOST_LOSS = 1.021
"""The final loss may be this many times that of the calm run."""
FEWEST_ROUNDS = 16
_CERTAIN = [
    *("nan", "huge", "greedy", "changing", "join", "cut", "stranger", "copy", "kill the first", "freeze and copy"),
    *("freeze and thaw", "return", "cut", "kill", "sidecar", "sleep", "join"),
]
_MORE = [
    *("kill", "freeze", "freeze and thaw", "join", "return", "sidecar", "p2pd", "copy", "freeze and copy"),
    *("liar returns", "sleep", "join", "cut", "cut"),
]


@dataclass(frozen=True)
class Plan:
    """The size of a chaos run, and its deeds."""

    rounds: int
    seed: int
    lost_seconds: float
    step_seconds: float
    workers: int = 4
    every: int = 3
    """Rounds between two deeds."""
    round_seconds: float = 60.0
    """A round that takes longer is a hang."""
    most_loss: float = MOST_LOSS

    def deeds(self) -> dict[int, list[str]]:
        """Draw the kinds of deeds, by round. Those that every run must have come first; the others are random."""
        generator = random.Random(self.seed)
        quiet_rounds = max(6, self.rounds // 4)  # so that a worker whose sidecar was killed is back before the end
        slots = list(range(0, self.rounds - quiet_rounds, self.every))
        kinds = _CERTAIN + generator.choices(_MORE, k=max(0, len(slots) - len(_CERTAIN)))
        deeds: dict[int, list[str]] = {}
        for index, kind in enumerate(kinds):
            deeds.setdefault(slots[index % len(slots)], []).append(kind)
        return deeds


def short(seed: int) -> Plan:
    """Fewer rounds, and a lost worker is found out sooner.

    A deed a round in the first sixteen rounds costs more than it does over sixty: the loss may be further off.
    """
    return Plan(FEWEST_ROUNDS, seed, lost_seconds=2.0, step_seconds=0.07, every=1, most_loss=1.15)
