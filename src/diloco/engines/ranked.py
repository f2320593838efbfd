"""Workers of several ranks in a torch.distributed world: their ranks among themselves, and an engine for each lane.

Consecutive global ranks are one worker: with sizes (1, 2) rank 0 is worker 0, and ranks 1 and 2 are worker 1. A rank
that dies takes its worker with it, and so, since the membership is fixed, the run; no wait is without a bound.
"""

import atexit
from collections.abc import Sequence
from itertools import accumulate

import torch.distributed as dist

from diloco.engines.base import Connection, Engine
from diloco.engines.process_groups import new_group
from diloco.engines.rounds import Member
from diloco.engines.torch_distributed import LaneGroups, TorchDistributedEngine
from diloco.engines.worker_ranks import WorkerRanks, compute_backend
from diloco.errors import ConfigError, EngineError

_RANK_SECONDS = 600.0
"""The longest that a rank of a worker may be behind another: one compiles, or writes to a slow disk."""


class RankedEngine(Connection):
    """The connection of one rank of a worker: its place in the worker and in the lanes."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        backend: str = "gloo",
        timeout_seconds: float = 600.0,
        owns_world: bool = False,
    ) -> None:
        """Collective: every rank builds it at the same point. `sizes`: the number of ranks of each worker.

        `backend` carries the outer gradients; `owns_world`: close() also ends torch.distributed.
        """
        if not dist.is_initialized():
            raise EngineError("torch.distributed is not initialised: use diloco.connect(), which does it")
        check_sizes(sizes, dist.get_world_size())
        self.sizes = tuple(sizes)
        self.workers = len(sizes)
        self._firsts = [0, *accumulate(sizes)]
        self.worker = max(worker for worker in range(self.workers) if self._firsts[worker] <= dist.get_rank())
        self._backend = backend
        self._timeout_seconds = timeout_seconds
        self._owns_world = owns_world
        self._engines: dict[tuple[int, ...], TorchDistributedEngine | None] = {}
        for first, after in zip(self._firsts, self._firsts[1:], strict=False):
            ranks = range(first, after)
            control = new_group(ranks, "gloo", timeout_seconds)
            compute = new_group(ranks, compute_backend(), timeout_seconds)
            if dist.get_rank() in ranks:
                self.ranks = WorkerRanks(ranks, dist.get_rank() - first, control, compute)
        atexit.register(self.close)  # its threads must end before the interpreter does

    def lanes(self, owners: Sequence[tuple[int, ...]]) -> list[Engine | None]:
        for lane in owners:
            if lane not in self._engines:
                ranks = [self._firsts[worker] + rank for worker, rank in enumerate(lane)]
                self._engines[lane] = self._engine(LaneGroups.new(ranks, self._backend, self._timeout_seconds))
        return [self._engines[lane] for lane in owners]

    def _engine(self, groups: LaneGroups | None) -> TorchDistributedEngine | None:
        if groups is None:
            return None
        return TorchDistributedEngine(backend=self._backend, timeout_seconds=self._timeout_seconds, groups=groups)

    def members(self) -> tuple[Member, ...]:
        """Return the workers as the first lane has heard of them: the reports are those of the first ranks."""
        mine = [engine for _, engine in sorted(self._engines.items()) if engine is not None]
        return mine[0].members() if mine else ()

    def close(self) -> None:
        atexit.unregister(self.close)
        self.closed = True
        mine = [engine for engine in self._engines.values() if engine is not None]
        broken = any(engine.broken for engine in mine)
        for engine in mine:
            engine.close()
        self.ranks.close(broken)
        if self._owns_world and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_world = False


def ranks_of_one_worker() -> WorkerRanks:
    """Make all processes of the initialised torch.distributed world the ranks of one worker. Collective."""
    ranks = range(dist.get_world_size())
    control = new_group(ranks, "gloo", _RANK_SECONDS)
    compute = new_group(ranks, compute_backend(), _RANK_SECONDS)
    return WorkerRanks(ranks, dist.get_rank(), control, compute)


def check_sizes(sizes: Sequence[int], world: int) -> None:
    if not sizes or min(sizes) < 1 or sum(sizes) != world:
        raise ConfigError(
            f"workers of {list(sizes)} ranks need {sum(sizes)} processes, but there are {world}: "
            "every worker has at least one rank, and together they are all processes"
        )


def sizes_of(ranks_per_worker: int | Sequence[int], world: int) -> tuple[int, ...]:
    """Return the number of ranks of each worker, from one number for all of them or one for each."""
    if not isinstance(ranks_per_worker, int):
        return tuple(ranks_per_worker)
    if ranks_per_worker < 1 or world % ranks_per_worker:
        raise ConfigError(
            f"{world} processes cannot be workers of {ranks_per_worker} ranks each: start a multiple of that, or give "
            "each worker's number"
        )
    return (ranks_per_worker,) * (world // ranks_per_worker)
