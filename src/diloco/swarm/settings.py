"""What a worker's sidecar is told at its start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Settings:
    """Times are in seconds. The swarm's files are in `folder` (RUN/swarm)."""

    folder: str
    name: str
    """Tells this machine's workers apart, worker-0 for example: this worker's files are NAME.key, NAME.json."""
    founder: bool = False
    """Found the swarm if no worker of it answers; other workers must find one that does."""
    host: str | None = None
    """The address to listen at; None: all, IPv4 and IPv6."""
    port: int | None = None
    """None: any free one."""
    announce: tuple[str, ...] = ()
    """Addresses that others should use instead of those that this machine finds for itself."""
    patience: float = 0.5
    """Once half of the workers are ready, a round waits for the others this share of the usual time between rounds."""
    lost_seconds: float = 5.0
    """A peer that is silent for so long is left out."""
    beat_seconds: float = 1.0
    timeout_seconds: float = 600.0
    """The longest time that a round may take."""
    quorum: Literal["majority", "any"] = "majority"
    """How many of the last round's members must be there to end the next one."""
    minority_seconds: float = 600.0
    """A side without a majority goes on as a run of its own after this time."""
    refusals_to_ban: int = 3
    threads: int = 1
    """How many threads torch uses in the trainer; the sidecar takes a share of them to reduce parts."""
    label: str = ""
    """The name of this worker's machine in `diloco status`."""

    @property
    def stall_seconds(self) -> float:
        """A transfer without progress for so long is broken, although both peers are live."""
        return 4 * self.lost_seconds

    def path(self, name: str) -> Path:
        return Path(self.folder) / name
