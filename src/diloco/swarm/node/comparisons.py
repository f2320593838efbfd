"""The comparison of a round's contributions as bytes: every reducer sends that of its parts, and a worker adds them up.

A statistic, never a proof: a reducer may lie about it, within the bounds of `unpack`.
"""

import struct

from diloco.core.merging import num_products
from diloco.engines.rounds import Comparison
from diloco.swarm.protocol.wire import Malformed


def size(contributors: int) -> int:
    return _form(contributors).size


def pack(told: Comparison) -> bytes:
    return _form(len(told.replaced)).pack(*told.products, *told.replaced)


def unpack(data: bytes, contributors: int, parts: int) -> Comparison:
    """The comparison of so many contributions in so many parts. Raises Malformed."""
    if len(data) != size(contributors):
        raise Malformed(f"a comparison of {len(data)} bytes instead of {size(contributors)}")
    told = Comparison.of_numbers([*_form(contributors).unpack(data), parts], contributors)
    if max(told.replaced) > parts:
        raise Malformed(f"a contribution that counts as the others' mean in {max(told.replaced)} of {parts} parts")
    return told


def _form(contributors: int) -> struct.Struct:
    """Inner products, and in how many parts each contribution was replaced."""
    return struct.Struct(f"<{num_products(contributors)}d{contributors}I")
