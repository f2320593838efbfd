"""What a round costs: seconds and memory of a worker alone, of two over gloo and of two in a swarm, on one device.

    python benchmarks/rounds.py                         the paper's 150M model (151M parameters), on the GPU
    python benchmarks/rounds.py --device cpu --model 60m --rounds 3
    python benchmarks/rounds.py --cases alone gloo      without the swarm, which needs the extra 'swarm'
    python benchmarks/rounds.py --free-gradients        without gradients beside a round, as `diloco train` has it

All workers share this machine and its GPU. A round is timed on every worker from the moment when all have taken their
inner step to updated parameters (`post`, then `merge`), and the slowest counts; the first two rounds are not counted.
The inner optimizer is AdamW with gradients in place, so that memory is that of training: `copies` is the peak of a
worker's memory in fp32 copies of the model, on a GPU as its allocator counts, on a CPU the resident memory (VmHWM)
beyond that of a process which has taken a step of AdamW, for which torch loads some 90 MB of its own.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import diloco
import search_path  # noqa: F401  `support` of the tests
from diloco.engines.base import Connection as Engine
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from measuring import Spread, check_cuda, peak_memory, reset_peak_memory, results_path, write_results

LIMIT_SECONDS = 300.0
CASES = ("alone", "gloo", "swarm")


@dataclass(frozen=True)
class Task:
    """What every worker does."""

    codec: str
    model: str
    device: str
    rounds: int
    free_gradients: bool = False


@dataclass(frozen=True)
class Measured:
    seconds: list[float]
    copies: float
    digest: str


def measure(engine: Engine, task: Task, together: Callable[[], object]) -> Measured:
    """Measure rounds. `together` returns when all workers have called it."""
    device = torch.device(task.device)
    torch.manual_seed(0)
    _warm_up()
    resident_before = reset_peak_memory()
    with device:
        model = NativeModel(preset(task.model))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    codec: Any = task.codec
    optimizer = diloco.DiLoCo(model, inner, engine, sync=diloco.SyncConfig(num_inner_steps=1, codec=codec))
    if task.free_gradients:
        inner.register_step_post_hook(lambda *_: inner.zero_grad())
    seconds = []
    for _ in range(task.rounds + 2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.inner_step()
        _finish(device)
        together()
        started = time.perf_counter()
        optimizer.post()
        optimizer.merge()
        _finish(device)
        seconds.append(time.perf_counter() - started)
    assert optimizer.loop.rounds == task.rounds + 2 and not optimizer.loop.counters.rounds_failed
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else peak_memory() - resident_before
    size = 4 * sum(parameter.numel() for parameter in model.parameters())
    return Measured(seconds[2:], peak / size, optimizer.anchor_digest())


def _warm_up() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    torch.optim.AdamW([parameter], fused=True).step()


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# The workers of each case


def over_gloo(task: Task, rank: int, workers: int, port: int, barrier: Any, pipe: Connection) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    engine = diloco.connect(timeout_seconds=LIMIT_SECONDS)
    pipe.send(measure(engine, task, lambda: barrier.wait(LIMIT_SECONDS)))
    engine.close()


def in_processes(workers: int, task: Task) -> list[Measured]:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(workers)
    port = _free_port()
    pipes = [context.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        context.Process(target=over_gloo, args=(task, rank, workers, port, barrier, pipes[rank][1]))
        for rank in range(workers)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    measured = [receiver.recv() for receiver, _ in pipes]
    for process in processes:
        process.join(LIMIT_SECONDS)
    return measured


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def swarm_worker(settings: Any, pipe: Connection, task: Task, workers: int) -> None:
    """Run a swarm's worker. Sends its number, and before each round "ready"; any answer begins the round."""
    from diloco.swarm.engine import SwarmEngine

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    engine = SwarmEngine(settings)
    pipe.send((True, engine.worker))

    def together() -> None:
        pipe.send((True, "ready"))
        pipe.recv()

    measured = measure(engine, task, together)
    pipe.send((True, measured))
    pipe.recv()
    engine.close()


def in_a_swarm(workers: int, task: Task) -> list[Measured]:
    from support.swarm.processes import Workers

    with tempfile.TemporaryDirectory() as folder, Workers(Path(folder), patience=1000.0) as swarm:
        all_workers = swarm.start_all([f"machine{n}" for n in range(workers)], swarm_worker, task, workers)
        for _ in range(task.rounds + 2):
            for worker in all_workers:
                assert worker.hear(LIMIT_SECONDS) == "ready"
            for worker in all_workers:
                worker.say("go")
        measured: list[Measured] = [worker.hear(LIMIT_SECONDS) for worker in all_workers]
        for worker in all_workers:
            worker.say("end")
        return measured


def summarise(case: str, task: Task, measured: list[Measured]) -> dict[str, Any]:
    if len({worker.digest for worker in measured}) > 1:
        raise SystemExit(f"{case}, {task.codec}: the workers' anchors differ")
    slowest = [max(pair) for pair in zip(*(worker.seconds for worker in measured), strict=True)]
    copies = statistics.median(worker.copies for worker in measured)
    row = {
        "case": case,
        **asdict(task),
        "workers": len(measured),
        "seconds": vars(Spread.of(slowest)),
        "copies": copies,
    }
    print(f"{case:6} {task.codec:6} {row['seconds']['median'] * 1e3:9.2f} ms   {copies:.2f} copies", flush=True)
    return row


def rows_before(rows: list[dict[str, Any]], device: str | None) -> list[dict[str, Any]]:
    """Read what an earlier run has measured on such a machine and this one has not."""
    path = results_path("rounds", device)
    if not path.exists():
        return []
    new_cases = [_case_of(row) for row in rows]
    return [row for row in json.loads(path.read_text())["results"] if _case_of(row) not in new_cases]


def _case_of(row: dict[str, Any]) -> tuple[Any, ...]:
    values = (row[name] for name in ("case", "codec", "model", "device"))
    return (*values, row.get("free_gradients", False))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="150m")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--codecs", nargs="+", default=["fp16", "int8"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--free-gradients", action="store_true")
    options = parser.parse_args()
    if options.device == "cuda":
        check_cuda("use --device cpu")
    rows = []
    for case in options.cases:
        for name in options.codecs:
            task = Task(name, options.model, options.device, options.rounds, options.free_gradients)
            measured = in_a_swarm(2, task) if case == "swarm" else in_processes(1 if case == "alone" else 2, task)
            rows.append(summarise(case, task, measured))
    device = torch.cuda.get_device_name() if options.device == "cuda" else None
    print(write_results("rounds", rows_before(rows, device) + rows, device=device))


if __name__ == "__main__":
    main()
