"""Lanes on a GPU: pieces of parameters at odd places in memory, through the kernels. Needs a CUDA device.

The ranks of a worker share one device here, which NCCL does not do: they talk over gloo.
"""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diloco.core.config import SyncConfig
from diloco.engines import ranked
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.optimizer import DiLoCo
from worlds.problem import batch, net
from worlds.processes import in_processes

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


def test_one_and_two_ranks_on_a_gpu_train_as_two_single_ranks_do() -> None:
    single, ranks = in_processes(2, trained, (1, 1)), in_processes(3, trained, (1, 2))
    assert len({rank["digest"] for rank in ranks}) == 1
    for rank in ranks:
        assert rank["final"] == pytest.approx(single[0]["final"], abs=1e-4)
        assert rank["final"] == ranks[0]["final"]
        assert rank["evaluated"] == pytest.approx(single[0]["evaluated"], abs=1e-3)
