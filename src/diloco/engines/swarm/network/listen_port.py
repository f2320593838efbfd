"""The port at which a worker is reached if its user names none: any that is free, and the same one again later.

Others remember where it was: a worker that comes back elsewhere could not be found by those who came back before it.
"""

import random
from pathlib import Path

from diloco.engines.swarm.network.addresses import listen_addresses
from diloco.engines.swarm.network.p2pd import check_ports
from diloco.engines.swarm.run_files import write_private
from diloco.errors import ConfigError, RendezvousError

_FIRST, _LAST = 20_000, 32_000  # below what operating systems give to outgoing connections
_TRIES = 20


def choose_port(folder: Path, name: str, host: str | None) -> int | None:
    """Of RUN/swarm and a worker of this machine; None (any) if no free one is found. Another if it is taken now."""
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
