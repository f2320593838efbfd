"""The state of one worker's outer loop: its position, the rounds it has merged, and the work behind them.

`inner_steps` and `sequence` are this worker's place in the schedule. Where workers come and go, that place may jump
ahead of the work done: `steps_taken` and `merged_at` count the work, and the weight of a contribution comes from them
alone. Tensors are in the replica's lanes; numbers and digests are the whole worker's, the same on all its ranks.

What a joiner takes over and what is saved follow from this state; rounds in flight are saved with it. To evaluate what
the workers have in common, the anchors take the parameters' place for a while.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import Fragment, PartLayout
from diloco.engines.rounds import GlobalState, Member, Report, RoundKey, RoundResult, RoundSummary
from diloco.errors import ConfigError, RoundFailed
from diloco.outer.method import Means, Method
from diloco.outer.replica import Lane, Replica
from diloco.outer.rounds import RoundInFlight, Settled, end_of
from diloco.outer.tensors import Numbers, TensorPieces


class OuterState:
    """One worker's position, counters, and the anchors and outer momentum that go with them."""

    def __init__(self, replica: Replica, methods: Sequence[Method] = ()) -> None:
        self._replica = replica
        self._methods = methods
        self.num_fragments = len(replica.groups)
        self.num_tensor_groups = sum(group.sending is None for group in replica.groups)
        """The first fragments, this many, hold the model's tensors; any others hold what a method averages."""
        self.inner_steps = 0
        """The position in the schedule, and in that of the learning rate."""
        self.jumped = 0
        """Positions at which this worker took no inner step."""
        self.sequence = 0
        """The next round to post."""
        self.unmerged = 0
        """The first round that may still move the anchors."""
        self.merged_at = [0] * self.num_fragments
        """The inner steps that were taken when each fragment's last merged round was posted."""
        self.merged_rounds = [0] * self.num_fragments
        self.lock = replica.lock
        """Held while anchors change, so that a served state is never half merged."""

    @property
    def lanes(self) -> list[Lane]:
        return self._replica.lanes

    @property
    def fragments(self) -> list[Fragment]:
        """The fragments of all lanes, in the schedule's order."""
        return [fragment for index in range(self.num_fragments) for _, fragment in self.fragments_of(index)]

    def fragments_of(self, index: int) -> list[tuple[Lane, Fragment]]:
        """Return the parts that this rank has of one fragment, by lane. Only for the trainer's thread."""
        self._replica.finish_posts()
        by_lane = [(lane, lane.fragments[index]) for lane in self._replica.lanes]
        return [(lane, fragment) for lane, fragment in by_lane if fragment is not None]

    @property
    def rounds(self) -> int:
        """Merged rounds, of all fragments."""
        return sum(self.merged_rounds)

    @property
    def steps_taken(self) -> int:
        """The inner steps of this worker itself."""
        return self.inner_steps - self.jumped

    @property
    def steps_since_round(self) -> int:
        """The inner steps since the last round of the fragment that was averaged longest ago: no mean has them all."""
        merged_at = self.merged_at
        if self.num_tensor_groups < self.num_fragments:
            merged_at = merged_at[: self.num_tensor_groups]
        return self.steps_taken - min(merged_at)

    def jump_to(self, position: int) -> None:
        """Move forward to a position; the steps between count as no work of this worker's."""
        ahead = max(0, position - self.inner_steps)
        self.inner_steps += ahead
        self.jumped += ahead

    def jump_back_to(self, end: int) -> None:
        """Take back as much of a jump as led past the end of the run."""
        past = min(self.jumped, max(0, self.inner_steps - end))
        self.inner_steps -= past
        self.jumped -= past

    def merged(self, key: RoundKey, steps_taken: int) -> None:
        """Count a round, posted after `steps_taken` inner steps, that has moved its fragment's anchor. Call it with
        the lock."""
        index = key.fragment
        self.unmerged = key.sequence + 1
        self.merged_rounds[index] += 1
        self.merged_at[index] = max(steps_taken, self.merged_at[index])  # a new worker did none of the work before

    def anchor_digest(self) -> str:
        return hashlib.sha256("".join(self._replica.digests).encode()).hexdigest()[:16]

    # What joiners take over: flat buffers, whose layout all workers have in common

    def numbers(self) -> dict[str, int]:
        numbers = {"inner_steps": self.inner_steps, "jumped": self.jumped, "sequence": self.sequence}
        numbers["merged"] = self.rounds
        for index in range(self.num_fragments):
            numbers[f"{index}.rounds"] = self.merged_rounds[index]
            numbers[f"{index}.merged_at"] = self.merged_at[index]
        return numbers

    def served_numbers(self) -> dict[str, int]:
        """Return the numbers for a joiner: `sequence` is the first round that is not in the anchors."""
        return self.numbers() | {"sequence": self.unmerged}

    def take_over_fragment(self, index: int, states: Sequence[GlobalState]) -> None:
        """Take the others' anchor and momentum of one fragment; the parameters stay this worker's own."""
        with self.lock, self.moving_anchors([index]):
            for lane, state in zip(self._replica.lanes, states, strict=True):
                mine = {name: tensor for name, tensor in lane.outer_tensors().items() if name.startswith(f"{index}.")}
                lane.copy(state.tensors, mine)
        self.set_rounds(index, states[0].numbers[f"{index}.rounds"])
        self._replica.update_digests()

    def moving_anchors(self, indices: Iterable[int]) -> ExitStack:
        """Entered while the others' anchors of these fragments come in place of this worker's."""
        inside = ExitStack()
        for method in self._methods:
            inside.enter_context(method.moving_anchors(indices))
        return inside

    def set_position(self, numbers: Mapping[str, int]) -> None:
        self.inner_steps = numbers["inner_steps"]
        self.jumped = numbers["jumped"]
        self.sequence = self.unmerged = numbers["sequence"]
        for index in range(self.num_fragments):
            self.set_rounds(index, numbers[f"{index}.rounds"])
            self.merged_at[index] = numbers[f"{index}.merged_at"]
        self._replica.update_digests()

    def set_rounds(self, index: int, rounds: int) -> None:
        self.merged_rounds[index] = rounds
        for _, fragment in self.fragments_of(index):
            fragment.rounds = rounds

    def adopt_anchors(self) -> None:
        """θ_i ← anchor, in all fragments."""
        for index in range(self.num_fragments):
            for _, fragment in self.fragments_of(index):
                fragment.adopt_anchor()
            self._at_anchor(index)
        self._replica.changed()

    def _at_anchor(self, index: int) -> None:
        for method in self._methods:
            method.at_anchor(index)

    def take_anchors(self) -> None:
        """anchor ← θ_i of all parameters, whose work is then in the anchor; averaged buffers stay as they are."""
        buffers = self._replica.tensors.averaged_buffers.keys()
        with self.lock:
            for index, group in enumerate(self._replica.groups):
                if not buffers & set(group.names):
                    for _, fragment in self.fragments_of(index):
                        fragment.take_anchor()
                    self._at_anchor(index)
                    self.merged_at[index] = self.steps_taken

    def start_from_anchor(self) -> None:
        """θ_i ← anchor, in all fragments, whose parameters then carry no work of this worker's."""
        for index in range(self.num_fragments):
            self.drop_work(index)
        self._replica.changed()

    def drop_work(self, index: int) -> None:
        """θ_i ← anchor of one fragment: nothing of this worker's work is in it, or will be sent later."""
        for _, fragment in self.fragments_of(index):
            fragment.adopt_anchor()
        self._at_anchor(index)
        for method in self._methods:
            method.work_dropped(index)
        self.merged_at[index] = self.steps_taken

    # What is saved: by parameter, so that it depends neither on flat buffers nor on ranks

    def saved_tensors(self, taken: Mapping[int, Means] | None = None) -> dict[str, TensorPieces]:
        """View anchors, outer momentum and what methods keep; after writing into them call `loaded`.

        `taken`: the means in flight that have this worker's contribution in them, by fragment.
        """
        saved: dict[str, TensorPieces] = {}
        for index, group in enumerate(self._replica.groups):
            mine = [fragment for _, fragment in self.fragments_of(index)]
            saved |= self.tensor_pieces(index, "outer.anchor", [fragment.anchor for fragment in mine])
            for kind in group.outer.state_names:
                saved |= self.tensor_pieces(index, f"outer.{kind}", [fragment.state[kind] for fragment in mine])
            means = (taken or {}).get(index)
            for method in self._methods:
                for name, flats in method.saved_tensors(index, means).items():
                    saved |= self.tensor_pieces(index, name, flats)
        return saved

    def tensor_pieces(self, index: int, prefix: str, flats: Sequence[Tensor]) -> dict[str, TensorPieces]:
        """Cut flat buffers of what this rank has of a fragment (`fragments_of`) by parameter."""
        pieces_by_name: dict[str, TensorPieces] = {}
        for (lane, _), flat in zip(self.fragments_of(index), flats, strict=True):
            for name, more in lane.tensor_pieces(index, prefix, flat).items():
                before = pieces_by_name.get(name)
                pieces_by_name[name] = more if before is None else replace(before, pieces=before.pieces + more.pieces)
        return pieces_by_name

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
        """Called when the memory of `saved_tensors` was filled; the model's parameters are the caller's to load."""
        with self.lock:
            for lane in self._replica.lanes:
                lane.take_digests()
        for index in range(self.num_fragments):
            for method in self._methods:
                method.ended(index, None)
        self.set_position(numbers)


