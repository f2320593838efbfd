"""DiLoCo between workers, FSDP2 inside each worker: two ranks per worker, each with half of the parameters.

    torchrun --nproc-per-node 4 examples/fsdp_loop.py        two workers of two ranks (CPU, or a CUDA device for each)

Workers of different sizes train together too: `RANKS = [1, 2]` with three processes. With DDP inside a worker:
`DistributedDataParallel(model, process_group=engine.ranks.group)` instead of `fully_shard`.
"""

import os

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import diloco

RANKS = 2


def batch(worker: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a worker at a step; its ranks divide the rows."""
    generator = torch.Generator().manual_seed(worker * 100_000 + step)
    x = torch.rand(32, 4, generator=generator) * 4 - 2
    return x, (x.square().sum(-1, keepdim=True) * 0.3).sin() + x[:, :1] * x[:, 1:2]


def main(steps: int = 200) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    engine = diloco.connect(ranks_per_worker=RANKS)
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    fully_shard(model, mesh=engine.ranks.mesh(device.type))  # over this worker's ranks; before DiLoCo is built
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = diloco.DiLoCo(model, inner, engine, H=20)

    for step in range(steps):
        x, y = (whole.chunk(engine.ranks.count)[engine.ranks.rank].to(device) for whole in batch(engine.worker, step))
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    optimizer.finish()
    x, y = batch(1000, 0)
    final = F.mse_loss(model(x.to(device)), y.to(device)).item()
    place = f"worker {engine.worker} rank {engine.ranks.rank}"
    print(f"{place}  final loss {final:.4f}  parameters {optimizer.anchor_digest()}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
