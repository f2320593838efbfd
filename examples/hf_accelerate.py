"""Accelerate as a DiLoCo worker: torchrun --nproc-per-node 2 examples/hf_accelerate.py

`island=True`: under torchrun `prepare` would wrap the model in DDP and divide the data, and `gather` would wait for all
workers. Accelerate must see a single process; the engine keeps the connection to the other workers.
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import diloco


def points(worker: int, count: int) -> TensorDataset:
    """A worker's own share of the data: noisy points of one function."""
    generator = torch.Generator().manual_seed(worker)
    x = torch.rand(count, 4, generator=generator) * 4 - 2
    y = (x.square().sum(-1, keepdim=True) * 0.3).sin() + x[:, :1] * x[:, 1:2]
    return TensorDataset(x, y + 0.05 * torch.randn(y.shape, generator=generator))


def main(steps: int = 200, accumulation: int = 2) -> None:
    torch.set_num_threads(1)
    engine = diloco.connect(island=True)  # first: Accelerator reads the environment
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=not torch.cuda.is_available())
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model.to(accelerator.device)  # before DiLoCo is built
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    diloco_optimizer = diloco.DiLoCo(model, inner, engine, H=20)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(diloco_optimizer, steps)
    share = 32 * accumulation * (steps - engine.worker)  # 200 steps and 199 steps: shares differ
    data = DataLoader(points(engine.worker, share), batch_size=32)
    model, optimizer, data, schedule = accelerator.prepare(model, diloco_optimizer, data, schedule)

    first = None
    for x, y in data:
        with accelerator.accumulate(model):  # the optimizer and the schedule step at every second batch
            loss = F.mse_loss(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        first = loss.item() if first is None else first

    diloco_optimizer.finish()  # the last rounds: all workers then have the same parameters
    x, y = (tensor.to(accelerator.device) for tensor in points(1000, 256).tensors)
    final = F.mse_loss(model(x), y).item()
    digest = diloco_optimizer.anchor_digest()
    print(f"worker {engine.worker}  first loss {first:.4f}  final loss {final:.4f}  parameters {digest}", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
