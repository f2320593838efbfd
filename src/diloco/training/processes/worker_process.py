"""A worker process from its beginning to its exit code: here a process begins that the launcher has started.

The launcher imports this file, so torch is imported inside a function only.
"""

import logging
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import NoReturn

from diloco.errors import CheckpointError, ConfigError, DiLoCoError, Excluded, LossNotFinite, ModelNotWritten
from diloco.run_lock import hold_as_worker
from diloco.training.config.run import RunConfig
from diloco.training.processes.local_process import (
    CHECKPOINT_CODE,
    CONFIG_CODE,
    EXCLUDED_CODE,
    LOSS_CODE,
    MODEL_CODE,
    LocalRank,
    SwarmSlot,
)

_CODES: dict[type[DiLoCoError], int] = {
    ConfigError: CONFIG_CODE,
    CheckpointError: CHECKPOINT_CODE,
    Excluded: EXCLUDED_CODE,
    LossNotFinite: LOSS_CODE,
    ModelNotWritten: MODEL_CODE,
}


def run_worker(config: RunConfig, local: LocalRank | SwarmSlot) -> NoReturn:
    """Train in this process, which a launcher has just started, and end it; errors are in its log.

    The log and the watch on the launcher come before the slow import of torch.
    """
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
        code = exit_code(error)
        traceback.print_exc()  # fails if the log's disk is full
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


def exit_code(error: BaseException) -> int:
    """Return the exit code of a worker process that ends with this error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), 1)


def exit_now(code: int) -> NoReturn:
    """End this process without waiting for a thread: one may still be in a collective that a lost peer never ends.

    Named semaphores of multiprocessing are given back first (tqdm makes one, for example): the launcher would otherwise
    report them as leaked.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # a launcher without them has none to hand on
            with suppress(OSError):  # a log on a full disk
                stream.flush()
    util._run_finalizers(0)  # type: ignore[attr-defined]
    os._exit(code)
