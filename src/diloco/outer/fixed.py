"""The policy of a fixed membership: all workers are there from the first step to the last, and post the same rounds.

Rounds are numbered in the order in which they are posted, which is the same on every worker. That makes the end safe
wherever workers stand. A worker that has taken all its steps says so in its headers (`done`) and posts on in that
order, without work, until all are done. A worker that stops early says that (`stopping`). Either way all workers learn
of the end from the headers of one round, and end after the same full turn through the fragments.

A worker that missed a round takes over the others' anchor of that fragment before it posts the fragment again, and
keeps its own parameters (I6): its next outer gradient, taken from the others' anchor, carries the work. A worker whose
anchor has diverged from the others' takes the parameters too, and its work since is lost.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

from diloco.engines.reduction import run_ends
from diloco.engines.rounds import GlobalState, RoundResult
from diloco.errors import EngineError, RoundFailed
from diloco.outer.loop import OuterLoop
from diloco.outer.policy import Policy
from diloco.outer.replica import Lane
from diloco.outer.rounds import Outcome, Posted, settled_result

logger = logging.getLogger(__name__)


class FixedMembership(Policy):
    """For an engine whose workers are the same throughout."""

    def __init__(self, loop: OuterLoop) -> None:
        self.loop, self.state, self.replica, self.schedule = loop, loop.state, loop.replica, loop.schedule
        self._started = False
        self._last_round: int | None = None  # set once a worker stops: after this round every worker does
        self._missed: set[int] = set()  # fragments whose anchor may not be the others'
        self._diverged: set[int] = set()  # of those, the ones whose parameters came from a diverged anchor
        self._first_of_step = 0  # the first round that was posted after the latest inner step
        self._began = (time.monotonic(), 0)  # when, and at which inner step

    # The start

    def join(self) -> None:
        """All take worker 0's parameters. Momentum is zero everywhere, and a state that is loaded next has it all."""
        for lane in self.replica.lanes:
            lane.engine.serve_state(partial(self._served, lane))
        try:
            states = self.replica.fetch_states()
        except RoundFailed as failure:
            raise EngineError(f"no worker gave its state to start from: {failure.reason}") from failure
        self._started = True
        if self.loop.restoring:
            return
        if states is not None:
            with self.state.lock:
                for lane, theirs in zip(self.replica.lanes, states, strict=True):
                    mine = lane.anchors() | lane.start_tensors()
                    if mine.keys() - theirs.tensors.keys():
                        raise EngineError(
                            "worker 0 restores a saved state and this worker does not: build DiLoCo with the same "
                            "`restoring` on every worker"
                        )
                    lane.copy(theirs.tensors, mine)
            self.state.set_position(states[0].numbers)
            self.state.adopt_anchors()
        self.replica.changed()
        self._begin()

    def _begin(self) -> None:
        self._began = (time.monotonic(), self.state.inner_steps)

    def _served(self, lane: Lane) -> GlobalState:
        with self.state.lock:
            if self._started:
                tensors = lane.outer_tensors() | lane.start_tensors()
            else:
                tensors = {} if self.loop.restoring else lane.anchors() | lane.start_tensors()
            return GlobalState(tensors, self.state.served_numbers(), lane.layout_digest)

    # Rounds

    def due(self) -> Iterator[int]:
        self._first_of_step = self.state.sequence
        for index in self._scheduled():
            while any(one.key.fragment == index for one in self.loop.in_flight):
                self.loop.merge_next()  # a round that travels until the fragment's next one
            self._catch_up(index)
            yield index

    def _scheduled(self) -> Iterable[int]:
        """The fragments of the schedule that the last inner step has reached, or passed."""
        if self.loop.pace is None:
            return self.schedule.posts_at(self.state.inner_steps)
        positions = self.loop.pace.advance(self.loop.ends_at)
        return [index for position in positions for index in self.schedule.posts_at(position)]

    def merge(self, posted: Posted, outcome: Outcome) -> float | None:
        return self.loop.outer_step(posted, outcome)

    def heard(self, posted: Posted, result: RoundResult) -> None:
        if self.loop.pace is not None:
            self.loop.pace.hear(result.members)
        told = any(member.report.stopping or member.report.done for member in result.members)
        if told and run_ends(result.members):
            self._save_before_cut(posted)
            self._end_after(posted)
        if result.resync:
            self._missed.add(posted.key.fragment)

    def failed(self, posted: Posted, failure: RoundFailed) -> None:
        if failure.silent and self.loop.report.done:
            raise EngineError(
                f"{failure.reason}. They have died, or need longer than that for the H = "
                f"{self.schedule.num_inner_steps} steps of a round: if so, raise sync.timeout_seconds, now "
                f"{self.loop.sync.timeout_seconds:g}"
            )
        if failure.stopping:
            self._end_after(posted)
        if failure.resync:
            self._missed.add(posted.key.fragment)

    def refused_for_its_anchor(self, posted: Posted) -> None:
        self._diverged.add(posted.key.fragment)

    def after_round(self, posted: Posted) -> None:
        """Nothing: what was missed is made up for before the fragment's next post."""

    def _catch_up(self, index: int) -> None:
        """After a missed round of a fragment: the others' anchor. One fragment at a time, others may be in flight."""
        if index not in self._missed:
            return
        started = time.monotonic()
        self._missed.remove(index)
        states = self.replica.fetch_states()
        if states is not None:
            self.state.take_over_fragment(index, states)
            if index in self._diverged:
                self.state.drop_work(index)
                self._diverged.remove(index)
            self.replica.changed()
            worker = self.loop.engine.worker
            logger.info("worker %d has the others' anchor of fragment %d again", worker, index)
        self.loop.sync_seconds += time.monotonic() - started

    # The end

    @property
    def stopping(self) -> bool:
        return self._last_round is not None

    def _end_after(self, posted: Posted) -> None:
        """A worker stops, or all are done: all end one full turn after the round that told of it.

        With eager updates the others hear of it a turn late, when they have steps to post again: two turns.
        """
        turns = 1 if self.loop.sync.outer_overlap == "none" else 2
        last = posted.key.sequence + turns * self.state.num_fragments - 1
        self._last_round = last if self._last_round is None else min(last, self._last_round)

    def _save_before_cut(self, posted: Posted) -> None:
        """This worker's state, but for the round's number, is as it was before it posted: it can be saved as such.

        Not if it is in `finish` itself (it has saved before its last rounds), nor if it has trained on since, nor if
        an earlier round of the same step is merged.
        """
        loop = self.loop
        at_post = posted.at_step == self.state.inner_steps and posted.key.sequence == self._first_of_step
        if loop.on_cut is None or loop.report.done or self.stopping or not at_post:
            return
        later, loop.in_flight = loop.in_flight, []
        sequence, self.state.sequence = self.state.sequence, posted.key.sequence
        try:
            loop.on_cut()
        finally:
            loop.in_flight, self.state.sequence = later, sequence

    def finish(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """Post what is left, go on with the others' rounds until all are done or one stops, and take the last turn.

        All take it, even a worker that has nothing left: another may have missed a round. A round in which no worker
        has work left is headers only. All workers are then at the same position, and may train on together.
        """
        loop, state = self.loop, self.state
        loop.merge_pending()
        loop.report = replace(loop.report, stopping=loop.report.stopping or early)
        loop.patience_seconds = self._patience_seconds()
        try:
            self._post_until_all_are_done()
        except EngineError as error:
            worker, steps = loop.engine.worker, state.steps_taken
            raise EngineError(
                f"worker {worker} had taken its {steps} steps and waited for the others in finish(): {error}"
            ) from error
        for index in range(state.num_fragments):
            self._catch_up(index)
        state.adopt_anchors()
        before_confirming()
        loop.confirm()
        state.jump_to(max(member.report.inner_steps for member in loop.confirmed))
        self._last_round, loop.patience_seconds = None, 0.0
        self._begin()

    def _post_until_all_are_done(self) -> None:
        """The rounds that the others post by the schedule, in its order; a mean is merged as soon as it is there."""
        loop = self.loop
        for index in cycle(self.schedule.rotation(self.state.inner_steps)):
            if self._last_round is not None and self.state.sequence > self._last_round:
                return
            loop.report = replace(loop.report, done=True)
            self._catch_up(index)
            loop.post_fragment(index)
            loop.merge_pending()

    def _patience_seconds(self) -> float:
        """Twice the time that H steps have taken this worker so far, rounds included: the others may have them left."""
        started, first = self._began
        steps = max(1, self.state.inner_steps - first)
        H = self.schedule.turn_steps(self.schedule.turn_of(self.state.sequence))
        return 2 * H * (time.monotonic() - started) / steps

    # Saving

    def unsavable(self) -> str | None:
        ended = [settled_result(posted) for posted in self.loop.in_flight]
        if self.stopping or any(one.stopping for one in ended):
            return "a round has been cut short by a worker that stops"
        if self._missed or any(one.resync for one in ended):
            return "this worker's anchors may not be the others'"
        return None

    def loaded(self) -> None:
        self._last_round, self._missed, self._diverged = None, set(), set()
        self._begin()
