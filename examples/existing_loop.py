"""An ordinary PyTorch training loop, made a DiLoCo worker by the lines that are marked.

Two workers on this machine:    torchrun --nproc-per-node 2 examples/existing_loop.py
On two machines, at each of them (N is 0 or 1):
    torchrun --nnodes 2 --node-rank N --nproc-per-node 1 --master-addr ADDRESS --master-port 29500 \\
        examples/existing_loop.py

Each worker trains on its own data. Every 20 steps the workers average their parameters; they send nothing else.
"""

import torch
from torch import nn
from torch.nn import functional as F

import diloco  # diloco


def batches(worker: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's own share of the data: noisy points of one function."""
    generator = torch.Generator().manual_seed(worker)
    x = torch.rand(count, 32, 4, generator=generator) * 4 - 2
    y = (x.square().sum(-1, keepdim=True) * 0.3).sin() + x[..., :1] * x[..., 1:2]
    return list(zip(x, y + 0.05 * torch.randn(y.shape, generator=generator), strict=True))


def main(steps: int = 200) -> None:
    torch.set_num_threads(1)
    engine = diloco.connect()  # diloco
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    optimizer = diloco.DiLoCo(model, optimizer, engine, H=20)  # diloco

    for step, (x, y) in enumerate(batches(engine.worker, steps)):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step % 50 == 0:
            print(f"worker {engine.worker}  step {step:3d}  loss {loss.item():.3f}", flush=True)

    optimizer.finish()  # diloco
    x, y = batches(1000, 1)[0]
    final = F.mse_loss(model(x), y).item()
    print(f"worker {engine.worker}  final loss {final:.4f}  parameters {optimizer.anchor_digest()}", flush=True)
    engine.close()  # diloco


if __name__ == "__main__":
    main()
