"""How long a checkpoint holds up training, and how long it takes to be on the disk.

A worker's whole state (parameters, two moments, anchor, outer momentum: five fp32 copies of the model) is saved while
something else uses the device all the time: inner steps that multiply matrices. A step is timed without a save, with
one at its end, and while one is being written.

    python benchmarks/checkpoints.py [--model 150m] [--device cpu] [--folder PLACE]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from diloco.models.native.model import NativeModel
from diloco.models.native.presets import preset
from diloco.outer.tensors import pieces_of
from diloco.training.checkpoints.store import CheckpointOwner, CheckpointStore
from diloco.training.config.run import CheckpointConfig
from measuring import check_cuda, write_results

STEPS = 10
SAVES = 4


def measure(model_name: str, device: torch.device, folder: Path) -> dict[str, Any]:
    events: list[dict[str, Any]] = []
    store = CheckpointStore(
        folder, CheckpointOwner(), CheckpointConfig(keep=1), {}, lambda _, **fields: events.append(fields)
    )
    with device:
        model = NativeModel(preset(model_name))
        matrix = torch.randn(4096 if device.type == "cuda" else 512, 4096 if device.type == "cuda" else 512)
    state = {
        f"{kind}.{name}": pieces_of(parameter.detach().clone())
        for kind in ("model", "inner.exp_avg", "inner.exp_avg_sq", "outer.anchor", "outer.momentum")
        for name, parameter in model.named_parameters()
    }

    def step() -> float:
        started = time.perf_counter()
        for _ in range(20):
            torch.mm(matrix, matrix)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    step()
    quiet_seconds = statistics.median(step() for _ in range(STEPS))
    held_seconds = []
    seconds_beside = []
    seconds_to_close = []
    for number in range(1, SAVES + 1):
        started = time.perf_counter()
        store.save(number, number, state, {})
        step()
        held_seconds.append(time.perf_counter() - started - quiet_seconds)
        seconds_beside += [step() for _ in range(STEPS)]
        started = time.perf_counter()
        store.close()
        seconds_to_close.append(time.perf_counter() - started)
    assert store.failed == 0
    return {
        "model": model_name,
        "bytes": events[-1]["bytes"],
        "step_seconds": quiet_seconds,
        "first_save_holds_up_seconds": held_seconds[0],
        "save_holds_up_seconds": statistics.median(held_seconds[1:]),
        "step_while_writing_seconds": statistics.median(seconds_beside),
        "seconds_to_disk": [event["seconds"] for event in events],
        "waited_at_the_end_seconds": seconds_to_close,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="150m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="where to write (default: the place of temporary files)")
    options = parser.parse_args()
    if options.device == "cuda":
        check_cuda("use --device cpu")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = measure(options.model, torch.device(options.device), Path(folder))
    for key, value in results.items():
        print(key, value)
    device = torch.cuda.get_device_name() if options.device == "cuda" else None
    print(write_results("checkpoints", results, device=device))


if __name__ == "__main__":
    main()
