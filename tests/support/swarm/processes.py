"""Workers of a swarm on this machine: each a trainer process with a sidecar and a p2pd, to be asked, killed and frozen.

Trainers are forks (support/forks.py), so that starting many costs little; their sidecars are started as in real use.
`Workers.close` leaves no process behind. Linux only.
"""

import contextlib
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from diloco.swarm.network.known_peers import read_peers
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from support.forks import context
from support.swarm.networks import Internet, enter

_DAY_SECONDS = 86_400.0
_START_SECONDS = 200.0


class Hung(Exception):
    """A worker did not say in time what it was to say."""


class Died(Exception):
    """A worker's process has ended; with its traceback, where it left one."""


class Worker:
    """One trainer process; `folder` is its machine's run folder. It runs `work(settings, pipe, *arguments)`."""

    def __init__(
        self, folder: Path, settings: Settings, work: Callable[..., None], *arguments: Any, namespace: str | None = None
    ) -> None:
        self.folder, self.settings = folder, settings
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(work, settings, theirs, arguments, namespace))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def say(self, command: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `hear` says what became of it
            self._pipe.send(command)

    def hear(self, seconds: float) -> Any:
        """What it says next; raises Hung or Died."""
        try:
            if not self._pipe.poll(seconds):
                raise Hung(f"{self.folder.name} said nothing for {seconds:g} s; its log: {self.log()}")
            fine, told = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise Died(f"{self.folder.name} ended without a word") from None
        if not fine:
            raise Died(f"{self.folder.name}: {told}")
        return told

    def ask(self, command: Any, seconds: float = 200.0) -> Any:
        self.say(command)
        return self.hear(seconds)

    def log(self) -> str:
        """The end of its sidecar's log."""
        path = self.folder / "logs" / f"{self.settings.name}-swarm.log"
        return path.read_text(errors="replace")[-4000:] if path.exists() else "(none)"

    def addresses(self) -> list[str]:
        """Its own, as its sidecar has last written them."""
        peers = read_peers(Path(self.settings.folder) / "peers.json")
        return [address for peer in peers if peer.local_name == self.settings.name for address in peer.addresses]

    # Violence: on the trainer, its sidecar and its p2pd at once, as if the machine was lost

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.process.join(100.0)

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, what: signal.Signals) -> None:
        for pid in self.tree():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, what)

    def tree(self) -> list[int]:
        """The trainer, its sidecar, its p2pd."""
        return [self.pid, *descendants(self.pid)] if self.alive else []

    def p2pd(self) -> int | None:
        return next((pid for pid in self.tree() if _name(pid) == "p2pd"), None)

    def sidecar(self) -> int | None:
        p2pd = self.p2pd()
        return None if p2pd is None else _parents().get(p2pd)

    def stop_carrying(self, num_bytes: int, at_most: float = math.inf, seconds: float = 200.0) -> bool:
        """Freeze its p2pd once it has moved so many bytes from now on: a transfer is under way, and does not end.

        False if it has moved `at_most` bytes before it stood still: the transfer may have ended, and p2pd goes on.
        """
        p2pd = self.p2pd()
        if p2pd is None:
            raise Died(f"{self.folder.name} has no p2pd")
        before, end = _written(p2pd), time.monotonic() + seconds
        while _written(p2pd) - before < num_bytes:
            if time.monotonic() > end:
                raise Hung(f"{self.folder.name} carried no {num_bytes} bytes within {seconds:g} s")
            time.sleep(0.002)
        os.kill(p2pd, signal.SIGSTOP)
        if _written(p2pd) - before < at_most:
            return True
        os.kill(p2pd, signal.SIGCONT)
        return False


class Workers:
    """All workers of one run. `settings`: what all have in common. `net`: each machine is one in it; else all are at
    127.0.0.1.
    """

    def __init__(self, folder: Path, net: Internet | None = None, **settings: Any) -> None:
        self.folder, self.key, self.net = folder, RunKey.create(), net
        self._settings = {"host": "127.0.0.1", **settings}
        self._hosts: dict[str, str] = {}
        self.all: list[Worker] = []

    def addresses(self) -> list[str]:
        """Of all that live."""
        return [address for worker in self.all if worker.alive for address in worker.addresses()]

    def start(self, name: str, work: Callable[..., None], *arguments: Any) -> Worker:
        """On a machine of that name: one that was there before has its identity again. The first one founds the run."""
        machine = self.folder / name
        swarm = machine / "swarm"
        text = invite(self.key, self.addresses()[-4:], _DAY_SECONDS, time.time()).text()
        write_private(swarm / invitation_file(), text)
        namespace = None
        if self.net is not None:
            self._hosts[name] = self._hosts.get(name) or self.net.public(name)
            namespace = self.net.namespace(name)
        there = self._settings | ({"host": self._hosts[name]} if self.net is not None else {})
        settings = Settings(str(swarm), "worker-0", founder=not self.all, label=name, **there)
        worker = Worker(machine, settings, work, *arguments, namespace=namespace)
        self.all.append(worker)
        return worker

    def start_all(self, names: list[str], work: Callable[..., None], *arguments: Any) -> list[Worker]:
        """The first one, then all others at once, in worker order; each says its number when it is ready."""
        first = self.start(names[0], work, *arguments)
        numbers = {first.hear(_START_SECONDS): first}
        others = [self.start(name, work, *arguments) for name in names[1:]]
        numbers |= {worker.hear(_START_SECONDS): worker for worker in others}
        return [numbers[number] for number in sorted(numbers)]

    def close(self) -> None:
        for worker in self.all:
            with contextlib.suppress(ValueError):
                worker.kill()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _run(
    work: Callable[..., None], settings: Settings, pipe: Connection, arguments: tuple[Any, ...], namespace: str | None
) -> None:
    import torch

    if namespace is not None:
        enter(namespace)
    torch.set_num_threads(1)
    try:
        work(settings, pipe, *arguments)
    except BaseException:  # noqa: BLE001  told to the process that started it
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))


# Processes


def descendants(pid: int) -> list[int]:
    """Of a process: its children, theirs, and so on."""
    parents = _parents()
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def _parents() -> dict[int, int]:
    return {pid: int(fields[1]) for pid, fields in _stats()}


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _written(pid: int) -> int:
    """By p2pd: to other machines, and what came from there to its own sidecar."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))


def _stats() -> Iterator[tuple[int, list[str]]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
