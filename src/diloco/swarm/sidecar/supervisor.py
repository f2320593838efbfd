"""Keeps one sidecar running for a trainer: starts it, passes requests to it, restarts it when it dies, and ends it.

One thread does all of it, since the kernel's death signal ties the sidecar to the thread that started it. A sidecar
that sends nothing for too long is killed and replaced like one that died. A request that was sent to a lost sidecar
fails with `SidecarLost`; a request that was not sent yet waits for the next sidecar.
"""

import contextlib
import itertools
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diloco.errors
from diloco.errors import ConfigError, DiLoCoError, EngineError, Excluded, RoundFailed
from diloco.swarm import timing
from diloco.swarm.settings import Settings
from diloco.swarm.sidecar import messages
from diloco.swarm.sidecar.link import BlockingLink, LinkClosed, LinkError, LinkFull, pair
from diloco.swarm.sidecar.messages import FromSidecar, FromTrainer

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "diloco.swarm.sidecar")
RESTARTS = 5
_CLOSED = "the swarm's engine is closed: no round can follow"

Request = messages.PostRound | messages.FetchState | messages.FetchRunFile | messages.Leave


class SidecarLost(Exception):
    """The sidecar died, or was given up, before it answered."""


class SidecarProcess:
    """A running sidecar, killed with all its children and waited for; and the trainer's end of its link."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Start the process; its output is appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        own_end, sidecar_end = pair()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [*command, str(sidecar_end.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[sidecar_end.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal is for the trainer
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                )
        except OSError:
            own_end.close()
            raise
        finally:
            sidecar_end.close()
        self.link = BlockingLink[FromSidecar](own_end, FromSidecar)
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._reaped = False

    def exits_within(self, seconds: float) -> bool:
        """Wait for its exit without reaping it; after reaping, its id could belong to another process."""
        fd = os.pidfd_open(self.pid)
        poll = select.poll()  # select.select takes no descriptor above 1023
        try:
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(1000 * seconds))
        finally:
            os.close(fd)

    def how_it_ended(self) -> str:
        """Say how a process ended that has exited and is not reaped yet."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if end is None:
            return "for an unknown reason"
        return f"exit code {end.si_status}" if end.si_code == os.CLD_EXITED else f"signal {end.si_status}"

    def kill(self) -> None:
        """Kill it with all processes that it has started. Any thread may call this."""
        with self._lock:
            self._kill_group()

    def end(self) -> None:
        """Kill what is left of the process, and reap it."""
        with self._lock:
            self._kill_group()
            self._process.wait()
            self._reaped = True

    def _kill_group(self) -> None:
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


@dataclass
class _PendingRequest:
    message: Request
    answer: "Future[Any]" = field(default_factory=Future)
    sent: bool = False


