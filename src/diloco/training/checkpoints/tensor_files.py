"""A worker's tensors in safetensors files, one file a rank, read back by any number of ranks.

A file holds the pieces of tensors that its rank had. For each piece the header's metadata names the whole tensor, its
shape and dtype, and the piece's offsets in it; in a second form too (`DCP_SHARDING_INFO`), so that
`torch.distributed.checkpoint.HuggingFaceStorageReader` reads the files as well. A rank that loads copies the overlaps
of the pieces it needs with the pieces in all files. Nothing is pickled, and ranks do not communicate.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.atomic_files import PartialFile
from diloco.errors import CheckpointError
from diloco.outer.tensors import TensorPieces
from diloco.safetensors_files import file_chunks

SUFFIX = ".safetensors"
_PIECES = "diloco"
"""Metadata: {key in the file: (tensor, shape, dtype, offsets)}."""
_TORCH_PIECES = "DCP_SHARDING_INFO"


@dataclass(frozen=True)
class SavedTensor:
    """A tensor in the files of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: dict[tuple[int, ...], "SavedPiece"] = field(default_factory=dict)
    """The pieces by their offsets; ranks that saved the same piece saved the same values."""


@dataclass(frozen=True)
class SavedPiece:
    """A piece of a tensor, and the file and key under which it is."""

    path: Path
    key: str
    sizes: tuple[int, ...]


def write_tensors(file: PartialFile, tensors: Mapping[str, TensorPieces]) -> None:
    """Write this rank's pieces."""
    pieces: dict[str, Tensor] = {}
    described: dict[str, tuple[str, list[int], str, list[int]]] = {}
    for name, tensor in tensors.items():
        for piece in tensor.pieces:
            key = name if name not in pieces else f"{name}@{','.join(map(str, piece.offsets))}"
            pieces[key] = piece.tensor
            dtype = str(tensor.dtype).removeprefix("torch.")
            described[key] = (name, list(tensor.shape), dtype, list(piece.offsets))
    offsets = {key: {"saved_offsets": where} for key, (_, _, _, where) in described.items()}
    metadata = {"format": "pt", _TORCH_PIECES: json.dumps(offsets), _PIECES: json.dumps(described)}
    for chunk in file_chunks(pieces, metadata):
        file.write(chunk)


def saved_tensors(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors in the files of a folder. Raises CheckpointError if one is not as `write_tensors` writes
    it."""
    tensors: dict[str, SavedTensor] = {}
    for path in sorted(folder.glob("*" + SUFFIX)):
        try:
            with safe_open(path, framework="pt") as file:
                for key, (name, shape, dtype, offsets) in json.loads(file.metadata()[_PIECES]).items():
                    tensor = tensors.setdefault(name, SavedTensor(tuple(shape), _dtype(dtype)))
                    tensor.pieces[tuple(offsets)] = SavedPiece(path, key, tuple(file.get_slice(key).get_shape()))
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged, or no file of a checkpoint ({error!r})") from error
    return tensors


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    return dtype


@torch.no_grad()
def read_tensors(folder: Path, tensors: Mapping[str, TensorPieces]) -> None:
    """Fill these pieces. A tensor that is missing, incomplete or of another shape is refused before any is read."""
    saved = saved_tensors(folder)
    copies = [copy for name, tensor in tensors.items() for copy in _plan_copies(name, tensor, saved.get(name))]
    with ExitStack() as stack:
        files: dict[Path, Any] = {}
        for target, piece, part in copies:
            if piece.path not in files:
                files[piece.path] = stack.enter_context(safe_open(piece.path, framework="pt"))
            file = files[piece.path]
            # A tensor without dimensions cannot be sliced.
            target.copy_(file.get_slice(piece.key)[part] if part else file.get_tensor(piece.key))


def _plan_copies(
    name: str, tensor: TensorPieces, saved: SavedTensor | None
) -> list[tuple[Tensor, SavedPiece, tuple[slice, ...]]]:
    """Return what to read: (a part of a piece here, a saved piece, the same part of it)."""
    if saved is None or saved.shape != tensor.shape:
        problem = "is missing" if saved is None else f"has the shape {saved.shape}"
        raise CheckpointError(f"'{name}' {problem} in the checkpoint, but {tensor.shape} is needed here")
    copies = []
    read = 0
    for piece in tensor.pieces:
        for offsets, stored in saved.pieces.items():
            both = _overlap(piece.offsets, piece.tensor.shape, offsets, stored.sizes)
            if all(start < end for start, end in both):
                target = piece.tensor[_slices(both, piece.offsets)]
                copies.append((target, stored, _slices(both, offsets)))
                read += target.numel()
    if read < sum(piece.tensor.numel() for piece in tensor.pieces):
        raise CheckpointError(f"'{name}' is in the checkpoint in part only: a rank's file is not of this checkpoint")
    return copies


def _overlap(
    offsets: Sequence[int], sizes: Sequence[int], other_offsets: Sequence[int], other_sizes: Sequence[int]
) -> list[tuple[int, int]]:
    """Start and end in each dimension; start >= end in one of them if the two have nothing in common."""
    dimensions = zip(offsets, sizes, other_offsets, other_sizes, strict=True)
    return [(max(a, b), min(a + size_a, b + size_b)) for a, size_a, b, size_b in dimensions]


def _slices(region: Sequence[tuple[int, int]], offsets: Sequence[int]) -> tuple[slice, ...]:
    """Return a region of the whole tensor, within a piece at these offsets."""
    return tuple(slice(start - o, end - o) for (start, end), o in zip(region, offsets, strict=True))
