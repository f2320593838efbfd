"""One lane on this rank: the fragments of its elements, the memory that travels, and the engine that averages them.

Fragments are cut by whole parameters (core/fragments.py); of each, a lane has the pieces that its ranks pieces_of
(core/lanes.py). A lane that holds nothing of a fragment takes part in its rounds with a header alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.digest import Digest, digest
from diloco.core.fragments import Fragment, PartLayout, Span, build_fragments, layout_digest
from diloco.core.lanes import LaneLayout, Piece
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.core.outer_step import outer_gradient, outer_step
from diloco.engines.base import Engine
from diloco.outer.ranks.local_tensors import LocalTensor
from diloco.outer.tensor_pieces import Piece as TensorPiece
from diloco.outer.tensor_pieces import TensorPieces

NOTHING = "0" * 16  # the digest of a fragment of which a lane holds nothing


@dataclass(frozen=True)
class Group:
    """The names of one fragment's tensors, and the outer optimizer they are averaged with."""

    names: tuple[str, ...]
    outer: OuterOptimizer


@dataclass(eq=False)
class Lane:
    """`fragments`, `pieces` and `vectors` are in the order of the groups."""

    number: int
    """In the order of all lanes of the swarm, of which this rank may have some only."""
    engine: Engine
    fragments: list[Fragment | None]
    pieces: list[list[Piece]]
    vectors: list[EncodedVector]
    start: dict[str, Tensor]
    """What is not averaged, but the same on all workers before the first step."""
    layout_digest: str
    """Of everything that must be the same on all ranks of the lane."""

    def __post_init__(self) -> None:
        self.digests = [NOTHING] * len(self.fragments)
        self._norms = [0.0] * len(self.fragments)  # of this worker's latest outer gradients
        self.take_digests()

    def take_digests(self) -> None:
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                self.digests[index] = digest(fragment.anchor)

    def encode(self, index: int) -> float:
        """Put the outer gradient of a fragment into its vector; its norm."""
        fragment, vector = self.fragments[index], self.vectors[index]
        norms = []
        if fragment is not None:
            for span, delta in outer_gradient(fragment):
                norms.append(torch.linalg.vector_norm(delta))
                if vector.num_bytes:
                    vector.encode(span.first_part, delta)
        self._norms[index] = _total(norms)
        return self._norms[index]

    def merge(self, index: int, encoded: EncodedVector, mixing: float) -> float:
        """The outer step of a fragment with a round's mean; the mean's norm. Mixing 1 leaves the parameters alone."""
        fragment = self.fragments[index]
        if fragment is None:
            return 0.0
        device, taken = fragment.device, Digest(fragment.device)
        norms: list[Tensor] = []

        def mean(span: Span) -> Tensor:
            delta = encoded.decode(span.first_part, span.num_parts, device)
            norms.append(torch.linalg.vector_norm(delta))
            return delta

        outer_step(fragment, mean if encoded.num_bytes else None, mixing, taken)
        self.digests[index] = taken.hexdigest()
        return _total(norms) if encoded.num_bytes else self._norms[index]

    def outer_tensors(self) -> dict[str, Tensor]:
        tensors = {}
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                tensors[f"{index}.anchor"] = fragment.anchor
                tensors |= {f"{index}.{name}": buffer for name, buffer in fragment.state.items()}
        return tensors

    def copies(self) -> dict[str, Tensor]:
        """Of what joiners need, on the CPU."""
        tensors = {name: tensor.to("cpu", copy=True) for name, tensor in self.start_tensors().items()}
        for index, fragment in enumerate(self.fragments):
            if fragment is not None:
                tensors[f"{index}.anchor"] = fragment.anchor_values()
                tensors |= {f"{index}.{name}": flat.to("cpu", copy=True) for name, flat in fragment.state.items()}
        return tensors

    def held(self, index: int, prefix: str, flat: Tensor) -> dict[str, TensorPieces]:
        """A flat buffer of a fragment, by parameter: whole rows of each, or all of it."""
        fragment = self.fragments[index]
        if fragment is None:
            return {}
        held = {}
        for piece, (label, view) in zip(self.pieces[index], fragment.views(flat).items(), strict=True):
            here = TensorPiece(piece.offsets, view if label == piece.name else view.view(piece.shape))
            held[f"{prefix}.{piece.name}"] = TensorPieces(
                piece.whole, view.dtype, (here,), replicated=label == piece.name
            )
        return held

    def start_tensors(self) -> dict[str, Tensor]:
        return {f"start.{name}": tensor.detach() for name, tensor in self.start.items()}

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor], into: Mapping[str, Tensor]) -> None:
        for name, tensor in into.items():
            if tensors[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(tensors[name])
        self.take_digests()


@dataclass(frozen=True)
class LaneBuilder:
    """Makes lanes of what this rank holds."""

    tensors: Mapping[str, LocalTensor]
    groups: Sequence[Group]
    rank: int
    sizes: tuple[int, ...]
    sync: SyncConfig
    common: tuple[object, ...]
    """What else must be the same on all workers."""
    alone: bool
    """There is no other worker, and there will be none."""

    @property
    def whole(self) -> bool:
        """Every worker is a single rank: tensors are averaged as they are, in whatever memory order."""
        return set(self.sizes) == {1}

    def build(self, number: int, layout: LaneLayout, engine: Engine) -> Lane:
        """What is in no group is made equal at the start."""
        pieces: dict[str, list[Piece]] = {name: [] for name in self.tensors}
        for piece in self._whole_tensors() if self.whole else layout.pieces:
            pieces[piece.name].append(piece)
        grouped = [[piece for name in group.names for piece in pieces.pop(name)] for group in self.groups]
        fragments = self._fragments(grouped)
        vectors = [self._vector(fragment) for fragment in fragments]
        start = {self._label(piece): self._view(piece) for rest in pieces.values() for piece in rest}
        return Lane(number, engine, fragments, grouped, vectors, start, self._digest(fragments, start, grouped))

    def _digest(
        self, fragments: Sequence[Fragment | None], start: Mapping[str, Tensor], pieces: Sequence[Sequence[Piece]]
    ) -> str:
        others = [(name, t.shape, t.dtype) for name, t in sorted(start.items())]
        cut = () if self.whole else (self.sizes, [list(map(str, group)) for group in pieces])
        return layout_digest([fragment for fragment in fragments if fragment], others, *self.common, *cut)

    def _whole_tensors(self) -> list[Piece]:
        return [Piece(name, one.shape, 0, one.tensor.numel()) for name, one in self.tensors.items()]

    def _fragments(self, grouped: Sequence[Sequence[Piece]]) -> list[Fragment | None]:
        fragments: list[Fragment | None] = [None] * len(grouped)
        for outer in {group.outer: None for group in self.groups}:
            mine = [i for i, group in enumerate(self.groups) if group.outer == outer and grouped[i]]
            tensors = {self._label(piece): self._view(piece) for i in mine for piece in grouped[i]}
            labels = [[self._label(piece) for piece in grouped[i]] for i in mine]
            built = build_fragments(tensors, labels, outer, offload=self.sync.offload)
            for i, fragment in zip(mine, built, strict=True):
                fragments[i] = fragment
        return fragments

    def _label(self, piece: Piece) -> str:
        return piece.name if self.whole else str(piece)

    def _view(self, piece: Piece) -> Tensor:
        one = self.tensors[piece.name]
        return one.local if self.whole else one.view(piece, self.rank)

    def _vector(self, fragment: Fragment | None) -> EncodedVector:
        how = codec(self.sync.codec)
        if fragment is None or (how.lossless and self.alone and not self.sync.overlap_steps):
            return EncodedVector(how, PartLayout(0))  # a worker alone sends nothing: its mean is its own
        if self.sync.offload:
            return EncodedVector(how, fragment.layout, pinned=True)
        return EncodedVector(how, fragment.layout, fragment.device)


def _total(norms: Sequence[Tensor]) -> float:
    """Asked for once, since on a GPU every question waits for all that was begun before it."""
    return float(torch.linalg.vector_norm(torch.stack(list(norms)).double())) if norms else 0.0
