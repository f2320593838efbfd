"""The outer loop of a swarm: workers come and go while the others train, and the others do not wait for ever.

The m-th round is the same fragment on every worker, whenever it joined (`Schedule.fragment_of`). A round that the
others call for is posted at once, with the work there is, and this worker's *position* jumps to where that round
belongs in the schedule; the *work* behind a contribution is counted apart (`steps_taken`), and its weight follows it.

A worker that missed a round, or whose anchor is not the others', takes over their state right away (catch_up.py).
A worker that stops leaves alone, and so does one that has taken all its steps before the others. All end together where
the run ends (`OuterLoop.end_at`), or where all take their last turn in the same rounds.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from diloco.engines.rounds import GlobalState, RoundResult
from diloco.errors import EngineError, RoundFailed
from diloco.outer.catch_up import CatchUp
from diloco.outer.loop import OuterLoop
from diloco.outer.replica import Lane
from diloco.outer.rounds import RoundInFlight, end_of

logger = logging.getLogger(__name__)


@dataclass
class Missed:
    """The part of the others' state that this worker lacks since a round that it missed."""

    reason: str
    diverged: set[int] = field(default_factory=set)
    """Fragments whose parameters came from an anchor that is not the others'."""
    later: list[tuple[RoundInFlight, RoundResult]] = field(default_factory=list)
    """Rounds after the missed one that ended well, and are not merged."""


