"""A worker process of this machine: what a launcher hands to it, how it begins and ends, what its exit code means.

The launcher imports this file, so it is torch-free: a process writes to its log and watches its launcher before it
imports torch, which is slow.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

from diloco.errors import CheckpointError, ConfigError, DiLoCoError, Excluded, LossNotFinite, ModelNotWritten
from diloco.run_lock import hold_as_worker
from diloco.training.config.run import RunConfig

RENDEZVOUS_FILE = ".rendezvous"
CONFIG_CODE = 2
"""Exit code: the configuration is refused."""
CHECKPOINT_CODE = 3
"""Exit code: no checkpoint to resume from is usable."""
EXCLUDED_CODE = 4
"""Exit code: the swarm refuses this worker, and would refuse it again."""
LOSS_CODE = 5
"""Exit code: the loss is not finite, and would be so again."""
MODEL_CODE = 6
"""Exit code: training has ended, and the model could not be written."""
_CODES: dict[type[DiLoCoError], int] = {
    ConfigError: CONFIG_CODE,
    CheckpointError: CHECKPOINT_CODE,
    Excluded: EXCLUDED_CODE,
    LossNotFinite: LOSS_CODE,
    ModelNotWritten: MODEL_CODE,
}
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heard_signals() -> list[signal.Signals]:
    """Return the stop signals that end a run: all, but SIGHUP where it is ignored (nohup)."""
    return [
        number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    ]


def exit_code(error: BaseException) -> int:
    """Return the exit code of a worker process that ends with this error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)


@dataclass(frozen=True)
class LocalRank:
    """A process of a run with a fixed set of workers: a whole worker, or one of a worker's ranks."""

    process: int
    sizes: tuple[int, ...]
    """The ranks of each worker; consecutive processes are one worker."""
    run_folder: Path
    corpus_folder: Path
    parent: int
    """Process id of the launcher: a worker does not outlive it."""
    resume: bool = False
    """Continue from the run folder's checkpoints."""

    @property
    def processes(self) -> int:
        return sum(self.sizes)

    @property
    def worker(self) -> int:
        return sum(first <= self.process for first in accumulate(self.sizes))

    @property
    def rank(self) -> int:
        """The rank within the worker."""
        return self.process - sum(self.sizes[: self.worker])

    def __str__(self) -> str:
        worker = f"worker {self.worker}"
        return worker if self.sizes[self.worker] == 1 else f"{worker}, rank {self.rank},"

    @property
    def log(self) -> Path:
        """The file of everything that the process and its libraries write."""
        rank = "" if self.sizes[self.worker] == 1 else f"-rank-{self.rank}"
        return self.run_folder / "logs" / f"worker-{self.worker}{rank}.log"


def worker_name(index: int) -> str:
    """Return the name of a swarm's local worker, which its files have."""
    return f"worker-{index}"


@dataclass(frozen=True)
class SwarmSlot:
    """A local worker of a swarm. The swarm gives it its worker number when it joins."""

    index: int
    slots: int
    """Local workers of this machine."""
    run_folder: Path
    corpus_folder: Path
    own_folder: Path | None
    """Text of its own, if it does not read the swarm's."""
    parent: int
    """Process id of the launcher."""
    founder: bool
    """Starts the swarm, or starts it again from a checkpoint, if no other member answers."""

    @property
    def name(self) -> str:
        """The name of its files in RUN/swarm and RUN/logs."""
        return worker_name(self.index)

    def __str__(self) -> str:
        return f"local worker {self.index}"

    @property
    def log(self) -> Path:
        return self.run_folder / "logs" / f"{self.name}.log"


def run_worker(config: RunConfig, local: LocalRank | SwarmSlot) -> NoReturn:
    """Train in this process, which a launcher has just started, and end it; errors are in its log."""
    _write_to_log(local.log)
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher alone, which passes it on once
    _end_with(local.parent)
    hold_as_worker(local.run_folder)
    code = 1
    try:
        if isinstance(local, LocalRank):
            from diloco.training.processes.worker import train_local_rank

            train_local_rank(config, local)
        else:
            from diloco.training.processes.swarm_worker import train_swarm_worker

            train_swarm_worker(config, local)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the process ends here, and its log must say why
        traceback.print_exc()
        code = exit_code(error)
    finally:
        exit_now(code)


def _write_to_log(path: Path) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True)


def _end_with(parent: int) -> None:
    """End this process once its launcher is gone, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="diloco-parent-watch", daemon=True).start()


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for a thread: one may still be in a collective that a lost peer never ends.

    Named semaphores of multiprocessing are given back first (tqdm makes one, for example): the launcher would otherwise
    report them as leaked.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a launcher without them has none to hand on
            stream.flush()
    util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(code)
