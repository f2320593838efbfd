"""Local workers of a swarm as processes: each may die, and is started again; the others go on meanwhile. Torch-free.

A worker that was killed, or failed for a reason that may pass, comes back under its own name: it takes the others'
state, or, if nobody is left, goes on from the newest checkpoint here. One that has no place among the others (banned,
another model, a configuration that cannot be), or that failed before it ever was in the swarm, does not. The run has
ended when all local workers have.
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
from diloco.training.processes.launcher import failure, put_aside, signals_held_back
from diloco.training.processes.spawn import CHECKPOINT_CODE, EXCLUDED_CODE, Chair, swarm_worker

MAX_RESTARTS = 5
"""Of each worker; a worker that has lived for RESTED_SECONDS begins to count anew."""
RESTED_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
_FOR_GOOD = (2, CHECKPOINT_CODE, EXCLUDED_CODE)


@dataclass
class _Local:
    """One local worker, through all its processes."""

    chair: Chair
    process: BaseProcess | None = None
    restarts: int = 0
    started: float = 0.0
    again_at: float | None = None
    """When to start it again."""
    code: int | None = None
    """How it ended for good."""


class SwarmWorkers:
    """The processes of this machine. `stop()` may be called from a signal handler."""

    def __init__(self, config: RunConfig, chairs: Sequence[Chair], tell: Callable[[str], None]) -> None:
        """`tell`: what a person should know of."""
        self.config, self._tell = config, tell
        self._locals = [_Local(chair) for chair in chairs]
        self.stop_requests = 0

    def run(self, poll: Callable[[], None]) -> None:
        """Start all workers and see them to their end; `poll` is called several times a second."""
        (self._locals[0].chair.run_folder / "logs").mkdir(exist_ok=True)
        try:
            for local in self._locals:
                put_aside(local.chair.log)
                self._start(local)
            while any(local.code is None for local in self._locals):
                time.sleep(_POLL_SECONDS)
                poll()
                for local in self._locals:
                    self._look_after(local)
            poll()
        finally:
            self._kill_all()
        self._judge()

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
        with signals_held_back():
            process = context.Process(
                target=swarm_worker, args=(self.config, local.chair), name=f"diloco-{local.chair.seat}", daemon=True
            )
            process.start()
            local.process, local.started, local.again_at = process, time.monotonic(), None
        if self.stop_requests:  # asked for before there was anyone to pass it on to
            self._pass_on()

    def _look_after(self, local: _Local) -> None:
        if local.code is not None:
            return
        if local.again_at is not None:
            if self.stop_requests:
                local.code = 0  # it has left already
            elif time.monotonic() >= local.again_at:
                put_aside(local.chair.log)
                self._start(local)
            return
        code = None if local.process is None else local.process.exitcode
        if code is None:
            return
        if time.monotonic() - local.started > RESTED_SECONDS:
            local.restarts = 0
        never_in = code > 0 and not (local.chair.run_folder / SWARM_FOLDER / f"{local.chair.seat}.json").exists()
        if code == 0 or code in _FOR_GOOD or never_in or self.stop_requests or local.restarts >= MAX_RESTARTS:
            local.code = code
            if code and len(self._locals) > 1:
                self._tell(f"{local.chair} has ended for good ({self._reason(local, code)}); the others go on")
            return
        local.restarts += 1
        pause = min(30.0, 2.0 ** (local.restarts - 1))
        local.again_at = time.monotonic() + pause
        self._tell(
            f"{local.chair} ended ({self._reason(local, code)}): it is started again ({local.restarts} of at most "
            f"{MAX_RESTARTS} times)"
        )

    @staticmethod
    def _reason(local: _Local, code: int) -> str:
        return str(failure(str(local.chair), local.chair.log, code))

    def _kill_all(self) -> None:
        processes = [local.process for local in self._locals if local.process is not None]
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(_GRACE_SECONDS)

    def _judge(self) -> None:
        """The run is as good as its best worker."""
        if self.stop_requests > 1:
            raise WorkerFailed("killed at the second request to stop: the others notice within seconds")
        ended = [(local, local.code) for local in self._locals if local.code is not None]
        if any(code == 0 for _, code in ended):
            return
        local, code = ended[0]
        raise failure(str(local.chair), local.chair.log, code)
