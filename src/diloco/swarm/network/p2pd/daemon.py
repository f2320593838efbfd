"""Hivemind's libp2p daemon, p2pd, as a child process that cannot outlive its parent.

`Daemon` starts it, reads its output and stops it. The kernel sends it SIGKILL when the thread that started it ends,
however that happens. It has a process group of its own, so that Ctrl-C in a terminal reaches this process and not p2pd.
`start_daemon` starts it as a public, private or unknown peer needs it; a public one relays with our limits. Linux only.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco.errors import ConfigError, EngineError, RendezvousError, install_hint
from diloco.swarm import timing
from diloco.swarm.network import multiaddr
from diloco.swarm.network.listening import ListenConfig, check_ports
from diloco.swarm.network.p2pd.control import Control, DaemonError, DaemonGone, hivemind_folder
from diloco.swarm.network.p2pd.reachability import Reachability

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_KEPT_LINES = 8
_PREFIX = "diloco-p2pd-"
_HOP_PROTOCOL = "/libp2p/circuit/relay/0.2.0/hop"
_RESERVE = b"\x02\x08\x00"
"""A request for a reservation: its length (2), then protobuf, field 1 (the kind) = 0."""
_LIMIT_FIELD = 4
"""The relay's limits, in the protobuf of its answer."""
_DATA_LIMIT_FIELD = 2
"""The bytes of a connection, in these limits."""
_RELAY_BYTES = 1 << 40
_RELAY_TIME = "720h"
_RELAY_CIRCUITS = 256
_RELAY_STARTS = 6
_ONE_PROCESSOR = {"GOMAXPROCS": "1"}
"""p2pd's environment: with more processors the wrong one of its two relays mostly wins; see `_has_our_relay`."""


def binary() -> Path:
    if sys.platform != "linux":
        raise EngineError(f"the swarm runs on Linux only, this is {sys.platform}; use a Linux machine or container")
    path = hivemind_folder() / "hivemind_cli" / "p2pd"
    if not os.access(path, os.X_OK):
        raise EngineError(f"hivemind's daemon is not at {path} or cannot be run; reinstall: {install_hint('swarm')}")
    return path


def _die_with(parent: int) -> Callable[[], None]:
    """Return what the forked child does before p2pd: it has the kernel kill it when its parent dies."""
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
                process_group=0, preexec_fn=_die_with(os.getpid()),
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
        greeting = ("Control socket", "Peer ID", "Peer Addrs", "/")
        lines = [line for line in self._lines if not line.startswith(greeting)]
        return f"; it said: {' | '.join(lines)[-600:]}" if lines else ""

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal without `Process.terminate`: that may reap the child before asyncio's watcher, which warns."""
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
    """Make a folder for the sockets, of mode 0700, and lock it.

    It lies in /tmp if TMPDIR is long: a Unix socket's path has at most 107 bytes.
    """
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


# p2pd as a peer of each kind of reachability needs it


def p2pd_arguments(reachability: Reachability, config: ListenConfig) -> list[str]:
    """p2pd's arguments for this reachability. Raises if the port is taken or an address in the options is not valid."""
    listening = config.listen_addresses()
    announced = config.announced_addresses()
    check_ports(listening)
    arguments = [f"-hostAddrs={','.join(listening)}"]
    if announced or reachability.seen_at:
        arguments.append(f"-announceAddrs={','.join([*announced, *reachability.seen_at])}")
    if reachability.kind == "public":
        limits = [f"-relayDataLimit={_RELAY_BYTES}", f"-relayTimeLimit={_RELAY_TIME}"]
        return [*arguments, "-forceReachabilityPublic", *limits, f"-relayMaxCircuits={_RELAY_CIRCUITS}"]
    if reachability.kind == "private":
        # p2pd needs a DHT to use relays; without bootstrap peers that DHT stays alone.
        dht = ["-dhtClient", "-relayDiscovery=0"]
        relays = f"-trustedRelays={','.join(reachability.relays)}"
        return [*arguments, "-autoRelay", "-forceReachabilityPrivate", relays, *dht]
    return arguments


