"""Local workers as processes: starts them, passes a stop on to them, and never leaves one behind. Torch-free.

A worker that dies ends the run (torch.distributed has a fixed membership), but not at once: the other workers have
their bounded wait to notice, to save the last agreed parameters and to write how far they came.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from diloco.errors import CheckpointError, ConfigError, WorkerFailed
from diloco.history.log import EventReader
from diloco.training.config.run import RunConfig
from diloco.training.processes.local_process import (
    CHECKPOINT_CODE,
    CONFIG_CODE,
    EXCLUDED_CODE,
    LOSS_CODE,
    MODEL_CODE,
    RENDEZVOUS_FILE,
    STOP_SIGNALS,
    LocalRank,
)
from diloco.training.processes.spawn import run_local_rank
from diloco.training.records.run_folder import resume_command
from diloco.training.sizes.disk import size_text
from diloco.training.sizes.machine import free_disk

_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
_FULL_BYTES = 1 << 20
"""A disk with less room is full."""


class LocalWorkers:
    """The processes of one run. `stop()` may be called from a signal handler."""

    def __init__(self, config: RunConfig, run_folder: Path, corpus_folder: Path, *, resume: bool = False) -> None:
        """`resume`: continue from the checkpoints in the run folder."""
        self.config, self.run_folder, self.corpus_folder = config, run_folder, corpus_folder
        self._events = EventReader(run_folder)
        self._started = False
        self._ending = False  # since a worker's loss is not finite
        self.stop_requests = 0
        sizes = config.sizes()
        self._ranks = [LocalRank(n, sizes, run_folder, corpus_folder, os.getpid(), resume) for n in range(sum(sizes))]
        self._processes: list[BaseProcess] = []
        self._failed: tuple[int, int] | None = None  # the first process that failed, and its exit code
        self._silent: list[LocalRank] = []  # did not end by themselves after that

    def run(self, poll: Callable[[], None]) -> None:
        """Start all workers and wait until they have ended; `poll` is called several times a second."""
        (self.run_folder / "logs").mkdir(exist_ok=True)
        (self.run_folder / RENDEZVOUS_FILE).unlink(missing_ok=True)  # a killed launcher leaves it
        for local in self._ranks:
            rotate_log(local.log)
        self._events.skip()
        try:
            self._start()
            self._supervise(poll)
        finally:
            self._kill_all()
        if self._failed is not None:
            raise self._failure(*self._failed)

    def stop(self) -> None:
        """First request: the workers end with a last round. Second: they are killed."""
        self.stop_requests += 1
        self._pass_on()

    def _pass_on(self) -> None:
        for process in self._alive():
            if process.pid is not None:
                os.kill(process.pid, signal.SIGINT if self.stop_requests == 1 else signal.SIGKILL)

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        with stop_signals_blocked():
            for local in self._ranks:
                process = context.Process(
                    target=run_local_rank, args=(self.config, local), name=f"diloco-worker-{local.process}", daemon=True
                )
                process.start()
                self._processes.append(process)
        if self.stop_requests:  # before the processes had started
            self._pass_on()

    def _supervise(self, poll: Callable[[], None]) -> None:
        deadline: float | None = None
        while self._alive():
            time.sleep(_POLL_SECONDS)
            poll()
            self._read_events()
            if self._failed is None and (failed := self._first_failure()) is not None:
                self._failed = failed
                deadline = time.monotonic() + self._grace_seconds(failed[1])
            if deadline is not None and time.monotonic() > deadline:
                started = zip(self._ranks, self._processes, strict=True)
                self._silent = [local for local, process in started if process.is_alive()]
                return
        self._failed = self._failed or self._first_failure()
        poll()

    def _grace_seconds(self, code: int) -> float:
        """How long the other workers may take to notice: 2 s if they had not found each other yet.

        A worker that failed without being killed has waited for the round's timeout itself, and so have the others.
        """
        self._read_events()
        if not self._started:
            return 2.0
        return _GRACE_SECONDS + (self.config.sync.timeout_seconds if code < 0 else 0.0)

    def _read_events(self) -> None:
        """Note that the workers have begun; ask all to end if one has a loss that is not finite."""
        for event in self._events.new_events():
            self._started |= event["type"] == "worker_started"
            if event["type"] == "loss_not_finite" and not self._ending:
                self._ending = True
                for process in self._alive():
                    if process.pid is not None:
                        os.kill(process.pid, signal.SIGINT)

    def _alive(self) -> list[BaseProcess]:
        return [process for process in self._processes if process.is_alive()]

    def _first_failure(self) -> tuple[int, int] | None:
        """A killed worker comes first: the others failed because of it."""
        codes = [(number, process.exitcode) for number, process in enumerate(self._processes)]
        failed = [(number, code) for number, code in codes if code not in (None, 0)]
        return min(failed, key=lambda item: (item[1] > 0, item[0])) if failed else None

    def _kill_all(self) -> None:
        for process in self._alive():
            process.kill()
        for process in self._processes:
            process.join(_GRACE_SECONDS)
        (self.run_folder / RENDEZVOUS_FILE).unlink(missing_ok=True)

    def _failure(self, process: int, code: int) -> Exception:
        if self.stop_requests > 1:
            return WorkerFailed("killed at the second request to stop: the workers had no time for a last round")
        local = self._ranks[process]
        silent = "".join(f"; {one} did not end and was killed" for one in self._silent)
        return failure(f"{local} of {self.config.workers}", local.log, code, silent)


def disk_is_full(folder: Path) -> bool:
    """Whether a process that writes there has ended for that reason; it may have left no word of it."""
    return free_disk(folder) < _FULL_BYTES


def full_disk(run: Path) -> str:
    return (
        f"the disk of {run} is full ({size_text(free_disk(run))} free): make room, then continue with "
        f"{resume_command(run)}"
    )


def failure(worker: str, log: Path, code: int, more: str = "") -> Exception:
    """The error that the user sees after a worker process has ended with this exit code."""
    output = log.read_text(errors="replace") if log.exists() else ""
    reason = _last_line(output)
    if code < 0:
        reason = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGILL:
            reason += " (an instruction that this CPU lacks; bf16 needs ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 on some)"
    elif code == CONFIG_CODE:
        return ConfigError(reason)
    elif code == CHECKPOINT_CODE:
        return CheckpointError(reason)
    elif code == MODEL_CODE and "ModelNotWritten" not in output:  # the log may be on the full disk too
        return WorkerFailed(f"{worker} has taken all its steps, but could not write the model")
    elif code not in (LOSS_CODE, MODEL_CODE) and disk_is_full(log.parent):
        return WorkerFailed(f"{worker} has ended: {full_disk(log.parent.parent)}")
    elif code in (EXCLUDED_CODE, LOSS_CODE, MODEL_CODE) or reason_is_enough(output):
        return WorkerFailed(f"{worker} has ended: {reason}")
    return WorkerFailed(f"{worker} failed: {reason}{more}", output)


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Processes started inside receive a stop signal only once they unblock it (worker.py); so does this process."""
    resource_tracker.ensure_running()  # a process of multiprocessing: starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def rotate_log(log: Path) -> None:
    """Rename the log of an earlier start: worker-0.1.log, and so on."""
    if log.exists():
        number = 1
        while (older := log.with_suffix(f".{number}.log")).exists():
            number += 1
        log.rename(older)


def reason_is_enough(output: str) -> bool:
    """Whether the message alone explains the failure, so that the traceback would not help: no worker answered, or the
    answer was no."""
    return any(line.startswith("diloco.errors.RendezvousError: ") for line in output.splitlines()[-1:])


def _last_line(output: str) -> str:
    """The message of the last traceback, without the exception's module."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    return last.split(": ", 1)[1] if last.startswith("diloco.errors.") and ": " in last else last
