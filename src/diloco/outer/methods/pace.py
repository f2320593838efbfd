"""How far one worker's position moves with each inner step, so that fast and slow workers arrive at a round together.

Only with `sync.dynamic_steps` (core/methods/dynamic_steps.py). A *turn* is the H positions between two multiples of H.
At the beginning of a turn a worker takes its number of steps from the speeds that the latest round's headers told, and
keeps it: the same headers give the same numbers, and a resumed run goes on with them. Only when it hears of speeds for
the first time, it plans the rest of the turn anew. Every worker stands at the end of every turn exactly, whatever its
speed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from diloco.core.methods.dynamic_steps import num_steps, speed_share
from diloco.core.schedule import Schedule
from diloco.engines.base import Connection
from diloco.engines.rounds import Member, Report
from diloco.outer.evaluation import Evaluation
from diloco.outer.state import OuterState


class Training(Protocol):
    """What a pace needs of the outer loop."""

    state: OuterState
    schedule: Schedule
    engine: Connection
    sync_seconds: float
    evaluation: Evaluation


class Pace:
    """One worker's turn: `steps` inner steps from position `_start` to position `_end`."""

    def __init__(self, training: Training) -> None:
        self._state, self._schedule, self._engine = training.state, training.schedule, training.engine
        self._training = training
        self.clock: Callable[[], float] = self._training_seconds
        """Counts the seconds of inner steps."""
        self.step_seconds = 0.0
        """As measured between the latest two posts; 0: not yet."""
        self._heard: dict[int, float] = {}  # by worker, from the headers of the latest round
        self._measured = (self._now(), 0)  # when, and after how many steps
        self._start = self._end = self._taken = 0
        self.steps = 0
        self._first_heard: int | None = None  # speeds were told for the first time in this turn, after so many steps

    # Speeds

    def report(self, report: Report) -> Report:
        """With the seconds per inner step since the last call, for the header of the round that is posted now."""
        now, taken = self._now(), self._state.steps_taken
        then, before = self._measured
        if taken > before:
            self.step_seconds = max(0.0, now - then) / (taken - before)
        if taken != before:
            self._measured = (now, taken)
        return replace(report, step_seconds=self.step_seconds)

    def restart(self) -> None:
        """The state is another worker's: measure anew."""
        self.step_seconds, self._measured = 0.0, (self._now(), self._state.steps_taken)

    def hear(self, members: Sequence[Member]) -> None:
        """What the headers of a round tell of the workers' speeds."""
        if not any(self._heard.values()) and any(one.report.step_seconds for one in members):
            self._first_heard = self._state.steps_taken
        self._heard = {member.worker: member.report.step_seconds for member in members}

    def _training_seconds(self) -> float:
        """By a clock that stands still during rounds and evaluations."""
        return time.monotonic() - self._training.sync_seconds - self._training.evaluation.seconds

    def _now(self) -> float:
        for device in {fragment.device for fragment in self._state.fragments}:
            if device.type == "cuda":  # steps that were only launched are not over
                torch.cuda.synchronize(device)
        return self.clock()

    # Positions

    def advance(self, end: int | None) -> range:
        """After an inner step: move to its position, at most to the run's `end`; the positions that it passed.

        A second call after the same step gives the same positions again.
        """
        state = self._state
        position, number = state.inner_steps, state.steps_taken - self._taken
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
        warm_start = self._schedule.warm_start
        self._start, self._taken, self._first_heard = start, taken, None
        if start < warm_start:  # all take these steps together
            self._end, share = warm_start, 1.0
        else:
            self._end = self._schedule.turn_end(start)
            share = speed_share(self._heard, self._engine.worker, trusted=not self._engine.elastic)
        self.steps = num_steps(self._end - start, share)

    def _place(self, number: int) -> int:
        """The position after this many steps of the turn."""
        return self._start + number * (self._end - self._start) // max(1, self.steps)

    # Saving

    def saved(self) -> dict[str, Any]:
        then, taken = self._measured
        return {
            "turn": [self._start, self._end, self._taken, self.steps],
            "step_seconds": self.step_seconds,
            "heard": {str(worker): seconds for worker, seconds in self._heard.items()},
            "measured": [self._now() - then, taken],
            "first_heard": self._first_heard,
        }

    def loaded(self, saved: dict[str, Any]) -> None:
        self._start, self._end, self._taken, self.steps = saved["turn"]
        self.step_seconds = saved["step_seconds"]
        self._heard = {int(worker): seconds for worker, seconds in saved["heard"].items()}
        self._first_heard = saved.get("first_heard")  # an earlier version saved none
        elapsed, taken = saved["measured"]
        self._measured = (self._now() - elapsed, taken)
