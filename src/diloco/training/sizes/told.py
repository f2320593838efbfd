"""The event `sizes`: the first worker of a machine tells what a run will take, before it builds its model."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from diloco.engines.base import Connection
from diloco.errors import DiLoCoError
from diloco.history.log import read_events
from diloco.training.compute import precision_name
from diloco.training.config.run import RunConfig
from diloco.training.micro_batch_size import budget_bytes
from diloco.training.sizes.estimate import Estimate, device_warning, estimate, memory_warning
from diloco.training.sizes.memory import Place

logger = logging.getLogger(__name__)


def emit_sizes(
    config: RunConfig,
    vocab_size: int,
    engine: Connection,
    device: torch.device,
    processes: int,
    emit: Callable[..., None],
    folder: Path,
) -> None:
    """`processes`: on this machine. A model whose sizes cannot be told is trained all the same."""
    workers = max(engine.workers, 2) if engine.elastic else engine.workers  # in a swarm others will come
    precision = precision_name(config.compute.precision, device)
    place = Place(workers, engine.ranks.count, device.type == "cuda", precision)
    try:
        sizes = estimate(
            config,
            vocab_size,
            place,
            processes=processes,
            folder=folder,
            events=read_events(folder),
            device_budget=device_budget(device, processes),
        )
    except (DiLoCoError, RuntimeError, TypeError, AttributeError) as error:  # of another library's model
        logger.warning("the sizes of this run cannot be told: %s", error)
        return
    emit("sizes", **sizes.as_json(), warnings=warnings(config, sizes, device))


def device_budget(device: torch.device, processes: int) -> float | None:
    """The GPU memory for one of a machine's processes, which share out its GPUs; None on the CPU."""
    return budget_bytes(device, sharing(processes)) if device.type == "cuda" else None


def sharing(processes: int) -> int:
    """How many of a machine's processes are on one GPU."""
    return -(-processes // max(1, torch.cuda.device_count()))


def warnings(config: RunConfig, sizes: Estimate, device: torch.device) -> list[str]:
    """What this machine has too little of."""
    found = [memory_warning(config, sizes)]
    if device.type == "cuda":
        found.append(device_warning(config, sizes, torch.cuda.mem_get_info(device)[0]))
    return [text for text in found if text is not None]
