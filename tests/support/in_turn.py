"""k workers in one thread, taken in turn: what the laboratory does, and the easiest world to look into."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.engines.local import LocalEngine, LocalSwarm
from diloco.optimizer import DiLoCo
from support.problem import Net, build, loss_of


@dataclass
class InTurn:
    """Workers that take each inner step together; `post` and `merge` may be called apart, to look in between."""

    workers: int
    sync: SyncConfig
    outer: OuterOptimizer | None = None
    fail_at: Collection[tuple[int, int]] = ()
    sgd: bool = False
    weights: Collection[float] = ()
    models: list[Net] = field(default_factory=list)
    optimizers: list[DiLoCo] = field(default_factory=list)
    step_number: int = 0
    more: dict[str, Any] = field(default_factory=dict)
    """For DiLoCo."""
    engines: Sequence[LocalEngine] = ()
    """Instead of new ones."""

    def __post_init__(self) -> None:
        weights = list(self.weights) or [1.0] * self.workers
        inner = (lambda model: torch.optim.SGD(model.parameters(), lr=0.1)) if self.sgd else None
        for engine in self.engines or LocalSwarm(self.workers, fail_at=self.fail_at).engines():
            weight = weights[engine.worker]
            model, optimizer = build(engine, self.sync, outer=self.outer, weight=weight, inner=inner, **self.more)
            self.models.append(model)
            self.optimizers.append(optimizer)

    def inner_step(self) -> None:
        for worker, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, worker, self.step_number).backward()
            optimizer.inner_step()
        self.step_number += 1

    def post(self) -> None:
        for optimizer in self.optimizers:
            optimizer.post()

    def merge(self) -> None:
        for optimizer in self.optimizers:
            optimizer.merge()

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.inner_step()
            self.post()
            self.merge()

    def digests(self) -> list[str]:
        return [optimizer.anchor_digest() for optimizer in self.optimizers]
