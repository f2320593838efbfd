"""Local workers as processes: starts them, passes a stop on to them, and never leaves one behind. Torch-free.

Both sides are here: the launcher, and the worker's process from its beginning (`run_worker`) to its exit code.

A policy says what becomes of the run when a process ends:

EndTogether    for a fixed set of workers: the run ends with the first that fails (torch.distributed has a fixed
               membership), but not at once: the others have their bounded wait to notice, to save the last agreed
               parameters and to write how far they came.
StartAgain     for workers of a swarm: a worker that was killed, or failed for a reason that may pass, is started again
               under its own name while the others train on; so is one of several ranks as a whole, when one of them
               has failed. It takes the swarm's state, or, if no member is left, continues from the newest checkpoint of
               this machine. A worker that the swarm refuses (banned, another model), whose configuration is refused,
               whose loss is not finite, or that failed before it had joined, is not started again. The run has ended
               when all local workers have.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from diloco.errors import (
    CheckpointError,
    ConfigError,
    DiLoCoError,
    Excluded,
    LossNotFinite,
    ModelNotWritten,
    WorkerFailed,
)
from diloco.history.events import LossNotFiniteEvent, WorkerStartedEvent
from diloco.history.log import EventReader
from diloco.run_lock import hold_as_worker
from diloco.swarm.run_files import SWARM_FOLDER
from diloco.training.config.run import RunConfig
from diloco.training.processes.local_process import RENDEZVOUS_FILE, STOP_SIGNALS, LocalRank, SwarmSlot
from diloco.training.records.run_folder import resume_command
from diloco.training.sizes.room import free_disk, size_text

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
EXIT_CODES: dict[type[DiLoCoError], int] = {
    ConfigError: CONFIG_CODE,
    CheckpointError: CHECKPOINT_CODE,
    Excluded: EXCLUDED_CODE,
    LossNotFinite: LOSS_CODE,
    ModelNotWritten: MODEL_CODE,
}
"""The exit codes of errors that another start would only meet again; that of any other error is 1."""
MAX_RESTARTS = 5
"""The most times that a swarm's worker is started again; counted anew once it has run for RESTED_SECONDS."""
RESTED_SECONDS = 1800.0
_POLL_SECONDS = 0.1
_GRACE_SECONDS = 15.0
_RANKS_GRACE_SECONDS = 5.0
"""From the failure of one rank of a swarm's worker until the others are killed: they write why they end."""
_GRACE_BEFORE_START_SECONDS = 2.0
"""The grace of workers that had not found each other yet."""
_LONGEST_PAUSE_SECONDS = 30.0
_FULL_SECONDS = 5.0
"""The time between two looks at a full disk."""
_FULL_BYTES = 1 << 20
"""A disk with less room is full."""


@dataclass
class LaunchedWorker:
    """Processes that are started together and end together: a worker, a rank of a fixed set's worker, or all ranks of a
    swarm's worker."""

    locals: Sequence[LocalRank] | Sequence[SwarmSlot]
    processes: list[BaseProcess] = field(default_factory=list)
    """Those that run now, in the same order."""
    started: float = 0.0
    restarts: int = 0
    restart_at: float | None = None
    """When it is started again."""
    code: int | None = None
    """The exit code with which it ended for good."""
    cause: LocalRank | SwarmSlot | None = None
    """The one by which it ended, if it failed."""
    _failed_at: float | None = None
    _killed: bool = False

    @property
    def local(self) -> LocalRank | SwarmSlot:
        """The first one."""
        return self.locals[0]

    @property
    def is_alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def send_signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, number)

    def begin(self, processes: list[BaseProcess]) -> None:
        self.processes = processes
        self.started = time.monotonic()
        self.restart_at = None
        self.cause = None
        self._failed_at = None
        self._killed = False

    def exit_code(self) -> int | None:
        """The exit code with which it has ended; None: it runs.

        Once a process has failed the others have a moment to notice; then they are killed. What failed first is the
        cause: a process that was killed, or else one with an exit code that says why.
        """
        codes = [process.exitcode for process in self.processes]
        locals_: Sequence[LocalRank | SwarmSlot] = self.locals
        failed = [(code, local) for code, local in zip(codes, locals_, strict=True) if code]
        if failed and not self._killed:
            self._failed_at = self._failed_at or time.monotonic()
            self.cause = min(failed, key=lambda one: (one[0] > 0, one[0] not in EXIT_CODES.values()))[1]
            if time.monotonic() - self._failed_at > _RANKS_GRACE_SECONDS and None in codes:
                self._killed = True
                self.send_signal(signal.SIGKILL)
        if None in codes or not codes:
            return None
        return 0 if self.cause is None else codes[list(self.locals).index(self.cause)]


