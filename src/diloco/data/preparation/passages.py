"""Documents cut into passages, and each passage assigned to training or validation.

A passage is a whole document, or a part of a long one cut at a line end; a conversation is never cut. The cut exists so
that one big file can be spread over many shards and have a validation part. The split is a function of the source, its
bounds and the fraction only: not of workers, seed, shards or tokenizer, so that validation losses of different runs
compare.

A passage goes to validation whenever validation has less than its fraction of the text so far; this meets the
fraction to within one passage, while a random choice could leave a small corpus without validation.

A walk over the source can be resumed: `Walk` and the digests of the documents seen are its whole state.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, final

from diloco.data.config import DataConfig
from diloco.data.sources.base import Document, Source, Spans

SHORTEST_LIMIT = 1 << 10
LONGEST_LIMIT = 1 << 16
PASSAGES_AT_LEAST = 256
"""Documents are cut so that a source has about this many passages; the two limits are in characters."""

DIGEST_BYTES = 16


class Passage(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    size_bytes: int
    is_validation: bool
    label: str | None = None
    answers: Spans | None = None
    """The characters that the model learns to write; None: all."""
    is_chat: bool = False


@final
@dataclass
class Walk:
    """The position of a walk over a source, exact after every passage."""

    taken: int = 0
    """Documents of the source that are finished, used or not."""
    taken_bytes: int = 0
    inside: int = 0
    """Passages of the next document that were already yielded."""
    documents: int = 0
    characters: int = 0
    train_bytes: int = 0
    validation_bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    first_problem: str | None = None
    """The first problem of the rows and files that cannot be used."""

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


@final
class Passages:
    """One walk over a source, from its beginning or from the position of an earlier walk."""

    def __init__(self, source: Source, config: DataConfig, walk: Walk | None = None) -> None:
        self.source = source
        self.config = config
        self.walk = walk or Walk()
        self.seen: set[bytes] = set()
        self.new_digests: list[bytes] = []
        """Digests of the documents used since the caller last saved and cleared this list."""
        known_sizes = [size for size in (source.size_bytes, config.max_bytes) if size is not None]
        self.size_bytes = min(known_sizes) if known_sizes else None
        """Approximate size of the text; None if unknown."""
        share = LONGEST_LIMIT if self.size_bytes is None else self.size_bytes // PASSAGES_AT_LEAST
        self._source_before = 0
        self._share = 0.0
        self._limit = max(SHORTEST_LIMIT, min(share, LONGEST_LIMIT))

    def __iter__(self) -> Iterator[Passage]:
        walk = self.walk
        for document in self._bounded_documents():
            if walk.inside or self._is_wanted(document):
                yielded_characters = 0
                texts = [document.text] if document.is_passage else cut(document.text, self._limit)
                for number, text in enumerate(texts):
                    yielded_characters += len(text)
                    if number == walk.inside:
                        walk.inside += 1
                        self._share = yielded_characters / len(document.text)
                        yield self._assign(text, document)
            self._source_before = self.source.progress()[0]
            self._share = 0.0
            walk.taken += 1
            walk.taken_bytes += len(document.text.encode())
            walk.inside = 0

    def progress(self) -> tuple[int, int | None]:
        """Return (done, total) of the bound that is nearest to being reached."""
        now, end = self.source.progress()
        # The source counts a document as soon as it yields it; this walk may still be inside that document.
        bounds = [(self._source_before + round(self._share * (now - self._source_before)), end)]
        if self.config.max_documents is not None:
            bounds.append((self.walk.taken, self.config.max_documents))
        if self.config.max_bytes is not None:
            bounds.append((self.walk.train_bytes + self.walk.validation_bytes, self.config.max_bytes))
        known_bounds = [(done, total) for done, total in bounds if total]
        return max(known_bounds, key=lambda pair: pair[0] / pair[1]) if known_bounds else (self.walk.taken, None)

    def _bounded_documents(self) -> Iterator[Document]:
        most_documents = self.config.max_documents
        most_bytes = self.config.max_bytes
        for document in self.source.documents(self.walk.taken):
            if most_documents is not None and self.walk.taken >= most_documents:
                return
            if most_bytes is None:
                yield document
                continue
            bytes_left = most_bytes - self.walk.taken_bytes
            if len(document.text.encode()) > bytes_left:
                if document.is_passage:
                    return
                document = document._replace(text=document.text.encode()[:bytes_left].decode(errors="ignore"))
                if document.text:
                    yield document
                return
            yield document

    def _is_wanted(self, document: Document) -> bool:
        if document.problem is not None:
            self.walk.leave_out("unreadable files" if document.is_file else "unreadable rows")
            self.walk.first_problem = self.walk.first_problem or document.problem
            return False
        if not document.text.strip():
            self.walk.leave_out("empty")
            return False
        digest = hashlib.blake2b(document.text.encode(), digest_size=DIGEST_BYTES).digest()
        if digest in self.seen:  # a copy could be in the other part of the split
            self.walk.leave_out("duplicate")
            return False
        self.seen.add(digest)
        self.new_digests.append(digest)
        self.walk.documents += 1
        self.walk.characters += len(document.text)
        return True

    def _assign(self, text: str, document: Document) -> Passage:
        walk = self.walk
        size = len(text.encode())
        seen = walk.train_bytes + walk.validation_bytes
        is_validation = walk.validation_bytes < self.config.validation_fraction * seen
        if is_validation:
            walk.validation_bytes += size
        else:
            walk.train_bytes += size
        return Passage(text, size, is_validation, document.label, document.answers, document.is_chat)


def cut(document: str, limit: int) -> Iterator[str]:
    """Cut a document into pieces of at most `limit` characters, after a line end if possible."""
    start = 0
    while len(document) - start > limit:
        line_end = document.rfind("\n", start, start + limit)
        end = line_end + 1 if line_end >= start else start + limit
        yield document[start:end]
        start = end
    yield document[start:]