class AnchorEvaluation:
    """Evaluations of one worker: parameters and anchors change places (core/fragments.py), which needs no more memory.

    `active` while the anchors are in the model; training is refused meanwhile.
    """

    def __init__(self, state: OuterState, replica: Replica, *, serves_copies: bool) -> None:
        """`serves_copies`: other workers get copies of the anchors, from wherever they are, and need not wait."""
        self._state = state
        self._replica = replica
        self._serves_copies = serves_copies
        self.active = False
        self.seconds = 0.0
        """Spent with the anchors in the model."""

    def refuse_training(self) -> None:
        if self.active:
            raise ConfigError("inside outer_parameters(): leave the evaluation before training on")

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Let parameters and anchors change places; refused inside itself. Live anchors are not served meanwhile."""
        self.refuse_training()
        started = time.monotonic()
        # Copies may be served between the two exchanges; live anchors may not.
        lock = self._state.lock
        evaluation_lock = nullcontext() if self._serves_copies else lock
        exchange_lock = lock if self._serves_copies else nullcontext()
        with evaluation_lock:
            with exchange_lock:
                self._exchange()
            try:
                yield
            finally:
                with exchange_lock:
                    self._exchange()
                self.seconds += time.monotonic() - started

    def _exchange(self) -> None:
        if not self.active:
            self._replica.average_buffers(self._replica.tensors.averaged_buffers)
        fragments = self._state.fragments
        for fragment in fragments:
            fragment.check_memory()  # of all, before any is exchanged
        for fragment in fragments:
            fragment.exchange()
        self._replica.changed()
        self.active = not self.active


# Rounds in flight as they are saved: settled, unmerged, and with the fp32 values that their means decode to. Values are
# saved by parameter, so that neither the codec's parts nor the number of ranks matter when the run goes on; merging
# them later gives the same bits.


def saved_rounds(rounds: Sequence[RoundInFlight], state: OuterState) -> tuple[dict[str, TensorPieces], list[Numbers]]:
    """Write settled rounds as tensors and numbers."""
    tensors: dict[str, TensorPieces] = {}
    numbers = [_to_numbers(posted) for posted in rounds]
    for posted, saved in zip(rounds, numbers, strict=True):
        if _has_mean(saved):
            tensors |= _mean_pieces(posted.key, _decoded_means(posted, state), state)
    return tensors, numbers


def means_taken(rounds: Sequence[RoundInFlight], worker: int) -> dict[int, Sequence[EncodedVector] | None]:
    """Return the means in flight that have this worker's contribution in them, by fragment; None where there is
    none."""
    ended = [(posted.key.fragment, end_of(posted)) for posted in rounds]
    return {index: end.means_with(worker) for index, end in ended if isinstance(end, RoundResult)}


def restored_rounds(
    numbers: Sequence[Numbers], state: OuterState
) -> tuple[dict[str, TensorPieces], Callable[[], list[RoundInFlight]]]:
    """Return the memory to load the rounds' means into, and a function that then gives the rounds."""
    tensors: dict[str, TensorPieces] = {}
    means: list[list[Tensor]] = []
    for saved in numbers:
        key = RoundKey(**saved["key"])
        mine = [fragment for _, fragment in state.fragments_of(key.fragment)]
        means.append([torch.empty_like(fragment.anchor) for fragment in mine] if _has_mean(saved) else [])
        tensors |= _mean_pieces(key, means[-1], state) if _has_mean(saved) else {}

    def rounds() -> list[RoundInFlight]:
        return [_from_numbers(saved, state, loaded) for saved, loaded in zip(numbers, means, strict=True)]

    return tensors, rounds


