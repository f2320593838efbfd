"""torch.distributed.checkpoint over safetensors: a file of pieces for each rank, read back by ranks cut otherwise.

Of torch.distributed.checkpoint (DCP) these are a storage writer and reader and the planners for `TensorPieces`; its
planning says which part of which file holds what a rank needs (resharding). Its own file format pickles the metadata,
and its coordinator sends pickled plans around: neither is used. What a file holds is in its safetensors header, in the
form in which DCP's HuggingFaceStorageReader reads it too, and every rank plans for itself, without the others.

It only reads and writes; when a checkpoint is complete and which one to take is in checkpoints.py.
"""

import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from diloco.errors import CheckpointError
from diloco.outer.tensor_pieces import Piece, TensorPieces
from diloco.training.checkpoints.durable import FileFacts, write_file

SUFFIX = ".safetensors"
_DTYPES = {
    torch.float32: "F32", torch.float64: "F64", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_OFFSETS, _PLACES = "DCP_SHARDING_INFO", "diloco"


def write_tensors(path: Path, tensors: Mapping[str, TensorPieces]) -> FileFacts:
    """This rank's pieces as one file, forced to the disk."""
    writer, planner = PieceWriter(path), PieceSavePlanner()
    planner.set_up_planner(dict(tensors))
    writer.write_data(planner.create_local_plan(), planner).wait()
    assert writer.facts is not None
    return writer.facts


def read_tensors(folder: Path, tensors: Mapping[str, TensorPieces]) -> None:
    """Fill these pieces from all files of a folder, however those are cut."""
    reader, planner = PieceReader(folder), PieceLoadPlanner()
    planner.set_up_planner(dict(tensors), reader.read_metadata())
    reader.read_data(planner.create_local_plan(), planner).wait()


def saved_tensors(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Shape and dtype of every tensor in the files of a folder."""
    found = PieceReader(folder).read_metadata().state_dict_metadata
    return {name: data for name, data in found.items() if isinstance(data, TensorStorageMetadata)}


class PieceSavePlanner(SavePlanner):
    """The pieces that this rank holds."""

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: object = None, is_coordinator: bool = False
    ) -> None:
        del storage_meta, is_coordinator
        self.tensors: dict[str, TensorPieces] = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan([_write_item(name, held, p) for name, held in self.tensors.items() for p in held.pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return _piece(self.tensors, write_item.index)


class PieceLoadPlanner(LoadPlanner):
    """Where in the files the pieces are that this rank needs."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        del is_coordinator
        assert metadata is not None
        self.tensors: dict[str, TensorPieces] = state_dict
        self.saved = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for name, held in self.tensors.items() for item in self._reads(name, held)])

    def _reads(self, name: str, held: TensorPieces) -> list[ReadItem]:
        saved = self.saved.get(name)
        if not isinstance(saved, TensorStorageMetadata) or tuple(saved.size) != held.shape:
            found = f"has the shape {tuple(saved.size)}" if isinstance(saved, TensorStorageMetadata) else "is missing"
            raise CheckpointError(f"'{name}' {found} in the checkpoint, but {held.shape} is needed here")
        items = create_read_items_for_chunk_list(name, saved, [_chunk(piece) for piece in held.pieces])
        read = sum(_volume(item.lengths) for item in items)
        if read < sum(piece.tensor.numel() for piece in held.pieces):
            raise CheckpointError(
                f"'{name}' is in the checkpoint in part only: a rank's file is not of this checkpoint"
            )
        return items

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        del value
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor: nothing else is loaded from a file of tensors")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = _piece(self.tensors, read_item.dest_index)
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what was resolved is the memory itself."""


class PieceWriter(StorageWriter):
    """One rank's file, streamed: no copy of it is built in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.facts: FileFacts | None = None

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        del checkpoint_id
        self.facts = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> "Future[list[WriteResult]]":
        self.facts = write_file(self.path, _chunks(plan.items, planner))
        done: Future[list[WriteResult]] = Future()
        done.set_result([WriteResult(item.index, 0, None) for item in plan.items])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing: the header says it all."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        del checkpoint_id
        return True


