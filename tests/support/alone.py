"""A worker that averages with no other, and its steps."""

from typing import Any

import torch
from torch import nn

from diloco.core.config import SyncConfig
from diloco.core.digest import digest
from diloco.engines.local import alone
from diloco.optimizer import DiLoCo
from support.problem import loss_of


def made(model: nn.Module, sync: SyncConfig | None = None, **options: Any) -> DiLoCo:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return DiLoCo(model, torch.optim.AdamW(trainable, lr=1e-2), alone(), sync=sync, **options)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int, worker: int = 0) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        loss_of(model, worker, step).backward()
        optimizer.step()


def made_digest(optimizer: DiLoCo) -> str:
    """The digest computed anew from the anchors as they are now."""
    optimizer.loop.replica.digests[:] = [digest(fragment.anchor) for fragment in optimizer.loop.state.fragments]
    return optimizer.anchor_digest()
