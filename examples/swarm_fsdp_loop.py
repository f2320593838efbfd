"""A swarm of workers with FSDP2 inside: each is a torchrun of its own, of as many ranks as its machine has devices.

    torchrun --nproc-per-node 2 examples/swarm_fsdp_loop.py                       starts the swarm
    diloco invite runs/swarm-loop > word.txt                                      beside it, while it trains
    torchrun --nproc-per-node 4 examples/swarm_fsdp_loop.py runs/other @word.txt  another worker, of another size

The first rank of a worker joins for all; the others see no difference between workers of one and of many ranks. DDP:
`DistributedDataParallel(model, process_group=engine.ranks.group)` instead of `fully_shard`.
"""

import os
import sys

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import diloco

STEPS = 200


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a worker at a step; its ranks divide the rows."""
    generator = torch.Generator().manual_seed(worker * 100_000 + step)
    x = torch.rand(32, 4, generator=generator) * 4 - 2
    return x, (x.square().sum(-1, keepdim=True) * 0.3).sin() + x[:, :1] * x[:, 1:2]


def main(folder: str = "runs/swarm-loop", invitation: str | None = None) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    engine = diloco.join_swarm(folder, invitation, ranks=int(os.environ["WORLD_SIZE"]))
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    fully_shard(model, mesh=engine.ranks.mesh(device.type))  # over this worker's ranks; before DiLoCo is built
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = diloco.DiLoCo(model, inner, engine, H=20)

    step = 0
    while optimizer.position < STEPS:  # it may jump ahead: the same for all ranks of a worker
        x, y = (whole.chunk(engine.ranks.count)[engine.ranks.rank].to(device) for whole in batch(engine.worker, step))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1

    optimizer.finish()
    x, y = batch(1000, 0)
    final = F.mse_loss(model(x.to(device)), y.to(device)).item()
    place = f"worker {engine.worker} rank {engine.ranks.rank}"
    print(f"{place}  final loss {final:.4f}  parameters {optimizer.anchor_digest()}", flush=True)
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
