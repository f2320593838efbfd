"""A peer's identity: an Ed25519 key in a file that only its owner can read, in the form that p2pd reads.

The peer id is made of the public key. libp2p proves at every connection that a peer holds the key of its id. The file
is never sent anywhere.
"""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from diloco.atomic_files import PRIVATE, write_file
from diloco.errors import ConfigError
from diloco.swarm.network.multiaddr import peer_id_to_bytes, peer_id_to_text

_PRIVATE = b"\x08\x01\x12\x40"
"""libp2p's protobuf around an Ed25519 private key: its kind (1), then 64 bytes, the seed and the public key."""
_PUBLIC = b"\x08\x01\x12\x20"
"""The same around a public key, of 32 bytes."""


def load_or_create(path: Path) -> str:
    """Return the peer id of the key in this file; a new key is made if the file is missing."""
    if not path.exists():
        save_seed(path, Ed25519PrivateKey.generate().private_bytes_raw())
    return peer_id(_read(path)[-32:])


def load_seed(path: Path) -> bytes:
    """Read the private half of the key in this file, to sign with."""
    return _read(path)[len(_PRIVATE) : -32]


def _read(path: Path) -> bytes:
    data = path.read_bytes()
    if len(data) != len(_PRIVATE) + 64 or not data.startswith(_PRIVATE):
        raise ConfigError(f"{path} is not a worker's key: move it away to start with a new key, as a new worker")
    return data


def peer_id(public: bytes) -> str:
    """Return the peer id of a public key. It contains the whole key, since that is short: libp2p's "identity hash"."""
    key = _PUBLIC + public
    return peer_id_to_text(b"\0" + bytes([len(key)]) + key)


def public_key_of(peer: str) -> bytes:
    """Read the public key that a peer id contains; ValueError if it is no id of an Ed25519 key."""
    data = peer_id_to_bytes(peer)
    start = b"\0" + bytes([len(_PUBLIC) + 32]) + _PUBLIC
    if len(data) != len(start) + 32 or not data.startswith(start):
        raise ValueError(f"{peer} contains no Ed25519 key")
    return data[len(start) :]


def save_seed(path: Path, seed: bytes) -> None:
    """Write the key with this private half to the file, readable by its owner only."""
    public = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _PRIVATE + seed + public, durable=True, mode=PRIVATE)
