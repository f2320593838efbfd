"""One worker of blocking.py, in a network namespace of its own. Writes what it saw as JSON into the task's folder.

    python benchmarks/blocking_worker.py '{"engine": "gloo", "rank": 0, ...}'       started by blocking.py

An inner step is a sleep, as if a GPU computed: that leaves the CPU free, as a GPU does. It also moves some parameters
a little, so that there are outer gradients. With `busy` it is matrix products on one thread instead. A step is timed
around the call of the inner optimizer's `step`, as a loop without DiLoCo has it too; torchft averages in a hook that
torch calls there, so its step is timed inside the call.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

import diloco
from links import ADDRESSES, DEVICE
from sync import build_model

LIMIT_SECONDS = 120.0
SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Task:
    """One worker's part of one case."""

    rank: int
    engine: str
    """gloo, swarm or torchft."""
    codec: str
    num_inner_steps: int
    fragments: int
    """Fragments of the blocks; the embeddings are one more. 1: the whole model at once."""
    overlap_steps: int
    mixing: float
    step_seconds: float
    syncs: int
    folder: str
    size: str = "10.5M"
    busy: bool = False


@dataclass
class Measured:
    """What a worker measured in the steps after the first sync, which is not counted."""

    steps: int = 0
    seconds: float = 0.0
    inner_seconds: float = 0.0
    cpu_seconds: float = 0.0
    thread_seconds: float = 0.0
    """Processor time of the trainer's own thread between the inner steps: what it costs on a machine that is idle."""
    rounds_failed: int = 0
    steps_with_transfer: list[float] = field(default_factory=list)
    steps_without: list[float] = field(default_factory=list)
    sent: list[tuple[float, int]] = field(default_factory=list)


class EmulatedSteps(torch.optim.SGD):
    """Inner steps of a given length. Each moves a few of the parameters, so that all have moved after some steps."""

    def __init__(self, parameters: list[torch.nn.Parameter], task: Task) -> None:
        super().__init__(parameters, lr=1.0)
        self.task = task
        self.moved = parameters
        self.taken = 0
        self.seconds: list[float] = []
        self.thread_seconds = 0.0
        self.with_transfer: list[float] = []
        self.without: list[float] = []
        self.in_flight: Callable[[], bool] = lambda: False
        self.square = torch.randn(320, 320)
        if task.engine == "torchft":
            self._compute = self._timed(self._compute)  # type: ignore[method-assign]
        else:
            self.step = self._timed(self.step)  # type: ignore[method-assign,assignment]

    def _timed(self, call: Callable[[], None]) -> Callable[[], None]:
        def timed() -> None:
            started = time.perf_counter()
            thread_started = time.thread_time()
            call()
            self.seconds.append(time.perf_counter() - started)
            (self.with_transfer if self.in_flight() else self.without).append(self.seconds[-1])
            self.thread_seconds += time.thread_time() - thread_started

        return timed

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del closure
        self._compute()

    def _compute(self) -> None:
        started = time.perf_counter()
        for number in range(4):
            parameter = self.moved[(4 * self.taken + number) % len(self.moved)]
            parameter.add_(-1e-3 if self.task.rank else 1e-3)
        self.taken += 1
        if self.task.busy:
            for _ in range(round(self.task.step_seconds * 1000)):
                torch.mm(self.square, self.square)
        else:
            time.sleep(max(0.0, started + self.task.step_seconds - time.perf_counter()))


# The engines


@contextmanager
def torchft(task: Task, model: Any, inner: EmulatedSteps) -> Iterator[Callable[[], object]]:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    address = ADDRESSES[task.rank]
    limit = timedelta(seconds=LIMIT_SECONDS)
    lighthouse = LighthouseServer(bind=f"{ADDRESSES[0]}:29510", min_replicas=2) if task.rank == 0 else None
    store = TCPStore(address, 29500, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=lambda state: model.load_state_dict(state),
        state_dict=lambda: model.state_dict(),
        min_replica_size=2,
        use_async_quorum=False,
        init_sync=False,  # both begin with the same parameters
        timeout=limit,
        quorum_timeout=limit,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=29500,
        lighthouse_addr=f"http://{ADDRESSES[0]}:29510",
        replica_id=f"worker{task.rank}",
        hostname=address,
    )
    parts = [model]
    if task.fragments > 1:
        blocks = list(model.model.layers)
        parts = [torch.nn.ModuleList(blocks[first :: task.fragments]) for first in range(task.fragments)]
        parts.append(torch.nn.ModuleList([model.model.embed_tokens, model.model.norm]))
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts]
    options = {"fragment_sync_delay": task.overlap_steps, "fragment_update_alpha": task.mixing}
    with DiLoCo(manager, parts, inner, outer, sync_every=task.num_inner_steps, **options):
        yield inner.step
    del lighthouse, store


