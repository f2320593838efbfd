"""Who may be in a swarm: the run's key, the invitations it signs, the credentials peers make of them, and revocations.

The run has an Ed25519 key pair; its private half never leaves the machine that founded the run. An invitation is a
key pair of its own with the run key's signature (its certificate), as one word to paste: who has the word can sign. A
peer signs its libp2p peer id with it: that and the certificate are its credential, which anybody can check who knows
the run's public key, and which is of no use to another peer. Every signature is over a text that names its purpose.

Nothing here reads a clock, opens a connection or remembers who came (trust.py does).
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from diloco.engines.swarm.run_files import write_private
from diloco.engines.swarm.trust.text_encoding import NotWhole, from_word, to_word
from diloco.errors import ConfigError, install_hint

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as error:
    raise ConfigError(f"the swarm needs the package cryptography: {install_hint('swarm')}") from error

VERSION = 1
_NAME = "diloco"
_MARK = f"{_NAME}{VERSION}"
"""An invitation begins so. Base58 has no l, so it cannot occur a second time."""
_SEALED = struct.Struct(">32s32sI64s")  # run's public key, the invitation's private seed, expiry, the run's signature
_CREDENTIAL = struct.Struct(
    ">B32sI64s64s"
)  # version, certificate (public key, expiry, signature), signature of the peer
_USUAL = b"/dns4/ip6/ip4/192.168./ip4/10./udp/quic-v1/tcp/p2p/12D3KooW/p2p-circuit/p2p/12D3KooW"
"""What addresses are made of, so that they take less room in an invitation."""
_ADDRESSES_BYTES = 2048
MAX_ADDRESSES = 8
MAX_ADDRESS_LENGTH = 200
CREDENTIAL_BYTES = _CREDENTIAL.size
MAX_REVOCATION_BYTES = 1 << 16
MAX_EXPIRES = (1 << 32) - 1

Kind = Literal["unknown", "forged", "expired", "revoked", "banned", "busy"]


class PeerRefused(Exception):
    """A peer is turned away. The text, which the peer gets to read, is its kind and one sentence."""

    def __init__(self, kind: Kind, sentence: str) -> None:
        super().__init__(f"{kind}: {sentence}")
        self.kind: Kind = kind


@dataclass(frozen=True)
class Certificate:
    """The public part of an invitation, signed by the run's key."""

    public: bytes
    expires: int
    """Unix time in seconds."""
    signature: bytes

    @property
    def id(self) -> str:
        return hashlib.sha256(self.public).hexdigest()[:16]

    def is_of(self, run_public: bytes) -> bool:
        return _is_signed(run_public, self.signature, _certified(self.public, self.expires))


@dataclass(frozen=True)
class Invitation:
    """Multi-use until it expires. Addresses are hints, not signed: whoever passes it on may write newer ones in."""

    run_public: bytes
    seed: bytes = field(repr=False)
    expires: int
    signature: bytes = field(repr=False)
    addresses: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str, now: float | None) -> "Invitation":
        """Spaces, line ends, quotes and the like are passed over. `now` None: also an expired one will do."""
        try:
            data = from_word(_body(text))
        except NotWhole as error:
            raise ConfigError(f"the invitation {error}; copy it again, from {_MARK} to its last letter") from error
        if len(data) < _SEALED.size:
            raise ConfigError("the invitation is damaged: it is too short; copy it again, or ask for another")
        run_public, seed, expires, signature = _SEALED.unpack_from(data)
        found = cls(run_public, seed, expires, signature, _unpacked(data[_SEALED.size :]))
        if not found.certificate.is_of(run_public):
            raise ConfigError("the invitation is forged: the run's key has not signed it; ask for another")
        if now is not None and now >= expires:
            raise ConfigError(
                f"the invitation expired at {_time(expires)} (this machine's clock says {_time(now)}): ask for a new "
                "one (`diloco invite RUN`, on the machine where the run began), or set the clock if it is wrong"
            )
        return found

    @property
    def run_id(self) -> str:
        return run_id(self.run_public)

    @property
    def id(self) -> str:
        return self.certificate.id

    @property
    def certificate(self) -> Certificate:
        return Certificate(_public(self.seed), self.expires, self.signature)

    @property
    def peers(self) -> tuple[str, ...]:
        """Whom the addresses lead to."""
        return tuple(dict.fromkeys(address.rpartition("/p2p/")[2] for address in self.addresses))

    @property
    def until(self) -> str:
        """For people."""
        return _time(self.expires)

    def with_addresses(self, addresses: Iterable[str]) -> "Invitation":
        return replace(self, addresses=_checked(addresses))

    def text(self) -> str:
        sealed = _SEALED.pack(self.run_public, self.seed, self.expires, self.signature)
        return _MARK + to_word(sealed + _packed(self.addresses))

    def credential(self, peer: str) -> "Credential":
        """What the peer of this name shows to the others."""
        signature = _sign(self.seed, _claimed(self.run_public, peer))
        return Credential(self.certificate, signature)


