"""The inner products of a round's contributions: every reducer sends those of its parts, and a worker adds them up."""

import struct
from collections.abc import Sequence

from diloco.engines.swarm.node.wire import Malformed


def pack(products: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(products)}d", *products)


def unpack(data: bytes, count: int) -> Sequence[float]:
    """Raises Malformed."""
    if len(data) != 8 * count:
        raise Malformed(f"inner products of {len(data)} bytes instead of {8 * count}")
    return struct.unpack(f"<{count}d", data)


def add(some: Sequence[float], others: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(some, others, strict=True)]
