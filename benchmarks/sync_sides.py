"""What sync.py compares: plain training, our DiLoCo, torchft's, each as a user would set it up.

A side is a context manager around a run. It connects first and then yields a function that takes the model and its
inner optimizer and returns the step to call after each backward, and the list in which reported bytes turn up.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

import diloco
from diloco.outer.rounds import RoundEvent

PLAIN = "plain AdamW"
TORCHFT = "torchft 0.2.0"
WORKERS = 2
STEPS_PER_SYNC = 2
LIMIT_SECONDS = 300.0
Build = Callable[[Any, Any], tuple[Callable[[], object], list[int]]]


@dataclass(frozen=True)
class Task:
    """One run of one case: what every worker does."""

    case: str
    size: str
    syncs: int
    port: int
    lighthouse: str


@contextmanager
def plain(_task: Task, _rank: int) -> Iterator[Build]:
    yield lambda _model, inner: (inner.step, [])


@contextmanager
def ours(task: Task, rank: int) -> Iterator[Build]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(WORKERS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    engine = diloco.connect(timeout_seconds=LIMIT_SECONDS)
    reported: list[int] = []

    def note(event: RoundEvent) -> None:
        assert event.result is not None, event.failure
        reported.append(event.result.bytes_sent)

    def build(model: Any, inner: Any) -> tuple[Any, list[int]]:
        codec: Any = task.case.removeprefix("ours ")
        sync = diloco.SyncConfig(num_inner_steps=STEPS_PER_SYNC, codec=codec)
        optimizer = diloco.DiLoCo(model, inner, engine, sync=sync)
        optimizer.loop.on_round = note
        return optimizer.step, reported

    yield build
    engine.close()


@contextmanager
def torchft(task: Task, rank: int) -> Iterator[Build]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    store = TCPStore("127.0.0.1", task.port + rank, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=LIMIT_SECONDS)
    state_holders: dict[str, Any] = {}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: [holder.load_state_dict(state[name]) for name, holder in state_holders.items()],
        state_dict=lambda: {name: holder.state_dict() for name, holder in state_holders.items()},
        min_replica_size=WORKERS,
        use_async_quorum=False,
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=task.port + rank,
        lighthouse_addr=task.lighthouse,
        replica_id=f"worker{rank}",
        hostname="127.0.0.1",
    )

    def build(model: Any, inner: Any) -> tuple[Any, list[int]]:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        state_holders.update(model=model, inner=inner)
        DiLoCo(manager, [model], inner, outer, sync_every=STEPS_PER_SYNC).__enter__()
        return inner.step, []

    yield build
    manager.shutdown(wait=False)
    del store


def side(case: str) -> Callable[[Task, int], AbstractContextManager[Build]]:
    """Return the side of a case. It is entered before the model exists, so that connections are not the model's
    memory."""
    return {PLAIN: plain, TORCHFT: torchft}.get(case, ours)