class ElasticLoop(OuterLoop):
    """The outer loop over an elastic engine."""

    serves_copies = True

    on_resync: Callable[[str, int], None] | None = None
    """Called after this worker took over the others' state, with the reason and the next round."""
    tells_progress = True
    """Tell the engine after each step how far this worker is; False: the caller does that, and more."""
    arrived_note = b""
    """The note that came with the latest state that this worker took over."""
    missed: Missed | None = None
    _joined = False
    """This worker has the run's state."""
    _leaving = False
    _agreed_last: int | None = None
    """Set in a run without an agreed end: all are done, and end after this round."""
    _last_step: float | None = None
    """When the latest inner step ended, on time.monotonic()'s clock."""
    _step_seconds = 0.0
    _catch_up: CatchUp

    # The start

    def join(self, *, restoring: bool) -> None:
        assert not restoring  # refused in arguments.py
        self._catch_up = CatchUp(self.state, self.replica, self.schedule)
        for lane in self.replica.lanes:
            lane.engine.serve_state(partial(self._served, lane))
            lane.engine.most_state_bytes = lane.state_bytes()
            lane.engine.next_round = self._next_round
        try:
            states = self.replica.fetch_states()
            if states is not None:
                self._catch_up.take_over(states, start=True)
                self.arrived_note = states[0].note
                self.state.start_from_anchor()
        except RoundFailed as failure:
            raise EngineError(f"no worker gave its state to start from: {failure.reason}") from failure
        self.replica.changed()
        self._joined = True

    def _served(self, lane: Lane) -> GlobalState:
        """Copy the state to the CPU: a joiner asks in another thread, at any moment."""
        with self.state.lock:
            if not self._has_state():
                raise RoundFailed("this worker's anchors are not the others': it takes theirs over itself")
            if self.state.inner_steps < self.schedule.warm_start:  # joiners ask again until it is over
                raise RoundFailed("the warm start is not over", withheld=True)
            return GlobalState(lane.copies(), self.state.served_numbers(), lane.layout_digest, note=self.note())

    def _has_state(self) -> bool:
        return self._joined and (self.missed is None or not self.missed.diverged)

    def _next_round(self) -> int | None:
        """Return the first round that is not in the anchors; None if they are not the others'."""
        with self.state.lock:
            return self.state.unmerged if self._has_state() else None

    # What is due

    def due(self) -> Iterator[int]:
        """Yield the fragments of rounds that are due, and of rounds that the others will not wait for any longer.

        Each at most once: a worker that is ahead of the others takes a step before it posts the next round.
        """
        posted: set[int] = set()
        if self.tells_progress:
            self._tell_progress()
        self.reached_positions()
        while self._must_act():
            if self.missed is not None:  # a post from an old anchor would be refused
                if not self._resync():
                    return
                continue
            index = self.schedule.fragment_of(self.state.sequence)
            if index in posted:
                return
            if self.is_in_flight(index):
                self.merge_next()  # the earlier round of this fragment comes first
                continue
            self._jump_to_next_post()
            posted.add(index)
            if self._is_last_turn():
                self.report = replace(self.report, done=True)
            yield index

    def _tell_progress(self) -> None:
        """Tell `diloco status` how far this worker is; the engine sends it twice a second at most."""
        now = time.monotonic()
        if self._last_step is not None:  # before the first step this worker may have waited for others, or compiled
            share = 0.1 if self._step_seconds else 1.0
            self._step_seconds += share * (now - self._last_step - self._step_seconds)
        self._last_step = now
        report = self.report
        self.engine.progress(
            inner_steps=self.state.inner_steps,
            tokens=report.tokens,
            loss=report.loss,
            step_seconds=self._step_seconds,
        )

    def _is_last_turn(self) -> bool:
        """Whether the next round comes after the last one of the schedule: the others are in `finish`."""
        end = self.ends_at
        return end is not None and self.state.sequence >= self.schedule.posts_until(end)

    def _must_act(self) -> bool:
        """Whether something must be done before the next inner step."""
        sequence = self.state.sequence
        wanted = self.engine.wanted(sequence)
        if not wanted and self.schedule.post_step(sequence) > self.state.inner_steps:
            return False
        if self.ends_at is not None and sequence > self._last_round():
            return False
        if self.missed is not None:  # the others' state is not asked for after every step
            return bool(wanted or self.schedule.posts_at(self.state.inner_steps))
        return True

    def _jump_to_next_post(self) -> None:
        step = self.schedule.post_step(self.state.sequence)
        end = self.ends_at
        self.state.jump_to(step if end is None else min(step, end))

    # What rounds do

    def got_result(self, posted: RoundInFlight, result: RoundResult) -> None:
        done = {member.worker for member in result.members if member.report.done}
        if self._agreed_last is None and done == {member.worker for member in result.members} | set(result.roster):
            self._agreed_last = posted.key.sequence + self.state.num_fragments - 1
        if result.resync:
            self._miss("its anchor is not the others'")

    def failed(self, posted: RoundInFlight, failure: RoundFailed) -> None:
        self._catch_up.record_failed(posted.key)
        if failure.resync:
            self._miss(failure.reason)

    def refused_for_its_anchor(self, posted: RoundInFlight) -> None:
        self._miss(f"round {posted.key.sequence}: its anchor is not the others'").diverged.add(posted.key.fragment)

    def _miss(self, reason: str) -> Missed:
        self.missed = self.missed or Missed(reason)
        return self.missed

    def merge_mean(self, posted: RoundInFlight, result: RoundResult) -> float | None:
        """Take the outer step, unless an earlier round was missed: the anchor then comes with the others' state."""
        if self.missed is not None:
            self.missed.later.append((posted, result))
            return None
        if not self.replica.are_finite(posted.key.fragment, result.means):  # the same bytes: the same answer everywhere
            logger.warning("round %d: its mean is not finite and is not merged", posted.key.sequence)
            self.counters.rounds_failed += 1
            return None
        self._catch_up.record_merged(posted.key)
        return self.outer_step(posted, result)

    def after_round(self, posted: RoundInFlight) -> None:
        if self.missed is None:
            self.state.unmerged = posted.key.sequence + 1
        elif not self._leaving:
            while self.in_flight:  # this worker's work is already in these means and must not be counted twice
                self.end_round(self.in_flight.pop(0))
            self._resync()

    def _resync(self) -> bool:
        """Take over the others' state; False if it cannot be had now, and is to be tried again at the next post.

        Rounds after the missed one are in the others' state; if this worker has the state itself, it merges them.
        """
        assert self.missed is not None
        missed = self.missed
        with self.count_seconds():
            taken = self._take_over_state(missed)
            if taken is not None:
                self.missed = None
                for posted, result in missed.later:
                    if not taken:
                        self.merge_mean(posted, result)
                    elif posted.key.sequence < self.state.sequence and not posted.dropped:
                        self._catch_up.follow(posted, self.mixing)
                self.state.unmerged = self.state.sequence
        if taken:
            if self.ends_at is not None:
                self.end_at(self.ends_at)
            self.counters.resyncs += 1
            if self.on_resync is not None:
                self.on_resync(missed.reason, self.state.sequence)
        return taken is not None

    def _take_over_state(self, missed: Missed) -> bool | None:
        """Fetch the others' state: True if it was taken over, False if this worker has it, None if it cannot be had
        now."""
        worker = self.engine.worker
        try:
            states = self.replica.fetch_states()
            if states is None:
                return False
            following = {posted.key.fragment for posted, _ in missed.later if not posted.dropped}
            self._catch_up.take_over(states, following=following)
        except RoundFailed as failure:
            logger.warning("worker %d trains on without the others' state for now: %s", worker, failure.reason)
            return None
        self.arrived_note = states[0].note
        self._catch_up.leave(missed.diverged)
        self.replica.changed()
        logger.info("worker %d has the others' state again; it goes on with round %d", worker, self.state.sequence)
        return True

    # The end

    @property
    def stopping(self) -> bool:
        """Always False: a worker that stops leaves alone."""
        return False

    def _last_round(self) -> int:
        """Return the last round of a run that ends here: one turn through all fragments after the last scheduled
        one."""
        end = self.state.inner_steps if self.ends_at is None else self.ends_at
        return self.schedule.posts_until(end) + self.state.num_fragments - 1

    def end_together(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """Merge what is in flight and, unless it is early, take a last turn with the work that is left.

        The confirmation follows if the others end too; if they train on, this worker leaves without it.
        """
        self._leaving = early
        self.merge_pending()
        if not early:
            self.report = replace(self.report, done=True)
            self._last_turn()
        self.state.adopt_anchors()
        before_confirming()
        if not early and (self.ends_at is not None or self._agreed_last is not None):
            self._confirm()
        self._leaving = False
        self._agreed_last = None

    def _last_turn(self) -> None:
        own = self._last_round()
        while self.state.sequence <= self._last_of_all(own) and (self.missed is None or self._resync()):
            self.post_fragment(self.schedule.fragment_of(self.state.sequence))
            self.merge_pending()

    def _last_of_all(self, own: int) -> int:
        """Return the round after which this worker ends: its own last one, or that of all once all are done (ADR
        25)."""
        return own if self.ends_at is not None or self._agreed_last is None else self._agreed_last

    def _confirm(self) -> None:
        try:
            self.confirm()
        except RoundFailed as failure:
            self.counters.rounds_failed += 1
            logger.warning("no other worker has confirmed the last parameters: %s", failure.reason)
        self.state.unmerged = self.state.sequence

    # Saving

    def unsavable(self) -> str | None:
        if self.missed is not None or any(end_of(posted).resync for posted in self.in_flight):
            return "this worker's anchors may not be the others'"
        return None

    def loaded(self) -> None:
        self.missed = None
        self._joined = True
