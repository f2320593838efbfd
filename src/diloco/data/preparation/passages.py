"""Documents cut into passages, and each passage sent to training or validation.

A passage is a whole document, or a part of a long one cut at a line end. The cut exists so that one big file
can still be dealt over many shards and have a validation part. The split is a function of the source, its bounds and
the fraction only: not of workers, seed, shards or tokenizer, so that validation losses of different runs compare.
A passage goes to validation whenever validation has fallen behind its fraction of the text seen so far; this
hits the fraction to within one passage, where a coin for each passage could leave a small corpus without any.

A walk can be taken up again: `Walk` is all that a later walk must know of an earlier one, besides the digests of the
documents already seen.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

from diloco.data.config import DataConfig
from diloco.data.sources.base import Document, Source

SHORTEST_LIMIT = 1 << 10
LONGEST_LIMIT = 1 << 16
PASSAGES_AT_LEAST = 256
"""Long documents are cut so that a source has about this many passages; the two limits are in characters."""

DIGEST_BYTES = 16


class Passage(NamedTuple):
    text: str
    size_bytes: int
    is_validation: bool
    label: str | None = None


@final
@dataclass
class Walk:
    """How far a walk has come, exact after every passage."""

    taken: int = 0
    """Documents of the source that are done with, whether they were used or not."""
    taken_bytes: int = 0
    inside: int = 0
    """Passages already given of the document after those."""
    documents: int = 0
    characters: int = 0
    train_bytes: int = 0
    validation_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


@final
class Passages:
    """One walk over a source, from its beginning or from where an earlier one has come to."""

    def __init__(self, source: Source, config: DataConfig, walk: Walk | None = None) -> None:
        self.source, self.config = source, config
        self.walk = walk or Walk()
        self.seen: set[bytes] = set()
        self.new_digests: list[bytes] = []
        """Of the documents that this walk has used; whoever keeps them empties the list."""
        known = [size for size in (source.size_bytes, config.max_bytes) if size is not None]
        self.size_bytes = min(known) if known else None
        """About how much text there is, if anyone knows."""
        share = LONGEST_LIMIT if self.size_bytes is None else self.size_bytes // PASSAGES_AT_LEAST
        self._source_before, self._share = 0, 0.0
        self._limit = max(SHORTEST_LIMIT, min(share, LONGEST_LIMIT))

    def __iter__(self) -> Iterator[Passage]:
        walk = self.walk
        for document in self._bounded_documents():
            if walk.inside or self._is_wanted(document):
                given = 0
                for number, text in enumerate(cut(document.text, self._limit)):
                    given += len(text)
                    if number == walk.inside:
                        walk.inside += 1
                        self._share = given / len(document.text)
                        yield self._assign(text, document.label)
            self._source_before, self._share = self.source.progress()[0], 0.0
            walk.taken += 1
            walk.taken_bytes += len(document.text.encode())
            walk.inside = 0

    def progress(self) -> tuple[int, int | None]:
        """How far, of how far: by whichever bound is nearest to being reached."""
        now, end = self.source.progress()
        # The source has given the whole of a document that may be a big one, of which we are at some passage.
        told = [(self._source_before + round(self._share * (now - self._source_before)), end)]
        if self.config.max_documents is not None:
            told.append((self.walk.taken, self.config.max_documents))
        if self.config.max_bytes is not None:
            told.append((self.walk.train_bytes + self.walk.validation_bytes, self.config.max_bytes))
        known = [(done, total) for done, total in told if total]
        return max(known, key=lambda pair: pair[0] / pair[1]) if known else (self.walk.taken, None)

    def _bounded_documents(self) -> Iterator[Document]:
        most_documents, most_bytes = self.config.max_documents, self.config.max_bytes
        for document in self.source.documents(self.walk.taken):
            if most_documents is not None and self.walk.taken >= most_documents:
                return
            if most_bytes is None:
                yield document
                continue
            left = most_bytes - self.walk.taken_bytes
            if len(document.text.encode()) > left:
                document = document._replace(text=document.text.encode()[:left].decode(errors="ignore"))
                if document.text:
                    yield document
                return
            yield document

    def _is_wanted(self, document: Document) -> bool:
        if not document.text.strip():
            self.walk.leave_out("empty")
            return False
        digest = hashlib.blake2b(document.text.encode(), digest_size=DIGEST_BYTES).digest()
        if digest in self.seen:  # a copy could land on the other side of the split
            self.walk.leave_out("duplicate")
            return False
        self.seen.add(digest)
        self.new_digests.append(digest)
        self.walk.documents += 1
        self.walk.characters += len(document.text)
        return True

    def _assign(self, text: str, label: str | None) -> Passage:
        walk, size = self.walk, len(text.encode())
        seen = walk.train_bytes + walk.validation_bytes
        is_validation = walk.validation_bytes < self.config.validation_fraction * seen
        if is_validation:
            walk.validation_bytes += size
        else:
            walk.train_bytes += size
        return Passage(text, size, is_validation, label)


def cut(document: str, limit: int) -> Iterator[str]:
    """Parts of at most `limit` characters, joined the document; cut after a line end where there is one."""
    start = 0
    while len(document) - start > limit:
        line_end = document.rfind("\n", start, start + limit)
        end = line_end + 1 if line_end >= start else start + limit
        yield document[start:end]
        start = end
    yield document[start:]
