"""Ed25519 signatures of a run. Each is over a purpose and the data, so that none can be used for another purpose."""

import hashlib
from typing import Annotated, Literal

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

Purpose = Literal["invitation", "credential", "revocation", "run", "range", "mean", "contribution"]
Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
"""A public key, or the seed that a private key is made of."""
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


def new_seed() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(seed: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def key_id(public: bytes) -> str:
    """Compute the name of a run or an invitation, made of its public key: 16 hex digits."""
    return hashlib.sha256(public).hexdigest()[:16]


def sign(seed: bytes, purpose: Purpose, data: bytes) -> bytes:
    return Ed25519PrivateKey.from_private_bytes(seed).sign(_signed_bytes(purpose, data))


def is_signed(public: bytes, signature: bytes, purpose: Purpose, data: bytes) -> bool:
    """Return whether the owner of this public key has signed the data for this purpose."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _signed_bytes(purpose, data))
    except (InvalidSignature, ValueError):
        return False
    return True


def _signed_bytes(purpose: Purpose, data: bytes) -> bytes:
    return f"diloco 1 {purpose}\0".encode() + data
