"""Local workers of a swarm as processes: one that dies is started again while the others train on. Torch-free.

A worker that was killed, or failed for a reason that may pass, is started again under its own name: it takes the
swarm's state, or, if no member is left, continues from the newest checkpoint of this machine. A worker that the swarm
refuses (banned, another model), whose configuration is refused, whose loss is not finite, or that failed before it had
joined, is not. The run has ended when all local workers have.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess

from diloco.engines.swarm.run_files import SWARM_FOLDER
from diloco.errors import WorkerFailed
from diloco.training.config.run import RunConfig
from diloco.training.processes.launcher import disk_is_full, failure, rotate_log, stop_signals_blocked
from diloco.training.processes.local_process import (
    CHECKPOINT_CODE,
    CONFIG_CODE,
    EXCLUDED_CODE,
    LOSS_CODE,
    MODEL_CODE,
    SwarmSlot,
)
from diloco.training.processes.spawn import run_swarm_worker
from diloco.training.sizes.disk import size_text
from diloco.training.sizes.machine import free_disk

MAX_RESTARTS = 5
"""Of each worker; the count starts again at 0 after RESTED_SECONDS of uptime."""
RESTED_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
_FULL_SECONDS = 5.0
"""Between two looks at a full disk."""
_FOR_GOOD = (CONFIG_CODE, CHECKPOINT_CODE, EXCLUDED_CODE, LOSS_CODE, MODEL_CODE)


@dataclass
class _Local:
    """One local worker and the process that runs it now."""

    slot: SwarmSlot
    process: BaseProcess | None = None
    restarts: int = 0
    started: float = 0.0
    restart_at: float | None = None
    """When it is started again."""
    code: int | None = None
    """The exit code with which it ended for good."""


class SwarmWorkers:
    """The processes of this machine. `stop()` may be called from a signal handler."""

    def __init__(self, config: RunConfig, slots: Sequence[SwarmSlot], tell: Callable[[str], None]) -> None:
        """`tell`: shows a message to the user."""
        self.config, self._tell = config, tell
        self._locals = [_Local(slot) for slot in slots]
        self.stop_requests = 0

    def run(self, poll: Callable[[], None]) -> None:
        """Start all workers and wait until they have ended; `poll` is called several times a second."""
        (self._locals[0].slot.run_folder / "logs").mkdir(exist_ok=True)
        try:
            for local in self._locals:
                rotate_log(local.slot.log)
                self._start(local)
            while any(local.code is None for local in self._locals):
                time.sleep(_POLL_SECONDS)
                poll()
                for local in self._locals:
                    self._restart_if_ended(local)
            poll()
        finally:
            self._kill_all()
        self._raise_if_all_failed()

    def stop(self) -> None:
        """First request: the workers leave the swarm, each after its current step. Second: they are killed."""
        self.stop_requests += 1
        self._pass_on()

    def _pass_on(self) -> None:
        for local in self._locals:
            if local.process is not None and local.process.is_alive() and local.process.pid is not None:
                os.kill(local.process.pid, signal.SIGINT if self.stop_requests == 1 else signal.SIGKILL)

    def _start(self, local: _Local) -> None:
        context = multiprocessing.get_context("spawn")
        with stop_signals_blocked():
            process = context.Process(
                target=run_swarm_worker, args=(self.config, local.slot), name=f"diloco-{local.slot.name}", daemon=True
            )
            process.start()
            local.process, local.started, local.restart_at = process, time.monotonic(), None
        if self.stop_requests:  # before the process had started
            self._pass_on()

    def _restart_if_ended(self, local: _Local) -> None:
        if local.code is not None:
            return
        if local.restart_at is not None:
            if self.stop_requests:
                local.code = 0  # it has left already
            elif time.monotonic() >= local.restart_at:
                if disk_is_full(local.slot.run_folder):
                    local.restart_at = time.monotonic() + _FULL_SECONDS
                    return
                rotate_log(local.slot.log)
                self._start(local)
            return
        code = None if local.process is None else local.process.exitcode
        if code is None:
            return
        if time.monotonic() - local.started > RESTED_SECONDS:
            local.restarts = 0
        never_in = code > 0 and not (local.slot.run_folder / SWARM_FOLDER / f"{local.slot.name}.json").exists()
        in_vain = never_in or any(other.code == LOSS_CODE for other in self._locals)  # no state may be left to join
        if code == 0 or code in _FOR_GOOD or in_vain or self.stop_requests or local.restarts >= MAX_RESTARTS:
            local.code = code
            if code and len(self._locals) > 1:
                self._tell(f"{local.slot} has ended for good ({self._reason(local, code)}); the others train on")
            return
        if disk_is_full(local.slot.run_folder):
            local.restart_at = time.monotonic() + _FULL_SECONDS
            free = size_text(free_disk(local.slot.run_folder))
            self._tell(
                f"{local.slot} ended: the disk of {local.slot.run_folder} is full ({free} free). Make room: it is "
                "started again when there is some; the others train on meanwhile"
            )
            return
        local.restarts += 1
        pause = min(30.0, 2.0 ** (local.restarts - 1))
        local.restart_at = time.monotonic() + pause
        self._tell(
            f"{local.slot} ended ({self._reason(local, code)}): it is started again ({local.restarts} of at most "
            f"{MAX_RESTARTS} times)"
        )

    @staticmethod
    def _reason(local: _Local, code: int) -> str:
        return str(failure(str(local.slot), local.slot.log, code))

    def _kill_all(self) -> None:
        processes = [local.process for local in self._locals if local.process is not None]
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(_GRACE_SECONDS)

    def _raise_if_all_failed(self) -> None:
        """The run has succeeded if one worker has; otherwise raise the first worker's failure."""
        if self.stop_requests > 1:
            raise WorkerFailed("killed at the second request to stop: the others notice within seconds")
        ended = [(local, local.code) for local in self._locals if local.code is not None]
        if any(code == 0 for _, code in ended):
            return
        local, code = ended[0]
        raise failure(str(local.slot), local.slot.log, code)
