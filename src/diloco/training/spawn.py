"""What a spawned worker process imports first. Torch-free, so that the launcher need not import torch."""

from dataclasses import dataclass
from pathlib import Path

from diloco.training.config import RunConfig


@dataclass(frozen=True)
class Place:
    """Where a local worker stands."""

    worker: int
    workers: int
    run_folder: Path
    corpus_folder: Path
    parent: int
    """Process id of the launcher: a worker does not outlive it."""


def local_worker(config: RunConfig, place: Place) -> None:
    """Entry of a worker process."""
    from diloco.training import worker

    worker.local_worker(config, place)
