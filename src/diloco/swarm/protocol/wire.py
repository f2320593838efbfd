"""The bytes of the messages between peers: msgpack maps with a tag (msgspec). Frames on streams: node/frames.py.

A message comes from outside. It is decoded strictly, into one of the types of messages.py and within their bounds;
anything else is Malformed. Nothing is unpickled.
"""

import msgspec

PROTOCOL = 8
"""Raised when peers of two versions would misunderstand each other."""


class Malformed(ValueError):
    """A message that no honest peer of this version sends."""


class PeerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, tag_field="t"):
    """The base of all messages between peers; its class name is the tag."""


def encode(message: PeerMessage) -> bytes:
    return msgspec.msgpack.encode(message)
