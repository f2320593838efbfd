"""The run's private key: it signs invitations and revocations, and stays on the machine where the run began."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from diloco.errors import ConfigError
from diloco.swarm.run_files import write_private
from diloco.swarm.trust.revocation import Revocation, RevocationClaims
from diloco.swarm.trust.signatures import key_id, new_seed, public_key


@dataclass(frozen=True)
class RunKey:
    seed: bytes = field(repr=False)

    @classmethod
    def create(cls) -> "RunKey":
        return cls(new_seed())

    @classmethod
    def load(cls, path: Path) -> "RunKey":
        try:
            seed = bytes.fromhex(path.read_text())
        except (ValueError, OSError) as error:
            raise ConfigError(f"the run's key {path} cannot be read ({error}); restore it from a copy") from error
        if len(seed) != 32:
            raise ConfigError(f"{path} is not a run's key: it has {len(seed)} bytes, not 32; restore it from a copy")
        return cls(seed)

    def save(self, path: Path) -> None:
        """Refuses to overwrite another key: without its key a run can neither invite nor revoke."""
        try:
            write_private(path, self.seed.hex() + "\n", new=True)
        except FileExistsError as error:
            raise ConfigError(f"{path} exists already: a run's key is not overwritten") from error

    @property
    def public(self) -> bytes:
        return public_key(self.seed)

    @property
    def run_id(self) -> str:
        return key_id(self.public)

    def revoke(self, peers: Iterable[str], invitation: str | None, now: float) -> Revocation:
        """Exclude `peers`, and every peer that comes with `invitation` (its id)."""
        claims = RevocationClaims(frozenset(peers), invitation, int(now))
        return Revocation.create(self.seed, self.public, claims)
