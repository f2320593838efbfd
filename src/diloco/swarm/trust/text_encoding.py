"""Bytes as one word to copy and paste: letters and digits only, so that no shell, chat or mail program changes it.

    word = length (2 letters: how many follow) + base58(data + 4 bytes of checksum)

The length tells a paste that was cut from one that was changed. The data is not encrypted.
"""

import base58

_ALPHABET = base58.BITCOIN_ALPHABET.decode()  # without 0, O, I and l, which look like others
_LENGTH_LETTERS = 2
MAX_LETTERS = 58**_LENGTH_LETTERS - 1


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
