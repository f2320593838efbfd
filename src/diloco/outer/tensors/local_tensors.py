"""A model's tensors as one rank of a worker holds them: whole, a shard of FSDP2, or a copy that all ranks have.

Of a sharded tensor a rank holds its own rows. Of a copy (plain DDP, buffers) it holds everything, but answers for its
rows alone, as if it were sharded: only they are averaged here, and after every change the ranks share theirs. So
anchors and outer momentum of a worker are held once, whatever its ranks do with the parameters.

Refused: a DTensor that is not cut by rows over the worker's own ranks (tensor parallelism, hybrid sharding), since
the other workers could not know which of its elements are where.
"""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from diloco.core.lanes import Piece, Shape, shard_bounds
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError


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
        """A piece of this rank's rows, as one dimension of the same memory."""
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
        """Views stay with the memory they were made of."""
        now = _local(self.tensor)
        if now.data_ptr() != self.local.data_ptr() or now.shape != self.local.shape:
            raise ConfigError(
                f"the memory of '{self.name}' was replaced after DiLoCo was built (model.to, load_state_dict with "
                "assign=True, or fully_shard): do that before"
            )


def local_tensors(tensors: Mapping[str, Tensor], ranks: WorkerRanks) -> dict[str, LocalTensor]:
    """Every tensor as this rank holds it."""
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
    """This rank's memory of a DTensor; any other tensor itself."""
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
