"""The run's private key: it signs invitations and revocations, and stays on the machine where the run began.

A revocation is a signed record that excludes peers from a run for ever. Members pass them on to each other.

    record = signature of the run's key in hex + " " + JSON of the claims        one line, of at most 64 KiB
"""

import string
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from diloco.errors import ConfigError
from diloco.swarm.run_files import write_private
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.signatures import is_signed, key_id, new_seed, public_key, sign

MAX_REVOCATION_BYTES = 1 << 16
_HEX_DIGITS = set(string.hexdigits.lower().encode())


class RevocationClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The claims of a revocation: `peers` are excluded; so is every peer that comes with `invitation` (its id)."""

    peers: frozenset[str]
    invitation: str | None
    at: int
    """Unix time in seconds."""

    def excludes(self, peer: str, invitation: str | None) -> bool:
        """Return whether this peer, which came with that invitation, is excluded."""
        return peer in self.peers or (self.invitation is not None and invitation == self.invitation)


class Revocation(RevocationClaims, frozen=True):
    """A record that the run's key has signed."""

    data: bytes
    """The signed record, as it is stored and passed on."""

    @classmethod
    def create(cls, seed: bytes, run_public: bytes, claims: RevocationClaims) -> "Revocation":
        """Sign the claims with the run's private key."""
        body = msgspec.json.encode(claims, order="deterministic")
        data = sign(seed, "revocation", body).hex().encode() + b" " + body
        if len(data) > MAX_REVOCATION_BYTES:
            raise ConfigError(f"a revocation of {len(claims.peers)} peers is longer than a message may be")
        return cls.read(data, run_public)

    @classmethod
    def read(cls, data: bytes, run_public: bytes) -> "Revocation":
        """Read a record, or raise PeerRefused. Its JSON is parsed only after the signature has been checked."""
        signature, _, body = data.partition(b" ")
        if len(data) > MAX_REVOCATION_BYTES or len(signature) != 128 or not _HEX_DIGITS.issuperset(signature):
            raise PeerRefused("forged", f"{len(data)} bytes are not a revocation")
        if not is_signed(run_public, bytes.fromhex(signature.decode()), "revocation", body):
            raise PeerRefused("forged", f"the key of the run {key_id(run_public)} has not signed this revocation")
        try:
            claims = msgspec.json.decode(body, type=RevocationClaims)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerRefused("forged", f"this version of diloco cannot read this revocation ({error})") from error
        return cls(**msgspec.structs.asdict(claims), data=data)


@dataclass(frozen=True)
class RunKey:
    """The run's private key, which invites and revokes."""

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
        """Write the key, but never over another one: without its key a run can neither invite nor revoke."""
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
