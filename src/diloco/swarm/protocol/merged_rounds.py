"""The rounds whose mean is in this worker's state, and how each has ended.

A worker that went on without most others takes over their state. It compares these rounds with those of its source:
what it had counted and is not in that state is lost, and it tells its own user and the other members how much that is.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from diloco.swarm.protocol.messages import END_BYTES, MOST_ENDS, Ends, RoundsLost
from diloco.swarm.protocol.plan import Plan


class _Merged(NamedTuple):
    plan: bytes
    """The beginning of the plan's digest."""
    tokens: int
    """This worker's tokens at the end of the round."""


class MergedRounds:
    def __init__(self) -> None:
        self._rounds: dict[int, _Merged] = {}

    def record(self, plan: Plan, tokens: int) -> None:
        """The mean of this plan is in the state; `tokens`: that this worker has trained on."""
        if plan.has_mean:
            self._rounds[plan.key.sequence] = _Merged(plan.digest[:END_BYTES], tokens)
            while len(self._rounds) > MOST_ENDS:
                del self._rounds[next(iter(self._rounds))]

    @property
    def first(self) -> int | None:
        """The first round of which the end is known; None if there is none."""
        return min(self._rounds, default=None)

    def ends_from(self, first: int) -> Ends:
        """Return how the rounds from `first` on have ended, for another member."""
        last = min(max(self._rounds, default=-1), first + MOST_ENDS - 1)
        unknown = _Merged(bytes(END_BYTES), 0)
        return Ends(b"".join(self._rounds.get(number, unknown).plan for number in range(first, last + 1)))

    def take_over(
        self, ends: Mapping[int, bytes], plans: Sequence[Plan], sequence: int, tokens: int
    ) -> RoundsLost | None:
        """The state before round `sequence` is another one now, with these ends of rounds in it, and these plans at
        last. Returns what is lost by that; None if nothing is."""
        plan_of = {**ends} | {plan.key.sequence: plan.digest[:END_BYTES] for plan in plans}
        lost = [
            number
            for number, merged in self._rounds.items()
            if number >= sequence or plan_of.get(number, merged.plan) != merged.plan
        ]
        kept = [merged.tokens for number, merged in self._rounds.items() if number < min(lost, default=0)]
        for number in lost:
            del self._rounds[number]
        for plan in plans:
            self.record(plan, tokens)
        return RoundsLost(len(lost), max(0, tokens - max(kept, default=0))) if lost else None
