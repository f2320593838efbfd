"""What the outer loop of one worker holds: anchors, outer momentum, and how far it is. Served to joiners, and saved.

Anchors, momentum and counters are the same on all workers after a round; `inner_steps`, `sequence` and `merged_at` are
this worker's place in the schedule. Nothing here decides, posts or merges: that is outer_loop.py.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from diloco.core.digest import digest
from diloco.core.fragments import Fragment
from diloco.engines.rounds import GlobalState
from diloco.errors import ConfigError
from diloco.held import Held, Numbers, hold


class OuterState:
    """The fragments and everything that is counted about them."""

    def __init__(self, fragments: Sequence[Fragment], equal_at_start: Mapping[str, Tensor], layout_digest: str) -> None:
        """`equal_at_start`: tensors that are not averaged, but the same on all workers before the first step."""
        self.fragments = list(fragments)
        self.layout_digest = layout_digest
        self.inner_steps = 0
        self.sequence = 0
        self.merged_at = [0] * len(self.fragments)
        """The step at which each fragment's last merged round was posted."""
        self.digests: list[str] = []
        """Of the anchors."""
        self.lock = threading.Lock()
        """Held while anchors change, so that a served state is never half merged."""
        self._equal_at_start = dict(equal_at_start)
        self._take_digests()

    def _take_digests(self) -> None:
        self.digests = [digest(fragment.anchor) for fragment in self.fragments]

    @property
    def rounds(self) -> int:
        """Merged rounds, of all fragments."""
        return sum(fragment.rounds for fragment in self.fragments)

    def anchor_digest(self) -> str:
        return hashlib.sha256("".join(self.digests).encode()).hexdigest()[:16]

    def merged(self, index: int, posted_at: int) -> None:
        """A round of this fragment, posted at that step, has moved its anchor; call it with the lock."""
        self.digests[index] = digest(self.fragments[index].anchor)
        self.merged_at[index] = max(posted_at, self.merged_at[index])  # a new worker did none of the work before

    # What joiners take over: flat buffers, whose layout all workers have in common

    def outer_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for index, fragment in enumerate(self.fragments):
            tensors[f"{index}.anchor"] = fragment.anchor
            tensors |= {f"{index}.{name}": buffer for name, buffer in fragment.state.items()}
        return tensors

    def _start_tensors(self) -> dict[str, Tensor]:
        return {f"start.{name}": tensor.detach() for name, tensor in self._equal_at_start.items()}

    def numbers(self) -> dict[str, int]:
        numbers = {"inner_steps": self.inner_steps, "sequence": self.sequence, "merged": self.rounds}
        for index, fragment in enumerate(self.fragments):
            numbers[f"{index}.rounds"] = fragment.rounds
            numbers[f"{index}.merged_at"] = self.merged_at[index]
        return numbers

    def global_state(self) -> GlobalState:
        with self.lock:
            return GlobalState(self.outer_tensors() | self._start_tensors(), self.numbers(), self.layout_digest)

    def take_over(self, state: GlobalState) -> None:
        """Before the first inner step: everything is the others', the parameters too."""
        self._copy(state.tensors, self.outer_tensors() | self._start_tensors())
        self._set_position(state.numbers)
        for fragment in self.fragments:
            fragment.adopt_anchor()

    def take_over_fragment(self, index: int, state: GlobalState) -> None:
        """The others' anchor and momentum of one fragment; the parameters stay this worker's own."""
        mine = {name: tensor for name, tensor in self.outer_tensors().items() if name.startswith(f"{index}.")}
        self._copy(state.tensors, mine)
        self.fragments[index].rounds = state.numbers[f"{index}.rounds"]

    def _set_position(self, numbers: Mapping[str, int]) -> None:
        self.inner_steps, self.sequence = numbers["inner_steps"], numbers["sequence"]
        for index, fragment in enumerate(self.fragments):
            fragment.rounds = numbers[f"{index}.rounds"]
            self.merged_at[index] = numbers[f"{index}.merged_at"]

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        with self.lock:
            for name, tensor in into.items():
                if tensors[name].data_ptr() != tensor.data_ptr():
                    tensor.copy_(tensors[name])
            self._take_digests()

    # What is saved: by parameter, so that it depends neither on flat buffers nor on ranks

    def held(self) -> dict[str, Held]:
        """Anchors and outer momentum; whoever writes into them calls `loaded` afterwards."""
        held: dict[str, Held] = {}
        for index, fragment in enumerate(self.fragments):
            for kind, flat in {"anchor": fragment.anchor, **fragment.state}.items():
                held |= self.held_of(index, f"outer.{kind}", flat)
        return held

    def held_of(self, index: int, prefix: str, flat: Tensor) -> dict[str, Held]:
        """A flat buffer of a fragment, by parameter."""
        return {f"{prefix}.{name}": hold(view) for name, view in self.fragments[index].views(flat).items()}

    def check_fragments(self, numbers: Numbers) -> None:
        saved = sum(name.endswith(".rounds") for name in numbers)
        if saved != len(self.fragments):
            raise ConfigError(
                f"the saved state has {saved} fragments, this optimizer {len(self.fragments)}: "
                "load it with the same model, fragments and outer optimizer"
            )

    def loaded(self, numbers: Numbers) -> None:
        """The memory of `held` has been filled; the model's parameters are the caller's to load."""
        with self.lock:
            self._take_digests()
        self._set_position(numbers)
