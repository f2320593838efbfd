"""Lanes on a GPU: pieces of parameters at odd places in memory, through the kernels. Needs a CUDA device.

The ranks of a worker share one device here, which NCCL does not do: they talk over gloo.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from diloco.core.config import SyncConfig
from diloco.engines import ranked
from diloco.engines.first_rank import FirstRankEngine
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.optimizer import DiLoCo
from support.elastic import ElasticSwarm
from support.problem import batch, net
from support.processes import in_processes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SYNC = SyncConfig(3, "fp32")


def trained(world: TorchDistributedEngine, sizes: tuple[int, ...]) -> dict[str, object]:
    ranked.compute_backend = lambda: "gloo"  # type: ignore[assignment]
    engine = ranked.RankedEngine(sizes)
    model = net(seed=world.worker).cuda()
    several = engine.ranks.count > 1
    wrapped = DistributedDataParallel(model, process_group=engine.ranks.group) if several else model
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine, sync=SYNC)
    for step in range(7):
        x, y = (part.chunk(engine.ranks.count)[engine.ranks.rank].cuda() for part in batch(engine.worker, step))
        optimizer.zero_grad()
        (wrapped(x) - y).square().mean().backward()
        optimizer.step()
        with optimizer.outer_parameters():
            evaluated = wrapped(batch(9, 0)[0].cuda()).sum().item()
    optimizer.finish()
    final = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    dist.barrier()
    return {"final": final, "digest": optimizer.anchor_digest(), "evaluated": evaluated}


def over_nccl(world: TorchDistributedEngine, sharded: bool) -> dict[str, object]:
    """Workers of one rank each, whose collectives are NCCL's; sharded over that rank or not."""
    torch.cuda.set_device(0)
    engine = ranked.RankedEngine((1, 1))
    model = net(seed=world.worker).cuda()
    if sharded:
        fully_shard(model, mesh=engine.ranks.mesh("cuda"))
    optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=1e-2), engine, sync=SyncConfig(3))
    for step in range(7):
        x, y = (part.cuda() for part in batch(engine.worker, step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        with optimizer.outer_parameters(), torch.no_grad():
            model(x)  # what FSDP2 gathers here must not be there at the next step
    optimizer.finish()
    dist.barrier()
    return {"digest": optimizer.anchor_digest(), "backend": str(dist.get_backend(engine.ranks.group))}


def gathered(world: TorchDistributedEngine) -> dict[str, object]:
    """A worker among others that come and go: one rank, or two that both see the whole batch."""
    ranked.compute_backend = lambda: "gloo"  # type: ignore[assignment]
    ranks = ranked.ranks_of_one_worker()
    first = ElasticSwarm([0]).engine(0) if ranks.rank == 0 else None
    engine = FirstRankEngine(first, ranks) if world.workers > 1 else ElasticSwarm([0]).engine(0)
    model = net(seed=0).cuda()
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine, sync=SyncConfig(3, "int8"))
    for step in range(7):
        x, y = (part.cuda() for part in batch(0, step))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.finish()
    final = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
    dist.barrier()
    return {"final": final, "digest": optimizer.anchor_digest()}


def test_two_ranks_that_gather_on_a_gpu_train_as_one_rank_does() -> None:
    [expected] = in_processes(1, gathered)
    for rank in in_processes(2, gathered):
        assert rank == expected


def test_fsdp2_over_nccl_gives_the_bits_of_a_plain_model() -> None:
    told = [*in_processes(2, over_nccl, False), *in_processes(2, over_nccl, True)]
    assert len({one["digest"] for one in told}) == 1
    assert {one["backend"] for one in told} == {"cpu:gloo,cuda:nccl"}


def test_one_and_two_ranks_on_a_gpu_train_as_two_single_ranks_do() -> None:
    single, ranks = in_processes(2, trained, (1, 1)), in_processes(3, trained, (1, 2))
    assert len({rank["digest"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["final"] == pytest.approx(single[0]["final"], abs=1e-4)
        assert rank["final"] == ranks[0]["final"]
        assert rank["evaluated"] == pytest.approx(single[0]["evaluated"], abs=1e-3)
