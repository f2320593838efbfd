"""What a spawned worker process does first, before the slow import of torch. The launcher imports this file too."""

import logging
import os
import signal
import threading
import time
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from diloco.training.config.run import RunConfig
from diloco.training.processes.run_lock import hold_as_worker

RENDEZVOUS_FILE = ".rendezvous"
CHECKPOINT_CODE = 3
"""Exit code of a worker process that cannot go on from the checkpoints there are."""
EXCLUDED_CODE = 4
"""Exit code of a worker process to which the others' answer is no: another try would hear the same."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Place:
    """Where a local process stands: it is a worker, or one of a worker's ranks."""

    process: int
    sizes: tuple[int, ...]
    """The ranks of each worker; consecutive processes are one worker."""
    run_folder: Path
    corpus_folder: Path
    parent: int
    """Process id of the launcher: a worker does not outlive it."""
    resume: bool = False
    """Go on from the run folder's checkpoints."""

    @property
    def processes(self) -> int:
        return sum(self.sizes)

    @property
    def worker(self) -> int:
        return sum(first <= self.process for first in accumulate(self.sizes))

    @property
    def rank(self) -> int:
        """Its place in the worker."""
        return self.process - sum(self.sizes[: self.worker])

    def __str__(self) -> str:
        worker = f"worker {self.worker}"
        return worker if self.sizes[self.worker] == 1 else f"{worker}, rank {self.rank},"

    @property
    def log(self) -> Path:
        """Everything that the process and its libraries write."""
        rank = "" if self.sizes[self.worker] == 1 else f"-rank-{self.rank}"
        return self.run_folder / "logs" / f"worker-{self.worker}{rank}.log"


@dataclass(frozen=True)
class Chair:
    """Where a local worker of a swarm sits: its number among the others it hears only once it has met them."""

    index: int
    chairs: int
    """Of this machine."""
    run_folder: Path
    corpus_folder: Path
    own_folder: Path | None
    """Text of its own, if it does not read the swarm's."""
    parent: int
    founder: bool
    """Begins the swarm, or begins it anew, if it finds nobody."""

    @property
    def seat(self) -> str:
        """The name of its files in RUN/swarm."""
        return f"worker-{self.index}"

    def __str__(self) -> str:
        return f"local worker {self.index}"

    @property
    def log(self) -> Path:
        return self.run_folder / "logs" / f"{self.seat}.log"


def local_worker(config: RunConfig, place: Place) -> None:
    """Entry of a worker process. Whatever goes wrong from here on, its log says it."""
    _begin(place)
    from diloco.training.processes import worker

    worker.local_worker(config, place)


def swarm_worker(config: RunConfig, chair: Chair) -> None:
    """Entry of a worker process of a swarm."""
    _begin(chair)
    from diloco.training.processes import swarm_worker

    swarm_worker.swarm_worker(config, chair)


def _begin(place: Place | Chair) -> None:
    _write_to_log(place.log)
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher alone, which passes it on once
    _end_with(place.parent)
    hold_as_worker(place.run_folder)


def _write_to_log(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def _end_with(parent: int) -> None:
    """End this process when its launcher is gone, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="diloco-parent-watch", daemon=True).start()
