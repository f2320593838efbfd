"""The contract of a source: whole documents, always in the same order, and an identity for the cache.

A source decides nothing about tokens, splits or shards. It can start at any document, so that an interrupted
preparation can continue; earlier documents are skipped, without decoding them if possible. Input that cannot be used is
an error that names it or, with data.on_bad_row = skip, a document that says so; it is never repaired.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from diloco.data.config import DataConfig

Spans = tuple[tuple[int, int], ...]
"""Ranges of characters: from the first to before the second."""


class Document(NamedTuple):
    """A document of a source, or a row or file that has none because it cannot be used."""

    text: str
    label: str | None = None
    """The origin of the document, if the source knows it; used to measure a partition, or to make one."""
    answers: Spans | None = None
    """The characters that the model learns to write; None: all."""
    is_passage: bool = False
    """Whether it must not be cut into passages: a conversation, or a prompt with its completion."""
    is_chat: bool = False
    """Whether a chat template wrote it, so that the letters of a special token are that token."""
    problem: str | None = None
    """Why there is no text, in a row that is left out (data.on_bad_row = skip)."""
    is_file: bool = False
    """Whether the problem is that of a whole file, or of the rest of it."""


class Source(ABC):
    """Documents in a fixed order. `skipped` counts, by reason, what the last walk left out."""

    chat_template: str | None = None
    """The Jinja template that writes the conversations of this source, if it has any."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()

    @classmethod
    @abstractmethod
    def open(cls, config: DataConfig) -> "Source | None":
        """Open the source that `config.source` names; None if it names another kind of source.

        DataError if it names this kind, but there is nothing to read.
        """

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """Return JSON that changes whenever the documents may have changed. Called at every start: must not read the
        files."""

    @property
    @abstractmethod
    def size_bytes(self) -> int | None:
        """Approximate size of the text, for the size of passages and samples; None if unknown."""

    @abstractmethod
    def documents(self, start: int = 0) -> Iterator[Document]:
        """Yield all documents but the first `start`; the same ones at every call."""

    @abstractmethod
    def progress(self) -> tuple[int, int | None]:
        """Return (done, total) of the current walk, in a unit of the source's choice; total is None if unknown."""

    def fingerprint(self) -> str:
        """Return a revision that `identity` cannot know without a network; if it changes, a preparation starts
        again."""
        return ""
