"""Networks inside this machine: an internet, machines with a public address in it, and homes behind routers.

They are network namespaces, which need root, iproute2 and nftables. `missing()` says what this machine lacks.
"""

import ctypes
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_numbers = itertools.count()
REQUIRED = "DILOCO_REQUIRE_NETNS"
"""If this is set (CI does), a test that cannot run here fails instead of being skipped."""
_CLONE_NEWNET = 0x40000000
_REMEDY = "apt-get install iproute2 nftables, and run the tests as root"


def missing() -> str | None:
    """Why these tests cannot run here, and how to get them; None if they can."""
    reason = _missing()
    return f"{reason}: {_REMEDY}" if reason else None


def _missing() -> str | None:
    if os.name != "posix" or os.geteuid() != 0:
        return "network namespaces need root"
    absent = [name for name in ("ip", "nft") if shutil.which(name) is None]
    if absent:
        return f"{' and '.join(absent)} not found"
    name = f"dl{os.getpid()}probe"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"this machine has no network namespaces: {tried.stderr.strip()}"
    tried = subprocess.run(
        ["ip", "netns", "exec", name, "nft", "add", "table", "ip", "probe"], capture_output=True, text=True, check=False
    )
    subprocess.run(["ip", "netns", "del", name], check=False)
    return f"nft does not work here: {tried.stderr.strip()}" if tried.returncode else None


class Internet:
    """Public machines are at 5.5.5.N. Nothing outside this machine can be reached from them."""

    def __init__(self) -> None:
        self._prefix = f"dl{os.getpid()}n{next(_numbers)}"
        self._hosts = itertools.count(1)
        self._homes = itertools.count(1)
        self._names: list[str] = []
        self._lines: dict[str, int] = {}
        self._add("net")
        self._in("net", "ip", "link", "add", "wire", "type", "bridge")
        self._in("net", "ip", "link", "set", "wire", "up")

    def _add(self, name: str) -> None:
        _run("ip", "netns", "add", self._full(name))
        self._names.append(name)
        self._in(name, "ip", "link", "set", "lo", "up")

    def _full(self, name: str) -> str:
        return f"{self._prefix}{name}"

    def _in(self, name: str, *command: str) -> None:
        _run("ip", "netns", "exec", self._full(name), *command)

    def _wire(self, near: str, near_end: str, far: str, far_end: str) -> None:
        ends = ["name", far_end, "netns", self._full(far)]
        self._in(near, "ip", "link", "add", near_end, "type", "veth", "peer", *ends)
        self._in(near, "ip", "link", "set", near_end, "up")
        self._in(far, "ip", "link", "set", far_end, "up")

    def _connect(self, name: str) -> str:
        """Connect a machine or a router to the internet; returns its address there."""
        number = self._lines[name] = next(self._hosts)
        self._wire(name, "wan", "net", f"w{number}")
        self._in("net", "ip", "link", "set", f"w{number}", "master", "wire")
        self._in(name, "ip", "address", "add", f"5.5.5.{number}/24", "dev", "wan")
        self._in(name, "ip", "route", "add", "default", "dev", "wan")
        return f"5.5.5.{number}"

    def public(self, name: str) -> str:
        """Add a machine with a public address, which is returned."""
        self._add(name)
        return self._connect(name)

    def home(self, name: str, *, open_ports: Sequence[int] = (), symmetric: bool = False) -> str:
        """Add a machine behind a router that masquerades; returns the router's public address. Ports may be forwarded.

        `symmetric`: the router gives every connection a random port, so that hole punching cannot work.
        """
        router, number = f"r{name}", next(self._homes)
        self._add(router)
        self._add(name)
        address = self._connect(router)
        self._wire(router, "lan", name, "eth0")
        self._in(router, "ip", "address", "add", f"192.168.{number}.1/24", "dev", "lan")
        self._in(name, "ip", "address", "add", f"192.168.{number}.2/24", "dev", "eth0")
        self._in(name, "ip", "route", "add", "default", "via", f"192.168.{number}.1")
        self._in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1")
        forwards = "".join(f"iif wan tcp dport {port} dnat to 192.168.{number}.2; " for port in open_ports)
        masquerade = "masquerade fully-random" if symmetric else "masquerade"
        rules = f"""
            table ip nat {{
                chain out {{ type nat hook postrouting priority srcnat; oif wan {masquerade}; }}
                chain in {{ type nat hook prerouting priority dstnat; {forwards} }}
            }}
            table ip filter {{
                chain through {{
                    type filter hook forward priority filter; policy drop;
                    iif lan accept; ct state established,related accept; ct status dnat accept;
                }}
                chain to {{
                    type filter hook input priority filter; policy accept;
                    iif wan ct state new drop;
                }}
            }}
        """
        _run("ip", "netns", "exec", self._full(router), "nft", "-f", "-", input=rules)
        return address

    def block(self, name: str, address: str) -> None:
        """That machine drops all packets from an address."""
        hook = "type filter hook input priority filter"
        rules = f"table ip blocks {{\n chain in {{\n {hook}; ip saddr {address} drop;\n }}\n }}\n"
        _run("ip", "netns", "exec", self._full(name), "nft", "-f", "-", input=rules)

    def unblock(self, name: str) -> None:
        """That machine drops no packets any more."""
        self._in(name, "nft", "delete", "table", "ip", "blocks")

    def limit(self, name: str, rate: str) -> None:
        """The rate of a public machine's line in both directions (`tc tbf`)."""
        for where, device in ((name, "wan"), ("net", f"w{self._lines[name]}")):
            shape = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
            self._in(where, "tc", "qdisc", "replace", "dev", device, "root", *shape)

    def cut(self, sides: Sequence[Sequence[str]]) -> None:
        """Machines of one side drop all packets from those of another, until `heal`."""
        for side in sides:
            others = [f"5.5.5.{self._lines[name]}" for rest in sides if rest is not side for name in rest]
            hook = "type filter hook input priority filter"
            rules = f"table ip cut {{\n chain in {{\n {hook}; ip saddr {{ {', '.join(others)} }} drop;\n }}\n }}\n"
            for name in side:
                _run("ip", "netns", "exec", self._full(name), "nft", "-f", "-", input=rules)

    def heal(self, sides: Sequence[Sequence[str]]) -> None:
        for name in (name for side in sides for name in side):
            self._in(name, "nft", "delete", "table", "ip", "cut")

    def namespace(self, name: str) -> str:
        """For `enter`."""
        return f"/run/netns/{self._full(name)}"

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on that machine."""
        return ["ip", "netns", "exec", self._full(name), *command]

    def close(self) -> None:
        for name in reversed(self._names):
            with suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", self._full(name))


def enter(namespace: str) -> None:
    """From here on this process, and what it starts, is on that machine."""
    with Path(namespace).open() as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _run(*command: str, **options: Any) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")


@contextmanager
def internet() -> Iterator[Internet]:
    made = Internet()
    try:
        yield made
    finally:
        made.close()
