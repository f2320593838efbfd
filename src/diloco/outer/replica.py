"""A worker's model as the outer loop sees it: fragments, the memory that travels, and the engine that averages them.

A `Lane` is what one engine averages. A worker of one rank has a single lane with all of its tensors: the `Replica` in
this file. Workers of several ranks have several lanes, and agree on what a round did: ranks/replica.py.
"""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import SyncConfig
from diloco.core.digest import Digest, digest
from diloco.core.fragments import Fragment, Span, layout_digest
from diloco.core.lanes import Piece
from diloco.core.methods.pruning import pruned_gradient
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.core.outer_step import next_anchor, outer_gradient, outer_step
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

if TYPE_CHECKING:
    from diloco.core.kernels import Kernels

_ERROR_EVERY, _ERROR_ELEMENTS = 16, 1 << 22  # what a codec loses is measured on these spans, at most so much of each
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
        norms, errors = [], []
        if fragment is not None and (kernels := _kernels(fragment, sending.vector)) and sending.as_it_is:
            from diloco.codecs.gradient_kernels import encode_gradient

            errors = [encode_gradient(kernels, fragment, sending.vector)]
            norms = [errors[0][1].sqrt()]
        elif fragment is not None:
            for number, (span, delta) in enumerate(self._gradient(index, fragment, turn, theta_i)):
                if sending.feedback is not None:
                    norms.append(sending.feedback.encode(sending.vector, span, delta))
                else:
                    norms.append(torch.linalg.vector_norm(delta))
                    if sending.vector.num_bytes:
                        sending.vector.encode(span.first_part, delta)
                if number % _ERROR_EVERY == 0 and sending.vector.num_bytes and not sending.vector.codec.lossless:
                    part = fragment.layout.part_elements
                    parts = min(span.num_parts, max(1, _ERROR_ELEMENTS // part))
                    errors.append(sending.vector.squared_error(span.first_part, parts, delta[: parts * part]))
                del delta  # before the next one is made
        self._norms[index] = _total(norms)
        self.codec_errors[index] = _relative(errors)
        return self._norms[index]

    def _gradient(
        self, index: int, fragment: Fragment, turn: int, theta_i: Tensor | None
    ) -> Iterator[tuple[Span, Tensor]]:
        prune, eager = self.sending[index].prune, self.sending[index].eager
        if eager is not None:
            return eager.outer_gradient(self.engine.workers, turn)
        if prune is None:
            return outer_gradient(fragment, theta_i)
        return pruned_gradient(fragment, self.pieces[index], prune, theta_i)

    def merge(self, index: int, encoded: EncodedVector, mixing: float, turn: int, *, plain: bool = False) -> float:
        """The outer step of a fragment with a round's mean; the mean's norm. Mixing 1 leaves the parameters alone.

        `plain`: as RoundResult.plain. The memory that the round travelled in is given back.
        """
        fragment, moments = self.fragments[index], self.sending[index].moments
        if moments is not None and mixing < 1:
            moments.take(encoded)
        mean = None
        if fragment is not None:
            mean, taken = _Decoded(encoded, fragment.device), Digest(fragment.device)
            whole = mean.stepper(fragment, mixing, taken) if fragment.device.type == "cuda" else None
            outer_step(fragment, mean if encoded.num_bytes else None, mixing, taken, turn, whole, plain=plain)
            self.digests[index] = taken.hexdigest()
        self.sending[index].vector.give_back()
        if mean is None:
            return 0.0
        return mean.norm() if encoded.num_bytes else self._norms[index]

    def next_anchor(self, index: int, encoded: EncodedVector, out: Tensor, turn: int) -> tuple[str, float]:
        """What `merge` will make of a fragment's anchor, into `out`: its digest, and the norm of the mean."""
        fragment = self.fragments[index]
        assert fragment is not None
        mean, taken = _Decoded(encoded, fragment.device), Digest(fragment.device)
        next_anchor(fragment, mean, out, taken, turn)
        return taken.hexdigest(), mean.norm()

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


class _Decoded:
    """An encoded mean, decoded span by span."""

    def __init__(self, encoded: EncodedVector, device: torch.device) -> None:
        self._encoded, self._device = encoded, device
        self._norms: list[Tensor] = []

    def __call__(self, span: Span) -> Tensor:
        delta = self._encoded.decode(span.first_part, span.num_parts, self._device)
        self._norms.append(torch.linalg.vector_norm(delta))
        return delta

    def stepper(self, fragment: Fragment, mixing: float, digest: Digest) -> "Callable[[OuterOptimizer], None] | None":
        """The outer step with this mean in one pass over a GPU's memory, where it can be taken so."""
        encoded, kernels = self._encoded, _kernels(fragment, self._encoded)
        if kernels is None:
            return None

        def step(outer: OuterOptimizer) -> None:
            from diloco.codecs.gradient_kernels import step_with_mean

            self._norms.append(step_with_mean(kernels, fragment, encoded, outer, mixing, digest).sqrt())

        return step

    def norm(self) -> float:
        return _total(self._norms)


def _kernels(fragment: Fragment, vector: EncodedVector) -> "Kernels | None":
    """See gradient_kernels.kernels_for."""
    if fragment.device.type != "cuda" or fragment.kernels is None or not vector.num_bytes:
        return None
    from diloco.codecs.gradient_kernels import kernels_for

    return kernels_for(fragment, vector)


def _relative(squares: Sequence[Tensor]) -> float | None:
    """The error of some values, from (squared error, squared norm) of each."""
    error, whole = torch.stack(list(squares)).double().sum(0).tolist() if squares else (0.0, 0.0)
    return math.sqrt(error / whole) if whole > 0 and math.isfinite(error / whole) else None


def _total(norms: Sequence[Tensor]) -> float:
    """Asked for once: on a GPU every question waits for all that was begun before it."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)).double())) if norms else 0.0
