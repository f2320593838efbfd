"""What peers say to each other: msgpack maps with a type, and frames of bytes on streams. Nothing is unpickled.

A message comes from outside: every field is taken with its type and its bounds, and what does not fit is Malformed.
"""

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from diloco.engines.swarm.network.transport import MAX_CALL_BYTES, Stream

PROTOCOL = 1
"""Raised when peers of two versions would misunderstand each other."""

_LENGTH = struct.Struct("<I")
_MAX_ENTRIES = 1024


class Malformed(Exception):
    """A message that no honest peer of this version sends."""


def pack(kind: str, **fields: object) -> bytes:
    return bytes(msgpack.packb({"t": kind, **fields}))


class Message:
    """A received map; what is taken from it has the type that is asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    @classmethod
    def unpack(cls, data: bytes) -> "Message":
        if len(data) > MAX_CALL_BYTES:
            raise Malformed(f"{len(data)} bytes, more than {MAX_CALL_BYTES}")
        try:
            values = msgpack.unpackb(
                data, max_array_len=_MAX_ENTRIES * 8, max_map_len=_MAX_ENTRIES, max_ext_len=0, strict_map_key=True
            )
        except (ValueError, msgpack.UnpackException, TypeError) as error:
            raise Malformed(f"not a message: {error!r}") from error
        if not isinstance(values, dict) or not isinstance(values.get("t"), str):
            raise Malformed("not a message with a type")
        return cls(values)

    @property
    def kind(self) -> str:
        return str(self._values["t"])

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def number(self, name: str, low: int = 0, high: int = 1 << 62) -> int:
        value = self._take(name, int)
        if isinstance(value, bool) or not low <= value <= high:
            raise Malformed(f"{name} = {value!r} is not from {low} to {high}")
        return int(value)

    def real(self, name: str) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Malformed(f"{name} is not a number")
        return float(value)

    def text(self, name: str, limit: int = 512) -> str:
        return str(self._bounded(name, str, limit))

    def data(self, name: str, limit: int = MAX_CALL_BYTES) -> bytes:
        return bytes(self._bounded(name, bytes, limit))

    def flag(self, name: str) -> bool:
        return bool(self._take(name, bool))

    def items(self, name: str) -> list[Any]:
        return list(self._bounded(name, list, _MAX_ENTRIES))

    def maps(self, name: str) -> "list[Message]":
        entries = self.items(name)
        if not all(isinstance(entry, dict) for entry in entries):
            raise Malformed(f"{name} is not a list of maps")
        return [Message(entry) for entry in entries]

    def map(self, name: str) -> "Message":
        return Message(self._take(name, dict))

    def plain(self, name: str) -> dict[str, Any]:
        return dict(self._take(name, dict))

    def _take(self, name: str, type_: type) -> Any:
        value = self._values.get(name)
        if not isinstance(value, type_):
            raise Malformed(f"{name} is {type(value).__name__} instead of {type_.__name__}")
        return value

    def _bounded(self, name: str, type_: type, limit: int) -> Any:
        value = self._take(name, type_)
        if len(value) > limit:
            raise Malformed(f"{name} has {len(value)} entries, more than {limit}")
        return value


def texts(values: list[Any], limit: int = 512) -> list[str]:
    if not all(isinstance(value, str) and len(value) <= limit for value in values):
        raise Malformed(f"not a list of texts of at most {limit} characters")
    return list(values)


async def write_frame(stream: Stream, data: bytes | memoryview, seconds: float) -> None:
    await stream.write(_LENGTH.pack(len(data)), seconds)
    if len(data):
        await stream.write(data, seconds)


async def read_frame(stream: Stream, limit: int, seconds: float) -> bytes:
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size, seconds))
    if length > limit:
        raise Malformed(f"a frame of {length} bytes, more than {limit}")
    return await stream.read(length, seconds) if length else b""


async def read_frame_into(stream: Stream, buffer: memoryview, seconds: float) -> int:
    """A frame into the beginning of `buffer`; how long it was."""
    (length,) = _LENGTH.unpack(await stream.read(_LENGTH.size, seconds))
    if length > len(buffer):
        raise Malformed(f"a frame of {length} bytes, more than the {len(buffer)} that are left")
    if length:
        await stream.read_into(buffer[:length], seconds)
    return int(length)
