"""Whether this machine can be in a swarm: packages, p2pd, disk, GPU, port, addresses. For `diloco doctor`.

Each check says what it found and, if that is not well, what to do. Nothing is changed. What needs the others is in
checks_outside.py.
"""

import importlib.util
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from diloco.engines.swarm.network import p2pd
from diloco.engines.swarm.network.addresses import ListenConfig
from diloco.engines.swarm.network.p2pd import Daemon
from diloco.engines.swarm.network.reachability import own_addresses
from diloco.errors import DiLoCoError, install_hint

State = Literal["ok", "warning", "failed"]

HIVEMIND = "1.1.12"
"""Its daemon and the messages to it are not the same in every version."""
_TORCH = (2, 11)
_LITTLE_DISK, _NO_DISK = 20 << 30, 2 << 30


@dataclass(frozen=True)
class Finding:
    name: str
    state: State
    told: str
    remedy: str | None = None


def look_at_packages() -> Iterator[Finding]:
    yield _torch()
    for name in ("hivemind", "msgpack", "msgspec", "base58", "cryptography"):
        yield _package(name)


def _torch() -> Finding:
    found = _version("torch")
    if found is None:
        return Finding("torch", "failed", "is not installed", "install it as the README says")
    numbers = tuple(int(part) for part in found.split("+")[0].split(".")[:2] if part.isdigit())
    if numbers < _TORCH:
        wanted = ".".join(map(str, _TORCH))
        return Finding("torch", "failed", f"{found} is older than {wanted}", f"install torch {wanted} or newer")
    return Finding("torch", "ok", found)


def _package(name: str) -> Finding:
    found = _version(name)
    if found is None:
        return Finding(name, "failed", "is not installed", install_hint("swarm"))
    if name == "hivemind" and found != HIVEMIND:
        return Finding(
            name, "warning", f"{found} is not {HIVEMIND}, which this diloco is made for", install_hint("swarm")
        )
    return Finding(name, "ok", found)


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


async def look_at_daemon() -> Finding:
    try:
        p2pd.messages()
        daemon = await Daemon.start(["-hostAddrs=/ip4/127.0.0.1/tcp/0"])
        await daemon.stop()
    except DiLoCoError as error:
        return Finding("p2pd", "failed", str(error), install_hint("swarm"))
    return Finding("p2pd", "ok", "runs")


def look_at_disk(folder: Path) -> Finding:
    there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
    free = shutil.disk_usage(there).free
    told = f"{free / (1 << 30):.1f} GiB free at {there}"
    if free < _NO_DISK:
        return Finding("disk", "failed", told, "make room: a run keeps its data, its state and its checkpoints there")
    if free < _LITTLE_DISK:
        return Finding("disk", "warning", told, "enough for small models only; make room, or use another folder")
    return Finding("disk", "ok", told)


def look_at_gpu() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding("GPU", "warning", "cannot be looked for without torch", "install torch")
    if not torch.cuda.is_available():
        return Finding("GPU", "warning", "none that torch can use", "this machine trains on its processor, slowly")
    names = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return Finding("GPU", "ok", ", ".join(f"{one.name} ({one.total_memory / (1 << 30):.0f} GiB)" for one in names))


def look_at_port(config: ListenConfig) -> Finding:
    try:
        p2pd.check_ports(config.listen_addresses())
        config.announced_addresses()
    except DiLoCoError as error:
        return Finding("port", "failed", str(error), "choose --host, --port and --announce anew")
    if config.port is None:
        return Finding("port", "ok", "any that is free; choose one with --port if a router or firewall must let it in")
    return Finding("port", "ok", f"{config.port} is free")


def look_at_addresses() -> Finding:
    found = own_addresses()
    told = ", ".join(f"{ip} ({'public' if ip.is_global else 'private'})" for ip in found)
    if not found:
        return Finding("addresses", "failed", "no network", "connect this machine; workers on it alone need none")
    if any(ip.is_global for ip in found):
        return Finding("addresses", "ok", told)
    return Finding(
        "addresses",
        "ok",
        f"{told}: machines outside this network can reach it only if its router forwards a port (then --announce "
        "ROUTER:PORT), or through a worker that is open",
    )
