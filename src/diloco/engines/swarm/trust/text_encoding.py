"""Bytes as one word to paste, and back: letters and digits only, so that no shell, chat or mail program changes it.

Base58 in blocks of 8 bytes, so that the beginning can be read though the end is missing. In front of the data goes its
length, after it a checksum: a paste that lost a piece is told from one that is whole. It hides nothing.
"""

import hashlib

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"  # base58: no 0, O, I, l
_VALUES = {letter: value for value, letter in enumerate(_ALPHABET)}
_LETTERS = (0, 2, 3, 5, 6, 7, 9, 10, 11)
"""How many letters a block of so many bytes takes."""
_BLOCK_BYTES, _BLOCK_LETTERS = 8, 11
_LENGTH_BYTES, _CHECKSUM_BYTES = 2, 4
MAX_BYTES = 4096


class NotWhole(ValueError):
    """What was pasted is not what was copied; says in what way, as the end of a sentence."""


def to_word(data: bytes) -> str:
    """Of two bytes or more, so that the length is in a whole block."""
    size = _LENGTH_BYTES + len(data) + _CHECKSUM_BYTES
    assert _BLOCK_BYTES <= size <= MAX_BYTES, size
    framed = size.to_bytes(_LENGTH_BYTES) + data
    framed += _checksum(framed)
    return "".join(_letters(framed[i : i + _BLOCK_BYTES]) for i in range(0, size, _BLOCK_BYTES))


def from_word(word: str) -> bytes:
    """Raises NotWhole."""
    for letter in word:
        if letter not in _VALUES:
            raise NotWhole(f"has the letter {letter!r}, which never occurs in one")
    if len(word) < _BLOCK_LETTERS:
        raise NotWhole(f"is cut short, with {len(word)} characters")
    size = int.from_bytes(_bytes(word[:_BLOCK_LETTERS])[:_LENGTH_BYTES])
    expected = size // _BLOCK_BYTES * _BLOCK_LETTERS + _LETTERS[size % _BLOCK_BYTES]
    if size > MAX_BYTES:
        raise NotWhole("is damaged near its beginning")
    if len(word) < expected:
        raise NotWhole(f"is cut short: {len(word)} of {expected} characters are there")
    if len(word) > expected:
        raise NotWhole(f"has {len(word)} characters where {expected} belong")
    framed = b"".join(_bytes(word[i : i + _BLOCK_LETTERS]) for i in range(0, expected, _BLOCK_LETTERS))
    if _checksum(framed[:-_CHECKSUM_BYTES]) != framed[-_CHECKSUM_BYTES:]:
        raise NotWhole("is damaged: its checksum does not fit")
    return framed[_LENGTH_BYTES:-_CHECKSUM_BYTES]


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_CHECKSUM_BYTES]


def _letters(block: bytes) -> str:
    number, letters = int.from_bytes(block), ""
    for _ in range(_LETTERS[len(block)]):
        number, digit = divmod(number, 58)
        letters = _ALPHABET[digit] + letters
    return letters


def _bytes(letters: str) -> bytes:
    number = 0
    for letter in letters:
        number = number * 58 + _VALUES[letter]
    size = _LETTERS.index(len(letters)) if len(letters) in _LETTERS else 0
    if number >> (8 * size):
        raise NotWhole("is damaged: a piece of it is out of range")
    return number.to_bytes(size)
