"""The sizes of a run before it starts: memory of a process, disk, bytes of a round. Nothing is trained or allocated.

Exact are parameters, tensors, checkpoints and rounds: they follow from shapes. Activations are estimated. The rate of
a network and the time of a step are measured by the run itself: they are known when it is resumed, or given.
"""

import importlib
import logging
import math
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.core.lanes import Shape
from diloco.data.tokenizer import Tokenizer
from diloco.engines.base import Connection
from diloco.engines.header import HEADER_BYTES
from diloco.engines.reduction import traffic
from diloco.errors import ConfigError, DiLoCoError
from diloco.history.events import Emit, make_event
from diloco.history.run_history import RunHistory, read_history
from diloco.models.registry import model_outline
from diloco.training.compute import SHORT_TYPES, precision_name
from diloco.training.config.run import RunConfig, num_rounds, turns
from diloco.training.micro_batches import budget_bytes, choices, estimated
from diloco.training.sizes.memory import (
    ACTIVATIONS,
    ANCHOR_OF_WORKER_0,
    Placement,
    encoded_vectors,
    moments_vectors,
    network_memory,
    process_memory,
)
from diloco.training.sizes.room import DiskUse, available_memory, disk_use, free_disk, resident_bytes, size_text

logger = logging.getLogger(__name__)

_BITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_DAY_SECONDS = 86_400.0
_USUAL_BITS = (10e6, 100e6, 1e9)
_SMALLER = "a smaller model"  # where no option is left that would need less
_MATRIX_SHARE = 0.6
"""The share of the matrix speed that training reaches: 0.585 on a GPU (benchmarks/gpu_inner.py), 0.5 to 0.8 on CPUs."""
_MATRIX_SECONDS = 0.3


@dataclass(frozen=True)
class Estimate:
    """The sizes of a run, in bytes."""

    parameters: int
    trainable_parameters: int
    """Those that are trained and averaged: with LoRA the adapters', otherwise all."""
    accumulation: int
    """Micro-batches of a step: as given, or as few as the memory of a GPU is estimated to hold."""
    micro_batch_rows: int
    """Sequences that a process computes at a time."""
    processes: int
    """Processes of the run on this machine."""
    memory: dict[str, int]
    """Main memory of one process, by what it holds."""
    device_memory: dict[str, int]
    """GPU memory of one process; empty on the CPU."""
    network_memory: dict[str, int]
    """Main memory of the processes that carry a swarm worker's rounds; empty with another engine."""
    memory_available: int | None
    """What the machine has for all processes; None if not known."""
    disk: DiskUse
    disk_free: int
    workers: int
    """Workers that average with each other."""
    round_bytes: int
    """Bytes that a worker sends for one round of all fragments."""
    round_steps: int
    """Inner steps from one such round to the next, with sync.growth to the first."""
    mean_round_steps: float
    """The mean of `round_steps` over the whole run."""
    second_moment_bytes: int
    """Bytes that a worker sends besides, in every sync.second_moment_every-th round."""
    second_moment_every: int
    """Rounds from one that averages second moments to the next; 0: never."""
    warm_start_bytes: int
    """Bytes that a worker sends in all steps of the warm start."""
    round_seconds: dict[str, float]
    """What a round takes, by rate in Mbit/s: usual ones, or the one that was given or measured."""
    step_seconds: float | None
    """The duration of an inner step, if it is known."""
    step_measured: bool
    """Whether the run itself has measured it, rounds included; otherwise it is a rough estimate."""

    @property
    def process_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def bytes_per_day(self) -> float | None:
        """Bytes that a worker sends in a day at that speed; None if it is not known."""
        return (
            None
            if self.step_seconds is None
            else (self.round_bytes + self.second_moment_bytes / max(1, self.second_moment_every))
            * (_DAY_SECONDS / self.mean_round_steps / self.step_seconds)
        )

    def as_json(self) -> dict[str, Any]:
        more = {
            "process_bytes": self.process_bytes,
            "device_bytes": sum(self.device_memory.values()),
            "network_process_bytes": sum(self.network_memory.values()),
            "disk_peak_bytes": self.disk.peak_bytes,
            "disk_written_bytes": self.disk.written_bytes,
            "bytes_per_day": self.bytes_per_day,
        }
        return asdict(self) | more