def _mean_pieces(key: RoundKey, means: Sequence[Tensor], state: OuterState) -> dict[str, TensorPieces]:
    return state.tensor_pieces(key.fragment, f"in_flight.{key.sequence}", means)


def _has_mean(numbers: Mapping[str, Any]) -> bool:
    return numbers["result"] is not None and numbers["result"]["total_weight"] > 0


@torch.no_grad()
def _decoded_means(posted: RoundInFlight, state: OuterState) -> list[Tensor]:
    """Decode the means of a settled round to fp32, flat, for what this rank has of the fragment."""
    by_lane = dict(zip((lane.number for lane in state.lanes), posted.pending.wait().means, strict=True))
    index = posted.key.fragment
    decoded = []
    for lane, fragment in state.fragments_of(index):
        flat = torch.empty_like(fragment.anchor)
        for span in fragment.spans():
            flat[span.slice].copy_(lane.sending[index].decode(by_lane[lane.number], span))
        decoded.append(flat)
    return decoded


def _to_numbers(posted: RoundInFlight) -> Numbers:
    """Return all of a settled round but its mean."""
    numbers: Numbers = {name: getattr(posted, name) for name in ("at_step", "norm", "dropped")}
    numbers["work"] = posted.steps_taken
    numbers["key"] = asdict(posted.key)
    ended = end_of(posted)
    if isinstance(ended, RoundFailed):
        return numbers | {"result": None, "failure": ended.reason, "resync": ended.resync}
    members = [member.as_json() for member in ended.members]
    return numbers | {"result": ended.as_json() | {"members": members}, "failure": None}