async def start_daemon(reachability: Reachability, config: ListenConfig, flags: list[str]) -> Daemon:
    """Start p2pd. `flags` are added to the arguments that follow from the other two.

    A free port is chosen here if the user named none: IPv4 and IPv6 must have the same, since a peer that sees this one
    over IPv4 is told the port for both.
    """
    for _ in range(_RELAY_STARTS):
        tried = config if config.port is not None else replace(config, port=_free_port())
        arguments = [*flags, *p2pd_arguments(reachability, tried)]
        if reachability.kind != "public":
            return await Daemon.start(arguments)
        daemon = await Daemon.start(arguments, _ONE_PROCESSOR)
        if await _has_our_relay(daemon, flags, tried.listen_addresses()):
            return daemon
        await daemon.stop()
    raise RendezvousError(
        f"p2pd did not come up as a relay in {_RELAY_STARTS} starts; start again, or listen at a private address only"
    )


def _free_port() -> int:
    with socket.socket() as probe:  # free for IPv4, and nearly always for IPv6 too; if not, p2pd says so
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


async def _has_our_relay(daemon: Daemon, flags: list[str], listening: list[str]) -> bool:
    """p2pd starts two relays, ours and libp2p's, which ends after 128 KiB. Which one answers is a race: ask it."""
    guest_flags = [flag for flag in flags if not flag.startswith("-id=")]
    guest = await Daemon.start([*guest_flags, "-noListenAddrs"])
    control = Control(daemon.control, daemon.streams)
    guest_control = Control(guest.control, guest.streams)
    try:
        async with asyncio.timeout(timing.RELAY_PROBE_SECONDS):
            await guest_control.connect()
            peer, _ = await control.identify()
            local = [a.replace("/0.0.0.0/", "/127.0.0.1/").replace("/::/", "/::1/") for a in listening]
            await guest_control.connect_peer(peer, local, timing.RELAY_PROBE_SECONDS)
            return await relay_limit(guest_control, peer) >= _RELAY_BYTES
    except (TimeoutError, DaemonError, DaemonGone, OSError):
        return False
    finally:
        await guest_control.close()
        await guest.stop()


async def relay_limit(control: Control, relay: str) -> int:
    """Return how many bytes a connection through that peer may carry each way; 0: it relays nothing.

    The relay is asked for a reservation, which ends by itself.
    """
    sock = await control.open_stream(relay, _HOP_PROTOCOL, timing.RELAY_PROBE_SECONDS)
    try:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, _RESERVE)
        answer = b""
        # Its length is a varint, of two bytes in a reservation, which has more than 127; a refusal is shorter.
        while len(answer) < 2 or len(answer) < 2 + (answer[0] & 0x7F) + (answer[1] << 7):
            data = await loop.sock_recv(sock, 4096)
            if not data:
                return 0
            answer += data
    finally:
        sock.close()
    limit = _protobuf_fields(answer[2:]).get(_LIMIT_FIELD, b"")
    assert isinstance(limit, bytes)
    data_limit = _protobuf_fields(limit).get(_DATA_LIMIT_FIELD, 0)
    return data_limit if isinstance(data_limit, int) else 0


def _protobuf_fields(data: bytes) -> dict[int, int | bytes]:
    """Read a protobuf message without its schema: numbers and bytes by field number."""
    fields: dict[int, int | bytes] = {}
    while data:
        tag, data = multiaddr.take_varint(data)
        field_number = tag >> 3
        kind = tag & 7
        value, data = multiaddr.take_varint(data)
        if kind == 0:  # a number
            fields[field_number] = value
        elif kind == 2:  # a length, and so many bytes
            fields[field_number] = data[:value]
            data = data[value:]
        else:
            raise ConfigError(f"a relay's answer has a field of unknown type {kind}")
    return fields
