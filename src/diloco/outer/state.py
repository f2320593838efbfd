"""What the outer loop of one worker holds: anchors, outer momentum, and how far it is. Served to joiners, and saved.

Anchors, momentum and counters are the same on all workers after a round; `inner_steps` and `sequence` are this worker's
place in the schedule. Where workers come and go, that place may jump ahead of the work done: `steps_taken` and
`merged_at` count the work, and the weight of a contribution comes from them alone. A rank holds what its lanes hold;
numbers and digests are the whole worker's, the same on all its ranks. Nothing here decides, posts or merges: that is
outer_loop.py.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from diloco.core.fragments import Fragment
from diloco.engines.rounds import GlobalState, RoundKey
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError, RoundFailed
from diloco.outer.lane import NOTHING, Group, Lane
from diloco.outer.tensor_pieces import Numbers, TensorPieces


class OuterState:
    """The lanes of one rank and everything that is counted about their fragments."""

    def __init__(self, lanes: Sequence[Lane], num_lanes: int, groups: Sequence[Group], ranks: WorkerRanks) -> None:
        """`num_lanes`: of the whole swarm. `groups`: what each fragment is. Collective among the worker's ranks."""
        self.lanes, self.num_lanes = list(lanes), num_lanes
        self.num_fragments = len(groups)
        self.inner_steps = 0
        """The position in the schedule, and in that of the learning rate."""
        self.jumped = 0
        """Positions at which this worker took no inner step."""
        self.sequence = 0
        """The next round to post."""
        self.unmerged = 0
        """The first round that may still move the anchors."""
        self.sound = True
        """The anchors have every round before `unmerged` and no other."""
        self.merged_at = [0] * self.num_fragments
        """The inner steps that were taken when each fragment's last merged round was posted."""
        self.merged_rounds = [0] * self.num_fragments
        self.digests = [NOTHING] * self.num_fragments
        """Of the worker's anchors, one for each fragment."""
        self.lock = threading.Lock()
        """Held while anchors change, so that a served state is never half merged."""
        self._groups, self._ranks = groups, ranks
        self.gather_digests(range(self.num_fragments))

    @property
    def fragments(self) -> list[Fragment]:
        """Those of all lanes, in the schedule's order."""
        return [fragment for index in range(self.num_fragments) for _, fragment in self.fragments_of(index)]

    def fragments_of(self, index: int) -> list[tuple[Lane, Fragment]]:
        """What this rank has of one fragment, by lane."""
        found = [(lane, lane.fragments[index]) for lane in self.lanes]
        return [(lane, fragment) for lane, fragment in found if fragment is not None]

    @property
    def rounds(self) -> int:
        """Merged rounds, of all fragments."""
        return sum(self.merged_rounds)

    @property
    def steps_taken(self) -> int:
        """The inner steps of this worker itself."""
        return self.inner_steps - self.jumped

    def jump_to(self, position: int) -> None:
        """Forward only; the steps between count as nobody's."""
        ahead = max(0, position - self.inner_steps)
        self.inner_steps += ahead
        self.jumped += ahead

    def merged(self, key: RoundKey, work: int) -> None:
        """A round, posted after so many steps, has moved its fragment's anchor; call it with the lock."""
        index = key.fragment
        self.sound = self.sound and self.unmerged == key.sequence
        self.unmerged = key.sequence + 1
        self.merged_rounds[index] += 1
        self.merged_at[index] = max(work, self.merged_at[index])  # a new worker did none of the work before

    def anchor_digest(self) -> str:
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:16]

    def gather_digests(self, indices: Sequence[int]) -> None:
        """The worker's digest of each fragment: of one lane its own, of several a hash of theirs in lane order."""
        own = [[NOTHING] * self.num_lanes for _ in indices]
        for lane in self.lanes:
            for row, index in zip(own, indices, strict=True):
                row[lane.number] = lane.digests[index]
        told = self._ranks.gather("".join("".join(row) for row in own).encode())
        for position, index in enumerate(indices):
            cells = range(position * self.num_lanes, (position + 1) * self.num_lanes)
            lanes = [max(rank[16 * cell : 16 * cell + 16].decode() for rank in told) for cell in cells]
            joined = hashlib.sha256("".join(lanes).encode()).hexdigest()[:16]
            self.digests[index] = lanes[0] if self.num_lanes == 1 else joined

    # What joiners take over: flat buffers, whose layout all workers have in common

    def numbers(self) -> dict[str, int]:
        numbers = {"inner_steps": self.inner_steps, "jumped": self.jumped, "sequence": self.sequence}
        numbers["merged"] = self.rounds
        for index in range(self.num_fragments):
            numbers[f"{index}.rounds"] = self.merged_rounds[index]
            numbers[f"{index}.merged_at"] = self.merged_at[index]
        return numbers

    def global_state(self, lane: Lane) -> GlobalState:
        with self.lock:
            return GlobalState(lane.outer_tensors() | lane.start_tensors(), self._served(), lane.layout_digest)

    def copied_state(self, lane: Lane, note: Callable[[], bytes]) -> GlobalState:
        """The same as copies on the CPU, for another thread; `note` is asked for in that thread, with the lock."""
        with self.lock:
            if not self.sound:
                raise RoundFailed("this worker's anchors are not the others': it takes theirs over itself")
            return GlobalState(lane.copies(), self._served(), lane.layout_digest, note=note())

    def _served(self) -> dict[str, int]:
        return self.numbers() | {"sequence": self.unmerged}

    def take_over(self, states: Sequence[GlobalState]) -> None:
        """Before the first inner step: everything is the others', the parameters too. One state for each lane."""
        with self.lock:
            for lane, state in zip(self.lanes, states, strict=True):
                lane.copy(state.tensors, lane.outer_tensors() | lane.start_tensors())
        self._set_position(states[0].numbers)
        for fragment in self.fragments:
            fragment.adopt_anchor()

    def take_over_fragment(self, index: int, states: Sequence[GlobalState]) -> None:
        """The others' anchor and momentum of one fragment; the parameters stay this worker's own."""
        with self.lock:
            for lane, state in zip(self.lanes, states, strict=True):
                mine = {name: tensor for name, tensor in lane.outer_tensors().items() if name.startswith(f"{index}.")}
                lane.copy(state.tensors, mine)
        self.set_rounds(index, states[0].numbers[f"{index}.rounds"])
        self.gather_digests(range(self.num_fragments))

    def _set_position(self, numbers: Mapping[str, int]) -> None:
        self.inner_steps, self.jumped = numbers["inner_steps"], numbers["jumped"]
        self.sequence = self.unmerged = numbers["sequence"]
        self.sound = True
        for index in range(self.num_fragments):
            self.set_rounds(index, numbers[f"{index}.rounds"])
            self.merged_at[index] = numbers[f"{index}.merged_at"]
        self.gather_digests(range(self.num_fragments))

    def set_rounds(self, index: int, rounds: int) -> None:
        self.merged_rounds[index] = rounds
        for _, fragment in self.fragments_of(index):
            fragment.rounds = rounds

    # What is saved: by parameter, so that it depends neither on flat buffers nor on ranks

    def held(self) -> dict[str, TensorPieces]:
        """Anchors and outer momentum; whoever writes into them calls `loaded` afterwards."""
        held: dict[str, TensorPieces] = {}
        for index, group in enumerate(self._groups):
            mine = [fragment for _, fragment in self.fragments_of(index)]
            held |= self.held_of(index, "outer.anchor", [fragment.anchor for fragment in mine])
            for kind in group.outer.state_names:
                held |= self.held_of(index, f"outer.{kind}", [fragment.state[kind] for fragment in mine])
        return held

    def held_of(self, index: int, prefix: str, flats: Sequence[Tensor]) -> dict[str, TensorPieces]:
        """Flat buffers of what this rank has of a fragment (`fragments_of`), by parameter."""
        held: dict[str, TensorPieces] = {}
        for (lane, _), flat in zip(self.fragments_of(index), flats, strict=True):
            for name, more in lane.held(index, prefix, flat).items():
                held[name] = replace(held[name], pieces=held[name].pieces + more.pieces) if name in held else more
        return held

    def start_from_anchor(self) -> None:
        """The parameters are the anchors, and carry no work of this worker's."""
        for fragment in self.fragments:
            fragment.adopt_anchor()
        self.merged_at = [self.steps_taken] * self.num_fragments

    def check_fragments(self, numbers: Numbers) -> None:
        if "jumped" not in numbers:
            raise ConfigError("the saved state is of an earlier version of diloco: go on with that one, or begin anew")
        saved = sum(name.endswith(".rounds") for name in numbers)
        if saved != self.num_fragments:
            raise ConfigError(
                f"the saved state has {saved} fragments, this optimizer {self.num_fragments}: "
                "load it with the same model, fragments and outer optimizer"
            )

    def loaded(self, numbers: Numbers) -> None:
        """The memory of `held` has been filled; the model's parameters are the caller's to load."""
        with self.lock:
            for lane in self.lanes:
                lane.take_digests()
        self._set_position(numbers)
