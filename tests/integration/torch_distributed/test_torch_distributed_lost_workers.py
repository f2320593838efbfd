"""A worker that dies or freezes: the others get an EngineError within the bound, never a hang, and can still save."""

import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.errors import EngineError
from support.problem import build, loss_of
from support.processes import World

pytestmark = pytest.mark.slow
VICTIM = 1


def trains_until_the_others_are_lost(engine: TorchDistributedEngine, sync: SyncConfig, flag: Path) -> dict[str, Any]:
    model, optimizer = build(engine, sync)

    def train_for_ever() -> None:
        for step in count():
            optimizer.zero_grad()
            loss_of(model, engine.worker, step).backward()
            optimizer.step()
            if step == 7 and engine.worker == VICTIM:
                flag.touch()

    with pytest.raises(EngineError) as caught:
        train_for_ever()
    with pytest.raises(EngineError):  # and not a second wait
        optimizer.finish()
    with optimizer.outer_parameters():
        fine = all(bool(p.isfinite().all()) for p in model.parameters())
    return {"text": str(caught.value), "fine": fine, "rounds": optimizer.loop.rounds, "again": _again(engine)}


def _again(engine: TorchDistributedEngine) -> str:
    with pytest.raises(EngineError) as caught:
        engine.fetch_state()
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "sync"),
    [
        (signal.SIGKILL, SyncConfig(1, "fp32", timeout_seconds=60.0)),
        (signal.SIGKILL, SyncConfig(4, "int8", fragments=2, overlap_steps=2, mixing=0.5, timeout_seconds=60.0)),
        (signal.SIGSTOP, SyncConfig(2, overlap_steps=1, timeout_seconds=10.0)),
    ],
    ids=["killed mid-round", "killed while streaming", "frozen"],
)
def test_the_others_get_an_error_that_names_the_workers_and_the_remedy(
    how: signal.Signals, sync: SyncConfig, tmp_path: Path
) -> None:
    flag = tmp_path / "training"
    with World(3, trains_until_the_others_are_lost, sync, flag, timeout_seconds=sync.timeout_seconds) as world:
        for _ in range(2000):
            if flag.exists():
                break
            time.sleep(0.05)
        assert flag.exists(), "the workers never came to train"
        pid = world.processes[VICTIM].pid
        assert pid is not None
        os.kill(pid, how)
        survivors = [world.result(worker, seconds=200.0) for worker in (0, 2)]
        for survivor in survivors:
            assert (
                f"one of 3 workers died, left or did not answer within {sync.timeout_seconds:g} s" in survivor["text"]
            )
            assert "start the run again" in survivor["text"]
            assert survivor["again"] == survivor["text"]
            assert survivor["fine"] and survivor["rounds"] >= 1
        for worker in (0, 2):
            world.processes[worker].join(100.0)
            assert world.processes[worker].exitcode == 0
