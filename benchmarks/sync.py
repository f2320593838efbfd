"""One sync of two workers: bytes, seconds and memory, ours against torchft's DiLoCo, side by side in one run.

Two processes on this machine train the same model over gloo on loopback and average every few steps. All cases
(plain AdamW without any sync, torchft 0.2.0, and ours with each codec) run one after another, several times in turn, so
that what else the machine does falls on all of them alike. Every worker has one torch thread.

    bytes     a worker sends during a sync, at its TCP sockets (TCP_INFO), per parameter; the wider of the two workers
    seconds   from the end of the inner optimizer's step to updated parameters, on all workers; a barrier just before
              takes out which came first; median over all syncs but the first of a run
    cpu       seconds of processor time, all threads of a worker, during the same: the work, on a busy machine too
    held      peak memory in fp32 copies of the model: VmHWM from just before the model is built to the end, less the
              resident memory at that point. Measured in runs of their own, in which malloc gives freed blocks
              back at once (MALLOC_MMAP_THRESHOLD_), so that it is what a side holds at its worst moment
    resident  the same in the timed runs, with malloc as it is: what the heap keeps in its holes counts too

Plain training holds 4 copies (parameters, gradients, two AdamW moments) and the temporary tensors of its steps.
Targets: ours fp16 sends at most 2.1 bytes a parameter, takes at most torchft's seconds, holds at most 7 copies.
Everything is as each side has it by default: torchft and ours both make all workers equal before the first step.
"""

import argparse
import importlib.util
import multiprocessing
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier

import torch
from rich.console import Console
from rich.table import Table

from diloco.core.digest import digest
from diloco.models.native.config import ModelConfig
from diloco.models.native.transformer import Transformer
from measuring import Spread, peak_memory, reset_peak_memory, socket_bytes_sent, write_results
from sync_sides import LIMIT_SECONDS, PLAIN, STEPS_PER_SYNC, TORCHFT, WORKERS, Task, side

SIZES = {
    "10.5M": (2048, 320, 816, 9, 10, 5, 32),
    "50M": (8192, 512, 1344, 16, 8, 4, 64),
}
CODECS = ("fp16", "bf16", "int8", "int4", "fp32")
TOKENS = 8  # a step's activations are not what is measured
MAX_BYTES = 2.1
MAX_COPIES = 7.0
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


@dataclass(frozen=True)
class Measured:
    """What one worker saw; one entry a sync."""

    seconds: list[float]
    cpu_seconds: list[float]
    bytes_sent: list[int]
    bytes_reported: list[int]
    copies: float
    digest: str


def build_model(size: str, layers: int | None = None) -> Transformer:
    vocab, hidden, intermediate, all_layers, heads, kv_heads, head_dim = SIZES[size]
    shape = ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers or all_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_sequence_length=TOKENS,
        tie_embeddings=True,
    )
    torch.manual_seed(0)
    return Transformer(shape)


# One worker


class Syncs:
    """Stamps a sync at both ends; `begin` is the inner optimizer's hook, so it runs just before each sync."""

    def __init__(self, barrier: Barrier) -> None:
        self.barrier = barrier
        self.due = False
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.bytes_sent: list[int] = []

    def begin(self, *_: object) -> None:
        if self.due:
            self.sent = socket_bytes_sent()
            self.barrier.wait(LIMIT_SECONDS)
            self.started = time.perf_counter()
            self.cpu_started = time.process_time()

    def end(self) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.cpu_seconds.append(time.process_time() - self.cpu_started)
        self.barrier.wait(LIMIT_SECONDS)
        self.bytes_sent.append(socket_bytes_sent() - self.sent)


def train(model: Transformer, step: Callable[[], object], syncs: Syncs, count: int, rank: int) -> None:
    """Train for `count` times H inner steps, each with its sync; the data differ between workers."""
    generator = torch.Generator().manual_seed(rank)
    for number in range(1, count * STEPS_PER_SYNC + 1):
        tokens = torch.randint(0, model.config.vocab_size, (1, TOKENS + 1), generator=generator)
        torch.autograd.backward(model.loss(tokens[:, :-1], tokens[:, 1:]))
        syncs.due = number % STEPS_PER_SYNC == 0
        step()
        if syncs.due:
            syncs.end()
        model.zero_grad()


