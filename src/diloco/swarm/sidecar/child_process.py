"""One sidecar process as an operating-system process: started, killed with its children, and waited for."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from diloco.swarm.sidecar.link import Link, pair
from diloco.swarm.sidecar.messages import FromSidecar

COMMAND = (sys.executable, "-P", "-m", "diloco.swarm.sidecar")


class SidecarProcess:
    """A running sidecar, and the trainer's end of its link."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        """Its output is appended to `log`."""
        log.parent.mkdir(parents=True, exist_ok=True)
        mine, theirs = pair()
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,  # Ctrl-C in the terminal is for the trainer
                    env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                )
        except OSError:
            mine.close()
            raise
        finally:
            theirs.close()
        self.link = Link[FromSidecar](mine, FromSidecar)
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._reaped = False

    def exits_within(self, seconds: float) -> bool:
        """Waits for its exit without reaping it; after reaping, its id could belong to another process."""
        fd, poll = os.pidfd_open(self.pid), select.poll()  # select.select takes no descriptor above 1023
        try:
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(1000 * seconds))
        finally:
            os.close(fd)

    def how_it_ended(self) -> str:
        """For a process that has exited and is not reaped yet."""
        end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if end is None:
            return "for an unknown reason"
        return f"exit code {end.si_status}" if end.si_code == os.CLD_EXITED else f"signal {end.si_status}"

    def kill(self) -> None:
        """With all processes that it has started. Any thread may call it."""
        with self._lock:
            self._kill_group()

    def end(self) -> None:
        """Kill what is left of it, and reap it."""
        with self._lock:
            self._kill_group()
            self._process.wait()
            self._reaped = True

    def _kill_group(self) -> None:
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
