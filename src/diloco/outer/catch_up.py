"""How a worker gets the others' state: at its start, after a round that it missed, after it went astray.

With a fixed membership all are there from the first step on, and a missed round is made up for fragment by fragment,
before the next post of each. With an elastic engine the others may be anywhere: everything is taken over at once,
anchors, outer momentum, the number of the next round and the position in the schedule. Either way a worker that has
missed a round keeps its own parameters (I6): its next outer gradient, taken from the others' anchor, carries its work.
Only one that was absent, and took fewer steps than the others, moves along with them for those (ADR 19).

A state is checked before any of it is used. Nothing here posts or waits. When everything is taken over no round of this
worker is in flight; those that ended well after the missed one are in the state, and the parameters must follow them
(`follow`): what of this worker's work is in a mean already must not come again.
"""

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from diloco.core.schedule import Schedule
from diloco.engines.rounds import GlobalState
from diloco.errors import EngineError, Excluded, RoundFailed
from diloco.outer.in_flight import Posted
from diloco.outer.lane import Lane
from diloco.outer.ranks.worker_round import Outcome
from diloco.outer.replica import Replica
from diloco.outer.state import OuterState

logger = logging.getLogger(__name__)


class CatchingUp:
    """What one worker lacks of the others' state, and how it takes it over."""

    def __init__(self, state: OuterState, replica: Replica, schedule: Schedule) -> None:
        self.state, self.replica, self.schedule = state, replica, schedule
        self.missed: dict[int, str] = {}
        """Fragments whose anchor may not be the others', and why."""
        self.astray: set[int] = set()
        """Of those, the ones whose parameters came from an anchor that nobody else had."""
        self.owed: list[tuple[Posted, Outcome]] = []
        """Rounds after the missed one that ended well, and are not merged."""
        self.note = b""
        """What came with the latest state."""

    def clear(self) -> None:
        self.missed, self.astray, self.owed = {}, set(), []

    # At the start

    def join(self) -> None:
        """Before the first inner step: the others' state, and the parameters that go with it."""
        try:
            states = self.replica.fetch_states()
            if states is not None and self.replica.engine.elastic:
                self._take_over(states, start=True)
                self.state.start_from_anchor()
            elif states is not None:
                self.state.take_over(states)
        except RoundFailed as failure:
            raise EngineError(f"no worker gave its state to start from: {failure.reason}") from failure
        self.replica.changed()

    # With a fixed membership

    def fragment(self, index: int) -> None:
        """After a missed round of it: the others' anchor. One fragment at a time, since others may be in flight.

        A worker that went astray takes the parameters too, and its work since is lost: it started from an anchor that
        nobody else had.
        """
        if index not in self.missed:
            return
        del self.missed[index]
        states = self.replica.fetch_states()
        if states is None:
            return
        self.state.take_over_fragment(index, states)
        self._leave_astray([index])
        self.replica.changed()
        logger.info("worker %d has the others' anchor of fragment %d again", self.replica.engine.worker, index)

    # With an elastic engine

    def everything(self) -> bool | None:
        """The others' whole state: True if it was taken over, False if this worker has it, None if not to be had now.

        No round of this worker may be in flight.
        """
        worker, state = self.replica.engine.worker, self.state
        try:
            states = self.replica.fetch_states()
            if states is not None:
                self._take_over(states, start=False)
                self._leave_astray(range(state.num_fragments))
                self.replica.changed()
                logger.info("worker %d has the others' state again; it goes on with round %d", worker, state.sequence)
        except RoundFailed as failure:
            logger.warning("worker %d trains on without the others' state for now: %s", worker, failure.reason)
            return None
        self.clear()
        return states is not None

    def follow(self, posted: Posted, mixing: float) -> None:
        """A round with this worker's work in it came with the others' state: what a merge does to the parameters."""
        index = posted.key.fragment
        for _, fragment in self.state.fragments_of(index):
            fragment.adopt_anchor(mixing)
        self.state.merged_at[index] = max(posted.work, self.state.merged_at[index])
        self.replica.changed(index)

    def _take_over(self, states: Sequence[GlobalState], *, start: bool) -> None:
        """All but the parameters, which move with the anchor as far as this worker was absent (ADR 19).

        `start`: also what is equal only at the start.
        """
        state, theirs = self.state, states[0]
        self._check(states, start=start)
        absences = {} if start else self._absences(theirs.numbers["sequence"])
        with state.lock:
            self._move(absences, -1.0)
            if theirs.tensors:
                for lane, one in zip(state.lanes, states, strict=True):
                    lane.copy(one.tensors, lane.outer_tensors() | (lane.start_tensors() if start else {}))
                for index in range(state.num_fragments):
                    state.set_rounds(index, theirs.numbers[f"{index}.rounds"])
            for position, (key, _) in enumerate(theirs.means):
                if theirs.tensors or key.sequence >= state.unmerged:
                    self._merge_mean(key.fragment, [one.means[position][1] for one in states])
            state.sequence = state.unmerged = theirs.numbers["sequence"]
            state.jump_to(self._position(theirs))
            self._move(absences, 1.0)
        state.gather_digests(range(state.num_fragments))
        self.note = theirs.note

    def _absences(self, sequence: int) -> dict[int, float]:
        """For each fragment: which share of the others' way, up to before that round, this worker has not gone itself.

        What is only counted stays as it is, and so does what follows a round with this worker's work in it (`follow`).
        """
        state, buffers = self.state, self.replica.tensors.averaged_buffers
        following = {posted.key.fragment for posted, _ in self.owed}
        shares = {}
        for index, group in enumerate(self.replica.groups):
            way = self._posted_before(sequence, index) - self._posted_before(state.unmerged, index)
            work = state.steps_taken - state.merged_at[index]
            if way > work and index not in following and not buffers.keys() & set(group.names):
                shares[index] = 1.0 - work / way
        return shares

    def _posted_before(self, sequence: int, index: int) -> int:
        """The position of a fragment's last post before that round."""
        for earlier in range(sequence - 1, max(-1, sequence - 1 - self.state.num_fragments), -1):
            if self.schedule.fragment_of(earlier) == index:
                return self.schedule.post_step(earlier)
        return 0

    def _move(self, shares: Mapping[int, float], sign: float) -> None:
        """Parameters by their shares of the anchors: off the old ones (−1), or onto the new ones (1)."""
        for index, share in shares.items():
            for _, fragment in self.state.fragments_of(index):
                fragment.add_anchor(sign * share)

    def _merge_mean(self, index: int, encoded: Sequence[Tensor]) -> None:
        """The outer step of all others in a round that this worker was not in; its parameters stay as they are."""
        for lane, mean in zip(self.state.lanes, encoded, strict=True):
            lane.vectors[index].data.copy_(mean.view(lane.vectors[index].data.shape))
            lane.merge(index, lane.vectors[index], mixing=1.0)
        self.state.merged_rounds[index] += 1

    def _position(self, theirs: GlobalState) -> int:
        """Where the others are, as far as is known; in any case after the last round and before the next one."""
        sequence = theirs.numbers["sequence"]
        position = theirs.numbers.get("inner_steps", 0) if theirs.position is None else theirs.position
        after = self.schedule.post_step(sequence - 1) if sequence else 0
        return max(after, min(position, self.schedule.post_step(sequence) - 1))

    def _check(self, states: Sequence[GlobalState], *, start: bool) -> None:
        """Refuse a state that does not fit, before anything has changed."""
        for lane, state in zip(self.state.lanes, states, strict=True):
            if state.tensors and state.layout_digest != lane.layout_digest:
                raise Excluded(
                    f"the others train something else than worker {self.replica.engine.worker} (layout "
                    f"{state.layout_digest} against {lane.layout_digest}): model, data, codec, schedule and outer "
                    "optimizer must be the same everywhere; compare the workers' config.toml and versions"
                )
            problem = _misfit(lane, state, start=start)
            if problem is not None:
                raise RoundFailed(f"the state that arrived cannot be used: {problem}")

    def _leave_astray(self, indices: Sequence[int]) -> None:
        """The parameters of fragments that went astray become the anchor; nothing of them is this worker's work."""
        for index in self.astray.intersection(indices):
            for _, fragment in self.state.fragments_of(index):
                fragment.adopt_anchor()
            self.state.merged_at[index] = self.state.steps_taken
        self.astray.difference_update(indices)


def _misfit(lane: Lane, state: GlobalState, *, start: bool) -> str | None:
    """What is wrong with a state, if anything. Without tensors it is this worker's own with the means after it."""
    needed = {"sequence"}
    if state.tensors or start:
        needed |= {f"{index}.rounds" for index in range(len(lane.fragments))}
        for name, mine in (lane.outer_tensors() | (lane.start_tensors() if start else {})).items():
            tensor = state.tensors.get(name)
            if tensor is None or (tensor.shape, tensor.dtype) != (mine.shape, mine.dtype):
                return f"tensor '{name}' is missing or not {tuple(mine.shape)} {mine.dtype}"
    for name in sorted(needed):
        if state.numbers.get(name, -1) < 0:
            return f"its number '{name}' is missing or below 0"
    for key, mean in state.means:
        if not 0 <= key.fragment < len(lane.vectors) or mean.numel() != lane.vectors[key.fragment].num_bytes:
            return f"the mean of round {key.sequence} (fragment {key.fragment}) has another size"
    return None
