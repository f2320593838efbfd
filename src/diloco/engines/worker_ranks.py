"""The ranks of one worker among themselves: an island of devices that are close to each other.

Averaging between workers goes lane by lane and needs none of this. What a worker says of itself does: the norm of its
whole outer gradient, the digest of its whole anchor, whether it stops, whether one of its ranks cannot go on. These are
a few bytes a round, over a gloo group of their own, which collectives of FSDP or DDP (`group`, `mesh`) cannot get in
the way of. Every method is collective: all ranks of the worker call it at the same point. No wait is without a bound.
"""

import math
import struct
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diloco.engines.process_groups import end_group, first_line
from diloco.errors import ConfigError, EngineError

_LENGTH = struct.Struct("<q")
_FIRST_BYTES = 56
"""The first bytes of what `tell` says travel with its length: most of it is short."""


class WorkerRanks:
    """One rank's end of its worker. Without groups the worker is this process alone, and nothing travels."""

    def __init__(
        self,
        ranks: Sequence[int] = (0,),
        rank: int = 0,
        control: "dist.ProcessGroup | None" = None,
        compute: "dist.ProcessGroup | None" = None,
    ) -> None:
        """`ranks` are the worker's global ranks, `rank` is this one's place among them."""
        self.global_ranks = tuple(ranks)
        self.rank = rank
        self._control = control
        self._compute = compute

    @property
    def count(self) -> int:
        return len(self.global_ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """The worker's ranks as a group: `DistributedDataParallel(model, process_group=engine.ranks.group)`."""
        if self._compute is None:
            raise ConfigError(
                "this worker has no process group: connect with diloco.connect(ranks_per_worker=...), which makes one"
            )
        return self._compute

    def mesh(self, device_type: str) -> DeviceMesh:
        """Return the worker's ranks as a mesh: `fully_shard(model, mesh=engine.ranks.mesh("cuda"))`."""
        return DeviceMesh.from_group(self.group, device_type)

    # What the ranks tell each other

    def gather(self, data: bytes) -> list[bytes]:
        """Gather bytes from every rank, in rank order; all must give the same number."""
        if self.count == 1:
            return [data]
        own = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in self.global_ranks]
        self._bounded(lambda: dist.all_gather(rows, own, group=self._control))
        return [bytes(row.tolist()) for row in rows]

    def gather_numbers(self, *values: float) -> list[tuple[float, ...]]:
        form = struct.Struct(f"<{len(values)}d")
        return [form.unpack(row) for row in self.gather(form.pack(*values))]

    def any(self, flag: bool) -> bool:
        return any(value for (value,) in self.gather_numbers(flag))

    def sums(self, *values: float) -> list[float]:
        """Sum each value over all ranks, in rank order: the same on each."""
        return [math.fsum(column) for column in zip(*self.gather_numbers(*values), strict=True)]

    def agree(self, error: EngineError | None) -> None:
        """Raise on all ranks if any of them has an error, so that none goes on to wait for one that has left."""
        broken = [rank for rank, (bad,) in enumerate(self.gather_numbers(error is not None)) if bad]
        if error is not None:
            raise error
        if broken:
            raise EngineError(f"rank {broken[0]} of this worker's {self.count} cannot go on: its own log says why")

    def tell(self, data: bytes) -> bytes:
        """Return on every rank what the first one says, of whatever length; the others' `data` counts for nothing."""
        if self.count == 1:
            return data
        head = _LENGTH.pack(len(data)) + data[:_FIRST_BYTES]
        first = torch.frombuffer(bytearray(head.ljust(_LENGTH.size + _FIRST_BYTES, b"\0")), dtype=torch.uint8)
        self._broadcast(first)
        head = bytes(first.tolist())
        (length,) = _LENGTH.unpack_from(head)
        said = head[_LENGTH.size :][:length]
        if length > _FIRST_BYTES:
            rest = torch.zeros(length - _FIRST_BYTES, dtype=torch.uint8)
            if self.rank == 0:
                rest = torch.frombuffer(bytearray(data[_FIRST_BYTES:]), dtype=torch.uint8)
            self._broadcast(rest)
            said += rest.numpy().tobytes()
        return said

    def _broadcast(self, data: Tensor) -> None:
        self._bounded(lambda: dist.broadcast(data, self.global_ranks[0], group=self._control))

    # Tensors

    def exchange(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Send part r to rank r, and return what every rank has sent to this one: so many elements of each.

        The parts are of one dimension and one dtype, on one device.
        """
        joined = torch.cat(list(parts))
        staged = joined if joined.device.type == "cpu" or self._carries(joined.device) else joined.cpu()
        out = staged.new_empty(sum(lengths))
        sizes = [len(part) for part in parts]
        group = self._group_of(staged)
        self._bounded(lambda: dist.all_to_all_single(out, staged, list(lengths), sizes, group=group))
        return list(torch.split(out.to(joined.device), list(lengths)))

    def share(self, flat: Tensor, bounds: Sequence[int]) -> None:
        """Make every rank's copy of a 1-D tensor that of rank r in [bounds[r], bounds[r + 1])."""
        if self.count == 1:
            return
        staged = flat if flat.device.type == "cpu" or self._carries(flat.device) else flat.cpu()
        works = []
        for source, (start, stop) in zip(self.global_ranks, pairwise(bounds), strict=True):
            if start < stop:  # as bytes, since gloo does not know every dtype
                data = staged[start:stop].view(torch.uint8)
                works.append(dist.broadcast(data, source, group=self._group_of(staged), async_op=True))
        self._bounded(lambda: [work.wait() for work in works if work is not None])
        if staged is not flat:
            flat.copy_(staged)

    def average(self, tensor: Tensor) -> None:
        """Make every rank's copy the mean of all."""
        if self.count == 1:
            return
        total = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        self._bounded(lambda: dist.all_reduce(total, group=self._control))
        tensor.copy_(total.div_(self.count))

    def _group_of(self, tensor: Tensor) -> "dist.ProcessGroup | None":
        return self._control if tensor.device.type == "cpu" else self._compute

    def _carries(self, device: torch.device) -> bool:
        return self._compute is not None and device.type == "cuda" and "nccl" in str(dist.get_backend(self._compute))

    def _bounded(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # what torch.distributed raises for a lost peer or a timeout
            traceback.clear_frames(error.__traceback__)  # they hold the process group
            raise EngineError(
                f"rank {self.rank} lost another of this worker's {self.count} ranks ({first_line(error)}): "
                "the worker cannot go on without it; start the run again"
            ) from error

    def close(self, broken: bool = False) -> None:
        """Leave the groups; the one method that is not collective. `broken`: a rank may be lost."""
        end_group(self._control, broken)
        end_group(self._compute, broken)
        self._control = None
        self._compute = None


ALONE = WorkerRanks()
"""A worker of one rank."""


def compute_backend() -> str:
    """Name the backend of a worker's own collectives: CUDA tensors over NCCL where there is CUDA, all others over
    gloo."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