class RestartPolicy(ABC):
    """The rule for what becomes of a run when one of its processes ends."""

    workers: Sequence[LaunchedWorker] = ()
    """All processes of the run; the launcher sets it."""

    @abstractmethod
    def pause_before_restart(self, worker: LaunchedWorker, code: int, *, stopping: bool) -> float | None:
        """Return the seconds until a process that ended with `code` starts again; None: it has ended for good."""

    @abstractmethod
    def run_error(self, stop_requests: int) -> Exception | None:
        """Return why the run has failed, after all processes have ended; None: it has not."""

    def begin(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Prepare the run folder; called before the processes are started."""

    def must_end(self) -> bool:
        """Return whether the processes that still run are to be killed now; called several times a second."""
        return False

    def close(self) -> None:  # noqa: B027 - a hook that may stay empty
        """Remove what `begin` has left; called after all processes have ended."""


class LocalWorkers:
    """The worker processes of one run on this machine. `stop()` may be called from a signal handler."""

    def __init__(
        self,
        config: RunConfig,
        together: Sequence[Sequence[LocalRank]] | Sequence[Sequence[SwarmSlot]],
        policy: RestartPolicy,
    ) -> None:
        """`together`: the processes that end together, by worker."""
        self.config = config
        self.workers = [LaunchedWorker(locals_) for locals_ in together]
        self.stop_requests = 0
        self._policy = policy
        policy.workers = self.workers

    def run(self, poll: Callable[[], None]) -> None:
        """Start all workers and wait until they have ended; `poll` is called several times a second.

        Raises the DiLoCoError that says why the run failed.
        """
        (self.workers[0].local.run_folder / "logs").mkdir(exist_ok=True)
        for worker in self.workers:
            _rotate_logs(worker)
        self._policy.begin()
        try:
            self._start(self.workers)
            while any(worker.code is None for worker in self.workers):
                time.sleep(_POLL_SECONDS)
                poll()
                for worker in self.workers:
                    self._note_exit(worker)
                if self._policy.must_end():
                    break
            poll()
        finally:
            self._kill_all()
            self._policy.close()
        error = self._policy.run_error(self.stop_requests)
        if error is not None:
            raise error

    def stop(self) -> None:
        """Let the workers end, each in its own time; at the second request kill them."""
        self.stop_requests += 1
        self._signal_stop()

    def _signal_stop(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGINT if self.stop_requests == 1 else signal.SIGKILL)

    def _start(self, workers: Sequence[LaunchedWorker]) -> None:
        context = multiprocessing.get_context("spawn")
        with stop_signals_blocked():
            for worker in workers:
                if isinstance(worker.local, SwarmSlot):
                    worker.local.rendezvous.unlink(missing_ok=True)  # of an earlier start
                processes = []
                for local in worker.locals:
                    name = f"diloco-{local.log.stem}"
                    process = context.Process(target=run_worker, args=(self.config, local), name=name, daemon=True)
                    process.start()
                    processes.append(process)
                worker.begin(list(processes))
        if self.stop_requests:  # before the processes had started
            self._signal_stop()

    def _note_exit(self, worker: LaunchedWorker) -> None:
        """Note that a process has ended, and start it again when its time has come."""
        if worker.code is not None:
            return
        if worker.restart_at is not None:
            self._restart_if_due(worker, worker.restart_at)
            return
        code = worker.exit_code()
        if code is None:
            return
        pause = self._policy.pause_before_restart(worker, code, stopping=self.stop_requests > 0)
        if pause is None:
            worker.code = code
        else:
            worker.restart_at = time.monotonic() + pause

    def _restart_if_due(self, worker: LaunchedWorker, restart_at: float) -> None:
        if self.stop_requests:
            worker.code = 0  # it has left already
        elif time.monotonic() >= restart_at:
            if disk_is_full(worker.local.run_folder):
                worker.restart_at = time.monotonic() + _FULL_SECONDS
                return
            _rotate_logs(worker)
            self._start([worker])

    def _kill_all(self) -> None:
        processes = [process for worker in self.workers for process in worker.processes]
        for process in processes:
            if process.is_alive():
                process.kill()
        for process in processes:
            process.join(_GRACE_SECONDS)


class EndTogether(RestartPolicy):
    """A fixed set of workers ends with the first that fails."""

    def __init__(self, config: RunConfig, run_folder: Path) -> None:
        self._config = config
        self._rendezvous = run_folder / RENDEZVOUS_FILE
        self._events = EventReader(run_folder)
        self._started = False
        self._ending = False  # since a worker's loss is not finite
        self._failed: LaunchedWorker | None = None  # the first one
        self._deadline = 0.0  # of the others, once one has failed
        self._killed: list[LaunchedWorker] = []  # did not end by themselves after that

    def begin(self) -> None:
        self._rendezvous.unlink(missing_ok=True)  # a killed launcher leaves it
        self._events.skip()

    def pause_before_restart(self, worker: LaunchedWorker, code: int, *, stopping: bool) -> float | None:  # noqa: ARG002
        return None

    def must_end(self) -> bool:
        self._read_events()
        if self._failed is None:
            self._failed = self._first_failure()
            if self._failed is not None:
                self._deadline = time.monotonic() + self._grace_seconds(self._failed.code or 0)
            return False
        if time.monotonic() <= self._deadline:
            return False
        self._killed = [worker for worker in self.workers if worker.is_alive]
        return True

    def _read_events(self) -> None:
        """Note that the workers have begun; ask all to end if one has a loss that is not finite."""
        for event in self._events.read()[0]:
            self._started |= isinstance(event, WorkerStartedEvent)
            if isinstance(event, LossNotFiniteEvent) and not self._ending:
                self._ending = True
                for worker in self.workers:
                    worker.send_signal(signal.SIGINT)

    def _first_failure(self) -> LaunchedWorker | None:
        """Return a worker that has failed, a killed one first: the others failed because of it."""
        failed = [worker for worker in self.workers if worker.code]
        return min(failed, key=lambda worker: (worker.code or 0) > 0, default=None)

    def _grace_seconds(self, code: int) -> float:
        """Return how long the other workers may take to notice.

        A worker that failed without being killed has waited for the round's timeout itself, and so have the others.
        """
        if not self._started:
            return _GRACE_BEFORE_START_SECONDS
        return _GRACE_SECONDS + (self._config.sync.timeout_seconds if code < 0 else 0.0)

    def close(self) -> None:
        self._rendezvous.unlink(missing_ok=True)

    def run_error(self, stop_requests: int) -> Exception | None:
        failed = self._failed or self._first_failure()
        if failed is None:
            return None
        if stop_requests > 1:
            return WorkerFailed("killed at the second request to stop: the workers had no time for a last round")
        killed = "".join(f"; {worker.local} did not end and was killed" for worker in self._killed)
        return worker_error(f"{failed.local} of {self._config.workers}", failed.local.log, failed.code or 0, killed)


class StartAgain(RestartPolicy):
    """A worker of a swarm is started again, unless it would only end the same way."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """`note`: shows a message to the user."""
        self._note = note

    def pause_before_restart(self, worker: LaunchedWorker, code: int, *, stopping: bool) -> float | None:
        local = worker.cause or worker.local
        if time.monotonic() - worker.started > RESTED_SECONDS:
            worker.restarts = 0
        if (
            code == 0
            or code in EXIT_CODES.values()
            or stopping
            or worker.restarts >= MAX_RESTARTS
            or self._would_fail_again(worker, code)
        ):
            if code and len(self.workers) > 1:
                self._note(
                    f"{local} has ended for good ({worker_error(str(local), local.log, code)}); the others train on"
                )
            return None
        if disk_is_full(local.run_folder):
            self._note(
                f"{local} ended: the disk of {local.run_folder} is full ({size_text(free_disk(local.run_folder))} "
                "free). Make room: it is started again when there is some; the others train on meanwhile"
            )
            return _FULL_SECONDS
        worker.restarts += 1
        error = worker_error(str(local), local.log, code)
        self._note(f"{local} ended ({error}): it is started again ({worker.restarts} of at most {MAX_RESTARTS} times)")
        return min(_LONGEST_PAUSE_SECONDS, 2.0 ** (worker.restarts - 1))

    def _would_fail_again(self, worker: LaunchedWorker, code: int) -> bool:
        """Return whether the worker failed before it had joined, or may find no state left to join."""
        assert isinstance(worker.local, SwarmSlot)
        joined = worker.local.run_folder / SWARM_FOLDER / f"{worker.local.name}.json"
        never_joined = code > 0 and not joined.exists()
        return never_joined or any(other.code == LOSS_CODE for other in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            assert isinstance(worker.local, SwarmSlot)
            worker.local.rendezvous.unlink(missing_ok=True)

    def run_error(self, stop_requests: int) -> Exception | None:
        """Return None if one worker has succeeded, and otherwise the first worker's error."""
        if stop_requests > 1:
            return WorkerFailed("killed at the second request to stop: the others notice within seconds")
        if any(worker.code == 0 for worker in self.workers):
            return None
        first = self.workers[0]
        local = first.cause or first.local
        return worker_error(str(local), local.log, first.code or 0)


def disk_is_full(folder: Path) -> bool:
    """Return whether the disk of a folder is full: a process that writes there may have ended for that reason, without
    a word of it in its log."""
    return free_disk(folder) < _FULL_BYTES


def worker_error(worker: str, log: Path, code: int, more: str = "") -> Exception:
    """Return the error that the user sees after a worker process has ended with this exit code."""
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
        run = log.parent.parent
        return WorkerFailed(
            f"{worker} has ended: the disk of {run} is full ({size_text(free_disk(run))} free): make room, then "
            f"continue with {resume_command(run)}"
        )
    elif code in (EXCLUDED_CODE, LOSS_CODE, MODEL_CODE) or _reason_is_enough(output):
        return WorkerFailed(f"{worker} has ended: {reason}")
    return WorkerFailed(f"{worker} failed: {reason}{more}", output)


def _reason_is_enough(output: str) -> bool:
    """Return whether the message alone explains the failure, so that the traceback would not help: no worker answered,
    or the answer was no."""
    return any(line.startswith("diloco.errors.RendezvousError: ") for line in output.splitlines()[-1:])


def _last_line(output: str) -> str:
    """Return the message of the last traceback, without the exception's module."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else "it wrote nothing"
    return last.split(": ", 1)[1] if last.startswith("diloco.errors.") and ": " in last else last


@contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Let processes started inside, and this one, receive a stop signal only once they unblock it (worker.py)."""
    resource_tracker.ensure_running()  # a process of multiprocessing: starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rotate_logs(worker: LaunchedWorker) -> None:
    for local in worker.locals:
        rotate_log(local.log)


def rotate_log(log: Path) -> None:
    """Rename the log of an earlier start: worker-0.1.log, and so on."""
    if log.exists():
        number = 1
        while (older := log.with_suffix(f".{number}.log")).exists():
            number += 1
        log.rename(older)


# A worker process from its beginning to its exit code


def run_worker(config: RunConfig, local: LocalRank | SwarmSlot) -> NoReturn:
    """Train in this process, which a launcher has just started, and end it; errors are in its log.

    The log and the watch on the launcher come before the slow import of torch.
    """
    _write_to_log(local.log)
    os.setpgid(0, 0)  # Ctrl-C reaches the launcher alone, which passes it on once
    _end_with_parent(local.parent)
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


def _end_with_parent(parent: int) -> None:
    """End this process once its launcher is gone, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="diloco-parent-watch", daemon=True).start()


def exit_code(error: BaseException) -> int:
    """Return the exit code of a worker process that ends with this error."""
    return next((code for kind, code in EXIT_CODES.items() if isinstance(error, kind)), 1)


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
