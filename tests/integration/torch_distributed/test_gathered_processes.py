"""A worker of two ranks in processes, with FSDP2 and DDP over gloo, as a member of an elastic set of workers: what it
posts, merges and serves is what a worker of one rank does.

Both ranks see the whole batch, so that their mean gradient is that of one rank, bit for bit.
"""

from dataclasses import dataclass, field

import pytest
import torch

from diloco.core.config import SyncConfig
from diloco.engines.base import Connection, Engine
from diloco.engines.first_rank import FirstRankEngine
from diloco.optimizer import DiLoCo
from support.elastic import ElasticSwarm
from support.problem import loss_of, net
from support.processes import with_ranks
from support.ranks import whole_parameters, wrapped

SYNC = SyncConfig(num_inner_steps=3, fragments=2, overlap_steps=1, codec="int8")
STEPS = 10
SPLIT = 5


@dataclass
class Trained:
    digests: list[str] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


def train(engine: Engine, how: str) -> Trained:
    """Ten steps; then the state of step 5 is loaded, and the last five are taken again."""
    model = wrapped(net(seed=1), engine, how)
    optimizer = DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine, sync=SYNC)
    trained = Trained()
    optimizer.loop.on_round = lambda event: trained.norms.append(event.norm)
    for step in range(STEPS):
        if step == SPLIT:
            saved = optimizer.state_dict()
            weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()
        trained.digests.append(optimizer.anchor_digest())
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    for step in range(SPLIT, STEPS):
        optimizer.zero_grad()
        loss_of(model, 0, step).backward()
        optimizer.step()
        trained.loaded.append(optimizer.anchor_digest())
    optimizer.finish()
    trained.digests.append(optimizer.anchor_digest())
    trained.final = whole_parameters(model).tolist()
    return trained


def on_a_rank(engine: Connection, how: str) -> Trained:
    first = ElasticSwarm([0]).engine(0) if engine.ranks.rank == 0 else None
    return train(FirstRankEngine(first, engine.ranks), how)


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_two_ranks_over_gloo_train_as_one_rank_does_and_go_on_from_a_saved_state(how: str) -> None:
    expected = train(ElasticSwarm([0]).engine(0), "plain")
    for rank in with_ranks((2,), on_a_rank, how):
        assert rank.digests == expected.digests
        assert rank.norms == expected.norms
        assert rank.final == expected.final
        assert rank.loaded == rank.digests[SPLIT:STEPS]
