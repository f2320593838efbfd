"""Dynamic local updates: a slow worker takes fewer inner steps in a round, so that all arrive together.

Asynchronous Local-SGD (arXiv 2401.09135, §5.2) gives worker i, whose speed is s_i inner steps a second,

    H_i = floor(H · s_i / max_j s_j),  at least 1

inner steps. Here the rounds stay synchronous: every worker posts every round, and the mean weighs a contribution by the
work behind it. All compute H_i from the same numbers, which the headers of a round tell (`Report.step_seconds`).

The steps are spread evenly over the round's H positions in the schedule: after its n-th of H_i steps a worker is at
position floor(n · H / H_i) of the round. So learning rate, fragments and overlap follow the schedule that all share.

A *turn* is the H positions between two multiples of H. At the beginning of a turn a worker takes its number of steps
from the speeds that the latest round's headers told, and keeps it: the same headers give the same numbers, and a
resumed run goes on with them. Only when it hears of speeds for the first time, it plans the rest of the turn anew.
Every worker stands at the end of every turn exactly, whatever its speed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from diloco.engines.rounds import Member, Report
from diloco.outer.method import Method, Options, TrainingWorker
from diloco.outer.tensors import Numbers

_ALIKE = 1.02
"""Speeds within 2 % count as equal: they are measured, and a step left out for a per mille would be wasted time."""
MOST_TIMES_FASTER = 10.0
"""A worker of a swarm, which may claim any speed, counts as at most so many times faster than the (lower) median."""


def speed_share(step_seconds: Mapping[int, float], worker: int, *, trusted: bool = True) -> float:
    """Compute s_i / max_j s_j of `worker` from the seconds of each worker's inner step; 1 if its own are not known.

    `trusted`: any speed is believed, else up to MOST_TIMES_FASTER.
    """
    known = {other: seconds for other, seconds in step_seconds.items() if math.isfinite(seconds) and seconds > 0}
    if worker not in known:
        return 1.0
    ordered = sorted(known.values())
    fastest = ordered[0]
    if not trusted:
        fastest = max(fastest, ordered[(len(ordered) - 1) // 2] / MOST_TIMES_FASTER)
    return min(1.0, fastest / known[worker])


def num_steps(positions: int, share: float) -> int:
    """Compute H_i, the inner steps that a worker takes for this many positions of the schedule."""
    return max(1, math.floor(positions * min(1.0, _ALIKE * share)))


class DynamicSteps(Method):
    """`sync.dynamic_steps`: one worker's turn, `steps` inner steps from position `_start` to position `_end`."""

    @classmethod
    def chosen(cls, options: Options) -> "DynamicSteps | None":
        return cls() if options.sync.dynamic_steps else None

    _worker: TrainingWorker
    clock: Callable[[], float]
    """Counts the seconds of inner steps."""

    def __init__(self) -> None:
        self.step_seconds = 0.0
        """Measured between the latest two posts; 0: not yet."""
        self.steps = 0
        self._heard: dict[int, float] = {}  # by worker, from the headers of the latest round
        self._first_heard: int | None = None  # speeds were told for the first time in this turn, after so many steps
        self._measured = (0.0, 0)  # when, and after how many steps
        self._start = 0
        self._end = 0
        self._taken = 0

    def begin(self, worker: TrainingWorker) -> None:
        self._worker = worker
        self.clock = worker.training_seconds
        self._measured = (self.clock(), 0)

    # Speeds

    def report(self, report: Report) -> Report:
        """Add the seconds per inner step since the last call."""
        now = self.clock()
        taken = self._worker.position.steps_taken
        then, before = self._measured
        if taken > before:
            self.step_seconds = max(0.0, now - then) / (taken - before)
        if taken != before:
            self._measured = (now, taken)
        return replace(report, step_seconds=self.step_seconds)

    def begin_anew(self) -> None:
        self.step_seconds = 0.0
        self._measured = (self.clock(), self._worker.position.steps_taken)

    def heard(self, members: Sequence[Member]) -> None:
        """Take the workers' speeds from the headers of a round."""
        if not any(self._heard.values()) and any(member.report.step_seconds for member in members):
            self._first_heard = self._worker.position.steps_taken
        self._heard = {member.worker: member.report.step_seconds for member in members}

    # Positions

    def positions(self, reached: range, end: int | None) -> range:
        """Move to the position of the step just taken, at most to the run's `end`; returns the positions that it
        passed.

        A second call after the same step gives the same positions again.
        """
        del reached
        state = self._worker.position
        position = state.inner_steps
        number = state.steps_taken - self._taken
        anew = self._first_heard is not None and state.steps_taken > self._first_heard
        if not anew and number <= self.steps and self._place(number) == position:
            return range(self._place(number - 1) + 1, position + 1)
        jumped = number > self.steps or self._place(number - 1) + 1 != position  # the next turn, or others called
        if anew or jumped:
            self._begin(position - 1, state.steps_taken - 1)
            number = 1
        place = self._place(number)
        state.jump_to(place if end is None else min(place, end))
        return range(position, max(position, state.inner_steps) + 1)

    def _begin(self, start: int, taken: int) -> None:
        warm_start = self._worker.schedule.warm_start
        self._start = start
        self._taken = taken
        self._first_heard = None
        if start < warm_start:  # all take these steps together
            self._end = warm_start
            share = 1.0
        else:
            self._end = self._worker.schedule.turn_end(start)
            share = speed_share(self._heard, self._worker.engine.worker, trusted=not self._worker.engine.elastic)
        self.steps = num_steps(self._end - start, share)

    def _place(self, number: int) -> int:
        """Return the position after this many steps of the turn."""
        return self._start + number * (self._end - self._start) // max(1, self.steps)

    # Saving

    def saved_numbers(self) -> Numbers:
        then, taken = self._measured
        pace = {
            "turn": [self._start, self._end, self._taken, self.steps],
            "step_seconds": self.step_seconds,
            "heard": {str(worker): seconds for worker, seconds in self._heard.items()},
            "measured": [self.clock() - then, taken],
            "first_heard": self._first_heard,
        }
        return {"pace": pace}

    def loaded(self, numbers: Numbers) -> None:
        if "pace" not in numbers:
            return
        pace = numbers["pace"]
        self._start, self._end, self._taken, self.steps = pace["turn"]
        self.step_seconds = pace["step_seconds"]
        self._heard = {int(worker): seconds for worker, seconds in pace["heard"].items()}
        self._first_heard = pace.get("first_heard")  # an earlier version saved none
        elapsed, taken = pace["measured"]
        self._measured = (self.clock() - elapsed, taken)