def warm_up(size: str) -> None:
    """Take one step of one layer: what libraries load and keep for themselves is not the model's memory."""
    model = build_model(size, layers=1)
    inner = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
    torch.autograd.backward(model.loss(tokens, tokens))
    inner.step()


def measure(task: Task, rank: int, barrier: Barrier) -> Measured:
    torch.set_num_threads(1)
    syncs = Syncs(barrier)
    warm_up(task.size)
    with side(task.case)(task, rank) as build:
        before = reset_peak_memory()
        model = build_model(task.size)
        inner = torch.optim.AdamW(model.parameters(), lr=4e-4)
        inner.register_step_post_hook(syncs.begin)
        step, reported = build(model, inner)
        train(model, step, syncs, task.syncs, rank)
        peak = peak_memory()
        size = 4 * sum(p.numel() for p in model.parameters())
        final = digest(torch.cat([p.detach().flatten() for p in model.parameters()]))
        barrier.wait(LIMIT_SECONDS)
    return Measured(syncs.seconds, syncs.cpu_seconds, syncs.bytes_sent, list(reported), (peak - before) / size, final)


def worker(task: Task, rank: int, barrier: Barrier, results: Connection) -> None:
    results.send(measure(task, rank, barrier))
    results.close()
    sys.stdout.flush()
    os._exit(0)  # torchft's threads outlive its shutdown


# All runs


def free_ports() -> int:
    """Find a port p such that p and p + 1 are free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = int(first.getsockname()[1])
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


@contextmanager
def errors_kept() -> Iterator[None]:
    """Hold back standard error, where torchft logs every quorum in all processes; show it only if a run fails."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as error_file:
        real = os.dup(2)
        os.dup2(error_file.fileno(), 2)
        try:
            yield
        except BaseException:
            error_file.seek(0)
            os.write(real, error_file.read()[-10_000:])
            raise
        finally:
            os.dup2(real, 2)
            os.close(real)


def run(case: str, size: str, syncs: int, malloc: dict[str, str]) -> list[Measured]:
    """Run a case. `malloc`: environment variables with which the workers start."""
    with errors_kept():
        os.environ.update(malloc)
        try:
            measured = run_workers(case, size, syncs)
        finally:
            for name in malloc:
                del os.environ[name]
    if case != PLAIN and len({m.digest for m in measured}) > 1:
        raise SystemExit(f"{case}, {size}: the workers' parameters differ after a sync")
    return measured


def run_workers(case: str, size: str, syncs: int) -> list[Measured]:
    lighthouse = None
    if case == TORCHFT:
        from torchft.coordination import LighthouseServer

        lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=WORKERS)
    task = Task(case, size, syncs, free_ports(), lighthouse.address() if lighthouse is not None else "")
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(WORKERS)
    pipes = [context.Pipe(duplex=False) for _ in range(WORKERS)]
    processes = [context.Process(target=worker, args=(task, r, barrier, pipes[r][1])) for r in range(WORKERS)]
    for process, (_, sender) in zip(processes, pipes, strict=True):
        process.start()
        sender.close()
    try:
        return [receiver.recv() for receiver, _ in pipes]
    except EOFError:
        raise SystemExit(f"{case}, {size}: a worker died, its traceback is above") from None
    finally:
        for process in processes:
            process.join(10)
            process.kill()
        if lighthouse is not None:
            lighthouse.shutdown()


@dataclass(frozen=True)
class Row:
    """All runs of one case at one size."""

    size: str
    case: str
    parameters: int
    bytes_per_parameter: float
    reported_bytes_per_parameter: float | None
    seconds: Spread
    cpu_seconds: Spread
    held_copies: Spread
    resident_copies: Spread


