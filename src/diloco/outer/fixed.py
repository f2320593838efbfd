"""The outer loop of a fixed membership: all workers are there from first step to last, and post the same rounds.

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
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle

from diloco.engines.reduction import run_ends
from diloco.engines.rounds import GlobalState, RoundResult
from diloco.errors import EngineError, RoundFailed
from diloco.outer.loop import OuterLoop
from diloco.outer.replica import Lane
from diloco.outer.rounds import RoundInFlight, end_of

logger = logging.getLogger(__name__)


class FixedLoop(OuterLoop):
    """The outer loop over an engine whose workers are the same throughout."""

    _restoring = False
    _started = False
    _last_round: int | None = None
    """Set once a worker stops: after this round every worker does."""
    _first_of_step = 0
    """The first round that was posted after the latest inner step."""
    _began = (0.0, 0)
    """The time and the inner step at which training began, at the start or after `finish`."""
    _patience_seconds = 0.0
    _missed: set[int]
    """Fragments whose anchor may not be the others'."""
    _diverged: set[int]
    """Fragments whose parameters came from a diverged anchor."""

    # The start

    def join(self, *, restoring: bool) -> None:
        """Take worker 0's parameters, as all do. Momentum is zero everywhere, and a state that is loaded next has it
        all."""
        self._restoring = restoring
        self._nothing_missed()
        for lane in self.replica.lanes:
            lane.engine.serve_state(partial(self._served, lane))
        try:
            states = self.replica.fetch_states()
        except RoundFailed as failure:
            raise EngineError(f"no worker gave its state to start from: {failure.reason}") from failure
        self._started = True
        if restoring:
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

    def _nothing_missed(self) -> None:
        self._missed = set()
        self._diverged = set()

    def _begin(self) -> None:
        self._began = (time.monotonic(), self.state.inner_steps)

    def _served(self, lane: Lane) -> GlobalState:
        with self.state.lock:
            if self._started:
                tensors = lane.outer_tensors() | lane.start_tensors()
            else:
                tensors = {} if self._restoring else lane.anchors() | lane.start_tensors()
            return GlobalState(tensors, self.state.served_numbers(), lane.layout_digest)

    # Rounds

    def due(self) -> Iterator[int]:
        """Yield the fragments of the schedule whose time the last inner step has reached, or passed."""
        self._first_of_step = self.state.sequence
        for position in self.reached_positions():
            for index in self.schedule.posts_at(position):
                while self.is_in_flight(index):
                    self.merge_next()  # a round that travels until the fragment's next one
                self._catch_up(index)
                yield index

    def got_result(self, posted: RoundInFlight, result: RoundResult) -> None:
        if run_ends(result.members):
            self._save_before_cut(posted)
            self._end_after(posted)
        if result.resync:
            self._missed.add(posted.key.fragment)

    def failed(self, posted: RoundInFlight, failure: RoundFailed) -> None:
        if failure.silent and self.report.done:
            raise EngineError(
                f"{failure.reason}. They have died, or need longer than that for the H = "
                f"{self.schedule.num_inner_steps} steps of a round: if so, raise sync.timeout_seconds, now "
                f"{self.sync.timeout_seconds:g}"
            )
        if failure.stopping:
            self._end_after(posted)
        if failure.resync:
            self._missed.add(posted.key.fragment)

    def refused_for_its_anchor(self, posted: RoundInFlight) -> None:
        self._diverged.add(posted.key.fragment)

    def _catch_up(self, index: int) -> None:
        """Take the others' anchor of a fragment whose round was missed. Others may be in flight meanwhile."""
        if index not in self._missed:
            return
        with self.count_seconds():
            self._missed.remove(index)
            states = self.replica.fetch_states()
            if states is None:
                return
            self.state.take_over_fragment(index, states)
            if index in self._diverged:
                self.state.drop_work(index)
                self._diverged.remove(index)
            self.replica.changed()
            logger.info("worker %d has the others' anchor of fragment %d again", self.engine.worker, index)

    # The end

    @property
    def stopping(self) -> bool:
        return self._last_round is not None

    @property
    def patience_seconds(self) -> float:
        return self._patience_seconds

    def _end_after(self, posted: RoundInFlight) -> None:
        """Set the last round: all end one full turn after the round that told of a worker that stops, or that all are
        done.

        Where rounds travel for a turn the others hear of it that late, when they have steps to post again: two turns.
        """
        turns = 2 if self._travels_a_turn else 1
        last = posted.key.sequence + turns * self.state.num_fragments - 1
        self._last_round = last if self._last_round is None else min(last, self._last_round)

    def _save_before_cut(self, posted: RoundInFlight) -> None:
        """Let the caller save this worker's state, which is as it was before it posted, but for the round's number.

        Not if it is in `finish` itself (it has saved before its last rounds), nor if it has trained on since, nor if
        an earlier round of the same step is merged.
        """
        at_post = posted.at_step == self.state.inner_steps and posted.key.sequence == self._first_of_step
        if self.on_cut is None or self.report.done or self.stopping or not at_post:
            return
        later = self.in_flight
        self.in_flight = []
        sequence = self.state.sequence
        self.state.sequence = posted.key.sequence
        try:
            self.on_cut()
        finally:
            self.in_flight = later
            self.state.sequence = sequence

    def end_together(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """Post what is left, go on with the others' rounds until all are done or one stops, and take the last turn.

        All take it, even a worker that has nothing left: another may have missed a round. A round in which no worker
        has work left is headers only. All workers are then at the same position, and may train on together.
        """
        state = self.state
        self.merge_pending()
        self.report = replace(self.report, stopping=self.report.stopping or early)
        self._patience_seconds = self._time_of_two_rounds()
        try:
            self._post_until_all_are_done()
        except EngineError as error:
            raise EngineError(
                f"worker {self.engine.worker} had taken its {state.steps_taken} steps and waited for the others in "
                f"finish(): {error}"
            ) from error
        for index in range(state.num_fragments):
            self._catch_up(index)
        state.adopt_anchors()
        before_confirming()
        self.confirm()
        state.jump_to(max(member.report.inner_steps for member in self.confirmed))
        self._last_round = None
        self._patience_seconds = 0.0
        self._begin()

    def _post_until_all_are_done(self) -> None:
        """Post the rounds that the others post by the schedule, in its order; a mean is merged as soon as it is
        there."""
        for index in cycle(self.schedule.rotation(self.state.inner_steps)):
            if self._last_round is not None and self.state.sequence > self._last_round:
                return
            self.report = replace(self.report, done=True)
            self._catch_up(index)
            self.post_fragment(index)
            self.merge_pending()

    def _time_of_two_rounds(self) -> float:
        """Return twice the time that H steps have taken this worker so far, with rounds: the others may have them
        left."""
        started, first = self._began
        steps = max(1, self.state.inner_steps - first)
        H = self.schedule.turn_steps(self.schedule.turn_of(self.state.sequence))
        return 2 * H * (time.monotonic() - started) / steps

    # Saving

    def unsavable(self) -> str | None:
        ends = [end_of(posted) for posted in self.in_flight]
        if self.stopping or any(end.stopping for end in ends):
            return "a round has been cut short by a worker that stops"
        if self._missed or any(end.resync for end in ends):
            return "this worker's anchors may not be the others'"
        return None

    def loaded(self) -> None:
        self._last_round = None
        self._nothing_missed()
        self._begin()
