"""Two machines on a slow link, inside this machine: network namespaces, a rate limit, latency. Needs root.

Without latency the namespaces are joined by a veth pair. With latency each has a tun device, and a relay process
moves the packets from one to the other after a delay: it works on kernels without netem. `tc tbf` limits what either
side sends.
"""

import ctypes
import fcntl
import multiprocessing
import os
import queue
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
DEVICE = "wan"
_TUNSETIFF, _TUN, _NO_HEADER = 0x400454CA, 0x1, 0x1000
_TUN_MTU = 32_000  # few large packets: the relay is Python


@dataclass(frozen=True)
class Link:
    """The link between two namespaces; `delay_seconds` is one way."""

    megabits: int | None
    delay_seconds: float = 0.0

    @property
    def words(self) -> str:
        rate = "unlimited" if self.megabits is None else f"{self.megabits} Mbit/s"
        return rate + (f", {1000 * self.delay_seconds:g} ms each way" if self.delay_seconds else "")


def inside(side: int, command: list[str]) -> list[str]:
    """Return the command line that runs `command` on that side."""
    return ["ip", "netns", "exec", _name(side), *command]


def _name(side: int) -> str:
    return f"dlb{os.getpid()}-{side}"


def _run(*command: str) -> None:
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed.returncode:
        raise SystemExit(f"{' '.join(command)}: {completed.stderr.strip()} (this benchmark needs root and iproute2)")


@contextmanager
def joined(link: Link) -> Iterator[None]:
    """Join the two sides, which reach each other at ADDRESSES, for the duration of the context."""
    stop = multiprocessing.get_context("fork").Event()
    relay = None
    try:
        for side in (0, 1):
            _run("ip", "netns", "add", _name(side))
            _run(*inside(side, ["ip", "link", "set", "lo", "up"]))
        if link.delay_seconds:
            for side in (0, 1):
                _run(*inside(side, ["ip", "tuntap", "add", "dev", DEVICE, "mode", "tun"]))
                _run(*inside(side, ["ip", "link", "set", DEVICE, "mtu", str(_TUN_MTU)]))
            arguments = (_name(0), _name(1), link.delay_seconds, stop)
            relay = multiprocessing.get_context("fork").Process(target=_relay, args=arguments)
            relay.start()
        else:
            ends = ["type", "veth", "peer", "name", DEVICE, "netns", _name(1)]
            _run(*inside(0, ["ip", "link", "add", DEVICE, *ends]))
        for side in (0, 1):
            _run(*inside(side, ["ip", "address", "add", f"{ADDRESSES[side]}/24", "dev", DEVICE]))
            _run(*inside(side, ["ip", "link", "set", DEVICE, "up"]))
            if link.megabits is not None:
                limit = ["rate", f"{link.megabits}mbit", "burst", "128kb", "latency", "100ms"]
                _run(*inside(side, ["tc", "qdisc", "add", "dev", DEVICE, "root", "tbf", *limit]))
        yield
    finally:
        stop.set()
        if relay is not None:
            relay.join(5)
            relay.kill()
        for side in (0, 1):
            subprocess.run(["ip", "netns", "del", _name(side)], capture_output=True, check=False)


# The relay


def _relay(first: str, second: str, delay_seconds: float, stop: Event) -> None:
    ends = [_open_tun(first), _open_tun(second)]
    for source, target in (ends, ends[::-1]):
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
        threading.Thread(target=_take, args=(source, waiting, delay_seconds), daemon=True).start()
        threading.Thread(target=_give, args=(target, waiting), daemon=True).start()
    stop.wait()
    os._exit(0)  # its threads wait in reads


def _open_tun(namespace: str) -> int:
    """Enter a namespace to open its device; packets then pass wherever the process is."""
    with Path(f"/run/netns/{namespace}").open() as namespace_file:
        if ctypes.CDLL(None).setns(namespace_file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(f"setns {namespace} failed")
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _TUN | _NO_HEADER))
    return device


def _take(source: int, waiting: "queue.SimpleQueue[tuple[float, bytes]]", delay_seconds: float) -> None:
    while True:
        packet = os.read(source, 65_536)
        waiting.put((time.monotonic() + delay_seconds, packet))


def _give(target: int, waiting: "queue.SimpleQueue[tuple[float, bytes]]") -> None:
    while True:
        due_time, packet = waiting.get()
        time.sleep(max(0.0, due_time - time.monotonic()))
        try:
            os.write(target, packet)
        except OSError:  # the device is not up yet, or no longer
            continue
