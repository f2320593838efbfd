"""The options of the swarm: the section [swarm] of a run file. Torch-free."""

import math
from dataclasses import dataclass
from typing import Literal

from diloco.core.options import option
from diloco.errors import ConfigError


@dataclass(frozen=True)
class SwarmConfig:
    """Workers that join and leave while others train (engine = swarm). Joiners get all options but invitation_days."""

    min_workers: int = 1
    """Training starts when this many workers have joined."""
    patience: float = 0.5
    """A round waits for slow workers this share of the usual time between rounds; then they contribute what is done."""
    lost_seconds: float = 5.0
    """A worker from which nothing was heard for this many seconds is left out of rounds."""
    quorum: Literal["majority", "any"] = "majority"
    """majority: of three or more, the side of a network split with most of them ends rounds; any: each side does."""
    minority_minutes: float = 10.0
    """A side without a majority goes on as a run of its own after this many minutes."""
    refusals_to_ban: int = 3
    """A worker is banned after this many refused contributions; ten good ones make up for one."""
    seats: int = option(1, may_differ="in a swarm")
    """The number of invitations printed at the start, each for one worker; `diloco invite RUN` makes more."""
    invitation_days: float = option(30.0, may_differ="in a swarm")
    """Those invitations are valid for this many days."""

    def __post_init__(self) -> None:
        for name, least in (("min_workers", 1), ("refusals_to_ban", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"swarm.{name} = {getattr(self, name)} must be at least {least}")
        if not 0 <= self.patience < math.inf:
            raise ConfigError(f"swarm.patience = {self.patience} must be a finite number of at least 0")
        if not 2 <= self.lost_seconds <= 600:  # every worker sends a beat once a second
            raise ConfigError(f"swarm.lost_seconds = {self.lost_seconds} must be from 2 to 600")
        if self.quorum not in ("majority", "any"):
            raise ConfigError(f"swarm.quorum = {self.quorum!r} must be majority or any")
        if not 0 < self.minority_minutes <= 100_000:
            raise ConfigError(f"swarm.minority_minutes = {self.minority_minutes} must be above 0 and at most 100,000")
        if not 0 <= self.seats <= 1023:
            raise ConfigError(f"swarm.seats = {self.seats} must be from 0 to 1023")
        if not 0 < self.invitation_days <= 3650:
            raise ConfigError(f"swarm.invitation_days = {self.invitation_days} must be above 0 and at most 3650")
