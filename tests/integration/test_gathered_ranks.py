"""Workers of several ranks among workers that come and go: to the others each looks like a worker of one rank.

The ranks are threads, and all of a worker's ranks see its whole batch, so that its inner steps are those of one rank:
whatever the sizes of the workers, every bit must be the same.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import pytest
import torch
from torch import nn

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import Adam, OuterOptimizer
from diloco.engines.base import Engine
from diloco.engines.first_rank import FirstRankEngine
from diloco.engines.rounds import GlobalState
from diloco.engines.worker_ranks import WorkerRanks
from diloco.optimizer import DiLoCo
from diloco.outer.rounds import RoundEvent
from support.elastic import ElasticSwarm
from support.problem import anchors, build, flat, loss_of, net
from support.thread_ranks import Meeting, in_threads, on_ranks

STEPS = 12
T = TypeVar("T")


@dataclass
class Seen:
    """What one rank saw."""

    digests: list[str] = field(default_factory=list)
    rounds: list[tuple[int, float, float | None]] = field(default_factory=list)
    """Sequence, norm of the outer gradient, codec error."""
    final: list[float] = field(default_factory=list)
    state_elements: int = 0
    layout: str = ""


def of_ranks(swarm: ElasticSwarm, worker: int, ranks: WorkerRanks | None) -> Engine:
    """The engine of one rank of a worker; None: of a worker of one rank."""
    if ranks is None:
        return swarm.engine(worker)
    return FirstRankEngine(swarm.engine(worker) if ranks.rank == 0 else None, ranks)


def in_background(work: Callable[[], T]) -> "Future[T]":
    return ThreadPoolExecutor(1).submit(work)


def train_on(model: nn.Module, optimizer: DiLoCo, *, worker: int, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, worker, step).backward()
        optimizer.step()


def train(
    swarm: ElasticSwarm,
    worker: int,
    ranks: WorkerRanks | None,
    sync: SyncConfig,
    outer: OuterOptimizer | None,
    built: list[threading.Event],
) -> Seen:
    """All begin at the same position: a worker that joins later would jump ahead."""
    if worker:
        assert built[0].wait(60.0)
    engine = of_ranks(swarm, worker, ranks)
    model = net(seed=worker)
    optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=1e-2), engine, sync=sync, outer=outer)
    built[worker].set()
    while engine.ranks.tell(b"all" if all(event.is_set() for event in built) else b"") == b"":
        engine.wanted(0)  # meanwhile the ranks gather their state for joiners
        time.sleep(0.001)
    seen = Seen(layout=optimizer.loop.replica.lanes[0].layout_digest)

    def on_round(event: RoundEvent) -> None:
        assert event.failure is None
        seen.rounds.append((event.key.sequence, event.norm, event.codec_error))

    optimizer.on_round = on_round
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, worker, step).backward()
        optimizer.step()
        seen.digests.append(optimizer.anchor_digest())
    optimizer.finish()
    seen.digests.append(optimizer.anchor_digest())
    seen.final = flat(model).tolist()
    seen.state_elements = len(anchors(optimizer))
    return seen


def train_all(sizes: Sequence[int], sync: SyncConfig, outer: OuterOptimizer | None = None) -> list[list[Seen]]:
    """By worker, by rank."""
    swarm = ElasticSwarm(range(len(sizes)))
    built = [threading.Event() for _ in sizes]
    works = []
    for worker, size in enumerate(sizes):
        meeting = Meeting(size)
        for rank in range(size):
            place = None if size == 1 else meeting.rank(rank)
            works.append(lambda worker=worker, place=place: train(swarm, worker, place, sync, outer, built))
    results = iter(in_threads(works))
    return [[next(results) for _ in range(size)] for size in sizes]


OPTIONS = {
    "plain": SyncConfig(num_inner_steps=4),
    "int4": SyncConfig(num_inner_steps=4, codec="int4"),
    "streaming": SyncConfig(num_inner_steps=4, fragments=2, overlap_steps=1, mixing=0.5, codec="int8"),
    "eager": SyncConfig(num_inner_steps=4, outer_overlap="eager", codec="fp32"),
    "clipped": SyncConfig(num_inner_steps=4, merge="clipped"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_workers_of_one_two_and_three_ranks_train_together_as_workers_of_one_rank_do(name: str) -> None:
    expected = train_all([1, 1, 1], OPTIONS[name])
    seen = train_all([1, 2, 3], OPTIONS[name])
    for worker in range(3):
        for rank in seen[worker]:
            assert rank.layout == expected[0][0].layout
            assert rank.digests == expected[worker][0].digests
            assert rank.rounds == expected[worker][0].rounds
            assert rank.final == expected[worker][0].final


def test_adam_s_outer_state_is_shared_out_among_the_ranks() -> None:
    sync = SyncConfig(num_inner_steps=4)
    expected = train_all([1, 1], sync, Adam())
    seen = train_all([4, 2], sync, Adam())
    assert {rank.final == expected[worker][0].final for worker in range(2) for rank in seen[worker]} == {True}
    whole = expected[0][0].state_elements
    for worker in seen:
        held = [rank.state_elements for rank in worker]
        assert sum(held) == whole and max(held) < 0.6 * whole


def served_state(size: int) -> GlobalState:
    """What a joiner gets of a worker of so many ranks after a round."""
    swarm = ElasticSwarm([0])

    def work(ranks: WorkerRanks | None) -> GlobalState | None:
        engine = of_ranks(swarm, 0, ranks)
        model = net(seed=3)
        model.register_buffer("counted", torch.full((5,), 2.0))
        model.register_buffer("number", torch.arange(3))
        optimizer = DiLoCo(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), engine, sync=SyncConfig(3, fragments=2)
        )
        train_on(model, optimizer, worker=0, steps=5)
        if ranks is None:
            return swarm.providers[0]()
        if ranks.rank == 0:
            asked = in_background(swarm.providers[0])
        while ranks.tell(b"done" if ranks.rank == 0 and asked.done() else b"") == b"":
            engine.wanted(10**6)
        return asked.result() if ranks.rank == 0 else None

    state = work(None) if size == 1 else on_ranks(size, work)[0]
    assert state is not None
    return state


@pytest.mark.parametrize("size", [2, 5])
def test_the_state_that_ranks_gather_is_that_of_one_rank(size: int) -> None:
    expected = served_state(1)
    state = served_state(size)
    assert state.tensors.keys() == expected.tensors.keys()
    for name, tensor in expected.tensors.items():
        assert state.tensors[name].dtype == tensor.dtype and torch.equal(state.tensors[name], tensor), name
    assert (state.numbers, state.layout_digest) == (expected.numbers, expected.layout_digest)


def test_a_joiner_of_two_ranks_takes_over_the_state_and_a_joiner_of_one_rank_takes_over_theirs() -> None:
    """Worker 1 joins after two rounds of worker 0, then worker 2 after worker 0 has left."""
    sync = SyncConfig(2)
    swarm = ElasticSwarm([0])
    world = build(swarm.engine(0), sync)
    train_on(*world, worker=0, steps=5)

    def joiner(ranks: WorkerRanks) -> list[str]:
        engine = of_ranks(swarm, 1, ranks)
        model, optimizer = build(engine, sync)
        digests = [optimizer.anchor_digest()]
        if ranks.rank == 0:
            swarm.leave(0)
        ranks.tell(b"")
        train_on(model, optimizer, worker=1, steps=1)
        digests.append(optimizer.anchor_digest())
        if ranks.rank == 0:
            last = in_background(lambda: build(swarm.engine(2), sync)[1].anchor_digest())
        while ranks.tell(b"done" if ranks.rank == 0 and last.done() else b"") == b"":
            engine.wanted(10**6)
        return [*digests, last.result()] if ranks.rank == 0 else digests

    first, second = on_ranks(2, joiner)
    assert first[:2] == second
    assert first[0] == world[1].anchor_digest()
    assert first[1] != first[0] and first[2] == first[1]


def test_a_round_that_fails_fails_on_all_ranks_and_all_take_over_the_others_state() -> None:
    """The others end round 1 without worker 1: its two ranks resynchronise, and every later round has equal anchors."""
    sync = SyncConfig(2)
    swarm = ElasticSwarm([0, 1], drop=[(1, 1)])
    built = [threading.Event(), threading.Event()]
    meeting = Meeting(2)

    def work(worker: int, ranks: WorkerRanks | None) -> tuple[list[str], int, int]:
        if worker:
            assert built[0].wait(60.0)
        engine = of_ranks(swarm, worker, ranks)
        model, optimizer = build(engine, sync)
        built[worker].set()
        assert built[1].wait(60.0)
        train_on(model, optimizer, worker=worker, steps=8)
        return [optimizer.anchor_digest()], optimizer.failures, optimizer.loop.counters.resyncs

    alone, first, second = in_threads(
        [lambda: work(0, None), lambda: work(1, meeting.rank(0)), lambda: work(1, meeting.rank(1))]
    )
    assert first == second and first[0] == alone[0]
    assert first[1:] == (1, 1) and alone[1:] == (0, 0)
