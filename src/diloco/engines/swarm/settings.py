"""What a worker's sidecar is told at its start: plain values only, handed over as JSON."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Settings:
    """Times are in seconds. Files of the swarm are in `folder` (RUN/swarm), each local worker's under its `seat`."""

    folder: str
    seat: str
    """Which of this machine's workers: its files are SEAT.key, SEAT.json."""
    founder: bool = False
    """Begins the swarm if it finds nobody of it; everyone else must find somebody."""
    host: str | None = None
    """The address to listen at; None: all, IPv4 and IPv6."""
    port: int | None = None
    """None: any that is free."""
    announce: tuple[str, ...] = ()
    """What others should call instead of what this machine thinks its addresses are."""
    min_workers: int = 1
    """The first round's training begins when so many are here."""
    patience: float = 0.5
    """A round waits for slow workers this share of the usual time between rounds, after half are ready."""
    lost_seconds: float = 5.0
    """A peer that is silent for so long is left out."""
    beat_seconds: float = 1.0
    timeout_seconds: float = 600.0
    """The longest that a round may take in all."""
    refusals_to_ban: int = 3
    label: str = ""
    """What `diloco status` calls this worker's machine."""

    def path(self, name: str) -> Path:
        return Path(self.folder) / name
