"""A pseudo-random permutation of 0..size-1 that is computed element by element: no table, any order.

A balanced Feistel network permutes 0..4^h-1, the smallest such range that holds `size`, because each of its
rounds can be inverted whatever the mixing function. A value outside 0..size-1 is permuted again until it is inside
("cycle walking"): it follows a cycle of the network, so no two inputs give the same output. Good enough to shuffle
data; not cryptographic.
"""

import hashlib
from typing import final

import numpy as np
from numpy.typing import NDArray

Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]

ROUNDS = 6
"""More than the four that make a Feistel network look random, because small ranges mix little per round."""


@final
class Permutation:
    """The permutation of 0..size-1 that belongs to `key`, any tuple of integers."""

    def __init__(self, size: int, *key: int) -> None:
        if size < 1:
            raise ValueError(f"a permutation of {size} elements")
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._half_bits = np.uint64(half_bits)
        self._mask = np.uint64((1 << half_bits) - 1)
        # A hash makes the round keys unrelated even for neighbouring seeds, workers and epochs.
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, indices: Int64) -> Int64:
        """Return the images of `indices`, all of which lie in 0..size-1."""
        values = self._network(indices.astype(np.uint64).ravel())
        outside = values >= self.size
        while outside.any():  # the range is at most four times the size: a few turns
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64).reshape(indices.shape)

    def _network(self, values: UInt64) -> UInt64:
        left = values >> self._half_bits
        right = values & self._mask
        for key in self._round_keys:
            left, right = right, left ^ (_mix(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _mix(values: UInt64) -> UInt64:
    """Spread every input bit over all output bits: multiply by an odd constant and fold, twice."""
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return values ^ (values >> np.uint64(32))
