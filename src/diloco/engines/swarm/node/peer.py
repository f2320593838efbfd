"""Another member of the swarm, as one node knows it."""

from dataclasses import dataclass, field

from diloco.engines.swarm.node.status import Status

MAX_ADDRESSES = 16


@dataclass
class Peer:
    """It is live from its first answer until it is lost or leaves."""

    name: str
    credential: bytes
    addresses: list[str]
    status: Status = field(default_factory=Status)
    heard: float = 0.0
    live: bool = False
    left: bool = False
    rejects: bool = False
    """It will not have this node."""
    asked: float = 0.0
    lost_at: float = 0.0
    gone: bool = False
    """It is known to be dead, or has said goodbye; else it may only be cut off."""
    latency_seconds: float = 0.0
    knows: set[str] | None = None
    """Who is here as it sees it, as it has told last."""

    def entry(self) -> list[object]:
        return [self.name, self.credential, self.addresses[:MAX_ADDRESSES], self.status.number]
