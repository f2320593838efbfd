"""A worker's sidecar as its trainer keeps it: started, heard, started again when it dies, and never left behind.

One thread does it all, since the kernel ties the sidecar's life to the thread that started it. A sidecar that is
silent for too long (frozen) is killed and replaced like one that died. What was asked of a lost sidecar fails with
`SidecarLost`; what was asked while there is none waits for the next.
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
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.sidecar import messages as say
from diloco.engines.swarm.sidecar.link import Link, LinkClosed, LinkError, LinkFull, pair
from diloco.errors import ConfigError, DiLoCoError, EngineError, RoundFailed

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-P", "-m", "diloco.engines.swarm.sidecar.process")
SILENT_TURNS = 30
"""So many seconds without a word, counted while this process itself runs."""
_FIRST_TURNS = 60  # a process that has yet to import everything says nothing
RESTARTS, RESTARTS_SECONDS = 5, 600.0
PAUSE_SECONDS = 1.0
"""Before the second restart; twice as long before each further one. The first comes at once."""
_SEND_SECONDS = 2.0
_LEAVE_SECONDS = 3.0
_EXIT_SECONDS = 2.0
_JOIN_SECONDS = 5.0
_DYING_SECONDS = 0.5


class SidecarLost(Exception):
    """The sidecar died, or was given up, before it answered."""


@dataclass
class _Request:
    message: say.Message
    answer: "Future[Any]" = field(default_factory=Future)
    sent: bool = False


class KeptSidecar:
    """`on_message` is called in the keeping thread, and must not wait."""

    def __init__(
        self,
        settings: Settings,
        log: Path,
        on_message: Callable[[say.Message], None],
        on_life: Callable[[str, dict[str, Any]], None],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """`on_life` hears (as type and fields) when a sidecar is lost, and when a later one has started."""
        self._settings, self._log, self._command = settings, log, command
        self._on_message, self._on_life = on_message, on_life
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._requests: dict[int, _Request] = {}
        self._link: Link | None = None  # of a sidecar whose node has started
        self._process: subprocess.Popen[bytes] | None = None
        self._process_lock = threading.Lock()
        self._pid = os.getpid()
        self._closing = threading.Event()  # nothing more can be asked
        self._ending = threading.Event()  # the thread must end
        self._lost_at: list[float] = []
        self.held: Callable[[], int | None] = lambda: None
        """What a later sidecar is told: the first round that the trainer has not merged, if it knows."""
        self.losses = 0
        """How many sidecars have been lost so far."""
        self.failure: DiLoCoError | None = None
        """Why there will be no sidecar any more."""
        self.first: Future[int] = Future()
        """This worker's number, or why the first start failed."""
        self._thread = threading.Thread(target=self._keep, name="diloco-sidecar", daemon=True)

    def start(self, seconds: float) -> int:
        """This worker's number; raises what the node says, or EngineError."""
        self._thread.start()
        try:
            return self.first.result(seconds)
        except TimeoutError:
            self.close()
            raise EngineError(
                f"the swarm's process ({self._settings.seat}) was not ready within {seconds:g} s: see {self._log}"
            ) from None
        except DiLoCoError:
            self.close()
            raise

    # Asking

    def number(self) -> int:
        return next(self._numbers)

    def ask(self, message: say.Message, number: int) -> "Future[Any]":
        """The answer to a request; its exception is SidecarLost, or what the sidecar failed with."""
        request = _Request(message)
        with self._lock:
            if self.failure is not None:
                raise self.failure
            if self._closing.is_set():
                raise EngineError("the swarm's engine is closed: no round can follow")
            self._requests[number] = request
            if self._link is not None:
                self._send(request, self._link)
        return request.answer

    def forget(self, number: int) -> None:
        """Nobody waits for this answer any more."""
        with self._lock:
            self._requests.pop(number, None)

    def tell(self, message: say.Message, seconds: float = _SEND_SECONDS) -> bool:
        """Whether the sidecar has taken it; nothing happens where there is none."""
        link = self._link
        if link is None:
            return False
        try:
            link.send(message, seconds)
        except LinkError:
            return False
        return True

    def kill(self) -> None:
        """Give this sidecar up; another one follows."""
        with self._process_lock:
            if self._process is not None:
                _kill_group(self._process)

    def close(self) -> None:
        """The others are told, in a few seconds or not at all; then nothing of the sidecar is left."""
        if os.getpid() != self._pid:
            return  # a fork of the trainer: the sidecar is not its own
        leaving: Future[Any] | None = None
        with contextlib.suppress(DiLoCoError):
            if self._link is not None:
                number = self.number()
                leaving = self.ask(say.Leave(number), number)
        self._closing.set()
        if leaving is not None:
            with contextlib.suppress(TimeoutError, SidecarLost, DiLoCoError):
                leaving.result(_LEAVE_SECONDS)
        self._ending.set()
        with self._lock:
            if self._link is not None:
                self._link.shut()
            else:
                self.kill()
        if self._thread.is_alive():
            self._thread.join(_EXIT_SECONDS + _JOIN_SECONDS)

    # The thread

    def _keep(self) -> None:
        while not self._ending.is_set() and self.failure is None:
            try:
                self._one_life()
            except (LinkError, OSError, DiLoCoError) as error:
                self._consider(error)
                self._lost(str(error))
            except Exception as error:  # whoever waits must hear of it, whatever it is
                logger.exception("the swarm's process can be kept no longer")
                self.failure = EngineError(f"the swarm's process can be kept no longer: {error!r}")
            self._ending.wait(PAUSE_SECONDS * (2 ** len(self._lost_at) // 2 - 1))
        self._fail_all(self.failure or EngineError("the swarm's engine is closed: no round can follow"))

    def _one_life(self) -> None:
        """Until the sidecar is lost, for which it raises, or until the end."""
        process, link = self._spawn()
        try:
            self._listen(link)
        except LinkClosed as error:
            if _exited(process, _DYING_SECONDS):
                raise LinkClosed(f"it died ({_how_it_ended(process)})") from error
            raise LinkClosed("it closed the link, and was killed") from error
        finally:
            with self._lock:
                self._link = None
                link.close()
            self._end(process)

    def _listen(self, link: Link) -> None:
        starting, silent, started = self.number(), 0, False
        link.send(
            say.Start(starting, self._settings.to_json(), self.held() if self.first.done() else None), _SEND_SECONDS
        )
        while silent < (SILENT_TURNS if started else _FIRST_TURNS):
            if self._ending.is_set():
                return
            message = link.receive(1.0)
            silent += 1
            if message is not None:
                silent, started = 0, True
                self._hear(message, starting, link)
        raise LinkFull(f"it was silent for {silent} s, and was killed")

    def _spawn(self) -> "tuple[subprocess.Popen[bytes], Link]":
        self._log.parent.mkdir(parents=True, exist_ok=True)
        mine, theirs = pair()
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    [*self._command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal is for the trainer
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        self._process = process
        return process, Link(mine)

    def _hear(self, message: say.Message, starting: int, link: Link) -> None:
        if isinstance(message, say.Started):
            self._started(message, link)
        elif isinstance(message, say.Failed) and message.number == starting:
            raise _error(message)
        elif isinstance(message, say.Failed):
            self._answer(message.number, error=_error(message))
        elif isinstance(message, say.RoundEnded | say.StateFetched | say.Done):
            self._answer(message.number, message)
        else:
            self._on_message(message)

    def _started(self, message: say.Started, link: Link) -> None:
        with self._lock:
            self._link = link
            for request in self._requests.values():
                self._send(request, link)
        self._on_message(message)
        if not self.first.done():
            self.first.set_result(message.worker)
        else:
            self._on_life("sidecar_restarted", {"restarts": len(self._lost_at)})

    def _send(self, request: _Request, link: Link) -> None:
        """Called with the lock. A sidecar that takes nothing is frozen."""
        if request.sent:
            return
        request.sent = True
        try:
            link.send(request.message, _SEND_SECONDS)
        except LinkClosed:
            pass  # the thread sees it too, and fails what was sent
        except LinkFull:
            self.kill()

    def _answer(self, number: int, value: object = None, error: Exception | None = None) -> None:
        with self._lock:
            request = self._requests.pop(number, None)
        if request is not None:
            _settle(request.answer, value, error)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        """When it has been told that it is over it ends by itself; what is left of it is killed."""
        if self._ending.is_set():
            _exited(process, _EXIT_SECONDS)
        with self._process_lock:
            _kill_group(process)
            process.wait()
            self._process = None

    def _consider(self, error: Exception) -> None:
        """Whether another sidecar could do better."""
        if not self.first.done():
            told: DiLoCoError = EngineError(self._last_words(str(error)))
            if isinstance(error, DiLoCoError) and not isinstance(error, RoundFailed):
                told = error
            self.failure = told
            self.first.set_exception(told)
        elif isinstance(error, ConfigError):
            self.failure = error

    def _lost(self, reason: str) -> None:
        """Everything that was sent is lost; what was not is for the next sidecar."""
        self.losses += not self._ending.is_set()
        with self._lock:
            sent = {number: request for number, request in self._requests.items() if request.sent}
            for number in sent:
                del self._requests[number]
        for request in sent.values():
            _settle(request.answer, None, SidecarLost(f"the swarm's process was lost: {reason}"))
        if self._ending.is_set() or self.failure is not None:
            return
        now = time.monotonic()
        self._lost_at = [at for at in self._lost_at if now - at < RESTARTS_SECONDS] + [now]
        self._on_life("sidecar_lost", {"reason": reason, "log": str(self._log)})
        if len(self._lost_at) > RESTARTS:
            self.failure = EngineError(
                f"the swarm's process was lost {len(self._lost_at)} times within {RESTARTS_SECONDS / 60:g} minutes: "
                + self._last_words(reason)
            )

    def _fail_all(self, error: Exception) -> None:
        with self._lock:
            requests, self._requests = self._requests, {}
            self._closing.set()
        if not self.first.done():
            self.first.set_exception(error)
        for request in requests.values():
            _settle(request.answer, None, error)

    def _last_words(self, reason: str) -> str:
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


def _error(message: say.Failed) -> DiLoCoError:
    """What is no error of ours may not happen the next time."""
    kind = getattr(diloco.errors, message.kind, RoundFailed) if message.kind else RoundFailed
    assert issubclass(kind, DiLoCoError)
    return kind(message.text)


def _exited(process: "subprocess.Popen[bytes]", seconds: float) -> bool:
    """Whether it ends in that time. It is not reaped: its group could then be somebody else's."""
    fd = os.pidfd_open(process.pid)
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


def _how_it_ended(process: "subprocess.Popen[bytes]") -> str:
    """Of one that has ended; it is not reaped."""
    told = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    if told is None:
        return "nobody knows how"
    return f"exit code {told.si_status}" if told.si_code == os.CLD_EXITED else f"signal {told.si_status}"


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    """With what it has started itself."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
