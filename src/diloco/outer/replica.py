"""A worker's model as the outer loop sees it: its lanes, and the engine that averages them.

A `Lane` is what one engine averages; a worker of one rank has a single lane, with all tensors. `OneRankReplica` is that
of a worker of one rank, where every other worker is of one rank too: nothing to agree on. background.py has one that
computes beside training, ranked_replica.py that of workers of several ranks.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import Fragment, PartLayout, layout_digest
from diloco.core.lanes import Piece
from diloco.engines.base import Connection, Engine, PendingRound
from diloco.engines.rounds import Contribution, GlobalState, Report, RoundKey, RoundResult
from diloco.errors import ConfigError
from diloco.outer.method import LaneFragment, Method
from diloco.outer.rounds import PendingWorkerRound
from diloco.outer.sending import NO_DIGEST, FragmentSending, Group, NothingToSend, Sending, cut_fragments
from diloco.outer.tensors import ModelTensors, TensorPiece, TensorPieces, local_tensors

_FEW_BITS = ("int4", "e3m0", "2bit", "topk")


@dataclass(eq=False)
class Lane:
    """What one engine averages on this rank. `fragments`, `pieces`, `sending` and `digests` are in the order of the
    groups."""

    number: int
    """Its place in the order of all lanes of the run, of which this rank may have some only."""
    engine: Engine
    fragments: list[Fragment | None]
    """None where the lane holds nothing of a group: it takes part in those rounds with a header alone."""
    pieces: list[list[Piece]]
    sending: list[Sending]
    start: dict[str, Tensor]
    """Tensors that are not averaged, but the same on all workers before the first step."""
    layout_digest: str
    """A hash of everything that must be the same on all ranks of the lane."""

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
        """Put the outer gradient of a fragment into its vector; returns the norm of what is sent.

        `theta_i`: a flat copy of the fragment's parameters, in place of the parameters.
        """
        self._norms[index], self.codec_errors[index] = self.sending[index].encode(turn, theta_i)
        return self._norms[index]

    def merge(self, index: int, mean: EncodedVector, mixing: float, turn: int, *, plain: bool = False) -> float:
        """Take the outer step of a fragment with a round's mean; returns the mean's norm. Mixing 1 leaves the
        parameters alone.

        `plain`: as RoundResult.plain. The memory that the round travelled in is given back.
        """
        sending = self.sending[index]
        self.digests[index], norm = sending.merge(mean, mixing, turn, plain=plain)
        sending.vector.give_back()
        return self._norms[index] if norm is None else norm

    def anchors(self) -> dict[str, Tensor]:
        return {f"{index}.anchor": f.anchor for index, f in enumerate(self.fragments) if f is not None}

    def outer_tensors(self) -> dict[str, Tensor]:
        """Return anchors and outer momentum by name."""
        tensors = self.anchors()
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                tensors |= {f"{index}.{name}": buffer for name, buffer in fragment.state.items()}
        return tensors

    def start_tensors(self) -> dict[str, Tensor]:
        return {f"start.{name}": tensor.detach() for name, tensor in self.start.items()}

    def state_bytes(self) -> int:
        """Return the most bytes that `copies` take as a file: some kilobytes for names and shapes are in it."""
        tensors = [*self.start.values()]
        for fragment in filter(None, self.fragments):
            tensors += [fragment.anchor, *fragment.state.values()]
        return (1 << 20) + sum(tensor.numel() * max(4, tensor.element_size()) + 512 for tensor in tensors)

    def copies(self) -> dict[str, Tensor]:
        """Copy to the CPU all that a joiner needs."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.start_tensors().items()}
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                tensors[f"{index}.anchor"] = fragment.anchor_values()
                tensors |= {f"{index}.{name}": flat.to("cpu", copy=True) for name, flat in fragment.state.items()}
        return tensors

    def tensor_pieces(self, index: int, prefix: str, flat: Tensor) -> dict[str, TensorPieces]:
        """Cut a flat buffer of a fragment by parameter: whole rows of each, or all of it."""
        fragment = self.fragments[index]
        if fragment is None:
            return {}
        pieces = {}
        for piece, (label, view) in zip(self.pieces[index], fragment.views(flat).items(), strict=True):
            whole = label == piece.name
            part = TensorPiece(piece.offsets, view if whole else view.view(piece.shape))
            pieces[f"{prefix}.{piece.name}"] = TensorPieces(piece.whole, view.dtype, (part,), replicated=whole)
        return pieces

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        for name, tensor in into.items():
            if tensors[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(tensors[name])
        self.take_digests()


def make_sending(
    lane: int,
    groups: Sequence[Group],
    fragments: Sequence[Fragment | None],
    pieces: Sequence[Sequence[Piece]],
    sync: SyncConfig,
    engine: Connection,
    methods: Sequence[Method],
) -> list[Sending]:
    """Choose how each group is sent in a lane, the `lane`-th of this rank."""
    sending: list[Sending] = []
    for index, (group, fragment) in enumerate(zip(groups, fragments, strict=True)):
        if group.sending is not None:
            sending.append(group.sending)
        elif fragment is None:
            sending.append(NothingToSend(EncodedVector(codec(sync.codec), PartLayout(0))))
        else:
            place = LaneFragment(index, lane, group, fragment, pieces[index], engine)
            sending.append(_fragment_sending(place, sync, methods))
    return sending


def codec_of(group: Group, sync: SyncConfig) -> Codec:
    """Return the codec of a group: counted buffers travel with 16 bits at least."""
    return codec("fp16" if group.buffers and sync.codec in _FEW_BITS else sync.codec)


def _fragment_sending(place: LaneFragment, sync: SyncConfig, methods: Sequence[Method]) -> FragmentSending:
    """Choose how a fragment is sent. A worker that is always alone sends nothing, unless something changes it on the
    way: the mean is its own outer gradient."""
    how = codec_of(place.group, sync)
    gradient = next(filter(None, (method.gradient(place) for method in methods)), None)
    encoder = next(filter(None, (method.encoder(place) for method in methods)), None)
    unchanged = how.lossless and gradient is None and encoder is None and not sync.overlap_steps
    if place.engine.mean_is_own and unchanged:
        return FragmentSending(place.fragment, EncodedVector(how, PartLayout(0)))
    device = torch.device("cpu") if sync.offload else place.fragment.device
    vector = EncodedVector(how, place.fragment.layout, device, pinned=sync.offload)
    return FragmentSending(place.fragment, vector, gradient, encoder)


class Replica(ABC):
    """The lanes of this rank, and what the whole worker does with them."""

    def __init__(self, tensors: ModelTensors, engine: Connection, groups: Sequence[Group]) -> None:
        """`groups` say what each fragment is."""
        self.tensors = tensors
        self.engine = engine
        self.groups = groups
        self.lanes: list[Lane] = []
        self.digests: list[str] = []
        """The digests of the worker's anchors, one for each fragment."""
        self.merge_lock: AbstractContextManager[object] = threading.Lock()
        """Held while a round is merged."""
        self.lock: AbstractContextManager[object] = self.merge_lock
        """See OuterState.lock."""

    @abstractmethod
    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        """Refuse a model whose trainable parameters, or their memory, are not those that it had when DiLoCo was
        built."""

    @abstractmethod
    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        """Encode the outer gradient of a fragment, unless it is dropped; returns its norm and the worker's report."""

    @abstractmethod
    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> PendingWorkerRound:
        """Give the engines one contribution for each lane; returns at once."""

    @abstractmethod
    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        """Take the outer step of a fragment; returns the norm of the mean outer gradient."""

    def are_finite(self, index: int, means: Sequence[EncodedVector]) -> bool:
        """Whether all values of a fragment's mean are finite."""
        del index
        return all(mean.is_finite() for mean in means)

    def finish_posts(self) -> None:  # noqa: B027 - only background.py has posts that go on
        """Wait until the rounds posted so far are with the engine."""

    @abstractmethod
    def changed(self, index: int | None = None) -> None:
        """Called when parameters of one fragment, or of all, were written: what FSDP2 has gathered of them is out of
        date."""

    def update_digests(self) -> None:  # noqa: B027 - of one lane, they are the worker's
        """Make the worker's digests of those of its lanes."""

    def average_buffers(self, names: Iterable[str]) -> None:  # noqa: B027 - a single rank has nothing to average
        """Average what each rank has counted by itself (batch-norm statistics)."""

    @abstractmethod
    def fetch_states(self) -> list[GlobalState] | None:
        """Return the others' state for each lane, if this worker must take it over."""


class OneRankReplica(Replica):
    """The model of a worker of one rank."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        groups: Sequence[Group],
        sync: SyncConfig,
        methods: Sequence[Method],
        common: tuple[object, ...],
    ) -> None:
        """`common` is what else must be the same on all workers."""
        super().__init__(tensors, engine, groups)
        local = local_tensors(tensors.all, engine.ranks)
        memory = {name: tensor.local for name, tensor in local.items()}
        self._sharded = [tensor for tensor in local.values() if tensor.local is not tensor.tensor]
        pieces = [[Piece(name, tuple(memory[name].shape), 0, memory[name].numel()) for name in g.names] for g in groups]
        fragments = cut_fragments(groups, [[(name, memory[name]) for name in g.names] for g in groups], sync)
        inside = {name for group in groups for name in group.names}
        start = {name: tensor for name, tensor in memory.items() if name not in inside}
        sending = make_sending(0, groups, fragments, pieces, sync, engine, methods)
        shapes = [(name, tensor.shape, tensor.dtype) for name, tensor in sorted(start.items())]
        layout = layout_digest([f.tensors_by_name for f in fragments if f], shapes, *common)
        [lane_engine] = engine.lanes([(0,) * len(engine.sizes)])
        assert lane_engine is not None
        self.lane = Lane(0, lane_engine, fragments, pieces, sending, start, layout)
        self.lanes = [self.lane]
        self.digests = self.lane.digests

    def check_unchanged(self, inner_parameters: Iterable[Tensor]) -> None:
        refuse_new_parameters(self.tensors, inner_parameters)
        for tensor in self._sharded:
            tensor.check_in_place()

    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        return 0.0 if dropped else self.lane.encode(index, turn), report

    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> PendingWorkerRound:
        return LaneRound(self.lane.engine.start_round(key, contributions[0], seconds), contributions[0].norm)

    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        norm = self.lane.merge(index, means[0], mixing, turn, plain=plain)
        self.changed(index)
        return norm

    def changed(self, index: int | None = None) -> None:
        del index
        for module in self.tensors.sharded_modules:
            module.reshard()  # type: ignore[operator]

    def fetch_states(self) -> list[GlobalState] | None:
        state = self.lane.engine.fetch_state()
        return None if state is None else [state]


@dataclass(frozen=True)
class LaneRound:
    """A round of a worker with one lane."""

    pending: PendingRound
    norm: float

    def wait(self) -> RoundResult:
        return self.pending.wait()


def refuse_new_parameters(tensors: ModelTensors, inner_parameters: Iterable[Tensor]) -> None:
    """Refuse a parameter that was unfrozen or added after DiLoCo was built: it would train without being averaged."""
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
