"""The port that a worker listens at: whether one is free, and which one to take if the user names none."""

import errno
import random
import socket
from pathlib import Path

from diloco.errors import ConfigError, RendezvousError
from diloco.swarm.network.addresses import listen_addresses
from diloco.swarm.network.multiaddr import ip_of
from diloco.swarm.run_files import write_private

_FIRST, _LAST = 20_000, 32_000  # below what operating systems give to outgoing connections
_TRIES = 20


def choose_port(folder: Path, name: str, host: str | None) -> int | None:
    """The port that this worker had last time, if it is free, else a random free one; None if none was found.

    The same port again, since the other workers remember it: after a pause of the whole swarm they find each other.
    `folder` is RUN/swarm, where the port is kept.
    """
    path = folder / f"{name}.port"
    try:
        candidates = [int(path.read_text())]
    except (OSError, ValueError):
        candidates = []
    candidates += random.SystemRandom().sample(range(_FIRST, _LAST), _TRIES)
    for port in candidates:
        try:
            check_ports(listen_addresses(host, port))
        except (ConfigError, RendezvousError):
            continue
        write_private(path, f"{port}\n")
        return port
    return None


def check_ports(addresses: list[str]) -> None:
    """Raises if a port cannot be used. p2pd would silently share a taken port (SO_REUSEPORT), or leave it out."""
    for address in addresses:
        ip, port = ip_of(address), int(address.rpartition("/")[2])
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
