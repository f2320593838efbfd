"""When each fragment is posted and merged: lines 1 and 4 of Algorithm 1, and §2 of Streaming DiLoCo (arXiv 2501.18512).

Inner steps are counted from 1. After inner step t, fragment p is posted if (t − offset_p) mod H = 0, and what was
posted is merged `overlap_steps` inner steps later (τ of the paper; 0 merges within the same step). So with one
fragment at offset 0 the first round comes after exactly H inner steps, not H + 1.

With a warm start of W steps (methods/warm_start.py) t counts from the end of it. H inner steps are a *turn*, in which
every fragment is posted once. Turns may grow (methods/growing_rounds.py): the offsets grow with them.

A pure function of the step: workers with the same numbers post the same fragments in the same order, which lets an
engine pair their contributions. `rotation` is that order from any step on; a worker that ends early posts its last
rounds in it. The posts of all fragments together are numbered from 0: the sequence number. `fragment_of` and
`post_step` give its fragment and its step, so a worker that was absent needs one number to continue.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from diloco.errors import ConfigError


class RoundLengths(Protocol):
    """Says how long rounds are that do not all take H inner steps; the same on all workers, as the schedule is."""

    def length(self, base: int, step: int) -> int:
        """Return the inner steps of a round that begins after inner step `step`; at least `base`, which is H."""


class _Turns:
    """The turns through all fragments: turn n begins after step `start(n)`, counted from the end of a warm start."""

    def __init__(self, base: int, lengths: RoundLengths, warm_start: int) -> None:
        self._base = base
        self._lengths = lengths
        self._warm_start = warm_start
        self._starts = [0]

    def start(self, turn: int) -> int:
        while len(self._starts) <= turn:
            self._add()
        return self._starts[turn]

    def at(self, step: int) -> int:
        """Return the turn that inner step `step` + 1 belongs to."""
        while self._starts[-1] <= step:
            self._add()
        return bisect_right(self._starts, step) - 1

    def _add(self) -> None:
        last = self._starts[-1]
        self._starts.append(last + self._lengths.length(self._base, self._warm_start + last))


@dataclass(frozen=True)
class Schedule:
    """H, the fragments' offsets within H, τ, and the steps before all of that."""

    num_inner_steps: int
    offsets: tuple[int, ...] = (0,)
    overlap_steps: int = 0
    warm_start: int = 0
    """Inner steps before the first round begins to count."""
    growth: RoundLengths | None = None
    """The lengths of later turns; H is then the shortest one."""

    def __post_init__(self) -> None:
        H = self.num_inner_steps
        if H < 1:
            raise ConfigError(f"num_inner_steps = {H} must be at least 1: a round needs an inner step behind it")
        if not 0 <= self.overlap_steps < H:
            raise ConfigError(
                f"overlap_steps = {self.overlap_steps} must be at least 0 and below num_inner_steps = {H}: "
                "a fragment is merged before it is posted again; lower overlap_steps or raise num_inner_steps"
            )
        if not self.offsets or any(not 0 <= offset < H for offset in self.offsets):
            raise ConfigError(f"offsets = {self.offsets} must be one number in [0, {H}) for each fragment")

    @classmethod
    def spread(cls, num_inner_steps: int, fragments: int, overlap_steps: int = 0) -> "Schedule":
        """Put fragments at even distances within H, so that the network is used evenly."""
        if num_inner_steps >= 1 and fragments > num_inner_steps:
            raise ConfigError(
                f"{fragments} fragments do not fit into num_inner_steps = {num_inner_steps}: "
                "each needs an inner step of its own; use fewer fragments or more inner steps"
            )
        offsets = tuple(p * num_inner_steps // fragments for p in range(fragments))
        return cls(num_inner_steps, offsets, overlap_steps)

    @cached_property
    def _turns(self) -> _Turns | None:
        return None if self.growth is None else _Turns(self.num_inner_steps, self.growth, self.warm_start)

    # Asked for after every inner step

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The fragments in the order of a turn's posts."""
        return self.rotation(self.warm_start)

    @cached_property
    def _posts(self) -> dict[int, tuple[int, ...]]:
        """The fragments that are posted after a step of a turn of H steps, which are counted from 1."""
        H = self.num_inner_steps
        fragments = range(len(self.offsets))
        places = [self._place(p, H) for p in fragments]
        return {place: tuple(p for p in fragments if places[p] == place) for place in places}

    def turn_steps(self, turn: int) -> int:
        """Return the inner steps of a turn: H, unless turns grow. Turns are numbered from 0."""
        return self._start(turn + 1) - self._start(turn)

    def turn_of(self, sequence: int) -> int:
        """Return the turn of post number `sequence`."""
        return sequence // len(self.offsets)

    def turns_until(self, step: int) -> int:
        """Count the turns that have begun when inner step `step` is taken."""
        steps = step - self.warm_start
        return self._turn_at(steps - 1) + 1 if steps > 0 else 0

    def turn_end(self, step: int) -> int:
        """Return the last step of the turn that the step after `step` belongs to."""
        return self.warm_start + self._start(self._turn_at(step - self.warm_start) + 1)

    def _start(self, turn: int) -> int:
        """Return the step after which a turn begins, counted from the end of the warm start."""
        return turn * self.num_inner_steps if self._turns is None else self._turns.start(turn)

    def _turn_at(self, step: int) -> int:
        """Return the turn that the step after `step` belongs to, both counted from the end of the warm start."""
        return step // self.num_inner_steps if self._turns is None else self._turns.at(step)

    def _place(self, fragment: int, H: int) -> int:
        """Return the step of a turn of H steps after which a fragment is posted: from 1 to H."""
        return (self.offsets[fragment] * H // self.num_inner_steps - 1) % H + 1

    def posts_at(self, step: int) -> tuple[int, ...]:
        """Return the fragments whose outer gradient is taken and sent after inner step `step`."""
        step -= self.warm_start
        if step <= 0:
            return ()
        if self._turns is None:
            return self._posts.get((step - 1) % self.num_inner_steps + 1, ())
        turn = self._turn_at(step - 1)
        H = self.turn_steps(turn)
        within = step - self._start(turn)
        return tuple(p for p in range(len(self.offsets)) if self._place(p, H) == within)

    def rotation(self, step: int) -> tuple[int, ...]:
        """Return all fragments in the order in which they are posted next, after inner step `step`."""
        step = max(0, step - self.warm_start)
        turn = self._turn_at(step)
        H = self.turn_steps(turn)
        within = step - self._start(turn)
        places = [self._place(p, H) for p in range(len(self.offsets))]
        return tuple(sorted(range(len(places)), key=lambda p: (places[p] <= within, places[p], p)))

    def fragment_of(self, sequence: int) -> int:
        """Return the fragment of post number `sequence`."""
        return self._order[sequence % len(self.offsets)]

    def post_step(self, sequence: int) -> int:
        """Return the inner step after which post number `sequence` is due."""
        turn = self.turn_of(sequence)
        place = self._place(self.fragment_of(sequence), self.turn_steps(turn))
        return self.warm_start + self._start(turn) + place

    def posts_until(self, step: int) -> int:
        """Count the posts that are due by the end of inner step `step`: the sequence number of the next one."""
        step = max(0, step - self.warm_start)
        turn = self._turn_at(step)
        H = self.turn_steps(turn)
        within = step - self._start(turn)
        return turn * len(self.offsets) + sum(self._place(p, H) <= within for p in range(len(self.offsets)))
