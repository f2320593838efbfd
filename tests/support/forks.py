"""Processes that are forks of one server, which has imported torch once for all of them.

Importing torch and what the first optimizer imports takes seconds; most processes of these tests live no longer. A fork
has one thread and no state of the tests. `fork_command` is `diloco` in such a process, and the workers that it starts
are forks too.
"""

import multiprocessing
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkProcess, SpawnProcess
from pathlib import Path
from typing import Protocol

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *("torch._dynamo", "torch.distributed.fsdp", "torch.nn.parallel"),
        *("diloco.optimizer", "diloco.engines.connect", "diloco.swarm.engine"),
        *("diloco.cli.main", "diloco.cli.train", "diloco.training.processes.worker", "diloco.models.native.model"),
        *("diloco.training.processes.launcher", "diloco.training.processes.swarm_worker"),
        "support.frozen_heap",
    ]
)


class Launched(Protocol):
    """What subprocess.Popen and a fork have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...
    def send_signal(self, sig: int, /) -> None: ...


Launch = Callable[[Sequence[str], dict[str, str], Path, Path], Launched]
"""Starts a command with an environment and files for its output and errors."""


class Fork:
    """A fork that runs `work(*arguments)` with an environment and files for its output and errors."""

    def __init__(
        self, work: Callable[..., object], *arguments: object, environment: dict[str, str], output: Path, errors: Path
    ) -> None:
        given = (work, arguments, environment, output, errors, Path.cwd())
        self._process = context.Process(target=_run, args=given)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self._process.join(0)
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("diloco", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int, /) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)


def fork_command(arguments: Sequence[str], environment: dict[str, str], output: Path, errors: Path) -> Launched:
    """`diloco ARGUMENTS`, in a session of its own."""
    for path in (output, errors):
        path.write_bytes(b"")
    return Fork(_run_diloco, list(arguments), environment=environment, output=output, errors=errors)


def fork_ranks(count: int) -> Launch:
    """As many `diloco ARGUMENTS` with the variables that torchrun sets; they end with the highest of their codes."""

    def launch(arguments: Sequence[str], environment: dict[str, str], output: Path, errors: Path) -> Launched:
        for path in (output, errors):
            path.write_bytes(b"")
        return Fork(_run_ranks, list(arguments), count, environment=environment, output=output, errors=errors)

    return launch


def start_interpreter(arguments: Sequence[str], environment: dict[str, str], output: Path, errors: Path) -> Launched:
    """The same in a new interpreter, which has imported nothing."""
    return run_command([sys.executable, "-m", "diloco.cli.main", *arguments], environment, output, errors)


def run_command(command: Sequence[str], environment: dict[str, str], output: Path, errors: Path) -> Launched:
    """A command line, in a session of its own."""
    with output.open("wb") as out, errors.open("wb") as err:
        return subprocess.Popen(command, stdout=out, stderr=err, env=environment, start_new_session=True)


def _run(
    work: Callable[..., object],
    arguments: Sequence[object],
    environment: dict[str, str],
    output: Path,
    errors: Path,
    folder: Path,
) -> None:
    os.setsid()
    os.chdir(folder)
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    work(*arguments)


def _run_ranks(arguments: list[str], count: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    os.environ |= {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    pids = []
    for rank in range(count):
        pids.append(os.fork())
        if pids[-1] == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            _run_diloco(arguments)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255 for pid in pids))


def _run_diloco(arguments: list[str]) -> None:
    setattr(SpawnProcess, "_Popen", staticmethod(ForkProcess._Popen))  # noqa: B010  its workers are forks of it
    from diloco.cli.main import run

    sys.argv = ["diloco", *arguments]
    sys.exit(run(arguments))
