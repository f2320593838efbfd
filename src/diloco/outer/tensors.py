"""A model's tensors: which are averaged, where a rank has them, and how they are saved.

- Averaged by the outer optimizer: every trainable parameter, once (tied weights are one tensor).
- Averaged plainly: floating-point buffers that are saved with the model (batch-norm statistics).
- Made equal at the start: frozen parameters and all other saved buffers. Unsaved buffers (rotary tables) are computed.
- A worker's own: the inner optimizer's state.

A trainable parameter that the inner optimizer does not know would never move, and one that only the inner optimizer
knows would never be averaged: both are refused.

Names are the bare model's, whatever wraps it (DDP, torch.compile, activation checkpointing), so that workers that wrap
it differently still know each other's parameters.

A rank of a worker holds a tensor whole, as a shard of FSDP2, or as a copy that all ranks have (`LocalTensor`). Of a
sharded tensor it holds its own rows. Of a copy (plain DDP, buffers) it holds everything, but answers for its rows
alone, as if it were sharded: only they are averaged here, and after every change the ranks share theirs. So anchors
and outer momentum of a worker are held once, whatever its ranks do with the parameters. Refused: a DTensor that is not
cut by rows over the worker's own ranks (tensor parallelism, hybrid sharding), since the other workers could not know
which of its elements are where.

Another start may cut a worker's tensors otherwise, so nothing is saved by rank or by flat buffer: a `TensorPieces` has
the whole tensor's shape and this rank's pieces of it, as views of the memory that is trained. Saving reads the pieces,
loading writes into them.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from diloco.core.lanes import Piece, Shape, shard_bounds
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError

Numbers = dict[str, Any]
"""All of a state that is not a tensor, in what JSON can hold."""


@dataclass(frozen=True)
class ModelTensors:
    """A model's tensors by what happens to them; names are the model's own."""

    averaged: dict[str, Tensor]
    averaged_buffers: dict[str, Tensor]
    equal_at_start: dict[str, Tensor]
    sharded_modules: tuple[nn.Module, ...] = ()
    """The modules that FSDP2 has wrapped, which may hold gathered copies of parameters after a forward pass."""

    @property
    def all(self) -> dict[str, Tensor]:
        return {**self.averaged, **self.averaged_buffers, **self.equal_at_start}

    @cached_property
    def averaged_ids(self) -> frozenset[int]:
        """The ids of the averaged parameters' tensors, which live as long as this object."""
        return frozenset(id(tensor) for tensor in self.averaged.values())


def model_tensors(model: nn.Module, inner: torch.optim.Optimizer, *, send_frozen: bool = True) -> ModelTensors:
    """Sort the model's tensors; refuses parameters that would be forgotten. `send_frozen`: False if frozen parameters
    are the same on all workers already."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    sharded = _sharded_modules(model)
    for module in sharded:
        module.reshard()  # type: ignore[operator]
    parameters = {bare_name(name): p for name, p in model.named_parameters()}
    optimized = {id(parameter) for group in inner.param_groups for parameter in group["params"]}
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    forgotten = [name for name, p in trainable.items() if id(p) not in optimized]
    if not optimized & {id(p) for p in parameters.values()}:
        raise ConfigError(
            "the inner optimizer has none of the model's parameters: it was built for another model, or the model's "
            "parameters were replaced since (by a copy, or by sharding). Build the inner optimizer from "
            "model.parameters() of the model that is given to DiLoCo"
        )
    if forgotten:
        raise ConfigError(
            f"trainable parameters that the inner optimizer does not have: {', '.join(forgotten)}. "
            "Give them to it, or freeze them with requires_grad_(False)"
        )
    known = {id(p) for p in parameters.values()}
    foreign = [
        tuple(p.shape)
        for group in inner.param_groups
        for p in group["params"]
        if p.requires_grad and id(p) not in known
    ]
    if foreign:
        raise ConfigError(
            f"the inner optimizer has parameters that are not in the model (shapes {foreign}): they would never be "
            "averaged. Register them in the model that is given to DiLoCo"
        )
    if not trainable:
        raise ConfigError("the model has no trainable parameter: nothing to train")
    saved = {bare_name(name) for name in model.state_dict(keep_vars=True)}
    buffers = {bare_name(name): buffer for name, buffer in model.named_buffers() if bare_name(name) in saved}
    means = {name: buffer for name, buffer in buffers.items() if buffer.is_floating_point() and buffer.numel()}
    rest = {name: buffer for name, buffer in buffers.items() if name not in means}
    frozen = {name: p for name, p in parameters.items() if not p.requires_grad and send_frozen}
    return ModelTensors(dict(trainable), means, {**frozen, **rest}, sharded)


def bare_name(name: str) -> str:
    """Return a parameter's name without what torch.compile and activation checkpointing put into it."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def _sharded_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import, and a sharded model has imported it
    return () if fsdp is None else tuple(module for module in model.modules() if isinstance(module, fsdp.FSDPModule))


# A tensor as one rank of a worker holds it