def estimate(
    config: RunConfig,
    vocab_size: int,
    place: Placement,
    *,
    processes: int,
    folder: Path,
    history: RunHistory | None = None,
    bandwidth_bits: float | None = None,
    threads: int | None = None,
    device_budget: float | None = None,
) -> Estimate:
    """Estimate the sizes of a run. `device_budget`: the GPU memory of one process, by which a step's micro-batches are
    chosen if they are left open.

    `processes`: on this machine. `history`: of the run so far, if it is resumed. `bandwidth_bits`: to assume.

    `threads`: of a process, to estimate the time of a step, which takes a moment of computing; None: only if measured.
    """
    libraries = resident_bytes()
    importlib.import_module("torch._dynamo")  # torch's optimizers do it at their first use: 80 MB
    base = resident_bytes()
    outline = model_outline(
        config.model, vocab_size=vocab_size, sequence_length=config.data.sequence_length, lora=config.lora
    )
    parameters = sum(p.numel() for p in outline.parameters())
    shapes = {name: tuple(p.shape) for name, p in outline.named_parameters() if p.requires_grad}
    trainable = sum(math.prod(shape) for shape in shapes.values())
    host, device = process_memory(config, outline, place, base, vocab_size)
    accumulation = config.training.least_accumulation
    if config.training.accumulation is None and device and device_budget is not None:
        activations = device[ACTIVATIONS]
        fixed = sum(device.values()) - activations
        counts = choices(config.training.batch_size, place.ranks)
        accumulation = estimated(counts, activations, fixed, device_budget)
        device[ACTIVATIONS] = activations // accumulation
    sent = round_bytes(config, shapes, place.workers)
    past = history or RunHistory()
    known = bandwidth_bits or measured_bits_per_second(past)
    measured = measured_step_seconds(past)
    rough = None if threads is None or measured else rough_step_seconds(config, parameters, place, threads)
    return Estimate(
        parameters=parameters,
        trainable_parameters=trainable,
        accumulation=accumulation,
        micro_batch_rows=config.training.batch_size // place.ranks // accumulation,
        processes=processes,
        memory=host,
        device_memory=device,
        network_memory=network_memory(config, shapes, libraries),
        memory_available=available_memory(),
        disk=disk_use(config, parameters, max(1, processes // place.ranks), trainable=trainable),
        disk_free=free_disk(folder),
        workers=place.workers,
        round_bytes=sent,
        round_steps=turns(config).turn_steps(0) if config.mode == "diloco" else 1,
        mean_round_steps=_mean_round_steps(config),
        second_moment_bytes=second_moment_bytes(config, shapes, place.workers),
        second_moment_every=config.sync.second_moment_every or 0,
        warm_start_bytes=warm_start_bytes(config, shapes, place.workers),
        round_seconds={f"{bits / 1e6:g}": 8 * sent / bits for bits in ([known] if known else _USUAL_BITS)},
        step_seconds=measured or rough,
        step_measured=measured is not None,
    )


def _mean_round_steps(config: RunConfig) -> float:
    if config.mode != "diloco":
        return 1.0
    H = config.sync.num_inner_steps
    steps = config.steps - config.sync.warm_start
    return float(H) if config.sync.growth is None or steps <= 0 else steps / num_rounds(config)


# What a worker sends


def round_bytes(config: RunConfig, shapes: Mapping[str, Shape], workers: int) -> int:
    """Return the bytes that a worker sends until every fragment has been averaged once: every H inner steps, or at
    every step."""
    if workers == 1:
        return 0
    vectors = encoded_vectors(config, shapes)
    moments = moments_vectors(config, shapes)
    if config.sync.asynchronous and config.mode == "diloco":  # to worker 0, which sends anchors in fp32 back
        return sum(vector.num_bytes for vector in vectors) + HEADER_BYTES
    headers = (len(vectors) + len(moments)) * HEADER_BYTES * (workers - 1)
    return sum(_sent(config, vector, workers) for vector in vectors) + headers


def second_moment_bytes(config: RunConfig, shapes: Mapping[str, Shape], workers: int) -> int:
    """Return the bytes that a worker sends besides, in a round that averages second moments."""
    return 0 if workers == 1 else sum(_sent(config, vector, workers) for vector in moments_vectors(config, shapes))


def _sent(config: RunConfig, vector: EncodedVector, workers: int) -> int:
    if config.engine == "bucket":  # the whole vector, and a range of the mean
        return vector.num_bytes + -(-vector.mean.num_bytes // workers)
    return max(traffic(vector, workers, worker)[0] for worker in (0, workers - 1))


def warm_start_bytes(config: RunConfig, shapes: Mapping[str, Shape], workers: int) -> int:
    """Return the bytes that a worker sends in all steps of the warm start."""
    if workers == 1 or not config.sync.warm_start or config.elastic:  # a swarm's is one worker's alone
        return 0
    numel = sum(torch.Size(shape).numel() for shape in shapes.values())
    vector = EncodedVector(codec(config.sync.gradient_codec), PartLayout(numel), torch.device("meta"))
    return config.sync.warm_start * (_sent(config, vector, workers) + HEADER_BYTES * (workers - 1))


def bits_per_second(text: str) -> float:
    """Read `100mbit`, `1 Gbit/s` or `800kbit` as bits per second."""
    rate = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?)bit(?:/s)?\s*", text.lower())
    if not rate or not float(rate[1]):
        raise ConfigError(f"--bandwidth {text}: give a number and a unit, such as 100mbit, 1gbit or 800kbit")
    return float(rate[1]) * _BITS[rate[2]]


def measured_bits_per_second(history: RunHistory) -> float | None:
    """Return the rate of a run's rounds so far, of the middle one; None if none has sent anything."""
    rounds = history.rounds.by_sequence.values()
    sent_rounds = [
        (round_.bytes_sent, round_.statistics["seconds"]) for round_ in rounds if round_.bytes_sent > HEADER_BYTES * 64
    ]
    rates = sorted(8 * sent / seconds for sent, seconds in sent_rounds if seconds)
    return rates[len(rates) // 2] if rates else None


def measured_step_seconds(history: RunHistory) -> float | None:
    """Return the seconds of an inner step, rounds included, of the worker that is furthest; None if none has logged a
    step. In a swarm a worker counts from where it joined."""
    workers = [worker.progress for worker in history.local_workers.values()]
    furthest = max(workers, key=lambda progress: progress.step, default=None)
    return None if furthest is None else furthest.mean_position_seconds


# How long a step takes


def rough_step_seconds(config: RunConfig, parameters: int, place: Placement, threads: int) -> float:
    """Return estimated seconds of a step on `threads` CPU threads, without rounds.

    A step is 6 operations for each parameter and token.
    """
    flops = 6.0 * parameters * config.tokens_per_step / place.ranks
    if config.compute.checkpoint_activations:
        flops *= 4 / 3  # the forward pass twice
    return flops / (_MATRIX_SHARE * _matrix_speed(place, threads))


def _matrix_speed(place: Placement, threads: int) -> float:
    """Return how many operations a second this machine's matrix product does."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size = 8192 if place.cuda else 1024
    device = "cuda" if place.cuda else "cpu"
    dtype = SHORT_TYPES.get(place.precision, torch.float32)
    try:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        torch.mm(left, right)
        taken: list[float] = []
        end = time.monotonic() + _MATRIX_SECONDS
        while not taken or time.monotonic() < end:
            started = time.perf_counter()
            product = torch.mm(left, right)
            product[0, 0].item()  # waits for a GPU
            taken.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / statistics.median(taken)


# What a run tells at its start


def emit_sizes(
    config: RunConfig,
    vocab_size: int,
    engine: Connection,
    device: torch.device,
    processes: int,
    emit: Emit,
    folder: Path,
) -> None:
    """Log the sizes of a run. A model whose sizes cannot be estimated is trained all the same. `processes`: on this
    machine."""
    workers = max(engine.workers, 2) if engine.elastic else engine.workers  # in a swarm others will come
    precision = precision_name(config.compute.precision, device)
    place = Placement(workers, engine.ranks.count, device.type == "cuda", precision)
    try:
        sizes = estimate(
            config,
            vocab_size,
            place,
            processes=processes,
            folder=folder,
            history=read_history(folder),
            device_budget=device_budget(device, processes),
        )
    except (DiLoCoError, RuntimeError, TypeError, AttributeError) as error:  # of another library's model
        logger.warning("the sizes of this run cannot be told: %s", error)
        return
    emit(make_event("sizes", sizes.as_json() | {"warnings": warnings(config, sizes, device)}))


def device_budget(device: torch.device, processes: int) -> float | None:
    """Return the GPU memory for one of a machine's processes, which share out its GPUs; None on the CPU."""
    return budget_bytes(device, sharing(processes)) if device.type == "cuda" else None


def sharing(processes: int) -> int:
    """Return how many of a machine's processes are on one GPU."""
    return -(-processes // max(1, torch.cuda.device_count()))


def warnings(config: RunConfig, sizes: Estimate, device: torch.device) -> list[str]:
    """Return what this machine has too little of."""
    texts = [memory_warning(config, sizes)]
    if device.type == "cuda":
        texts.append(device_warning(config, sizes, torch.cuda.mem_get_info(device)[0]))
    return [text for text in texts if text is not None]


def memory_warning(config: RunConfig, sizes: Estimate) -> str | None:
    """Return what to say if the processes of this machine need more memory than it has."""
    each = sizes.process_bytes + sum(sizes.network_memory.values())
    needed = sizes.processes * each - (sizes.processes - 1) * sizes.memory.get(ANCHOR_OF_WORKER_0, 0)
    available = sizes.memory_available
    if available is None or needed <= available:
        return None
    ways = ["fewer --workers"] if sizes.processes > 1 else []
    if not sizes.device_memory:
        over = each - available // sizes.processes
        ways += _smaller_batches(config, sizes.memory[ACTIVATIONS], over)
        ways += [] if config.compute.checkpoint_activations else ["--compute.checkpoint_activations true"]
    ways += ["--checkpoint.asynchronous false"] if config.checkpoint.asynchronous and config.num_checkpoints else []
    return (
        f"this machine has {size_text(available)} of memory available, and {sizes.processes} processes need about "
        f"{size_text(needed)}: try {', or '.join(ways or [_SMALLER])}"
    )


def device_warning(config: RunConfig, sizes: Estimate, free: int) -> str | None:
    """Return what to say if a GPU with `free` bytes has too little memory for a process."""
    needed = sum(sizes.device_memory.values())
    if needed <= free:
        return None
    ways = _smaller_batches(config, sizes.device_memory[ACTIVATIONS], needed - free)
    ways += [] if config.compute.checkpoint_activations else ["--compute.checkpoint_activations true"]
    ways += [] if config.sync.offload or config.mode != "diloco" else ["--sync.offload true"]
    return (
        f"the GPU has {size_text(free)} of memory free, and a process needs about {size_text(needed)}: "
        f"try {', or '.join(ways or [_SMALLER])}"
    )


def _smaller_batches(config: RunConfig, activations: int, over: int) -> list[str]:
    """Return the accumulation with which activations are smaller by `over` bytes, or that with the smallest ones."""
    now = config.training.least_accumulation
    most = config.training.batch_size // max(map(int, config.ranks.split(",")))
    larger = [count for count in range(now + 1, most + 1) if most % count == 0]
    enough = [count for count in larger if activations * now / count <= activations - over]
    return [f"--training.accumulation {(enough or larger[-1:])[0]}"] if larger else []


def vocabulary_of(config: RunConfig) -> int:
    """Return the tokenizer's, or the most that a new one may have, for a run whose text is not prepared yet."""
    return config.data.vocab_size if config.data.tokenizer is None else Tokenizer.load(config.data.tokenizer).vocab_size
