"""A worker of a swarm takes over the others' state: anchors, outer momentum, the next round, the position.

A worker that has missed a round keeps its own parameters (I6): its next outer gradient, taken from the others' anchor,
carries its work. After an absence, in which it took fewer inner steps than the schedule has, it also moves along with
the anchor (ADR 19):

    θ_i ← θ_i + (1 − w/p) · (new anchor − old anchor)      w own steps, p schedule steps since the last merged round

A state is checked before any of it is used. No round of this worker is in flight; those that ended well after the
missed one are in the state, and the parameters must follow them (`follow`): work that is in a mean must not come again.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from diloco.core.schedule import Schedule
from diloco.engines.rounds import GlobalState, RoundKey
from diloco.errors import Excluded, RoundFailed
from diloco.outer.replica import Lane, Replica
from diloco.outer.rounds import RoundInFlight
from diloco.outer.state import OuterState


class CatchUp:
    """Puts a state that has arrived in place of this worker's."""

    def __init__(self, state: OuterState, replica: Replica, schedule: Schedule) -> None:
        self._state = state
        self._replica = replica
        self._schedule = schedule
        self._failed: dict[int, int] = {}
        """Fragment -> its first round since the last merge that failed here, and may have ended for the others."""

    def record_failed(self, key: RoundKey) -> None:
        """Record a round that has failed for this worker, and as far as it knows for all."""
        self._failed.setdefault(key.fragment, key.sequence)

    def record_merged(self, key: RoundKey) -> None:
        """Record that a later round of the fragment is merged, from an anchor that all have: the others have no mean of
        the failed one."""
        self._failed.pop(key.fragment, None)

    def _unmerged(self, index: int) -> int:
        """Return the first round that may not be in the anchor of this fragment."""
        return min(self._state.unmerged, self._failed.get(index, self._state.unmerged))

    def take_over(self, states: Sequence[GlobalState], *, start: bool = False, following: Collection[int] = ()) -> None:
        """Take over all but the parameters, which only move along after an absence. One state for each lane.

        `start`: also what is equal only at the start. `following`: fragments that `follow` a later round instead.
        """
        state = self._state
        lanes = self._replica.lanes
        theirs = states[0]
        self._check(states, start=start)
        shares = {} if start else self._absences(theirs.numbers["sequence"], following)
        moving = [] if start else [index for index in range(state.num_fragments) if index not in following]
        with state.lock, state.moving_anchors(moving):
            self._add_anchors(shares, -1.0)
            if theirs.tensors:
                for lane, lane_state in zip(lanes, states, strict=True):
                    lane.copy(lane_state.tensors, lane.outer_tensors() | (lane.start_tensors() if start else {}))
                for index in range(state.num_fragments):
                    state.set_rounds(index, theirs.numbers[f"{index}.rounds"])
            for position, (key, _) in enumerate(theirs.means):
                if theirs.tensors or key.sequence >= self._unmerged(key.fragment):
                    encoded = [lane_state.means[position][1] for lane_state in states]
                    self._merge_mean(key, encoded, plain=key.sequence in theirs.plain)
            state.sequence = state.unmerged = theirs.numbers["sequence"]
            self._failed.clear()
            state.jump_to(self._position(theirs))
            self._add_anchors(shares, 1.0)
        self._replica.update_digests()

    def follow(self, posted: RoundInFlight, mixing: float) -> None:
        """Move the parameters as a merge does, after a round with this worker's work in it that came with the others'
        state."""
        index = posted.key.fragment
        for _, fragment in self._state.fragments_of(index):
            fragment.adopt_anchor(mixing)
        self._state.merged_at[index] = max(posted.steps_taken, self._state.merged_at[index])
        self._replica.changed(index)

    def leave(self, indices: Collection[int]) -> None:
        """θ_i ← anchor, in these fragments: nothing in them is this worker's work."""
        for index in indices:
            self._state.drop_work(index)

    def _absences(self, sequence: int, following: Collection[int]) -> dict[int, float]:
        """Per fragment: 1 − own steps / schedule steps since the last merged round, up to before that round.

        Counted buffers stay as they are, and so does what follows a round with this worker's work in it.
        """
        state = self._state
        buffers = self._replica.tensors.averaged_buffers
        shares = {}
        for index, group in enumerate(self._replica.groups):
            schedule_steps = self._posted_before(sequence, index) - self._posted_before(self._unmerged(index), index)
            own_steps = state.steps_taken - state.merged_at[index]
            if schedule_steps > own_steps and index not in following and not buffers.keys() & set(group.names):
                shares[index] = 1.0 - own_steps / schedule_steps
        return shares

    def _posted_before(self, sequence: int, index: int) -> int:
        """Return the position of a fragment's last post before that round."""
        for earlier in range(sequence - 1, max(-1, sequence - 1 - self._state.num_fragments), -1):
            if self._schedule.fragment_of(earlier) == index:
                return self._schedule.post_step(earlier)
        return 0

    def _add_anchors(self, shares: Mapping[int, float], sign: float) -> None:
        """θ_i ← θ_i + sign · share · anchor: with −1 for the old anchors, then with 1 for the new ones."""
        for index, share in shares.items():
            for _, fragment in self._state.fragments_of(index):
                fragment.add_anchor(sign * share)

    def _merge_mean(self, key: RoundKey, encoded: Sequence[Tensor], *, plain: bool) -> None:
        """Take the others' outer step of a round that this worker was not in; its parameters stay as they are."""
        for lane, mean in zip(self._replica.lanes, encoded, strict=True):
            into = lane.sending[key.fragment].vector.mean
            into.data.copy_(mean.view(into.data.shape))
            lane.merge(key.fragment, into, 1.0, self._schedule.turn_of(key.sequence), plain=plain)
        self._state.merged_rounds[key.fragment] += 1

    def _position(self, theirs: GlobalState) -> int:
        """Return the others' position as far as it is known; in any case after the last round and before the next
        one."""
        sequence = theirs.numbers["sequence"]
        position = theirs.numbers.get("inner_steps", 0) if theirs.position is None else theirs.position
        after = self._schedule.post_step(sequence - 1) if sequence else self._schedule.warm_start
        return max(after, min(position, self._schedule.post_step(sequence) - 1))

    def _check(self, states: Sequence[GlobalState], *, start: bool) -> None:
        """Refuse a state that does not fit, before anything has changed."""
        for lane, state in zip(self._replica.lanes, states, strict=True):
            if state.tensors and state.layout_digest != lane.layout_digest:
                raise Excluded(
                    f"the others train something else than worker {self._replica.engine.worker} (layout "
                    f"{state.layout_digest} against {lane.layout_digest}): model, data, codec, schedule and outer "
                    "optimizer must be the same everywhere; compare the workers' config.toml and versions"
                )
            problem = _misfit(lane, state, start=start)
            if problem is not None:
                raise RoundFailed(f"the state that arrived cannot be used: {problem}")


def _misfit(lane: Lane, state: GlobalState, *, start: bool) -> str | None:
    """Say what is wrong with a state, if anything. Without tensors it is this worker's own with the means after it."""
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
        known = 0 <= key.fragment < len(lane.sending)
        if not known or mean.numel() != lane.sending[key.fragment].vector.mean.num_bytes:
            return f"the mean of round {key.sequence} (fragment {key.fragment}) has another size"
        if not lane.sending[key.fragment].vector.mean.is_finite(mean):
            return f"the mean of round {key.sequence} (fragment {key.fragment}) is not finite"
    return None
