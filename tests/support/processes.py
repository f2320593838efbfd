"""k workers as processes of this machine, over torch.distributed with gloo on the loopback device."""

import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diloco.engines.connect import join
from diloco.engines.ranked import RankedEngine
from diloco.engines.torch_distributed import TorchDistributedEngine
from support.forks import context

Work = Callable[..., Any]


class World:
    """Worker processes that run `work(engine, *arguments)`; each sends one result, or its traceback."""

    def __init__(
        self,
        workers: int,
        work: Work,
        *arguments: Any,
        timeout_seconds: float = 100.0,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        """With `sizes`, the ranks of each worker, there is a process for each rank, in order."""
        self._folder = tempfile.TemporaryDirectory()
        path = str(Path(self._folder.name) / "rendezvous")
        self.processes: list[BaseProcess] = []
        self._results: list[Connection] = []
        world = sum(sizes or (1,) * workers)
        for rank in range(world):
            receive, send = context.Pipe(duplex=False)
            process = context.Process(
                target=_run, args=(rank, world, path, timeout_seconds, send, sizes, work, arguments), daemon=True
            )
            process.start()
            send.close()
            self.processes.append(process)
            self._results.append(receive)

    def result(self, worker: int, seconds: float = 200.0) -> Any:
        """What the worker sends next."""
        assert self._results[worker].poll(seconds), f"nothing from worker {worker} within {seconds} s"
        fine, value = self._results[worker].recv()
        assert fine, f"worker {worker} failed:\n{value}"
        return value

    def results(self, seconds: float = 200.0) -> list[Any]:
        return [self.result(worker, seconds) for worker in range(len(self.processes))]

    def exit_codes(self, seconds: float = 100.0) -> list[int | None]:
        for process in self.processes:
            process.join(seconds)
        return [process.exitcode for process in self.processes]

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._folder.cleanup()


def in_processes(workers: int, work: Work, *arguments: Any, timeout_seconds: float = 100.0) -> list[Any]:
    """`work(engine, *arguments)` in every process; the results in worker order."""
    with World(workers, work, *arguments, timeout_seconds=timeout_seconds) as world:
        results = world.results()
        assert world.exit_codes() == [0] * workers
        return results


def with_ranks(sizes: tuple[int, ...], work: Work, *arguments: Any, timeout_seconds: float = 100.0) -> list[Any]:
    """The same for workers of several ranks; the results in the order of all ranks."""
    with World(len(sizes), work, *arguments, timeout_seconds=timeout_seconds, sizes=sizes) as world:
        results = world.results()
        assert world.exit_codes() == [0] * sum(sizes)
        return results


def _run(
    rank: int,
    world: int,
    path: str,
    timeout_seconds: float,
    send: Connection,
    sizes: tuple[int, ...] | None,
    work: Work,
    arguments: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        join(path, dist.FileStore(path, world), rank, world, 100.0)
        engine: TorchDistributedEngine | RankedEngine
        if sizes is None:
            engine = TorchDistributedEngine(timeout_seconds=timeout_seconds, owns_world=True)
        else:
            engine = RankedEngine(sizes, timeout_seconds=timeout_seconds, owns_world=True)
        value = work(engine, *arguments)
        engine.close()
        send.send((True, value))
    except BaseException:  # noqa: BLE001  the test raises it again, in its own process
        send.send((False, traceback.format_exc()))