def _from_numbers(numbers: Mapping[str, Any], state: OuterState, loaded: Sequence[Tensor]) -> RoundInFlight:
    """Read a settled round back; `loaded` is what its means decoded to. A worker that stopped then does not stop
    now."""
    key = RoundKey(**numbers["key"])
    if numbers["result"] is None:
        ended: RoundResult | RoundFailed = RoundFailed(numbers["failure"], resync=numbers["resync"])
    else:
        ended = _result(numbers["result"], _encoded_means(state, key.fragment, loaded))
    dropped = numbers.get("dropped", False)  # an earlier version saved none
    return RoundInFlight(key, numbers["at_step"], numbers["work"], Settled(ended, numbers["norm"]), dropped=dropped)


def _encoded_means(state: OuterState, index: int, loaded: Sequence[Tensor]) -> list[EncodedVector]:
    """Encode a mean for each lane; it is empty where this rank has nothing of the fragment, or there was no mean."""
    rest = list(loaded)
    means = []
    for fragment in (lane.fragments[index] for lane in state.lanes):
        if fragment is None:
            means.append(EncodedVector(codec("fp32"), PartLayout(0)))
            continue
        means.append(EncodedVector(codec("fp32"), fragment.layout, fragment.anchor.device))
        if rest:
            means[-1].encode(0, rest.pop(0))
    return means


def _result(saved: Mapping[str, Any], means: Sequence[EncodedVector]) -> RoundResult:
    members = [
        member | {"report": Report(**member["report"] | {"stopping": False, "done": False})}
        for member in saved["members"]
    ]
    return RoundResult(
        mean=means[0],
        members=tuple(Member(**member) for member in members),
        lane_means=tuple(means),
        **RoundSummary.from_json(saved).summary_fields(),
    )
