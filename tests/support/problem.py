"""A small regression problem with numbered blocks, and a worker that trains on it and tells what happened."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.engines.base import Engine
from diloco.engines.rounds import RoundResult
from diloco.methods.dynamic_steps import DynamicSteps
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from support.methods import method_of

WIDTH, INPUTS, OUTPUTS, BATCH = 48, 12, 3, 8
_seeding = threading.Lock()  # torch's generator is shared by the threads of a process


class Net(nn.Module):
    """Four numbered blocks, with an entrance and an exit outside them: 10 287 parameters, 11 parts."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.entrance = nn.Linear(INPUTS, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.exit = nn.Linear(width, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entrance(x).tanh()
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.exit(x)


def net(seed: int = 0, width: int = WIDTH) -> Net:
    with _seeding, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(width)


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """The batch that a worker sees at a step: a pure function of the two."""
    generator = torch.Generator().manual_seed(100_003 * worker + step)
    x = torch.randn(BATCH, INPUTS, generator=generator)
    return x, torch.stack([x[:, :4].sum(1).sin(), x[:, 4] * x[:, 5], x[:, 6:].mean(1)], dim=1)


def loss_of(model: nn.Module, worker: int, step: int) -> Tensor:
    x, y = batch(worker, step)
    return (model(x) - y).square().mean()


def flat(model: nn.Module) -> Tensor:
    """All parameters, copied, as one vector."""
    return torch.cat([p.detach().float().reshape(-1).clone() for p in model.parameters()])


def anchors(optimizer: DiLoCo) -> Tensor:
    """All anchors, copied, as one vector (in the fragments' order)."""
    return torch.cat([fragment.anchor.clone() for fragment in optimizer.loop.state.fragments])


@dataclass
class Story:
    """What one worker saw: digests after each step and at the end, losses, results of rounds."""

    digests: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    events: list[RoundEvent] = field(default_factory=list)
    steps: int = 0
    final: list[float] = field(default_factory=list)
    bytes_sent: int = 0
    member_digests: tuple[str, ...] = ()

    @property
    def results(self) -> list[RoundResult]:
        return [event.result for event in self.events if event.result is not None]

    def without_mean(self) -> "Story":
        """What can be sent between processes and compared: no encoded vectors."""
        return Story(self.digests, self.losses, [], self.steps, self.final, self.bytes_sent, self.member_digests)


def build(
    engine: Engine,
    sync: SyncConfig,
    *,
    outer: OuterOptimizer | None = None,
    weight: float = 1.0,
    seed: int | None = None,
    inner: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    **more: Any,
) -> tuple[Net, DiLoCo]:
    """Worker i starts from its own seed, to show that all begin with worker 0's parameters. `more`: for DiLoCo."""
    model = net(seed=engine.worker if seed is None else seed)
    make = inner or (lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, DiLoCo(model, make(model), engine, sync=sync, outer=outer, weight=weight, **more)


def train(
    engine: Engine,
    sync: SyncConfig,
    steps: int,
    *,
    stop_after: int | None = None,
    outer: OuterOptimizer | None = None,
    weight: float = 1.0,
    seed: int | None = None,
    built: Callable[[], object] | None = None,
    seconds: Sequence[float] = (),
    **more: Any,
) -> Story:
    """Train for `steps`, or end early after `stop_after`, or when another worker does; then finish.

    `built` is called before the first step. `seconds`: that an inner step takes each worker, with sync.dynamic_steps:
    it then trains until position `steps`. `more`: for DiLoCo.
    """
    model, optimizer = build(engine, sync, outer=outer, weight=weight, seed=seed, **more)
    if pace := method_of(optimizer.loop, DynamicSteps):
        pace.clock = lambda: optimizer.loop.state.steps_taken * seconds[engine.worker]
        pace.begin_anew()
    if built is not None:
        built()
    story = Story()
    optimizer.loop.on_round = story.events.append
    early = False
    for step in range(steps):
        if (early := step == stop_after) or (pace and optimizer.position >= steps):
            break
        optimizer.zero_grad()
        loss = loss_of(model, engine.worker, step)
        loss.backward()
        optimizer.step()
        story.losses.append(loss.item())
        story.digests.append(optimizer.anchor_digest())
        if optimizer.loop.stopping:
            break
    story.steps = optimizer.loop.inner_steps
    optimizer.finish(early=early)
    story.digests.append(optimizer.anchor_digest())
    story.final, story.bytes_sent = flat(model).tolist(), optimizer.loop.counters.bytes_sent
    story.member_digests = tuple(member.anchor_digest for member in engine.members())
    return story
