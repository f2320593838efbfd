"""How replicas are computed: stacked or one after another, chosen by a short measurement.

Small models are faster stacked (one kernel serves all replicas), large ones may be as fast, and need less memory, one
after another. Which it is depends on the device, so the first simulation of a shape times a few steps of each way. The
choice is kept for the process, and in the lab folder (`ways.json`) for the next one.
"""

import json
import time
from pathlib import Path

import torch

from diloco.atomic_files import replace_file
from diloco.errors import ConfigError
from diloco.lab.simulation.replicas import Beginning, Replicas, Sequential, Task
from diloco.lab.simulation.stacked import Stacked

_TIMED_STEPS = 3
_SHARE_OF_MEMORY = 0.4
_KEPT: dict[str, str] = {}


def build(task: Task, beginning: Beginning, how: str = "auto", folder: Path | None = None) -> Replicas:
    """`how`: auto, sequential, stacked, or "stacked N" for stacks of N replicas."""
    if how == "auto":
        how = choose(task, beginning, folder)
    name, _, size = how.partition(" ")
    if name == "sequential" and not size:
        return Sequential(task, beginning)
    if name != "stacked" or (size and not size.isdigit()) or size == "0":
        raise ConfigError(f"how = {how!r} must be auto, sequential, stacked, or stacked N with a number of replicas")
    return Stacked(task, beginning, min(int(size), task.replicas) if size else largest_stack(task))


def choose(task: Task, beginning: Beginning, folder: Path | None) -> str:
    """The faster of the ways, measured once for a shape and device."""
    key = _key(task)
    path = None if folder is None else folder / "ways.json"
    kept: dict[str, str] = json.loads(path.read_text()) if path is not None and path.exists() else {}
    if key not in _KEPT and key in kept:
        _KEPT[key] = kept[key]
    if key not in _KEPT:
        ways = ["sequential", f"stacked {largest_stack(task)}"]
        _KEPT[key] = min(ways, key=lambda way: seconds(build(task, beginning, way), task))
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replace_file(path) as file:
                file.write(json.dumps(kept | {key: _KEPT[key]}, indent=1).encode())
    return _KEPT[key]


def seconds(replicas: Replicas, task: Task, steps: int = _TIMED_STEPS) -> float:
    """For a step of all replicas; the state of these replicas is of no use afterwards."""
    count = min(steps, len(task.places) - 1)
    replicas.take_step()  # compiles
    _wait(task.places.device)
    started = time.perf_counter()
    for _ in range(count):
        replicas.take_step()
    _wait(task.places.device)
    return (time.perf_counter() - started) / max(1, count)


def largest_stack(task: Task) -> int:
    """All replicas, or as many as leave room on the GPU; stacks are equal in size, but for the last."""
    if task.places.device.type != "cuda":
        return task.replicas
    c, (_, k, B) = task.config, task.places.shape
    activations = 2 * c.num_layers * (20 * c.hidden_size + 5 * c.intermediate_size) * B * task.length  # bytes, bf16
    free, _ = torch.cuda.mem_get_info(task.places.device)
    fit = max(1, int(_SHARE_OF_MEMORY * free / activations))
    return -(-k // -(-k // min(k, fit)))


def _key(task: Task) -> str:
    device = task.places.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    _, k, B = task.places.shape
    return f"{name}, torch {torch.__version__}, {k} replicas, batch {B}, {task.inner.optimizer}, {task.config}"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