@dataclass(frozen=True)
class RunKey:
    """The run's private key: makes invitations and revocations."""

    seed: bytes = field(repr=False)

    @classmethod
    def create(cls) -> "RunKey":
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def load(cls, path: Path) -> "RunKey":
        try:
            seed = bytes.fromhex(path.read_text())
        except (ValueError, OSError) as error:
            raise ConfigError(f"the run's key {path} cannot be read ({error}); bring it back from a copy") from error
        if len(seed) != 32:
            raise ConfigError(f"{path} is not a run's key: it has {len(seed)} bytes, not 32; bring it back from a copy")
        return cls(seed)

    def save(self, path: Path) -> None:
        """Never over another: without its key a run can invite nobody and revoke nothing."""
        try:
            write_private(path, self.seed.hex() + "\n", new=True)
        except FileExistsError as error:
            raise ConfigError(f"{path} is there already: a run's key is not written over") from error

    @property
    def public(self) -> bytes:
        return _public(self.seed)

    @property
    def run_id(self) -> str:
        return run_id(self.public)

    def revoke(self, peers: Iterable[str], invitation: str | None, kept: Iterable[str], now: float) -> "Revocation":
        """Take peers out, and `invitation` (an id) with all who came with it but `kept`."""
        staying = sorted(kept)
        told = {"peers": sorted(peers), "invitation": invitation, "kept": staying, "at": int(now)}
        data = json.dumps(told).encode()
        signed = _sign(self.seed, _REVOKED + data).hex().encode() + b" " + data
        if len(signed) > MAX_REVOCATION_BYTES:
            raise ConfigError(f"a revocation that keeps {len(staying)} peers is longer than a message may be")
        return Revocation.read(signed, self.public)


def invite(run_key: RunKey, addresses: Iterable[str], valid_seconds: float, now: float) -> Invitation:
    """A new invitation, with a key pair of its own."""
    if not 1 <= valid_seconds <= MAX_EXPIRES - now:
        raise ConfigError(f"an invitation must be valid for 1 s or more and end before 2106, not {valid_seconds} s")
    seed, expires = Ed25519PrivateKey.generate().private_bytes_raw(), int(now + valid_seconds)
    signature = _sign(run_key.seed, _certified(_public(seed), expires))
    return Invitation(run_key.public, seed, expires, signature, _checked(addresses))


@dataclass(frozen=True)
class Credential:
    certificate: Certificate
    signature: bytes

    @classmethod
    def read(cls, data: bytes) -> "Credential":
        """Raises PeerRefused; says nothing about whether it is true."""
        if len(data) != CREDENTIAL_BYTES or data[0] != VERSION:
            version = data[0] if data else "none"
            raise PeerRefused(
                "forged", f"a credential of {len(data)} bytes, version {version}, is none of this version"
            )
        _, public, expires, signature, own = _CREDENTIAL.unpack(data)
        return cls(Certificate(public, expires, signature), own)

    def data(self) -> bytes:
        certificate = self.certificate
        return _CREDENTIAL.pack(VERSION, certificate.public, certificate.expires, certificate.signature, self.signature)

    def verify(self, run_public: bytes, peer: str, now: float | None) -> None:
        """Raises PeerRefused. `now` None: its expiry does not matter."""
        if not self.certificate.is_of(run_public):
            raise PeerRefused("forged", f"{peer} comes with an invitation that is not of the run {run_id(run_public)}")
        if not _is_signed(self.certificate.public, self.signature, _claimed(run_public, peer)):
            raise PeerRefused("forged", f"the credential that {peer} shows was made for another peer")
        if now is not None and now >= self.certificate.expires:
            raise PeerRefused(
                "expired",
                f"the invitation of {peer} expired at {_time(self.certificate.expires)} (the clock here says "
                f"{_time(now)}), and nobody here remembers that peer; ask for a new one",
            )


