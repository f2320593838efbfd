"""Entry points of spawned worker processes: the log and the watch on the launcher come before the slow import of torch.

The launchers import this file, so torch is imported inside the functions only.
"""

import logging
import os
import threading
import time
from pathlib import Path

from diloco.run_lock import hold_as_worker
from diloco.training.config.run import RunConfig
from diloco.training.processes.local_process import LocalRank, SwarmSlot


def run_local_rank(config: RunConfig, local: LocalRank) -> None:
    """A rank of a run with a fixed set of workers. Ends the process; errors are in its log."""
    _begin(local)
    from diloco.training.processes.worker import local_worker

    local_worker(config, local)


def run_swarm_worker(config: RunConfig, slot: SwarmSlot) -> None:
    """A worker of a swarm. Ends the process; errors are in its log."""
    _begin(slot)
    from diloco.training.processes.swarm_worker import swarm_worker

    swarm_worker(config, slot)


def _begin(local: LocalRank | SwarmSlot) -> None:
    _write_to_log(local.log)
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher alone, which passes it on once
    _end_with(local.parent)
    hold_as_worker(local.run_folder)


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
