"""A Merkle tree over the encoded parts of a contribution: its root is in the worker's header, and so in the plan.

A worker is bound to its parts before it has seen any other's. Some consecutive parts are shown with a proof, which is
the digests of the subtrees beside them.
"""

import hashlib
from collections.abc import Iterator, Sequence

from diloco.swarm.protocol.wire import Malformed

DIGEST_BYTES = 32


class Tree(list[bytes]):
    """The leaves, with the digests of all subtrees above them: a root or a proof costs no hash.

    The subtrees are in the order root, left half, right half. One of k leaves has 2k − 1 nodes, so that the place of
    each is known: 64 bytes for each leaf in all.
    """

    def __init__(self, leaves: Sequence[bytes]) -> None:
        super().__init__(leaves)
        self._nodes = bytearray(DIGEST_BYTES * max(0, 2 * len(leaves) - 1))
        if leaves:
            self._fill(0, len(leaves), 0)

    def _fill(self, low: int, high: int, place: int) -> bytes:
        if high - low == 1:
            digest = self[low]
        else:
            middle = (low + high) // 2
            left = self._fill(low, middle, place + 1)
            digest = _node(left, self._fill(middle, high, place + 2 * (middle - low)))
        self._nodes[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)] = digest
        return digest

    def node(self, low: int, high: int) -> bytes:
        """Return the digest of the subtree over these leaves."""
        first = 0
        last = len(self)
        place = 0
        while (first, last) != (low, high):
            middle = (first + last) // 2
            if high <= middle:
                last = middle
                place = place + 1
            else:
                first, place = middle, place + 2 * (middle - first)
        return bytes(self._nodes[DIGEST_BYTES * place : DIGEST_BYTES * (place + 1)])


def leaves(data: memoryview, part_bytes: int) -> list[bytes]:
    """Compute the digests of whole parts."""
    digests = []
    for first in range(0, len(data), max(1, part_bytes)):
        leaf = hashlib.sha256(b"\0")
        leaf.update(data[first : first + part_bytes])
        digests.append(leaf.digest())
    return digests


def root(of: Sequence[bytes]) -> bytes:
    return _root(of, 0, len(of)) if of else hashlib.sha256(b"").digest()


def prove(of: Sequence[bytes], rows: range) -> bytes:
    """Make the proof of the parts `rows`: the digests that a receiver of these parts needs to compute the root."""
    return b"".join(_beside(of, rows, 0, len(of)))


def root_from(found: Sequence[bytes], rows: range, total: int, proof: bytes) -> bytes:
    """Compute the root of a tree of `total` leaves, of which those of `rows` are known. Raises Malformed."""
    beside = iter(proof[first : first + DIGEST_BYTES] for first in range(0, len(proof), DIGEST_BYTES))
    if len(found) != len(rows) or not 0 <= rows.start < rows.stop <= total or len(proof) % DIGEST_BYTES:
        raise Malformed("the proof of a contribution's parts does not fit them")
    try:
        computed = _join(found, rows, 0, total, beside)
    except StopIteration:
        raise Malformed("the proof of a contribution's parts is too short") from None
    if next(beside, None) is not None:
        raise Malformed("the proof of a contribution's parts is too long")
    return computed


def narrow(found: Sequence[bytes], rows: range, part: int, total: int, proof: bytes) -> bytes:
    """Make the proof of one part from `proof`, which is that of the parts `rows`."""
    beside = iter(proof[first : first + DIGEST_BYTES] for first in range(0, len(proof), DIGEST_BYTES))
    outside: dict[tuple[int, int], bytes] = {}

    def note(low: int, high: int) -> None:
        if high <= rows.start or rows.stop <= low:
            outside[low, high] = next(beside)
        elif not (rows.start <= low and high <= rows.stop):
            middle = (low + high) // 2
            note(low, middle)
            note(middle, high)

    def digest(low: int, high: int) -> bytes:
        if (low, high) in outside:
            return outside[low, high]
        if high - low == 1:
            return found[low - rows.start]
        middle = (low + high) // 2
        return _node(digest(low, middle), digest(middle, high))

    def walk(low: int, high: int) -> Iterator[bytes]:
        if not low <= part < high:
            yield digest(low, high)
        elif high - low > 1:
            middle = (low + high) // 2
            yield from walk(low, middle)
            yield from walk(middle, high)

    note(0, total)
    return b"".join(walk(0, total))


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def _root(of: Sequence[bytes], low: int, high: int) -> bytes:
    if isinstance(of, Tree):
        return of.node(low, high)
    if high - low == 1:
        return of[low]
    middle = (low + high) // 2
    return _node(_root(of, low, middle), _root(of, middle, high))


def _beside(of: Sequence[bytes], rows: range, low: int, high: int) -> Iterator[bytes]:
    if high <= rows.start or rows.stop <= low:
        yield _root(of, low, high)
    elif not (rows.start <= low and high <= rows.stop):
        middle = (low + high) // 2
        yield from _beside(of, rows, low, middle)
        yield from _beside(of, rows, middle, high)


def _join(found: Sequence[bytes], rows: range, low: int, high: int, beside: Iterator[bytes]) -> bytes:
    if high <= rows.start or rows.stop <= low:
        return next(beside)
    if high - low == 1:
        return found[low - rows.start]
    middle = (low + high) // 2
    left = _join(found, rows, low, middle, beside)
    return _node(left, _join(found, rows, middle, high, beside))
