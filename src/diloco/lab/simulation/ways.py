"""How replicas are computed: stacked or one after another, by the size of the model and the kind of device.

Small models are faster stacked (one kernel serves all replicas), large ones are as fast, and need less memory, one
after another. Both give the same up to rounding, which training then amplifies: so the choice follows from the arm and
the kind of device alone, and one seed gives one run in every folder.
"""

import torch

from diloco.errors import ConfigError
from diloco.lab.simulation.replicas import Beginning, Replicas, Sequential, Task
from diloco.lab.simulation.stacked import Stacked

_STACKED_BELOW = {"cuda": 50_000_000, "cpu": 100_000}
"""Parameters. On a GPU launches dominate a small model's step; on a CPU (8 replicas, one core: 0.01M parameters 0.31 ms
a step stacked and 1.4 ms in turn, 0.16M 11 and 10 ms, 1.3M 135 and 31 ms) stacking only saves Python's own time."""
_STACK_BYTES = 16 * 2**30
"""Of activations of one stack on a GPU: the same on every device, so that stacks are the same too."""


def build(task: Task, beginning: Beginning, how: str = "auto") -> Replicas:
    """`how`: auto, sequential, stacked, or "stacked N" for stacks of N replicas."""
    if how == "auto":
        how = choose(task.config.num_parameters(), task.places.device)
    name, _, size = how.partition(" ")
    if name == "sequential" and not size:
        return Sequential(task, beginning)
    if name != "stacked" or (size and not size.isdigit()) or size == "0":
        raise ConfigError(f"how = {how!r} must be auto, sequential, stacked, or stacked N with a number of replicas")
    return Stacked(task, beginning, min(int(size), task.replicas) if size else largest_stack(task))


def choose(parameters: int, device: torch.device) -> str:
    return "stacked" if parameters < _STACKED_BELOW.get(device.type, 0) else "sequential"


def largest_stack(task: Task) -> int:
    """All replicas, or as many as fit into the memory for a stack; stacks are equal in size, but for the last."""
    if task.places.device.type != "cuda":
        return task.replicas
    c, (_, k, B) = task.config, task.places.shape
    activations = 2 * c.num_layers * (20 * c.hidden_size + 5 * c.intermediate_size) * B * task.length  # bytes, bf16
    fit = max(1, _STACK_BYTES // activations)
    return int(-(-k // -(-k // min(k, fit))))