def _swarm_engine(task: Task) -> Any:
    from diloco.swarm.engine import SwarmEngine
    from diloco.swarm.run_files import invitation_file, write_private
    from diloco.swarm.settings import Settings
    from diloco.swarm.trust.invitation import invite
    from diloco.swarm.trust.run_key import RunKey

    shared = Path(task.folder) / "invitation"
    folder = Path(task.folder) / f"machine-{task.rank}" / "swarm"
    if task.rank == 0:
        key = RunKey.create()
        write_private(folder / invitation_file(), invite(key, [], 3600.0, time.time()).text())
    else:
        until(lambda: shared.exists())
        write_private(folder / invitation_file(), shared.read_text())
    host = ADDRESSES[task.rank]
    engine = SwarmEngine(Settings(str(folder), "worker-0", founder=task.rank == 0, host=host, patience=1000.0))
    if task.rank == 0:
        until(lambda: any(member.addresses for member in engine.status().members))
        addresses = [address for member in engine.status().members for address in member.addresses]
        write_private(shared, invite(key, addresses, 3600.0, time.time()).text())
    return engine


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the other worker did not come")
        time.sleep(0.05)


@contextmanager
def ours(task: Task, model: Any, inner: EmulatedSteps) -> Iterator[Callable[[], object]]:
    codec: Any = task.codec
    sync = diloco.SyncConfig(
        num_inner_steps=task.num_inner_steps,
        codec=codec,
        fragments=task.fragments,
        overlap_steps=task.overlap_steps,
        mixing=task.mixing,
    )
    if task.engine == "gloo":
        os.environ.update(RANK=str(task.rank), WORLD_SIZE="2", MASTER_ADDR=ADDRESSES[0], MASTER_PORT="29500")
    connected: Any = diloco.connect(timeout_seconds=LIMIT_SECONDS) if task.engine == "gloo" else _swarm_engine(task)
    with connected as engine:
        if task.engine == "swarm":
            until(lambda: engine.workers == 2)
        optimizer = diloco.DiLoCo(model, inner, engine, sync=sync)
        if task.engine == "swarm":
            until(lambda: len(engine.roster) == 2)
        inner.in_flight = lambda: bool(optimizer.loop.in_flight)
        yield optimizer.step
        optimizer.loop.merge_pending()
        if optimizer.loop.counters.rounds_failed:
            raise SystemExit(f"{optimizer.loop.counters.rounds_failed} rounds failed")
        if task.engine == "swarm":
            time.sleep(2.0)  # the other's last round needs this one's sidecar


# Measuring


def result_path(folder: str, rank: int) -> Path:
    """Return the file of a worker's result. The standard output would not do: torchft makes it non-blocking, and a long
    line is then cut."""
    return Path(folder) / f"result-{rank}.json"


def sample(sent: list[tuple[float, int]], stop: threading.Event) -> None:
    """Sample the bytes that have left this namespace, every 20 ms."""
    counter = Path(f"/sys/class/net/{DEVICE}/statistics/tx_bytes")
    while not stop.wait(SAMPLE_SECONDS):
        sent.append((time.perf_counter(), int(counter.read_text())))


def measure(task: Task) -> Measured:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
    model = build_model(task.size)
    inner = EmulatedSteps(list(model.parameters()), task)
    measured = Measured()
    stop = threading.Event()
    with (torchft if task.engine == "torchft" else ours)(task, model, inner) as step:
        sampler = threading.Thread(target=sample, args=(measured.sent, stop), daemon=True)
        for number in range(task.num_inner_steps * (task.syncs + 1)):
            if number == task.num_inner_steps:
                for times in (inner.seconds, inner.with_transfer, inner.without):
                    times.clear()
                sampler.start()
                inner.thread_seconds = 0.0
                started = time.perf_counter()
                cpu_started = time.process_time()
                thread_started = time.thread_time()
            step()
        measured.seconds = time.perf_counter() - started
        measured.cpu_seconds = time.process_time() - cpu_started
        measured.thread_seconds = time.thread_time() - thread_started - inner.thread_seconds
        stop.set()
        sampler.join()
        measured.steps = len(inner.seconds)
        measured.inner_seconds = sum(inner.seconds)
        measured.steps_with_transfer = inner.with_transfer
        measured.steps_without = inner.without
    return measured


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    result_path(task.folder, task.rank).write_text(json.dumps(measure(task).__dict__))
    os._exit(0)  # torchft's threads outlive its shutdown


if __name__ == "__main__":
    main()