class PieceReader(StorageReader):
    """All files of a folder as one set of tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[tuple[str, tuple[int, ...]], tuple[Path, str]] = {}

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        del checkpoint_id
        self._places = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        found: dict[str, TensorStorageMetadata] = {}
        for path in sorted(self.folder.glob("*" + SUFFIX)):
            with safe_open(path, framework="pt") as file:
                for key, (name, shape, dtype, offsets) in json.loads(file.metadata()[_PLACES]).items():
                    properties = TensorProperties(dtype=getattr(torch, dtype))
                    data = found.setdefault(name, TensorStorageMetadata(properties, torch.Size(shape), []))
                    sizes = torch.Size(file.get_slice(key).get_shape())
                    if (name, tuple(offsets)) not in self._places:  # replicas are the same
                        data.chunks.append(ChunkStorageMetadata(torch.Size(offsets), sizes))
                    self._places[name, tuple(offsets)] = (path, key)
        return Metadata(dict(found))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @torch.no_grad()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> "Future[None]":
        by_file: dict[Path, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            path, key = self._places[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            by_file.setdefault(path, []).append((key, item))
        for path, reads in by_file.items():
            with safe_open(path, framework="pt") as file:
                for key, item in reads:
                    target = planner.resolve_tensor(item)
                    target.copy_(_part(file, key, item))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        del checkpoint_id
        return True


def _part(file: Any, key: str, item: ReadItem) -> Tensor:
    if not item.lengths:  # a tensor without dimensions cannot be sliced
        whole: Tensor = file.get_tensor(key)
        return whole
    slices = tuple(slice(start, start + n) for start, n in zip(item.storage_offsets, item.lengths, strict=True))
    part: Tensor = file.get_slice(key)[slices]
    return part


def _write_item(name: str, held: TensorPieces, piece: Piece) -> WriteItem:
    data = TensorWriteData(_chunk(piece), TensorProperties(dtype=held.dtype), torch.Size(held.shape))
    return WriteItem(MetadataIndex(name, torch.Size(piece.offsets)), WriteItemType.SHARD, tensor_data=data)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offsets), piece.tensor.size())


def _piece(tensors: Mapping[str, TensorPieces], index: MetadataIndex) -> Tensor:
    offsets = tuple(index.offset or ())
    return next(piece.tensor for piece in tensors[index.fqn].pieces if piece.offsets == offsets)


def _volume(sizes: Iterable[int]) -> int:
    volume = 1
    for size in sizes:
        volume *= size
    return volume


def _chunks(items: Sequence[WriteItem], planner: SavePlanner) -> Iterator[memoryview]:
    """A safetensors file: the length of the header, the header, the tensors' bytes one after another."""
    header = _header(items)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for item in items:
        data = planner.resolve_data(item)
        assert isinstance(data, Tensor)
        if data.numel():
            yield data.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _header(items: Sequence[WriteItem]) -> bytes:
    tensors: dict[str, dict[str, object]] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    places: dict[str, tuple[str, list[int], str, list[int]]] = {}
    position = 0
    for item in items:
        assert item.tensor_data is not None
        name, data = item.index.fqn, item.tensor_data
        where, dtype = list(data.chunk.offsets), data.properties.dtype
        key = name if name not in tensors else f"{name}@{','.join(map(str, where))}"
        end = position + _volume(data.chunk.sizes) * dtype.itemsize
        if dtype not in _DTYPES:
            known = ", ".join(str(one).removeprefix("torch.") for one in _DTYPES)
            raise CheckpointError(
                f"'{name}' is a tensor of {dtype}, which a checkpoint cannot hold: it can hold {known}"
            )
        tensors[key] = {"dtype": _DTYPES[dtype], "shape": list(data.chunk.sizes), "data_offsets": [position, end]}
        offsets[key] = {"saved_offsets": where}
        places[key] = (name, list(data.size), str(dtype).removeprefix("torch."), where)
        position = end
    more = {"format": "pt", _OFFSETS: json.dumps(offsets), _PLACES: json.dumps(places)}
    text = json.dumps({"__metadata__": more, **tensors}).encode()
    return text + b" " * (-len(text) % 8)
