"""How long an inner step takes while a round is in flight, and while none is: on one GPU, or on a CPU.

    python benchmarks/step_time.py                                         the 60m model on the GPU, under a minute
    python benchmarks/step_time.py --device cpu --model tiny --batch 8 --sequence 64

Two workers over gloo on this machine, streaming in four fragments (the embeddings are one), overlap, int4. Worker 0
trains: forward, backward and AdamW of a real model. Worker 1 takes its steps without computing, so that beside worker
0's steps there is the transfer alone: on one GPU two that compute would slow each other down whether or not a round
travels. `--other` says where worker 1 is:

    cpu       on the CPU, so that the GPU does what it does where each worker has one
    gpu       on the same GPU, which gives the two processes turns
    apart     on the same GPU with the same steps and syncs, alone: worker 0 neither posts nor merges, no round is in
              flight. What its steps lose then, they lose to another process on their GPU, not to a round

    step      from the start of the forward pass to the end of the inner optimizer's step: CUDA events, or a clock
    with      a round is posted and not merged; `without`: none is
    outer     from there to the start of the next step, a full-model sync: posts, merges, and waiting for a late mean
    round     from a post until the whole mean is there
    lost      by all steps of a sync together, against as many at the median of those `without`

Medians after the first sync, which is not counted. The steps of a sync are alike: a fragment is in flight for two
of five steps. Target: `with` at most 2 % above `without`.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

import diloco
from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from measuring import Spread, check_cuda, write_results

H = 20
FRAGMENTS = 3
OVERLAP = 2
LIMIT_SECONDS = 120.0
MOST_SLOWER = 1.02


@dataclass(frozen=True)
class Task:
    """What both workers do."""

    device: str
    model: str
    batch: int
    sequence: int
    syncs: int
    codec: str
    other: str
    """Where worker 1 is: "cpu", "gpu" or "apart"."""
    trace: str
    """A folder for a trace of one more sync, for chrome://tracing or Perfetto; "": none."""
    apart_step_seconds: float
    """How long an inner step takes, for the cadence of a worker 1 that is apart."""
    port: int


@dataclass
class Measured:
    """What worker 0 measured after the first sync, in seconds."""

    with_transfer: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    outer: list[float] = field(default_factory=list)
    """One for each sync."""
    rounds: list[float] = field(default_factory=list)
    waited: float = 0.0


class Clock:
    """Moments on a device: CUDA events in the trainer's stream, or the time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        return float(start.elapsed_time(end) / 1000 if self._cuda else end - start)


def connect(task: Task, rank: int) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    return diloco.connect(timeout_seconds=LIMIT_SECONDS)


def build(task: Task, device: str) -> tuple[Any, diloco.SyncConfig]:
    torch.manual_seed(0)
    with torch.device(device):
        model = NativeModel(preset(task.model))
    codec: Any = task.codec
    sync = diloco.SyncConfig(
        H,
        codec,
        fragments=FRAGMENTS,
        overlap_steps=OVERLAP,
        mixing=0.5,
        max_norm_ratio=None,
        timeout_seconds=LIMIT_SECONDS,
    )
    return model, sync


def train(task: Task, pipe: Connection) -> None:
    """Train as worker 0, and send what it measured."""
    with connect(task, 0) as engine:
        model, sync = build(task, task.device)
        device = torch.device(task.device)
        optimizer = diloco.DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=1e-4), engine, sync=sync)
        tokens = torch.randint(model.config.vocab_size, (task.batch, task.sequence + 1), device=device)

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model.loss(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.inner_step()

        pipe.send(measure(optimizer, step, Clock(device), task))
        if task.other == "apart":
            optimizer.unfinished.silence()
        else:
            optimizer.finish()


def measure(optimizer: diloco.DiLoCo, step: Callable[[], None], clock: Clock, task: Task) -> Measured:
    result = Measured()
    loop = optimizer.loop
    syncs = task.syncs
    steps: list[tuple[bool, Any, Any, Any]] = []
    for _ in range(H * (syncs + 1)):
        in_flight = bool(loop.in_flight)
        started = clock.now()
        step()
        stepped = clock.now()
        if len(steps) == H:  # the second sync begins
            loop.on_round = lambda event: result.rounds.append(event.result.seconds if event.result else float("nan"))
        waiting = loop.counters.sync_seconds
        if task.other != "apart":
            optimizer.post()
            optimizer.merge()
        steps.append((in_flight, started, stepped, clock.now()))
        result.waited += loop.counters.sync_seconds - waiting if len(steps) > H else 0.0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for in_flight, started, stepped, _ in steps[H:]:
        (result.with_transfer if in_flight else result.without).append(clock.seconds(started, stepped))
    for first in range(H, len(steps), H):
        result.outer.append(sum(clock.seconds(moments[2], moments[3]) for moments in steps[first : first + H]))
    result.waited /= syncs
    if task.trace:
        with torch.profiler.profile() as profiler:
            for _ in range(H):
                step()
                if task.other != "apart":
                    optimizer.post()
                    optimizer.merge()
        profiler.export_chrome_trace(f"{task.trace}/step-time-{task.other}.json.gz")
    return result


def follow(task: Task) -> None:
    """Follow as worker 1: the same rounds, and no computing between them."""
    with connect(task, 1) as engine:
        model, sync = build(task, "cpu" if task.other == "cpu" else task.device)
        optimizer = diloco.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1e-4), engine, sync=sync)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        if task.other == "apart":
            optimizer.unfinished.silence()
            model, _ = build(task, task.device)
            keep_turning(model, sync, task)
            return
        for _ in range(H * (task.syncs + (2 if task.trace else 1))):
            optimizer.step()
        optimizer.finish()


def keep_turning(model: Any, sync: diloco.SyncConfig, task: Task) -> None:
    """Do what worker 1 does, but alone, at the pace of worker 0's steps, until the process is ended."""
    optimizer = diloco.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=1e-4), diloco.alone(), sync=sync)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    between = H // (FRAGMENTS + 1)
    while True:
        for _ in range(between):
            optimizer.step()
        time.sleep(between * task.apart_step_seconds)


