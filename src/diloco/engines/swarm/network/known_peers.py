"""RUN/swarm/peers.json: whom this machine's workers have met and where, so that a restarted one finds the swarm again.

Not trusted for more than that: whoever answers at such an address still shows its credential.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from diloco.engines.swarm.run_files import write_private

MAX_PEERS = 512
"""Those not seen for longest are forgotten."""


@dataclass(frozen=True)
class KnownPeer:
    peer: str
    worker: int | None
    """Its number in the swarm; None: it never had one."""
    addresses: tuple[str, ...]
    """Multiaddrs that end in /p2p/PEER, the best first."""
    invitation: str | None = None
    """The id of the invitation it came with, as Trust.invitation_of tells it; None: not known."""
    seen: float = 0.0
    """When it was last heard of, Unix time."""
    seat: str | None = None
    """Which of this machine's own workers it is; None: it is on another machine, as far as is known."""


def read_peers(path: Path) -> list[KnownPeer]:
    """The one last seen comes first. A missing file is an empty list, and so is a damaged one: it is a cache."""
    try:
        values = json.loads(path.read_text())
        peers = [KnownPeer(**value | {"addresses": tuple(value["addresses"])}) for value in values["peers"]]
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return sorted(peers, key=lambda peer: -peer.seen)


def write_peers(path: Path, peers: Iterable[KnownPeer]) -> None:
    """Beside those that are in the file already; what is told of a peer here replaces what is told there."""
    merged = {peer.peer: peer for peer in read_peers(path)}
    for peer in peers:
        old = merged.get(peer.peer, peer)
        invitation, seat = peer.invitation or old.invitation, peer.seat or old.seat
        merged[peer.peer] = replace(peer, invitation=invitation, seat=seat)
    newest = sorted(merged.values(), key=lambda peer: -peer.seen)[:MAX_PEERS]
    write_private(path, json.dumps({"version": 1, "peers": [asdict(peer) for peer in newest]}, indent=1) + "\n")
