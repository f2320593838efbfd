"""Documents cut into passages, and each passage sent to training or validation.

A passage is a whole document, or a part of a long one cut at a line end. The cut exists so that one big file
can still be dealt over many shards and have a validation part. The split is a function of the source and the
fraction only: not of workers, seed, shards or tokenizer, so that validation losses of different runs compare.
A passage goes to validation whenever validation has fallen behind its fraction of the text seen so far; this
hits the fraction to within one passage, where a coin for each passage could leave a small corpus without any.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple, final

from diloco.data.sources import Source

SHORTEST_LIMIT = 1 << 10
LONGEST_LIMIT = 1 << 16
PASSAGES_AT_LEAST = 256
"""Long documents are cut so that a source has about this many passages; the two limits are in characters."""


class Passage(NamedTuple):
    text: str
    size_bytes: int
    is_validation: bool


@final
class Passages:
    """One walk over a source. The counts are complete when the walk is."""

    def __init__(self, source: Source, validation_fraction: float) -> None:
        self.source = source
        self.validation_fraction = validation_fraction
        self.documents = 0
        self.characters = 0
        self.train_bytes = 0
        self.validation_bytes = 0
        self.left_out: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Passage]:
        limit = max(SHORTEST_LIMIT, min(self.source.size_bytes // PASSAGES_AT_LEAST, LONGEST_LIMIT))
        for document in self._distinct_documents():
            self.documents += 1
            self.characters += len(document)
            for text in cut(document, limit):
                yield self._assign(text)

    def _distinct_documents(self) -> Iterator[str]:
        seen: set[bytes] = set()
        for document in self.source.documents():
            if not document.strip():
                self.left_out["empty"] += 1
                continue
            digest = hashlib.blake2b(document.encode(), digest_size=16).digest()
            if digest in seen:  # a copy could land on the other side of the split
                self.left_out["duplicate"] += 1
                continue
            seen.add(digest)
            yield document

    def _assign(self, text: str) -> Passage:
        size = len(text.encode())
        seen = self.train_bytes + self.validation_bytes
        is_validation = self.validation_bytes < self.validation_fraction * seen
        if is_validation:
            self.validation_bytes += size
        else:
            self.train_bytes += size
        return Passage(text, size, is_validation)


def cut(document: str, limit: int) -> Iterator[str]:
    """Parts of at most `limit` characters, joined the document; cut after a line end where there is one."""
    start = 0
    while len(document) - start > limit:
        line_end = document.rfind("\n", start, start + limit)
        end = line_end + 1 if line_end >= start else start + limit
        yield document[start:end]
        start = end
    yield document[start:]
