"""The inner optimizer of a run: AdamW and its learning-rate schedule."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from diloco.training.config import InnerConfig


def inner_optimizer(model: nn.Module, config: InnerConfig) -> torch.optim.AdamW:
    """AdamW, fused; weight decay for matrices and embeddings, none for norms."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), fused=True)


def learning_rate_schedule(inner: torch.optim.Optimizer, config: InnerConfig, steps: int) -> LambdaLR:
    """Linear warm-up, then a cosine down to `final_lr_ratio` at the last step."""

    def factor(step: int) -> float:
        if step < config.warmup_steps:
            return (step + 1) / config.warmup_steps
        progress = (step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine

    return LambdaLR(inner, factor)
