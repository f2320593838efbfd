"""Workers of several ranks on the small problem: FSDP2 or DDP inside a worker, each rank with its rows of the batch."""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from diloco.core.config import SyncConfig
from diloco.engines.base import Connection
from diloco.optimizer import DiLoCo
from support.problem import Net, batch, net


@dataclass
class RankStory:
    """What one rank saw. `final` is the worker's whole model."""

    digests: list[str] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    steps: int = 0
    failed: int = 0
    refused: int = 0
    bytes_sent: int = 0
    norms: list[float] = field(default_factory=list)
    state_elements: int = 0
    member_digests: tuple[str, ...] = ()


def wrapped(model: Net, engine: Connection, how: str) -> nn.Module:
    """The model as a worker of several ranks holds it; of one rank as it is."""
    if engine.ranks.count == 1 or how == "plain":
        return model
    if how == "ddp":
        return DistributedDataParallel(model, process_group=engine.ranks.group)
    mesh = engine.ranks.mesh("cpu")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rank_loss(model: nn.Module, engine: Connection, step: int) -> Tensor:
    """On this rank's rows of its worker's batch."""
    x, y = batch(engine.worker, step)
    rank, ranks = engine.ranks.rank, engine.ranks.count
    return (model(x.chunk(ranks)[rank]) - y.chunk(ranks)[rank]).square().mean()


def build_rank(
    engine: Connection, sync: SyncConfig, how: str = "fsdp", *, sgd: bool = False, model: Net | None = None
) -> tuple[nn.Module, DiLoCo]:
    """Every rank starts from its own seed (DDP and FSDP do not care), to show that all begin with worker 0's."""
    whole = wrapped(model or net(seed=engine.worker), engine, how)
    inner: torch.optim.Optimizer
    inner = torch.optim.SGD(whole.parameters(), lr=0.1) if sgd else torch.optim.AdamW(whole.parameters(), lr=1e-2)
    return whole, DiLoCo(whole, inner, engine, sync=sync)


def whole_parameters(model: nn.Module) -> Tensor:
    """All parameters of the worker, gathered, as one vector; collective."""
    parts = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([part.detach().reshape(-1) for part in parts])


def train_rank(
    engine: Connection,
    sync: SyncConfig,
    steps: int,
    how: str = "fsdp",
    *,
    sgd: bool = False,
    stop_after: int | None = None,
) -> RankStory:
    model, optimizer = build_rank(engine, sync, how, sgd=sgd)
    story = RankStory()
    optimizer.loop.on_round = lambda event: story.norms.append(event.norm)
    early = False
    for step in range(steps):
        if early := step == stop_after:
            break
        optimizer.zero_grad()
        rank_loss(model, engine, step).backward()
        optimizer.step()
        story.digests.append(optimizer.anchor_digest())
        if step % 4 == 1:
            story.evaluated.append(evaluated(model, optimizer, engine))
        if optimizer.loop.stopping:
            break
    story.steps = optimizer.loop.inner_steps
    optimizer.finish(early=early)
    return told(story, model, optimizer, engine)


def evaluated(model: nn.Module, optimizer: DiLoCo, engine: Connection) -> float:
    with optimizer.outer_parameters(), torch.no_grad():
        return engine.ranks.sums(rank_loss(model, engine, 999).item())[0] / engine.ranks.count


def told(story: RankStory, model: nn.Module, optimizer: DiLoCo, engine: Connection) -> RankStory:
    outer = optimizer.loop
    story.digests.append(optimizer.anchor_digest())
    story.final = whole_parameters(model).tolist()
    counters = outer.counters
    story.failed, story.refused = counters.rounds_failed, counters.contributions_refused
    story.bytes_sent = counters.bytes_sent
    story.state_elements = sum(fragment.numel for fragment in outer.state.fragments)
    story.member_digests = tuple(member.anchor_digest for member in engine.members())
    dist.barrier()
    return story
