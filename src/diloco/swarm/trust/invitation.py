"""Invitations: one word that lets one worker join a run, until it expires.

An invitation is a key pair whose public half the run's key has signed (the certificate), and a few addresses of peers.
The word holds the private half: with it a peer signs its libp2p id, and that is its credential (credential.py).

    word = "diloco2" + text of msgpack of [run's public key, private seed, expiry, signature, addresses]
    text = length (2 letters: how many follow) + base58(data + 4 bytes of checksum)

The text has letters and digits only, so that no shell, chat or mail program changes it. The length tells a paste that
was cut from one that was changed. The data is not encrypted.

The command line takes invitations where the list of processes does not show them: `read_invitations`.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import base58
import msgspec

from diloco.errors import ConfigError
from diloco.own_command import command
from diloco.swarm.network import multiaddr
from diloco.swarm.trust.credential import (
    MAX_EXPIRES,
    Credential,
    Expires,
    InvitationCertificate,
    Role,
    certified_bytes,
    claimed_bytes,
    format_time,
)
from diloco.swarm.trust.run_key import RunKey
from diloco.swarm.trust.signatures import Key, Signature, key_id, new_seed, public_key, sign

VERSION = 2
_NAME = "diloco"
MARK = f"{_NAME}{VERSION}"
"""Every invitation begins with this. Base58 has no l, so it cannot occur a second time."""
MAX_ADDRESSES = 8
MAX_ADDRESS_BYTES = 200
VARIABLE = "DILOCO_INVITATION"
"""The environment variable that a command without an invitation reads."""
_MAX_TEXT = 1 << 20
"""Letters that are read of a file or of standard input."""
_PackedAddress = Annotated[bytes, msgspec.Meta(max_length=MAX_ADDRESS_BYTES)]
_ALPHABET = base58.BITCOIN_ALPHABET.decode()  # without 0, O, I and l, which look like others
_LENGTH_LETTERS = 2
MAX_LETTERS = 58**_LENGTH_LETTERS - 1


class Invitation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One worker's invitation. Its addresses are not signed: every member may print its own with newer ones."""

    run_public: Key
    seed: Key
    """The seed of the invitation's private key: secret."""
    expires: Expires
    signature: Signature
    packed_addresses: Annotated[tuple[_PackedAddress, ...], msgspec.Meta(max_length=MAX_ADDRESSES)] = ()
    """The addresses as binary multiaddrs."""

    @classmethod
    def parse(cls, text: str, now: float | None) -> "Invitation":
        """Read a word; spaces, line ends, quotes and the like are ignored. `now` None: an expired one is accepted."""
        try:
            data = decode_text(_without_mark(text))
        except DamagedText as error:
            raise ConfigError(f"the invitation {error}; copy it again, from {MARK} to its last letter") from error
        try:
            invitation = msgspec.msgpack.decode(data, type=cls)
            _check_addresses(invitation.addresses)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ConfigError) as error:
            raise ConfigError(f"the invitation is damaged ({error}); copy it again, or ask for another") from error
        if not invitation.certificate.is_signed_by(invitation.run_public):
            raise ConfigError("the invitation is forged: the run's key has not signed it; ask for another")
        if now is not None and now >= invitation.expires:
            raise ConfigError(
                f"the invitation expired at {invitation.until} (this machine's clock says {format_time(now)}): ask for "
                f"a new one (`{command('invite', 'RUN')}`, on the machine where the run began), or set the clock if "
                "it is wrong"
            )
        return invitation

    def __repr__(self) -> str:
        """Show everything but the secret."""
        return f"Invitation(run={self.run_id}, id={self.id}, until={self.until}, addresses={self.addresses})"

    @property
    def run_id(self) -> str:
        return key_id(self.run_public)

    @property
    def id(self) -> str:
        return self.certificate.id

    @property
    def certificate(self) -> InvitationCertificate:
        return InvitationCertificate(public_key(self.seed), self.expires, self.signature)

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(map(multiaddr.to_text, self.packed_addresses))

    @property
    def peers(self) -> tuple[str, ...]:
        """The peers that the addresses lead to."""
        return tuple(dict.fromkeys(multiaddr.split_peer(address)[1] for address in self.addresses))

    @property
    def until(self) -> str:
        """The expiry in words."""
        return format_time(self.expires)

    def with_addresses(self, addresses: Iterable[str]) -> "Invitation":
        return msgspec.structs.replace(self, packed_addresses=_pack_addresses(addresses))

    def text(self) -> str:
        return MARK + encode_text(msgspec.msgpack.encode(self))

    def credential(self, peer: str, role: Role = "worker") -> Credential:
        """Return what the peer of this id shows to the others. A worker's gives it the invitation's seat, for ever."""
        signature = sign(self.seed, "credential", claimed_bytes(self.run_public, peer, role))
        return Credential(self.certificate, signature, role)


def invite(run_key: RunKey, addresses: Iterable[str], valid_seconds: float, now: float) -> Invitation:
    """Make a new invitation, with a key pair of its own."""
    if not 1 <= valid_seconds <= MAX_EXPIRES - now:
        raise ConfigError(f"an invitation must be valid for 1 s or more and end before 2106, not {valid_seconds} s")
    seed = new_seed()
    expires = int(now + valid_seconds)
    signature = sign(run_key.seed, "invitation", certified_bytes(public_key(seed), expires))
    return Invitation(run_key.public, seed, expires, signature, _pack_addresses(addresses))


# As a word