def run(task: Task) -> Measured:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    processes = [context.Process(target=train, args=(task, sender)), context.Process(target=follow, args=(task,))]
    for process in processes:
        process.start()
    sender.close()
    try:
        result: Measured = receiver.recv()
    except EOFError:
        raise SystemExit("worker 0 gave no result") from None
    finally:
        if task.other == "apart":
            processes[1].kill()
        for process in processes:
            process.join(LIMIT_SECONDS)
            process.kill()
    return result


def summarise(task: Task, result: Measured) -> dict[str, Any]:
    row = {name: value for name, value in asdict(task).items() if name not in ("port", "trace")} | {
        "H": H,
        "overlap_steps": OVERLAP,
    }
    spreads = {"with": result.with_transfer, "without": result.without, "outer": result.outer, "round": result.rounds}
    for name, values in spreads.items():
        if not values:  # of a round, where there is none
            continue
        row[f"{name}_seconds"] = vars(Spread.of(values))
        print(f"{name:8} {1e3 * statistics.median(values):8.2f} ms  ({len(values)})")
    usual_seconds = statistics.median(result.without)
    row["slower"] = statistics.median(result.with_transfer) / usual_seconds if result.with_transfer else None
    row["lost_seconds"] = sum(seconds - usual_seconds for seconds in result.with_transfer + result.without) / task.syncs
    print(f"lost     {1e3 * row['lost_seconds']:8.2f} ms  a sync, of {1e3 * H * usual_seconds:.1f}")
    row["waited_seconds"] = result.waited
    share = sum(result.with_transfer) + sum(result.without)
    row["utilization"] = share / (share + sum(result.outer))
    if result.with_transfer:
        print(f"a step with a round in flight takes {row['slower']:.3f} of one without", end="; ")
    print(f"utilisation {row['utilization']:.1%}")
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="60m")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--syncs", type=int, default=8, help="that are measured, of 20 steps each")
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--other", choices=("cpu", "gpu", "apart"), nargs="*", default=["cpu", "gpu", "apart"])
    parser.add_argument("--apart-step-seconds", type=float, default=0.0224)
    parser.add_argument("--trace", default="", help="a folder for a trace of one more sync of each case")
    options = parser.parse_args()
    if options.device == "cuda":
        check_cuda("use --device cpu")
    rows = []
    for other in options.other:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        sizes = (options.device, options.model, options.batch, options.sequence, options.syncs, options.codec)
        task = Task(*sizes, other, options.trace, options.apart_step_seconds, port)
        print(f"worker 1: {other}")
        rows.append(summarise(task, run(task)))
    device = torch.cuda.get_device_name() if options.device == "cuda" else None
    print(write_results("step-time", rows, device=device))
    slow = [row["slower"] for row in rows if row["other"] == "cpu" and row["slower"] > MOST_SLOWER]
    if slow:
        print(f"missed: worker 1 on the cpu, a step with a round in flight may take {MOST_SLOWER} of one without")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
