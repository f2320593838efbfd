"""Where a peer listens and which addresses it announces: the options --host, --port and --announce as multiaddrs.

Also whether a port is free, and which one a worker takes if its user names none. Nothing is connected to here, and only
names that the user has written are looked up.
"""

import errno
import ipaddress
import random
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError, RendezvousError
from diloco.swarm.network import multiaddr
from diloco.swarm.network.multiaddr import ip_of
from diloco.swarm.run_files import write_private

_CALLABLE = re.compile(r"/(?P<kind>ip4|ip6|dns|dns4|dns6)/(?P<host>[^/]+)/tcp/[0-9]+(/|$)")
_FIRST_PORT = 20_000
_LAST_PORT = 32_000
"""A random port lies between these: below what operating systems give to outgoing connections."""
_TRIES = 20


@dataclass(frozen=True)
class ListenConfig:
    """The address at which this peer listens, and those that it announces."""

    host: str | None = None
    """An address or name of this machine; None: all its addresses, IPv4 and IPv6."""
    port: int | None = None
    """The port to listen at; None: any free one."""
    announce: tuple[str, ...] = ()
    """The addresses that others call, instead of those that this machine finds itself."""
    guest: bool = False
    """This peer only calls others, for a short while: it relays nothing and needs no relay."""

    def listen_addresses(self) -> list[str]:
        return listen_addresses(self.host, self.port)

    def announced_addresses(self) -> list[str]:
        return [parse_announced(text, self.port) for text in self.announce]


def listen_addresses(host: str | None, port: int | None) -> list[str]:
    """Return the multiaddrs to listen at: all IPv4 and IPv6 addresses, or those of one address or name of this
    machine."""
    number = _checked_port(port, "port") if port is not None else 0
    if host is None:
        return [f"/ip4/0.0.0.0/tcp/{number}", f"/ip6/::/tcp/{number}"]
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"host {host!r} is not an address or name of this machine ({error}); leave it out") from error
    addresses = dict.fromkeys(ipaddress.ip_address(str(info[4][0]).split("%")[0]) for info in infos)
    return [f"/ip{ip.version}/{ip}/tcp/{number}" for ip in addresses]


def parse_announced(text: str, port: int | None) -> str:
    """Return the multiaddr of what a user wrote after --announce: ADDRESS, ADDRESS:PORT, [IPV6]:PORT or a multiaddr."""
    if text.startswith("/"):
        return _announced_multiaddr(text)
    name, number = _name_and_port(text, port)
    try:
        ip = ipaddress.ip_address(name)
        host = f"/ip{ip.version}/{ip}"
    except ValueError:
        parts = name.rstrip(".").split(".")
        if not all(part.replace("-", "").isalnum() for part in parts) or parts[-1].isdecimal():
            raise ConfigError(f"announce {text!r} is not ADDRESS, ADDRESS:PORT or a multiaddr") from None
        host = f"/dns/{name}"
    if number is None:
        raise ConfigError(f"announce {text!r} has no port and none was chosen: write {text}:PORT or set the port too")
    return f"{host}/tcp/{number}"


def _announced_multiaddr(text: str) -> str:
    multiaddr.to_bytes(text)  # raises ConfigError for what is none
    if "/tcp/0" in text:
        raise ConfigError(f"announce {text!r}: name the port that others must call, not 0")
    if not _CALLABLE.match(text):
        raise ConfigError(f"announce {text!r} does not say where to call: write /ip4/ADDRESS/tcp/PORT, say")
    return text.partition("/p2p/")[0]


def check_name(address: str) -> None:
    """Raise ConfigError if an address to be announced has a name that the domain name system says does not exist."""
    callable_address = _CALLABLE.match(address)
    if callable_address is None or not callable_address["kind"].startswith("dns"):
        return
    host = callable_address["host"]
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise ConfigError(f"announce {host!r}: no machine of that name is known") from error


def _name_and_port(text: str, port: int | None) -> tuple[str, int | None]:
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        return name, _checked_port(rest[1:], f"announce {text!r}: port") if rest else port
    if text.count(":") == 1:
        name, _, rest = text.partition(":")
        return name, _checked_port(rest, f"announce {text!r}: port")
    return text, port


def _checked_port(port: int | str, what: str) -> int:
    try:
        number = int(port)
    except ValueError:
        number = 0
    if not 0 < number < 65536:
        raise ConfigError(f"{what} {port!r} is not between 1 and 65535")
    return number


# Ports


def choose_port(folder: Path, name: str, host: str | None) -> int | None:
    """Choose the port that this worker had last time, if it is free, else a random free one; None if none was found.

    It is the same port again, since the other workers remember it: after a pause of the whole swarm they find each
    other.
    `folder` is RUN/swarm, where the port is kept.
    """
    path = folder / f"{name}.port"
    try:
        candidates = [int(path.read_text())]
    except (OSError, ValueError):
        candidates = []
    candidates += random.SystemRandom().sample(range(_FIRST_PORT, _LAST_PORT), _TRIES)
    for port in candidates:
        try:
            check_ports(listen_addresses(host, port))
        except (ConfigError, RendezvousError):
            continue
        write_private(path, f"{port}\n")
        return port
    return None


def check_ports(addresses: list[str]) -> None:
    """Raise RendezvousError or ConfigError if a port cannot be used.

    p2pd would silently share a taken port (SO_REUSEPORT), or leave it out.
    """
    for address in addresses:
        ip = ip_of(address)
        port = int(address.rpartition("/")[2])
        assert ip is not None
        try:
            with socket.socket(socket.AF_INET if ip.version == 4 else socket.AF_INET6) as probe:
                if ip.version == 6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((str(ip), port))
        except OSError as error:
            if ip.version == 6 and ip.is_unspecified and error.errno != errno.EADDRINUSE:
                continue  # this machine has no IPv6
            _raise_explained(error, str(ip), port)


def _raise_explained(error: OSError, ip: str, port: int) -> None:
    if error.errno == errno.EADDRINUSE:
        raise RendezvousError(
            f"port {port} is taken at {ip} on this machine; choose another with --port, or stop what uses it"
        ) from error
    if error.errno == errno.EADDRNOTAVAIL:
        raise ConfigError(
            f"host {ip} is no address of this machine; leave --host out to listen at all its addresses"
        ) from error
    if error.errno == errno.EACCES:
        raise ConfigError(f"port {port} may not be used by this user; choose one above 1023 with --port") from error
    raise RendezvousError(f"cannot listen at {ip} port {port}: {error.strerror}") from error