class DamagedText(ValueError):
    """The pasted word is not the one that was copied; the message is a predicate, such as "is cut short"."""


def encode_text(data: bytes) -> str:
    body = base58.b58encode_check(data).decode()
    if len(body) > MAX_LETTERS:
        raise ValueError(f"{len(data)} bytes are too many for one word")
    return base58.b58encode_int(len(body)).decode().rjust(_LENGTH_LETTERS, "1") + body


def decode_text(word: str) -> bytes:
    """Raises DamagedText."""
    for letter in word:
        if letter not in _ALPHABET:
            raise DamagedText(f"has the letter {letter!r}, which no invitation contains")
    if len(word) < _LENGTH_LETTERS:
        raise DamagedText(f"is cut short: only {len(word)} characters are there")
    expected = _LENGTH_LETTERS + base58.b58decode_int(word[:_LENGTH_LETTERS])
    if len(word) < expected:
        raise DamagedText(f"is cut short: {len(word)} of {expected} characters are there")
    if len(word) > expected:
        raise DamagedText(f"has {len(word)} characters instead of {expected}")
    try:
        return base58.b58decode_check(word[_LENGTH_LETTERS:])
    except ValueError as error:
        raise DamagedText("is damaged: its checksum does not fit") from error


# Where a user gives it


def read_invitations(given: Sequence[str], now: float | None) -> list[Invitation]:
    """Read the invitations that a command was given: words, `-` for standard input, `@FILE`; none: of
    DILOCO_INVITATION.

    Raises ConfigError, also for invitations to different runs and for one that is there twice.
    """
    texts = [_text_of(source) for source in given] or [os.environ.get(VARIABLE, "")]
    if not given and not texts[0].strip():
        raise ConfigError(
            f"no invitation is given: paste it after `{command('join', '-')}`, name a file that has it with @FILE, or "
            f"set {VARIABLE}"
        )
    invitations = [Invitation.parse(word, now) for text in texts for word in split_invitations(text)]
    if len({invitation.run_id for invitation in invitations}) > 1:
        raise ConfigError("the invitations are to different runs: give those of one run")
    if len({invitation.id for invitation in invitations}) < len(invitations):
        raise ConfigError("one invitation is there twice: each is for one worker")
    return invitations


def is_word(source: str) -> bool:
    """Return whether this argument is an invitation itself: other users can read it in the list of processes."""
    return source != "-" and not source.startswith("@")


def split_invitations(text: str) -> list[str]:
    """Return the invitations in a text, each from its mark on; the whole text if it has no mark."""
    letters = "".join(letter for letter in text if letter.isalnum())
    starts = [mark.start() for mark in re.finditer(rf"{_NAME}(?=\d)", letters, re.IGNORECASE)]
    return [letters[start:end] for start, end in pairwise([*starts, None])] or [text]


def _text_of(source: str) -> str:
    if source == "-":
        return _standard_input()
    if source.startswith("@"):
        try:
            with Path(source[1:]).open() as file:
                return file.read(_MAX_TEXT)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the file of invitations {source[1:]} cannot be read: {error}") from error
    return source


def _standard_input() -> str:
    """Read the invitation that is pasted or piped to this command."""
    if sys.stdin is None or sys.stdin.closed:  # Python has none where the shell has closed it (`<&-`)
        raise ConfigError(
            "the invitation was to come from standard input (-), which is closed: pipe it to the command, or name a "
            f"file that has it with @FILE, or set {VARIABLE}"
        )
    try:
        if sys.stdin.isatty():
            sys.stderr.write("paste the invitation, then press Enter: ")
            sys.stderr.flush()
            return sys.stdin.readline()
        return sys.stdin.read(_MAX_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the invitation cannot be read from standard input: {error}") from error


def _without_mark(text: str) -> str:
    """Return the letters and digits after the mark; anything else was added on the way, wherever it stands."""
    letters = "".join(letter for letter in text if letter.isalnum())
    if not letters:
        raise ConfigError(f"the invitation is empty: paste the whole word that `{command('invite', 'RUN')}` prints")
    start = letters.lower().rfind(_NAME)
    if start < 0:
        raise ConfigError(f"this is not an invitation: one begins with {MARK}; copy it again, whole")
    body = letters[start + len(_NAME) :]
    if body[:1] != str(VERSION):
        raise ConfigError(
            f"the invitation is of version {body[:1] or 'none'}, and this diloco reads version {VERSION}: "
            "both machines need the same diloco"
        )
    return body[1:]


def _pack_addresses(addresses: Iterable[str]) -> tuple[bytes, ...]:
    unique = tuple(dict.fromkeys(addresses))
    if len(unique) > MAX_ADDRESSES:
        raise ConfigError(f"an invitation holds at most {MAX_ADDRESSES} addresses, not {len(unique)}")
    _check_addresses(unique)
    return tuple(map(multiaddr.to_bytes, unique))


def _check_addresses(addresses: Iterable[str]) -> None:
    """Raise ConfigError for an address that does not name its peer, is no multiaddr, too long or not printable."""
    for address in addresses:
        multiaddr.split_peer(address)
        size = len(multiaddr.to_bytes(address))
        if size > MAX_ADDRESS_BYTES:
            raise ConfigError(f"address {address!r} takes {size} bytes; at most {MAX_ADDRESS_BYTES} are allowed")
        if not (address.isascii() and address.isprintable()) or " " in address:
            raise ConfigError(f"address {address!r} has a space or a character that is not printable ASCII")
