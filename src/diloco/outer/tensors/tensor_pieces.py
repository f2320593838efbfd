"""A tensor as one rank holds it: what is saved and loaded, whatever the layout it is held in.

A worker of several ranks has each parameter cut among them, and another start may cut it otherwise. So nothing is saved
by rank or by flat buffer: a `TensorPieces` has the whole tensor's shape and this rank's pieces of it, as views of the
memory that is trained. Saving reads the pieces, loading writes into them.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diloco.errors import ConfigError

Numbers = dict[str, Any]
"""All of a state that is not a tensor, in what JSON can hold."""


@dataclass(frozen=True)
class TensorPiece:
    """`tensor` holds the elements of the whole one from `offsets` on."""

    offsets: tuple[int, ...]
    tensor: Tensor


@dataclass(frozen=True)
class TensorPieces:
    """A tensor of `shape`, of which this rank holds `pieces`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorPiece, ...]
    replicated: bool = False
    """All ranks of the worker hold the same: one of them writes it."""


def pieces_of(tensor: Tensor) -> TensorPieces:
    """All of an ordinary tensor, or this rank's shard of a DTensor."""
    shape = tuple(tensor.shape)
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and a DTensor has imported it
    if module is None or not isinstance(tensor, module.DTensor):
        return TensorPieces(shape, tensor.dtype, (TensorPiece((0,) * len(shape), tensor.detach()),), replicated=True)
    chunks = tensor.__create_chunk_list__()
    local = tensor.to_local().detach()
    pieces = tuple(TensorPiece(tuple(chunk.offsets), local) for chunk in chunks if local.numel())
    return TensorPieces(shape, tensor.dtype, pieces)


def as_tensors(held: Mapping[str, TensorPieces]) -> dict[str, Tensor]:
    """Copies by name, for a state dict; a piece that is not all of its tensor has its place in the name."""
    return {
        _piece_name(name, whole, piece): piece.tensor.detach().clone()
        for name, whole in held.items()
        for piece in whole.pieces
    }


@torch.no_grad()
def copy_into(held: Mapping[str, TensorPieces], saved: Mapping[str, Tensor]) -> None:
    """The reverse of `as_tensors`; names and shapes must be the same."""
    pieces = {_piece_name(name, whole, piece): piece.tensor for name, whole in held.items() for piece in whole.pieces}
    mine, theirs = ({name: tuple(t.shape) for name, t in side.items()} for side in (pieces, saved))
    if mine != theirs:
        odd = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise ConfigError(
            f"the saved state differs from this optimizer's in {len(odd)} tensors, the first is '{odd[0]}' "
            f"({theirs.get(odd[0], 'not saved')} against {mine.get(odd[0], 'not here')}): "
            "load it with the same model, fragments and outer optimizer"
        )
    for name, tensor in pieces.items():
        tensor.copy_(saved[name])


def _piece_name(name: str, whole: TensorPieces, piece: TensorPiece) -> str:
    return name if tuple(piece.tensor.shape) == whole.shape else f"{name}@{','.join(map(str, piece.offsets))}"