def summarise(case: str, size: str, runs: list[list[Measured]], memory_run: list[Measured]) -> Row:
    with torch.device("meta"):
        parameters = build_model(size).config.num_parameters()
    pairs = [pair for run_ in runs for pair in zip(*(m.seconds[1:] for m in run_), strict=True)]
    sent_bytes = [max(m.bytes_sent[1:]) for run_ in runs for m in run_]
    reported = [count for run_ in runs for m in run_ for count in m.bytes_reported]
    return Row(
        size,
        case,
        parameters,
        max(sent_bytes) / parameters,
        max(reported) / parameters if reported else None,
        Spread.of([max(pair) for pair in pairs]),
        Spread.of([seconds for run_ in runs for m in run_ for seconds in m.cpu_seconds[1:]]),
        Spread.of([m.copies for m in memory_run]),
        Spread.of([m.copies for run_ in runs for m in run_]),
    )


def missed_targets(rows: list[Row]) -> list[str]:
    missed = []
    for row in (row for row in rows if row.case == "ours fp16"):
        if row.bytes_per_parameter > MAX_BYTES:
            missed.append(f"{row.size}: {row.bytes_per_parameter:.3f} bytes a parameter, above {MAX_BYTES}")
        if row.held_copies.high > MAX_COPIES:
            missed.append(f"{row.size}: holds {row.held_copies.high:.2f} copies, above {MAX_COPIES:g}")
        torchft_seconds = [other.seconds.median for other in rows if (other.size, other.case) == (row.size, TORCHFT)]
        if torchft_seconds and row.seconds.median > torchft_seconds[0]:
            missed.append(f"{row.size}: {row.seconds.median:.3f} s a sync, above torchft's {torchft_seconds[0]:.3f} s")
    return missed


def print_table(rows: list[Row]) -> None:
    table = Table(title=f"one sync of {WORKERS} workers, gloo on loopback, one torch thread each")
    for heading in ("parameters", "case", "bytes/param", "reported", "s/sync (low–high)", "cpu", "held", "resident"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for row in rows:
        synced = row.case != PLAIN
        table.add_row(
            row.size,
            row.case,
            f"{row.bytes_per_parameter:.3f}" if synced else "",
            f"{row.reported_bytes_per_parameter:.3f}" if row.reported_bytes_per_parameter is not None else "",
            f"{row.seconds.median:.3f} ({row.seconds.low:.3f}–{row.seconds.high:.3f})" if synced else "",
            f"{row.cpu_seconds.median:.3f}" if synced else "",
            f"{row.held_copies.median:.2f}",
            f"{row.resident_copies.median:.2f} ({row.resident_copies.low:.2f}–{row.resident_copies.high:.2f})",
            end_section=row.case == "ours fp32",
        )
    Console(width=max(120, Console().width)).print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=("ours", "torchft"), help="one side (ours needs no torchft)")
    parser.add_argument("--quick", action="store_true", help="the smaller model, one repeat")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), help="default: all")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--repeats", type=int, default=3, help="runs of each case, in turn")
    parser.add_argument("--syncs", type=int, default=6, help="syncs a run, the first of which is not timed")
    return parser.parse_args()


def main() -> int:
    options = parse()
    if options.only != "ours" and importlib.util.find_spec("torchft") is None:
        print("torchft is not installed: `make bench` installs it (the extra 'bench'), or run with --only ours")
        return 2
    cases = [PLAIN]
    cases += [TORCHFT] if options.only != "ours" else []
    cases += [f"ours {codec}" for codec in options.codecs] if options.only != "torchft" else []
    sizes = options.sizes or (["10.5M"] if options.quick else list(SIZES))
    rows = []
    for size in sizes:
        runs: dict[str, list[list[Measured]]] = {case: [] for case in cases}
        for _ in range(1 if options.quick else options.repeats):
            for case in cases:
                runs[case].append(run(case, size, options.syncs, {}))
        rows += [summarise(case, size, runs[case], run(case, size, 2, GIVE_BACK)) for case in cases]
    print_table(rows)
    print(f"written: {write_results('sync', [asdict(row) for row in rows]).name}")
    missed = missed_targets(rows)
    for target in missed:
        print(f"target missed: {target}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
