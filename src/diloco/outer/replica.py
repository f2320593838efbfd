"""A worker's model as the outer loop sees it: fragments, the memory that travels, and the engine that averages them.

A `Lane` is what one engine averages. A worker of one rank has a single lane with all of its tensors: the `Replica` in
this file. Workers of several ranks have several lanes, and agree on what a round did: ranks/replica.py.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.encoded_steps import (
    encode_outer_gradient,
    next_anchor_with_encoded_mean,
    step_with_encoded_mean,
)
from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import Fragment, Span, layout_digest
from diloco.core.lanes import Piece
from diloco.core.methods.pruning import pruned_gradient
from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.engines.base import Connection, Engine, PendingRound
from diloco.engines.rounds import Contribution, GlobalState, Report, RoundKey
from diloco.errors import ConfigError
from diloco.outer.rounds import Outcome, PendingOutcome
from diloco.outer.sending import Sending
from diloco.outer.tensors.groups import Group, cut_fragments
from diloco.outer.tensors.local_tensors import local_tensors
from diloco.outer.tensors.model_tensors import ModelTensors
from diloco.outer.tensors.tensor_pieces import Piece as TensorPiece
from diloco.outer.tensors.tensor_pieces import TensorPieces

NO_DIGEST = "0" * 16  # of a fragment of which a lane holds nothing


@dataclass(eq=False)
class Lane:
    """`fragments`, `pieces`, `sending` and `digests` are in the order of the groups."""

    number: int
    """In the order of all lanes of the run, of which this rank may have some only."""
    engine: Engine
    fragments: list[Fragment | None]
    """None where the lane holds nothing of a group: it takes part in those rounds with a header alone."""
    pieces: list[list[Piece]]
    sending: list[Sending]
    start: dict[str, Tensor]
    """What is not averaged, but the same on all workers before the first step."""
    layout_digest: str
    """Of everything that must be the same on all ranks of the lane."""

    def __post_init__(self) -> None:
        self.digests = [NO_DIGEST] * len(self.fragments)
        self._norms = [0.0] * len(self.fragments)  # of this worker's latest outer gradients
        self.codec_errors: list[float | None] = [None] * len(self.fragments)
        """‖sent − Δ‖ / ‖Δ‖ of the latest outer gradients, from some spans; None if they are sent as they are."""
        self.take_digests()

    def take_digests(self) -> None:
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                self.digests[index] = digest(fragment.anchor)

    def encode(self, index: int, turn: int, theta_i: Tensor | None = None) -> float:
        """Put the outer gradient of a fragment into its vector; its norm, with error feedback that of what is sent.

        `theta_i`: a flat copy of the fragment's parameters, in place of the parameters.
        """
        fragment, sending = self.fragments[index], self.sending[index]
        if sending.moments is not None:
            return sending.moments.encode(sending.vector) if sending.moments.due(turn) else 0.0
        if fragment is None:
            self._norms[index], self.codec_errors[index] = 0.0, None
            return 0.0
        gradient = self._gradient(index, fragment, turn, theta_i)
        self._norms[index], self.codec_errors[index] = encode_outer_gradient(
            fragment, sending.vector, gradient=gradient, feedback=sending.feedback, theta_i=theta_i
        )
        return self._norms[index]

    def _gradient(
        self, index: int, fragment: Fragment, turn: int, theta_i: Tensor | None
    ) -> Iterator[tuple[Span, Tensor]] | None:
        prune, eager = self.sending[index].prune, self.sending[index].eager
        if eager is not None:
            return eager.outer_gradient(self.engine.workers, turn)
        if prune is None:
            return None
        return pruned_gradient(fragment, self.pieces[index], prune, theta_i)

    def merge(self, index: int, encoded: EncodedVector, mixing: float, turn: int, *, plain: bool = False) -> float:
        """The outer step of a fragment with a round's mean; the mean's norm. Mixing 1 leaves the parameters alone.

        `plain`: as RoundResult.plain. The memory that the round travelled in is given back.
        """
        fragment, moments = self.fragments[index], self.sending[index].moments
        if moments is not None and mixing < 1:
            moments.take(encoded)
        norm: float | None = 0.0
        if fragment is not None:
            self.digests[index], norm = step_with_encoded_mean(fragment, _outer(fragment, turn, plain), encoded, mixing)
        self.sending[index].vector.give_back()
        return self._norms[index] if norm is None else norm

    def next_anchor(self, index: int, encoded: EncodedVector, out: Tensor, turn: int) -> tuple[str, float]:
        """What `merge` will make of a fragment's anchor, into `out`: its digest, and the norm of the mean."""
        fragment = self.fragments[index]
        assert fragment is not None
        return next_anchor_with_encoded_mean(fragment, _outer(fragment, turn), encoded, out)

    def anchors(self) -> dict[str, Tensor]:
        return {f"{index}.anchor": f.anchor for index, f in enumerate(self.fragments) if f is not None}

    def outer_tensors(self) -> dict[str, Tensor]:
        """Anchors and outer momentum."""
        tensors = self.anchors()
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                tensors |= {f"{index}.{name}": buffer for name, buffer in fragment.state.items()}
        return tensors

    def start_tensors(self) -> dict[str, Tensor]:
        return {f"start.{name}": tensor.detach() for name, tensor in self.start.items()}

    def state_bytes(self) -> int:
        """The most that `copies` take as a file: some kilobytes for names and shapes are in it."""
        tensors = [*self.start.values()]
        for fragment in filter(None, self.fragments):
            tensors += [fragment.anchor, *fragment.state.values()]
        return (1 << 20) + sum(tensor.numel() * max(4, tensor.element_size()) + 512 for tensor in tensors)

    def copies(self) -> dict[str, Tensor]:
        """What a joiner needs, copied to the CPU."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.start_tensors().items()}
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                tensors[f"{index}.anchor"] = fragment.anchor_values()
                tensors |= {f"{index}.{name}": flat.to("cpu", copy=True) for name, flat in fragment.state.items()}
        return tensors

    def tensor_pieces(self, index: int, prefix: str, flat: Tensor) -> dict[str, TensorPieces]:
        """A flat buffer of a fragment, by parameter: whole rows of each, or all of it."""
        fragment = self.fragments[index]
        if fragment is None:
            return {}
        found = {}
        for piece, (label, view) in zip(self.pieces[index], fragment.views(flat).items(), strict=True):
            whole = label == piece.name
            here = TensorPiece(piece.offsets, view if whole else view.view(piece.shape))
            found[f"{prefix}.{piece.name}"] = TensorPieces(piece.whole, view.dtype, (here,), replicated=whole)
        return found

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        for name, tensor in into.items():
            if tensors[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(tensors[name])
        self.take_digests()


class Replica:
    """The model of a worker of one rank, where every other worker is of one rank too: one lane, nothing to agree on."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        groups: Sequence[Group],
        sync: SyncConfig,
        common: tuple[object, ...],
    ) -> None:
        """`groups` say what each fragment is; `common` is what else must be the same on all workers."""
        self.tensors, self.engine, self.groups = tensors, engine, groups
        local = local_tensors(tensors.all, engine.ranks)
        memory = {name: one.local for name, one in local.items()}
        self._sharded = [one for one in local.values() if one.local is not one.tensor]
        grouped = [
            [Piece(name, tuple(memory[name].shape), 0, memory[name].numel()) for name in g.names] for g in groups
        ]
        fragments = cut_fragments(groups, [[(name, memory[name]) for name in g.names] for g in groups], sync)
        inside = {name for group in groups for name in group.names}
        start = {name: tensor for name, tensor in memory.items() if name not in inside}
        alone = engine.workers == 1 and not engine.elastic
        sending = [Sending.of(f, group, sync, alone=alone) for f, group in zip(fragments, groups, strict=True)]
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(start.items())]
        layout = layout_digest([fragment for fragment in fragments if fragment], shapes, *common)
        [lane_engine] = engine.lanes([(0,) * len(engine.sizes)])
        assert lane_engine is not None
        self.lane = Lane(0, lane_engine, fragments, grouped, sending, start, layout)
        self.lanes = [self.lane]
        self.lock: AbstractContextManager[object] = threading.Lock()
        """See OuterState.lock."""
        self.merge_lock = self.lock
        """Held while a round is merged."""
        self.digests = self.lane.digests
        """Of the worker's anchors, one for each fragment."""

    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        """The model still has the trainable parameters that it had when DiLoCo was built, in the same memory."""
        refuse_new_parameters(self.tensors, inner_parameters)
        for one in self._sharded:
            one.check_in_place()

    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        """The outer gradient of a fragment into what travels, unless it is dropped: its norm, the worker's report."""
        return 0.0 if dropped else self.lane.encode(index, turn), report

    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> PendingOutcome:
        """One contribution for each lane; returns at once."""
        return _LaneRound(self.lane.engine.start_round(key, contributions[0], seconds), contributions[0].norm)

    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        """The outer step of a fragment; the norm of the mean outer gradient."""
        norm = self.lane.merge(index, means[0], mixing, turn, plain=plain)
        self.changed(index)
        return norm

    def are_finite(self, index: int, means: Sequence[EncodedVector]) -> bool:
        """Whether all values of a fragment's mean are finite."""
        del index
        return all(mean.is_finite() for mean in means)

    def finish_posts(self) -> None:
        """A post ends when it returns; see background.py."""

    def changed(self, index: int | None = None) -> None:
        """Parameters of one fragment, or of all, were written: what FSDP2 has gathered of them is out of date."""
        del index
        for module in self.tensors.sharded_modules:
            module.reshard()  # type: ignore[operator]

    def update_digests(self) -> None:
        """The lane's digests are the worker's."""

    def average_buffers(self, names: Iterable[str]) -> None:
        """A single rank has nothing to average among its own."""
        del names

    def fetch_states(self) -> list[GlobalState] | None:
        """The others' state for each lane, if this worker must take it over."""
        state = self.lane.engine.fetch_state()
        return None if state is None else [state]