@dataclass(frozen=True, eq=False)
class LocalTensor:
    """One tensor of the model on this rank."""

    name: str
    tensor: Tensor
    local: Tensor
    """Its memory here; of a plain tensor the tensor itself."""
    shape: Shape
    bounds: tuple[int, ...]
    """Rank r of the worker answers for the flat elements [bounds[r], bounds[r + 1])."""
    copied: bool
    """Every rank of the worker has all of it."""

    def view(self, piece: Piece, rank: int) -> Tensor:
        """View a piece of this rank's rows as one dimension of the same memory."""
        assert self.bounds[rank] <= piece.start <= piece.stop <= self.bounds[rank + 1]
        offset = 0 if self.copied else self.bounds[rank]
        view = self.flat()[piece.start - offset : piece.stop - offset]
        return view.requires_grad_(self.tensor.requires_grad)  # by which a fragment knows parameters from buffers

    def flat(self) -> Tensor:
        if not self.local.is_contiguous():
            raise ConfigError(
                f"'{self.name}' with strides {self.local.stride()} is not in row-major order: among several ranks it "
                "must be; make it contiguous before DiLoCo is built"
            )
        return self.local.detach().view(-1)

    def check_in_place(self) -> None:
        """Refuse a tensor whose memory was replaced: views stay with the memory that they were made of."""
        now = _local(self.tensor)
        if now.data_ptr() != self.local.data_ptr() or now.shape != self.local.shape:
            raise ConfigError(
                f"the memory of '{self.name}' was replaced after DiLoCo was built (model.to, load_state_dict with "
                "assign=True, or fully_shard): do that before"
            )


def local_tensors(tensors: Mapping[str, Tensor], ranks: WorkerRanks) -> dict[str, LocalTensor]:
    """Find every tensor as this rank holds it."""
    return {name: _local_tensor(name, tensor, ranks) for name, tensor in tensors.items()}


def share(tensors: Iterable[LocalTensor], ranks: WorkerRanks) -> None:
    """Let all ranks take each rank's rows of every copy from that rank, after changes."""
    if ranks.count > 1:
        for tensor in tensors:
            if tensor.copied:
                ranks.share(tensor.flat(), tensor.bounds)


def take_first(tensors: Iterable[LocalTensor], ranks: WorkerRanks) -> None:
    """Make all ranks' copies those of the first rank, before anything else."""
    for tensor in tensors:
        if tensor.copied:
            ranks.share(tensor.flat(), [0, *(tensor.local.numel() for _ in range(ranks.count))])


def _local_tensor(name: str, tensor: Tensor, ranks: WorkerRanks) -> LocalTensor:
    shape = tuple(tensor.shape)
    local = _local(tensor)
    bounds = tuple(shard_bounds(shape, ranks.count))
    sharded = local is not tensor and _is_sharded(name, tensor, ranks)
    if sharded and local.numel() != bounds[ranks.rank + 1] - bounds[ranks.rank]:
        raise ConfigError(
            f"'{name}' of shape {shape} has {local.numel()} elements on rank {ranks.rank} of {ranks.count}: rows "
            "must be cut as FSDP2 cuts them"
        )
    return LocalTensor(name, tensor, local, shape, bounds, copied=not sharded and ranks.count > 1)


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's memory of a DTensor; any other tensor itself."""
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and a DTensor has imported it
    if module is None or not isinstance(tensor, module.DTensor):
        return tensor
    local: Tensor = tensor.detach().to_local()
    return local.requires_grad_(tensor.requires_grad)


def _is_sharded(name: str, tensor: Any, ranks: WorkerRanks) -> bool:
    mesh, placements = tensor.device_mesh, tensor.placements
    places = tuple(mesh.mesh.flatten().tolist())
    if mesh.ndim == 1 and places == ranks.global_ranks and len(placements) == 1:
        if placements[0].is_shard(0):
            return True
        if placements[0].is_replicate():
            return False
    raise ConfigError(
        f"'{name}' is placed as {placements} on the ranks {mesh.mesh.tolist()}, but this worker's ranks are "
        f"{list(ranks.global_ranks)}: only Shard(0) and Replicate() over all of them, in one dimension, can be "
        "averaged; use fully_shard(model, mesh=engine.ranks.mesh(device_type))"
    )


# What is saved and loaded, whatever the layout it is held in


@dataclass(frozen=True)
class TensorPiece:
    """A part of a tensor: `tensor` holds the elements of the whole one from `offsets` on."""

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
    """Return all of an ordinary tensor, or this rank's shard of a DTensor."""
    shape = tuple(tensor.shape)
    module = sys.modules.get("torch.distributed.tensor")  # slow to import, and a DTensor has imported it
    if module is None or not isinstance(tensor, module.DTensor):
        return TensorPieces(shape, tensor.dtype, (TensorPiece((0,) * len(shape), tensor.detach()),), replicated=True)
    chunks = tensor.__create_chunk_list__()
    local = tensor.to_local().detach()
    pieces = tuple(TensorPiece(tuple(chunk.offsets), local) for chunk in chunks if local.numel())
    return TensorPieces(shape, tensor.dtype, pieces)


def as_tensors(held: Mapping[str, TensorPieces]) -> dict[str, Tensor]:
    """Copy all pieces by name, for a state dict; a piece that is not all of its tensor has its place in the name."""
    return {
        _piece_name(name, whole, piece): piece.tensor.detach().clone()
        for name, whole in held.items()
        for piece in whole.pieces
    }


@torch.no_grad()
def copy_into(held: Mapping[str, TensorPieces], saved: Mapping[str, Tensor]) -> None:
    """Copy what `as_tensors` gave back into place; names and shapes must be the same."""
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