@dataclass(frozen=True)
class Revocation:
    """`peers` are out, for ever; so is everyone who came with `invitation`, but for `kept`."""

    peers: frozenset[str]
    invitation: str | None
    kept: frozenset[str]
    at: int
    data: bytes = field(repr=False)
    """As it was signed: what is passed on."""

    @classmethod
    def read(cls, data: bytes, run_public: bytes) -> "Revocation":
        """Raises PeerRefused. Nothing is parsed before the run's signature has been checked."""
        signature, _, told = data.partition(b" ")
        if len(data) > MAX_REVOCATION_BYTES or len(signature) != 128 or not _is_hex(signature):
            raise PeerRefused("forged", f"{len(data)} bytes are not a revocation")
        if not _is_signed(run_public, bytes.fromhex(signature.decode()), _REVOKED + told):
            raise PeerRefused("forged", f"a revocation that the key of the run {run_id(run_public)} has not signed")
        try:
            values = json.loads(told)
            peers, kept = frozenset(values["peers"]), frozenset(values["kept"])
            return cls(peers, values["invitation"], kept, values["at"], data)
        except (ValueError, KeyError, TypeError) as error:
            raise PeerRefused("forged", f"a revocation that this version of diloco cannot read ({error!r})") from error

    def concerns(self, peer: str, invitation: str | None) -> bool:
        """Whether it puts this peer, who came with that invitation, out."""
        if peer in self.peers:
            return True
        return self.invitation is not None and invitation == self.invitation and peer not in self.kept


def run_id(run_public: bytes) -> str:
    return hashlib.sha256(run_public).hexdigest()[:16]


# What is signed. Each begins with its purpose, so that no signature can serve for another

_REVOKED = b"diloco 1 revocation\0"


def _certified(public: bytes, expires: int) -> bytes:
    return b"diloco 1 invitation\0" + public + expires.to_bytes(4)


def _claimed(run_public: bytes, peer: str) -> bytes:
    return b"diloco 1 credential\0" + run_public + peer.encode()


def _sign(seed: bytes, data: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).sign(data)


def _public(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def _is_signed(public: bytes, signature: bytes, data: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _is_hex(data: bytes) -> bool:
    return not data.translate(None, b"0123456789abcdef")


def _time(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"


# The text


def _body(text: str) -> str:
    """What follows the mark. What is neither letter nor digit does not belong to it, wherever a paste has put it."""
    letters = "".join(letter for letter in text if letter.isalnum())
    if not letters:
        raise ConfigError("the invitation is empty: paste the whole word that `diloco invite RUN` prints")
    start = letters.lower().rfind(_NAME)
    if start < 0:
        raise ConfigError(f"this is not an invitation: one begins with {_MARK}; copy it again, whole")
    body = letters[start + len(_NAME) :]
    if body[:1] != str(VERSION):
        raise ConfigError(
            f"the invitation is of version {body[:1] or 'none'}, and this diloco reads version {VERSION}: "
            "both machines need the same diloco"
        )
    return body[1:]


def _checked(addresses: Iterable[str]) -> tuple[str, ...]:
    unique = tuple(dict.fromkeys(addresses))
    if len(unique) > MAX_ADDRESSES:
        raise ConfigError(f"an invitation holds at most {MAX_ADDRESSES} addresses, not {len(unique)}")
    for address in unique:
        way, _, peer = address.rpartition("/p2p/")
        if not (way.startswith("/") and peer.isalnum() and address.isascii() and address.isprintable()):
            raise ConfigError(f"{address!r} is not a peer's address: one looks like /ip4/203.0.113.7/tcp/4000/p2p/PEER")
        if " " in address or len(address) > MAX_ADDRESS_LENGTH:
            raise ConfigError(
                f"{address!r} is not a peer's address: it has a space, or over {MAX_ADDRESS_LENGTH} letters"
            )
    return unique


def _packed(addresses: tuple[str, ...]) -> bytes:
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_DEFAULT_STRATEGY, _USUAL)
    return deflate.compress(" ".join(addresses).encode()) + deflate.flush()


def _unpacked(data: bytes) -> tuple[str, ...]:
    inflate = zlib.decompressobj(-15, _USUAL)
    try:
        text = inflate.decompress(data, _ADDRESSES_BYTES)
        if not inflate.eof or inflate.unused_data:
            raise ConfigError("the invitation is damaged: its addresses do not end; ask for another")
        return _checked(text.decode("ascii").split())
    except (zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"the invitation is damaged: its addresses cannot be read ({error})") from error
