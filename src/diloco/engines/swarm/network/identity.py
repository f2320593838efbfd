"""A peer's lasting identity: an Ed25519 key in a file that only its owner can read, in the form p2pd wants.

libp2p proves at every connection that a peer holds the key of its name. The file is never sent anywhere.
"""

from pathlib import Path

from diloco.atomic_files import PRIVATE, write_file
from diloco.engines.swarm.network.multiaddr import peer_id_to_text
from diloco.errors import ConfigError, EngineError, install_hint

_PRIVATE = b"\x08\x01\x12\x40"
"""libp2p's protobuf around an Ed25519 private key: its kind (1), then 64 bytes, the seed and the public key."""
_PUBLIC = b"\x08\x01\x12\x20"


def ensure(path: Path) -> str:
    """Makes the key if there is none; returns the peer id."""
    if not path.exists():
        _make(path)
    data = path.read_bytes()
    if len(data) != len(_PRIVATE) + 64 or not data.startswith(_PRIVATE):
        raise ConfigError(f"{path} is not a worker's key; move it away and a new one is made (a new worker then)")
    return peer_id(data[-32:])


def peer_id(public: bytes) -> str:
    """A key this short is its own name: libp2p's "identity hash"."""
    key = _PUBLIC + public
    return peer_id_to_text(b"\0" + bytes([len(key)]) + key)


def _make(path: Path) -> None:
    try:
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError as error:
        raise EngineError(f"the swarm needs the package cryptography: {install_hint('swarm')}") from error
    key = Ed25519PrivateKey.generate()
    seed = key.private_bytes(form.Encoding.Raw, form.PrivateFormat.Raw, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.Raw, form.PublicFormat.Raw)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, _PRIVATE + seed + public, durable=True, mode=PRIVATE)
