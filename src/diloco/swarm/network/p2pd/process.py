"""Hivemind's libp2p daemon, p2pd, as a child process that cannot outlive its parent.

Starts it, reads its output, stops it. The kernel sends it SIGKILL when the thread that started it ends, however that
happens. It has a process group of its own, so that Ctrl-C in a terminal reaches this process and not p2pd. Linux only.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import importlib.util
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from diloco.errors import EngineError, RendezvousError, install_hint
from diloco.swarm.protocol import timing

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 8
_PREFIX = "diloco-p2pd-"


def _folder_of_hivemind() -> Path:
    """Found without importing it: that takes seconds, imports torch, and sets logging and fork hooks of its own."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise EngineError(f"the swarm needs the package hivemind: {install_hint('swarm')}")
    return Path(spec.origin).parent


def binary() -> Path:
    if sys.platform != "linux":
        raise EngineError(f"the swarm runs on Linux only, this is {sys.platform}; use a Linux machine or container")
    path = _folder_of_hivemind() / "hivemind_cli" / "p2pd"
    if not os.access(path, os.X_OK):
        raise EngineError(f"hivemind's daemon is not at {path} or cannot be run; reinstall: {install_hint('swarm')}")
    return path


def messages() -> ModuleType:
    """Hivemind's generated protobuf module with the messages of p2pd's control socket, loaded from its file."""
    name = "diloco_p2pd_messages"
    if name not in sys.modules:
        path = _folder_of_hivemind() / "proto" / "p2pd_pb2.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # protobuf may be missing, or be of another version
            raise EngineError(
                f"hivemind's messages cannot be loaded ({error}); reinstall: {install_hint('swarm')}"
            ) from error
        sys.modules[name] = module
    return sys.modules[name]


def _kill_with(parent: int) -> Callable[[], None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl  # looked up before the fork: the child must do little

    def in_child() -> None:
        if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0 or os.getppid() != parent:
            os._exit(1)

    return in_child


@dataclass
class Daemon:
    """A running p2pd. `ended` gets a reason when p2pd ends without `stop`."""

    process: asyncio.subprocess.Process
    folder: Path
    """Private to this user; holds both sockets."""
    lock: int
    """Held while this process lives: a folder without a lock was left by a killed process."""
    ended: "asyncio.Future[str]"
    _lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    _reading: "asyncio.Task[None] | None" = None
    _stopping: bool = False

    @property
    def control(self) -> str:
        return str(self.folder / "d")

    @property
    def streams(self) -> str:
        return str(self.folder / "s")

    @classmethod
    async def start(cls, arguments: list[str], environment: Mapping[str, str] | None = None) -> "Daemon":
        program = binary()
        folder, lock = _private_folder()
        try:
            process = await asyncio.create_subprocess_exec(
                program, f"-listen=/unix{folder}/d", *arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
                env={"GOLOG_LOG_LEVEL": "error", **os.environ, **(environment or {})},
                process_group=0, preexec_fn=_kill_with(os.getpid()),
            )  # fmt: skip
        except OSError as error:
            _remove(folder, lock)
            raise EngineError(f"{program} cannot be run ({error}); reinstall: {install_hint('swarm')}") from error
        daemon = cls(process, folder, lock, asyncio.get_running_loop().create_future())
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        daemon._reading = asyncio.create_task(daemon._read(ready))
        try:
            async with asyncio.timeout(timing.DAEMON_START_SECONDS):
                await ready
        except TimeoutError:
            await daemon.stop()
            raise RendezvousError(
                f"p2pd did not start within {timing.DAEMON_START_SECONDS:.0f} s{daemon.recent_output()}"
            ) from None
        except BaseException:
            await daemon.stop()
            raise
        return daemon

    async def _read(self, ready: "asyncio.Future[None]") -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            text = line.decode(errors="replace").rstrip()
            self._lines.append(text)
            log.debug("p2pd: %s", text)
            if text.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        code = await self.process.wait()
        reason = f"p2pd ended with code {code}{self.recent_output()}"
        if not ready.done():
            ready.set_exception(RendezvousError(reason))
        if not self._stopping and not self.ended.done():
            self.ended.set_result(reason)

    def recent_output(self) -> str:
        said = [line for line in self._lines if not line.startswith(("Control socket", "Peer ID", "Peer Addrs", "/"))]
        return f"; it said: {' | '.join(said)[-600:]}" if said else ""

    def _signal(self, number: signal.Signals) -> None:
        """Instead of `Process.terminate`, which may reap the child before asyncio's watcher, which then warns."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    async def stop(self) -> None:
        self._stopping = True
        self._signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timing.DAEMON_STOP_SECONDS):
                await self.process.wait()
        except TimeoutError:
            self._signal(signal.SIGKILL)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timing.DAEMON_STOP_SECONDS):
                    await self.process.wait()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=timing.DAEMON_STOP_SECONDS)
        if self.lock >= 0:
            _remove(self.folder, self.lock)
            self.lock = -1


def _private_folder() -> tuple[Path, int]:
    """For the sockets; mode 0700, and locked. /tmp if TMPDIR is long: a Unix socket's path has at most 107 bytes."""
    base = Path(tempfile.gettempdir() if len(tempfile.gettempdir()) <= 80 else "/tmp")
    _remove_stale(base)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return folder, lock


def _remove(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)


def _remove_stale(base: Path) -> None:
    """Remove the folders that killed processes have left."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if (
                folder.stat().st_uid != os.getuid()
                or time.time() - folder.stat().st_mtime < timing.STALE_SOCKETS_SECONDS
            ):
                continue
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                _remove(folder, lock)
