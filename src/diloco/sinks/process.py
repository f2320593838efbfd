"""Sinks beside a run, each in its own process: a sink that is slow, hangs or dies does not affect the training.

The process follows the run folder until its standard input ends, because the run closed it or died; then it writes the
rest and exits. It has its own session, so that Ctrl-C in the terminal does not reach it.
"""

import contextlib
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from diloco.own_command import command
from diloco.sinks.follower import open_follower, read_state
from diloco.sinks.registry import SINKS

_POLL_SECONDS = 1.0
_CHECK_SECONDS = 5.0
GRACE_SECONDS = 30.0


class SinkProcesses:
    """The sinks of one run, as a context around the run and its summary. Their failures are reported, never raised."""

    def __init__(
        self, names: Sequence[str], run: Path, report: Callable[[str], None], grace_seconds: float = GRACE_SECONDS
    ) -> None:
        self.names = names
        self.run = run
        self.report = report
        self.grace_seconds = grace_seconds
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lost_before: dict[str, int] = {}
        self._reported: set[str] = set()
        self._next_check = 0.0

    def __enter__(self) -> "SinkProcesses":
        for name in self.names:
            try:
                self._start(name)
            except OSError as error:
                self._report_once(name, f"could not be started ({error})")
        return self

    def _start(self, name: str) -> None:
        self._lost_before[name] = read_state(self.run, name).lost
        log = self._log(name)
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as output:
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", "diloco.sinks.process", str(self.run), name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def poll(self) -> None:
        """Report a failing sink, once; cheap enough to call several times a second."""
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + _CHECK_SECONDS
        for name, process in self._processes.items():
            if process.poll() is not None:
                self._report_once(name, f"has ended: {self._last_log_line(name)}")
            elif self._lost(name):
                self._report_once(name, f"cannot write: {read_state(self.run, name).error}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadline = time.monotonic() + self.grace_seconds
        try:
            for process in self._processes.values():
                if process.stdin is not None:
                    process.stdin.close()
            for name, process in self._processes.items():
                self._end(name, process, deadline)
        finally:
            for process in self._processes.values():
                _kill(process)

    def _end(self, name: str, process: "subprocess.Popen[bytes]", deadline: float) -> None:
        rest = f"`{command('sink', shlex.quote(str(self.run)), name)}` writes the rest"
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.report(f"the sink {name} was not done {self.grace_seconds:g} s after the run, and was stopped; {rest}")
            return
        if code != 0:
            self._report_once(name, f"has ended: {self._last_log_line(name)}; {rest}")
        elif lost := self._lost(name):
            self.report(f"the sink {name} could not write {lost} events: {read_state(self.run, name).error}")

    def _lost(self, name: str) -> int:
        return read_state(self.run, name).lost - self._lost_before[name]

    def _report_once(self, name: str, what: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            self.report(f"the sink {name} {what} (see {self._log(name)}); the training is not affected")

    def _log(self, name: str) -> Path:
        return self.run / "logs" / f"sink-{name}.log"

    def _last_log_line(self, name: str) -> str:
        with contextlib.suppress(OSError):
            lines = [line for line in self._log(name).read_text(errors="replace").splitlines() if line.strip()]
            return lines[-1] if lines else "it wrote nothing"
        return "it left no log"


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and its children: wandb starts a helper process."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def follow(run: Path, name: str) -> None:
    """Follow the run until standard input ends."""
    with open_follower(run, name, SINKS[name]) as follower:
        while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            follower.catch_up()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    os.nice(10)  # the training comes first
    follow(Path(sys.argv[1]), sys.argv[2])