def refuse_new_parameters(tensors: ModelTensors, inner_parameters: Iterable[Tensor]) -> None:
    """A parameter that is unfrozen or added after DiLoCo was built would train without being averaged."""
    known = tensors.averaged_ids
    added = [tuple(p.shape) for p in inner_parameters if p.requires_grad and id(p) not in known]
    for name, tensor in tensors.equal_at_start.items():
        if tensor.requires_grad:
            raise ConfigError(
                f"parameter '{name}' was frozen when DiLoCo was built and is trainable now: it would not be averaged. "
                "Set requires_grad before building DiLoCo, and build it anew to change it"
            )
    if added:
        raise ConfigError(
            f"the inner optimizer got parameters after DiLoCo was built (shapes {added}): they would not be averaged. "
            "Add them before building DiLoCo"
        )


@dataclass(frozen=True)
class _LaneRound:
    """A round of a worker with one lane."""

    pending: PendingRound
    norm: float

    def wait(self) -> Outcome:
        result = self.pending.wait()
        return Outcome(result, [result.mean])


def _outer(fragment: Fragment, turn: int, plain: bool = False) -> OuterOptimizer:
    """The outer optimizer of a round; `plain`: θ ← θ − Δ, and the state of the fragment's own one stays as it is.

    At the end of a run, where Δ is what some workers have left and others have nothing, momentum would add a whole step
    without work.
    """
    return SGD(lr=1.0) if plain else fragment.outer_opt.at(turn)
