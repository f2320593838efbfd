"""How long an inner step takes on this machine, roughly: from the speed of its matrix product."""

import statistics
import time

import torch

from diloco.training.compute import SHORT_TYPES
from diloco.training.config.run import RunConfig
from diloco.training.sizes.memory import Place

_SHARE = 0.6
"""Of the matrix speed that training reaches: 0.585 on a GPU (benchmarks/gpu_inner.py), 0.5 to 0.8 on CPUs."""
_SECONDS = 0.3


def rough_step_seconds(config: RunConfig, parameters: int, place: Place, threads: int) -> float:
    """Of a process with so many CPU threads, without rounds: 6 operations for each parameter and token."""
    flops = 6.0 * parameters * config.tokens_per_step / place.ranks
    if config.compute.checkpoint_activations:
        flops *= 4 / 3  # the forward pass twice
    return flops / (_SHARE * _matrix_speed(place, threads))


def _matrix_speed(place: Place, threads: int) -> float:
    """Operations a second."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    size, device = (8192, "cuda") if place.cuda else (1024, "cpu")
    dtype = SHORT_TYPES.get(place.precision, torch.float32)
    try:
        one, other = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        torch.mm(one, other)
        taken: list[float] = []
        end = time.monotonic() + _SECONDS
        while not taken or time.monotonic() < end:
            started = time.perf_counter()
            product = torch.mm(one, other)
            product[0, 0].item()  # waits for a GPU
            taken.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / statistics.median(taken)
