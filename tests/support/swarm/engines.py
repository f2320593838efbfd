"""A real swarm on the loopback device: workers are threads of this process, each with a sidecar and a p2pd of its own.

Starting a sidecar takes seconds, so one swarm serves many tests: `Shifted` lets each of them count rounds from 0.
"""

import atexit
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine, PendingRound
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey
from diloco.swarm.engine import SwarmEngine
from diloco.swarm.protocol.status import MemberStatus
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from support.problem import Story, train

T, W = TypeVar("T"), TypeVar("W")


class ElasticWorkers:
    """Workers of an elastic engine in threads of this process; `engines` are in worker order."""

    engines: list[Any]

    def _member(self, engine: Any, number: int) -> MemberStatus:
        found = [one for one in engine.status().members if one.number == number and one.live]
        return found[0] if found else MemberStatus()

    def settle(self) -> None:
        """Until all know of each other that they have the state."""
        deadline = time.monotonic() + 100.0
        while not all(self._member(one, other.worker).has_state for one in self.engines for other in self.engines):
            assert time.monotonic() < deadline, "the workers do not see each other"
            time.sleep(0.02)

    def train(
        self, sync: SyncConfig, steps: int | Sequence[int], first: int, **options: Any
    ) -> tuple[list[Story], int]:
        """All together from the first step on; their stories, and the round after the last.

        `steps`: of all, or of each; the last worker, if it has fewer than the first, leaves when it has taken them.
        """
        gate = threading.Barrier(len(self.engines))
        counts = [steps] * len(self.engines) if isinstance(steps, int) else list(steps)

        def built() -> None:
            gate.wait(200.0)
            self.settle()
            gate.wait(200.0)

        engines = [Shifted(engine, first) for engine in self.engines]

        def work(engine: Shifted) -> Story:
            story = train(engine, sync, counts[engine.worker], built=built, **options)
            if counts[engine.worker] < counts[0]:
                self.leave()
            return story

        return together(engines, work), first + engines[0].rounds

    def leave(self) -> None:
        """The one with the highest number does."""
        self.engines.pop().close()


class LoopbackSwarm(ElasticWorkers):
    """A swarm on the loopback device."""

    def __init__(self, workers: int, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="diloco-swarm-"))
        self.engines: list[SwarmEngine] = []
        self._key = RunKey.create()
        self._settings: dict[str, Any] = {
            "host": "127.0.0.1", "timeout_seconds": 60.0, "patience": 1000.0, "refusals_to_ban": 1000, **settings,
        }  # fmt: skip
        atexit.register(self.close)
        self.engines.append(self._start(0))
        joined = together(range(1, workers), self._start)
        self.engines += sorted(joined, key=lambda engine: engine.worker)
        assert [engine.worker for engine in self.engines] == list(range(workers))

    def _start(self, machine: int) -> SwarmEngine:
        folder = self.folder / f"machine-{machine}" / "swarm"
        write_private(folder / invitation_file(), invite(self._key, self._addresses(), 3600.0, time.time()).text())
        return SwarmEngine(Settings(str(folder), "worker-0", founder=machine == 0, **self._settings))

    def _addresses(self) -> list[str]:
        return [a for engine in self.engines for a in self._member(engine, engine.worker).addresses]

    def lose_p2pd(self, number: int) -> None:
        """It is killed; returns when its worker is in the swarm again."""
        engine = self.engines[number]
        sidecar = engine._sidecar.process
        assert sidecar is not None
        children = Path(f"/proc/{sidecar.pid}/task/{sidecar.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        assert sidecar.exits_within(20.0)
        deadline = time.monotonic() + 100.0
        while engine._sidecar.process in (sidecar, None):  # until its worker has seen that, a round would fail
            assert time.monotonic() < deadline, "the swarm's process is not restarted"
            time.sleep(0.02)
        engine.fetch_state()
        self.settle()

    def close(self) -> None:
        atexit.unregister(self.close)
        for engine in self.engines:
            engine.close()
        shutil.rmtree(self.folder)


def together(workers: Sequence[W], work: Callable[[W], T], seconds: float = 300.0) -> list[T]:
    """`work(worker)` in a thread for each; the results in order. Raises the first one's error, or for a hang."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(index: int) -> None:
        torch.set_num_threads(1)
        try:
            results[index] = work(workers[index])
        except BaseException as error:  # noqa: BLE001  raised again below
            errors[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(len(workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[min(errors)]
    assert not any(thread.is_alive() for thread in threads), "a worker hangs"
    return [results[index] for index in range(len(workers))]


class Shifted(Engine):
    """The engine, with rounds counted from `by` on. It does not close what it shares with others."""

    elastic = True

    def __init__(self, engine: Any, by: int) -> None:
        self.engine, self.by, self.rounds = engine, by, 0
        self.worker = engine.worker

    @property
    def workers(self) -> int:  # type: ignore[override]
        return self.engine.workers

    def wanted(self, sequence: int) -> bool:
        return self.engine.wanted(sequence + self.by)

    def lanes(self, owners: Sequence[tuple[int, ...]]) -> "list[Engine | None]":
        del owners
        return [self]

    @property
    def sizes(self) -> tuple[int, ...]:  # type: ignore[override]
        return (1,)

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        self.rounds = max(self.rounds, key.sequence + 1)
        return self.engine.start_round(self._moved(key, self.by), contribution, deadline_seconds)

    def members(self) -> tuple[Member, ...]:
        return self.engine.members()

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self.engine.serve_state(lambda: self._counted(provider(), self.by))
        self.engine.next_round = self._next_round

    def _next_round(self) -> int | None:
        own = None if self.next_round is None else self.next_round()
        return None if own is None else own + self.by

    def fetch_state(self) -> GlobalState | None:
        state = self.engine.fetch_state()
        return None if state is None else self._counted(state, -self.by)

    def _counted(self, state: GlobalState, by: int) -> GlobalState:
        means = tuple((self._moved(key, by), mean) for key, mean in state.means)
        return replace(state, numbers={**state.numbers, "sequence": state.numbers["sequence"] + by}, means=means)

    def _moved(self, key: RoundKey, by: int) -> RoundKey:
        return RoundKey(key.sequence + by, key.fragment)

    def close(self) -> None:
        """Nothing: others use it."""
