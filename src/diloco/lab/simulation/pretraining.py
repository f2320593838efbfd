"""The shared beginning: a phase of ordinary training on one worker, from which all arms of an experiment go on.

It depends on the seed, the model, the inner optimizer, the length of the whole schedule and the code, and on nothing
else of an arm. It is kept in memory for the next arm, and in the lab folder (`beginnings/KEY.safetensors`) for the next
process.
"""

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from diloco.atomic_files import replace_file
from diloco.lab.arm import Arm
from diloco.lab.code import simulation_code
from diloco.lab.simulation.batches import PRETRAINING, CorpusTokens
from diloco.lab.simulation.replicas import Beginning, Replicas, ReplicaTask, fresh, learning_rates
from diloco.models.native.config import ModelConfig
from diloco.safetensors_files import file_chunks

Build = Callable[[ReplicaTask, Beginning], Replicas]
_KEPT: dict[str, Beginning] = {}
_MOST_KEPT = 4


def beginning(
    arm: Arm, config: ModelConfig, seed: int, text: CorpusTokens, corpus_digest: str, build: Build, folder: Path | None,
    how: str, on_step: Callable[[int], None],
) -> Beginning:  # fmt: skip
    """Return the beginning of the replicas of this arm and seed, from memory, the lab folder or a training of its own.

    `how`: the way in which `build` computes replicas.
    """
    if not arm.pretraining_steps:
        return fresh(config, seed, text.device)
    size = arm.pretraining_batch_size or arm.batch_size
    total = arm.pretraining_steps + arm.steps
    settings = (repr(config), repr(arm.pretraining_config), arm.pretraining_steps, size, total, corpus_digest, seed)
    key = hashlib.sha256(json.dumps([*settings, text.device.type, how, simulation_code()]).encode()).hexdigest()[:16]
    if key in _KEPT:
        return _KEPT[key]
    path = None if folder is None else folder / "beginnings" / f"{key}.safetensors"
    with _locked(path):  # each process rounds differently, and all arms of a seed must have the same beginning
        if path is not None and path.exists():
            start = _load(path, text.device)
        else:
            ranges = text.ranges(arm, PRETRAINING)
            seeds = (seed, PRETRAINING)
            places = text.windows(ranges, arm.pretraining_steps, size, arm.sequence_length, seeds)
            rates = learning_rates(arm.pretraining_config, 0, arm.pretraining_steps, total, text.device)
            task = ReplicaTask(
                config, arm.pretraining_config, text, torch.from_numpy(places)[:, None].to(text.device), rates
            )
            start = _pretrain(build(task, fresh(config, seed, text.device)), arm.pretraining_steps, on_step)
            if path is not None:
                _save(path, start)
    while len(_KEPT) >= _MOST_KEPT:
        _KEPT.pop(next(iter(_KEPT)))
    _KEPT[key] = start
    return start


def _pretrain(replicas: Replicas, steps: int, on_step: Callable[[int], None]) -> Beginning:
    for step in range(steps):
        replicas.take_step()
        on_step(step + 1)
    return replicas.as_beginning()


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Let one process compute a beginning while others wait for its file. The system releases the lock of a process
    that dies."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _save(path: Path, start: Beginning) -> None:
    tensors: dict[str, Tensor] = {f"parameters/{name}": tensor for name, tensor in start.parameters.items()}
    for kind, by_name in start.state.items():
        tensors |= {f"{kind}/{name}": tensor for name, tensor in by_name.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replace_file(path) as file:
        for chunk in file_chunks(tensors, {"steps": str(start.steps)}):
            file.write(chunk)


def _load(path: Path, device: torch.device) -> Beginning:
    state: dict[str, dict[str, Tensor]] = {}
    with safe_open(path, "pt", str(device)) as file:
        for label in file.keys():  # noqa: SIM118
            kind, _, name = label.partition("/")
            state.setdefault(kind, {})[name] = file.get_tensor(label)
        steps = int(file.metadata()["steps"])
    return Beginning(state.pop("parameters"), state, steps)
