"""Lightning as a DiLoCo worker: torchrun --nproc-per-node 2 examples/lightning_trainer.py

`island=True`: under torchrun the Trainer would take DDP as its strategy, divide the data and log on rank 0 only. It
must see a single process; the engine keeps the connection to the other workers. Everything else is the Trainer's.
"""

import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import diloco
from diloco.integrations.lightning import LightningCallback


def points(worker: int, count: int) -> TensorDataset:
    """A worker's own share of the data: points of one function."""
    x = torch.rand(count, 4, generator=torch.Generator().manual_seed(worker)) * 4 - 2
    return TensorDataset(x, (x.square().sum(-1, keepdim=True) * 0.3).sin() + x[:, :1] * x[:, 1:2])


class Regression(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, engine: Any) -> None:
        super().__init__()
        self.engine, self.losses = engine, list[float]()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:  # the model is on its device
        inner = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer = diloco.DiLoCo(self, inner, self.engine, H=20)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", ".*treespec, LeafSpec")  # a warning of Lightning with a newer torch
    model = Regression(diloco.connect(island=True))  # before the Trainer reads the environment
    options: dict[str, Any] = {"devices": 1, "gradient_clip_val": 1.0, "accumulate_grad_batches": 2, "max_epochs": 1}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(callbacks=[LightningCallback()], **options, **quiet)  # the callback runs the last rounds
    trainer.fit(model, DataLoader(points(model.engine.worker, 32 * (400 + 50 * model.engine.worker)), batch_size=32))
    x, y = points(1000, 256).tensors
    place, final, digest = model.engine.worker, F.mse_loss(model.net(x), y), trainer.optimizers[0].anchor_digest()
    print(f"worker {place}  first loss {model.losses[0]:.4f}  final loss {final:.4f}  parameters {digest}", flush=True)
    model.engine.close()


if __name__ == "__main__":
    main()
