"""A lane: what one engine averages of a worker's model. A worker of one rank has a single lane, with all tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.core.fragments import Fragment, PartLayout
from diloco.core.lanes import Piece
from diloco.engines.base import Connection, Engine
from diloco.outer.method import LaneFragment, Method
from diloco.outer.sending import NO_DIGEST, FragmentSending, NothingToSend, Sending
from diloco.outer.tensors.groups import Group
from diloco.outer.tensors.tensor_pieces import Piece as TensorPiece
from diloco.outer.tensors.tensor_pieces import TensorPieces

_FEW_BITS = ("int4", "e3m0", "2bit", "topk")


@dataclass(eq=False)
class Lane:
    """`fragments`, `pieces`, `sending` and `digests` are in the order of the groups."""

    number: int
    """Its place in the order of all lanes of the run, of which this rank may have some only."""
    engine: Engine
    fragments: list[Fragment | None]
    """None where the lane holds nothing of a group: it takes part in those rounds with a header alone."""
    pieces: list[list[Piece]]
    sending: list[Sending]
    start: dict[str, Tensor]
    """What is not averaged, but the same on all workers before the first step."""
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
        """Put the outer gradient of a fragment into its vector; the norm of what is sent.

        `theta_i`: a flat copy of the fragment's parameters, in place of the parameters.
        """
        self._norms[index], self.codec_errors[index] = self.sending[index].encode(turn, theta_i)
        return self._norms[index]

    def merge(self, index: int, mean: EncodedVector, mixing: float, turn: int, *, plain: bool = False) -> float:
        """The outer step of a fragment with a round's mean; the mean's norm. Mixing 1 leaves the parameters alone.

        `plain`: as RoundResult.plain. The memory that the round travelled in is given back.
        """
        sending = self.sending[index]
        self.digests[index], norm = sending.merge(mean, mixing, turn, plain=plain)
        sending.vector.give_back()
        return self._norms[index] if norm is None else norm

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


def lay_sending(
    lane: int,
    groups: Sequence[Group],
    fragments: Sequence[Fragment | None],
    pieces: Sequence[Sequence[Piece]],
    sync: SyncConfig,
    engine: Connection,
    methods: Sequence[Method],
) -> list[Sending]:
    """How each group is sent in a lane, the `lane`-th of this rank."""
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


def _fragment_sending(place: LaneFragment, sync: SyncConfig, methods: Sequence[Method]) -> FragmentSending:
    """A worker that is always alone sends nothing if nothing is changed on the way: its mean is its outer gradient."""
    how = codec("fp16" if place.group.buffers and sync.codec in _FEW_BITS else sync.codec)
    gradient = next(filter(None, (method.gradient(place) for method in methods)), None)
    encoder = next(filter(None, (method.encoder(place) for method in methods)), None)
    own_mean = len(place.engine.sizes) == 1 and not place.engine.elastic and not sync.asynchronous
    unchanged = how.lossless and gradient is None and encoder is None and not sync.overlap_steps
    if own_mean and unchanged:
        return FragmentSending(place.fragment, EncodedVector(how, PartLayout(0)))
    device = torch.device("cpu") if sync.offload else place.fragment.device
    vector = EncodedVector(how, place.fragment.layout, device, pinned=sync.offload)
    return FragmentSending(place.fragment, vector, gradient, encoder)
