"""Certificates and credentials: how a peer proves to every other that it was invited to the run.

A certificate is the public half of an invitation, signed by the run's key. A credential is a certificate, the peer's
libp2p id and its role, signed with the invitation's private half: every peer that has the run's public key can check
it, and it is of no use to a peer of another id, nor to a guest that would be a worker. Nothing here reads a clock or
remembers a peer (permissions.py does).
"""

from datetime import UTC, datetime
from typing import Annotated, Literal

import msgspec

from diloco.swarm.trust.signatures import Key, Signature, is_signed, key_id

MAX_CREDENTIAL_BYTES = 256
MAX_EXPIRES = (1 << 32) - 1
Expires = Annotated[int, msgspec.Meta(ge=0, le=MAX_EXPIRES)]
"""Unix time in seconds."""
Role = Literal["worker", "guest"]
"""A guest asks (status, doctor, the visit before joining) and takes no seat."""
RefusalKind = Literal["unknown", "forged", "expired", "revoked", "banned", "busy", "seats"]


class PeerRefused(Exception):
    """A peer is refused, and gets to read the message: the kind and one sentence."""

    def __init__(self, kind: RefusalKind, sentence: str) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind: RefusalKind = kind


class InvitationCertificate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The public half of an invitation, signed by the run's key."""

    public: Key
    expires: Expires
    signature: Signature

    @property
    def id(self) -> str:
        """The name of the invitation."""
        return key_id(self.public)

    def is_signed_by(self, run_public: bytes) -> bool:
        return is_signed(run_public, self.signature, "invitation", certified_bytes(self.public, self.expires))


class Credential(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A certificate, and the invitation's signature over the id and the role of the one peer that may show it."""

    certificate: InvitationCertificate
    signature: Signature
    role: Role = "worker"

    @classmethod
    def read(cls, data: bytes) -> "Credential":
        """Read a credential, or raise PeerRefused if this is none. `verify` checks the signatures."""
        if len(data) > MAX_CREDENTIAL_BYTES:
            raise PeerRefused("forged", f"{len(data)} bytes are no credential: one has at most {MAX_CREDENTIAL_BYTES}")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerRefused("forged", f"{len(data)} bytes are no credential of this version ({error})") from error

    def data(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def verify(self, run_public: bytes, peer: str, now: float | None) -> None:
        """Raise PeerRefused unless the run has invited this peer. `now` None: an expired credential is good too."""
        if not self.certificate.is_signed_by(run_public):
            raise PeerRefused("forged", f"the invitation of {peer} is not of the run {key_id(run_public)}")
        claimed = claimed_bytes(run_public, peer, self.role)
        if not is_signed(self.certificate.public, self.signature, "credential", claimed):
            raise PeerRefused("forged", f"the credential that {peer} shows was made for another peer")
        if now is not None and now >= self.certificate.expires:
            raise PeerRefused(
                "expired",
                f"the invitation of {peer} expired at {format_time(self.certificate.expires)} (the clock here says "
                f"{format_time(now)}), and neither this worker nor most members know that peer; ask for a new one",
            )


def certified_bytes(public: bytes, expires: int) -> bytes:
    """Return the bytes that the run's key signs to make an invitation."""
    return public + expires.to_bytes(4)


def claimed_bytes(run_public: bytes, peer: str, role: Role) -> bytes:
    """Return the bytes that an invitation's key signs to make a credential."""
    return run_public + role.encode() + b" " + peer.encode()


def format_time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