class SidecarSupervisor:
    """Keeps one sidecar running, and passes requests to it; used by the trainer's threads."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        on_message: Callable[[FromSidecar], None],
        on_event: Callable[[str, dict[str, Any]], None],
        next_round: Callable[[], int | None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`on_message` and `on_event` are called in the supervisor's thread and must not wait.

        `on_event` gets (type, fields) when a sidecar is lost, and when its replacement has started. `next_round` gives
        what a replacement is told: the first round that the trainer has not merged, if it is known.
        """
        self._settings = settings
        self._log = log
        self._command = command
        self._on_message = on_message
        self._on_event = on_event
        self._next_round = next_round
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._requests: dict[int, _PendingRequest] = {}
        self._link: BlockingLink[FromSidecar] | None = None
        """The link of a sidecar whose node has started; None while there is none."""
        self.process: SidecarProcess | None = None
        self._pid = os.getpid()
        self._closing = threading.Event()
        """No more requests are taken."""
        self._ending = threading.Event()
        """The thread must end."""
        self._lost_at: list[float] = []
        """When sidecars were lost lately."""
        self.times_lost = 0
        self.failure: DiLoCoError | None = None
        """Why there will be no further sidecar."""
        self._first_start: Future[int] = Future()
        """This worker's number, or why the first start failed."""
        self._thread = threading.Thread(target=self._run, name="diloco-sidecar", daemon=True)

    def start(self, seconds: float) -> int:
        """Start a sidecar and return this worker's number; raise the node's error, or EngineError."""
        self._thread.start()
        try:
            return self._first_start.result(seconds)
        except TimeoutError:
            self.close()
            raise EngineError(
                f"the swarm's process ({self._settings.name}) was not ready within {seconds:g} s: see {self._log}"
            ) from None
        except DiLoCoError:
            self.close()
            raise

    # Requests and messages

    def new_number(self) -> int:
        """Return the number of a new request."""
        return next(self._numbers)

    def request(self, message: Request) -> "Future[Any]":
        """Return the answer to come; its exception is SidecarLost, or the error that the sidecar answered with."""
        request = _PendingRequest(message)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._closing.is_set():
                raise EngineError(_CLOSED)
            self._requests[message.number] = request
            if self._link is not None:
                self._send_request(request, self._link)
        return request.answer

    def forget(self, number: int) -> None:
        """Drop a request: no caller waits for its answer any more."""
        with self._lock:
            self._requests.pop(number, None)

    def send(self, message: FromTrainer, seconds: float = timing.SEND_SECONDS) -> bool:
        """Send a message that has no answer; False if there is no sidecar now, or if it did not take it in time."""
        link = self._link
        if link is None:
            return False
        try:
            link.send(message, seconds)
        except LinkError:
            return False
        return True

    def kill(self) -> None:
        """Give this sidecar up; the thread starts another."""
        process = self.process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Tell the other workers, within a few seconds or not at all, and end the sidecar."""
        if os.getpid() != self._pid:
            return  # a fork of the trainer must not end the trainer's sidecar
        leaving: Future[Any] | None = None
        with contextlib.suppress(DiLoCoError):
            if self._link is not None:
                leaving = self.request(messages.Leave(self.new_number()))
        self._closing.set()
        if leaving is not None:
            with contextlib.suppress(TimeoutError, SidecarLost, DiLoCoError):
                leaving.result(timing.LEAVE_SECONDS)
        self._ending.set()
        with self._lock:
            if self._link is not None:
                self._link.shut()
            else:
                self.kill()
        if self._thread.is_alive():
            self._thread.join(timing.EXIT_SECONDS + timing.THREAD_SECONDS)

    # The supervisor's thread

    def _run(self) -> None:
        while not self._ending.is_set() and self.failure is None:
            try:
                self._run_sidecar()
            except (LinkError, OSError, DiLoCoError) as error:
                self._give_up_if_hopeless(error)
                self._on_loss(str(error))
            except Exception as error:  # callers that wait must get it, whatever it is
                logger.exception("the swarm's process cannot be supervised any longer")
                self.failure = EngineError(f"the swarm's process cannot be supervised any longer: {error!r}")
            self._ending.wait(self._restart_pause())
        self._fail_all(self.failure or EngineError(_CLOSED))

    def _restart_pause(self) -> float:
        """Return the pause before the next sidecar: none before the first restart, then 1 s, 3 s, 7 s, ..."""
        restarts_before = max(0, len(self._lost_at) - 1)
        return timing.RESTART_PAUSE_SECONDS * ((1 << restarts_before) - 1)

    def _run_sidecar(self) -> None:
        """Live with one sidecar; raise when it is lost, return when the supervisor is closed."""
        process = SidecarProcess(self._command, self._log)
        self.process = process
        try:
            self._listen(process.link)
        except LinkClosed as error:
            if process.exits_within(timing.DYING_SECONDS):
                raise LinkClosed(f"it died ({process.how_it_ended()})") from error
            raise LinkClosed("it closed the link, and was killed") from error
        finally:
            with self._lock:
                self._link = None
                process.link.close()
            if self._ending.is_set():
                process.exits_within(timing.EXIT_SECONDS)  # by itself, since its link is closed
            process.end()
            self.process = None

    def _listen(self, link: BlockingLink[FromSidecar]) -> None:
        """Start the node, and pass its messages on until the supervisor is closed. Raises LinkError, or the node's
        error if it does not start."""
        start = messages.StartNode(
            self.new_number(), self._settings, self._next_round() if self._first_start.done() else None
        )
        link.send(start, timing.SEND_SECONDS)
        silent = 0
        started = False
        while silent < (timing.SIDECAR_SILENT_TURNS if started else timing.SIDECAR_FIRST_TURNS):
            if self._ending.is_set():
                return
            message = link.receive(1.0)
            silent += 1
            if message is not None:
                silent = 0
                started = True
                self._dispatch(message, start.number, link)
        raise LinkFull(f"it was silent for {silent} s, and was killed")

    def _dispatch(self, message: FromSidecar, start_number: int, link: BlockingLink[FromSidecar]) -> None:
        match message:
            case messages.Started():
                self._on_started(message, link)
            case messages.Failed() if message.number == start_number:
                raise _error(message)
            case messages.Failed():
                self._answer(message.number, error=_error(message))
            case messages.RoundEnded() | messages.StateFetched() | messages.RequestDone():
                self._answer(message.number, message)
            case _:
                self._on_message(message)

    def _on_started(self, message: messages.Started, link: BlockingLink[FromSidecar]) -> None:
        with self._lock:
            self._link = link
            for request in self._requests.values():
                self._send_request(request, link)
        self._on_message(message)
        if not self._first_start.done():
            self._first_start.set_result(message.worker)
        else:
            self._on_event("sidecar_restarted", {"restarts": len(self._lost_at)})

    def _send_request(self, request: _PendingRequest, link: BlockingLink[FromSidecar]) -> None:
        """Send a request; the caller holds the lock. A sidecar that takes no message is frozen."""
        if request.sent:
            return
        request.sent = True
        try:
            link.send(request.message, timing.SEND_SECONDS)
        except LinkClosed:
            pass  # the thread sees it too, and fails all requests that were sent
        except LinkFull:
            self.kill()

    def _answer(self, number: int, value: object = None, error: Exception | None = None) -> None:
        with self._lock:
            request = self._requests.pop(number, None)
        if request is not None:
            _settle(request.answer, value, error)

    def _give_up_if_hopeless(self, error: Exception) -> None:
        """Give up after a failed first start, an error of configuration or an exclusion.

        Another sidecar would fail likewise, or come back as the later one of two processes of its identity.
        """
        if not self._first_start.done():
            final: DiLoCoError = EngineError(self._with_last_log_line(str(error)))
            if isinstance(error, DiLoCoError) and not isinstance(error, RoundFailed):
                final = error
            self.failure = final
            self._first_start.set_exception(final)
        elif isinstance(error, ConfigError | Excluded):
            self.failure = error

    def _on_loss(self, reason: str) -> None:
        """Fail every request that was sent; the others wait for the next sidecar."""
        if not self._ending.is_set():
            self.times_lost += 1
        with self._lock:
            sent = {number: request for number, request in self._requests.items() if request.sent}
            for number in sent:
                del self._requests[number]
        for request in sent.values():
            _settle(request.answer, None, SidecarLost(f"the swarm's process was lost: {reason}"))
        if self._ending.is_set() or self.failure is not None:
            return
        now = time.monotonic()
        self._lost_at = [at for at in self._lost_at if now - at < timing.RESTARTS_SECONDS] + [now]
        self._on_event("sidecar_lost", {"reason": reason, "log": str(self._log)})
        if len(self._lost_at) > RESTARTS:
            self.failure = EngineError(
                f"the swarm's process was lost {len(self._lost_at)} times within "
                f"{timing.RESTARTS_SECONDS / 60:g} minutes: " + self._with_last_log_line(reason)
            )

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            requests = self._requests
            self._requests = {}
            self._closing.set()
        if not self._first_start.done():
            self._first_start.set_exception(error)
        for request in requests.values():
            _settle(request.answer, None, error)

    def _with_last_log_line(self, reason: str) -> str:
        last = ""
        with contextlib.suppress(OSError):
            lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
            last = f"; it last wrote: {lines[-1][:300]}" if lines else ""
        return f"{reason}{last} (see {self._log})"


def _settle(answer: "Future[Any]", value: object, error: Exception | None) -> None:
    with contextlib.suppress(InvalidStateError):
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)


def _error(message: messages.Failed) -> DiLoCoError:
    """Return the error that a sidecar answered with; one that diloco.errors does not name becomes RoundFailed."""
    kind = getattr(diloco.errors, message.kind, RoundFailed) if message.kind else RoundFailed
    assert issubclass(kind, DiLoCoError)
    return kind(message.text)
