"""The contract of a file format: the documents of one file, from any of them on."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from diloco.data.sources.base import Document
from diloco.data.sources.rows import Rows


class DocumentFile(ABC):
    """One file. `count`: documents skipped or yielded so far; `position`: approximate bytes read."""

    has_fields: ClassVar[bool] = True

    def __init__(self, path: Path, rows: Rows, encoding: str | None = None) -> None:
        """`encoding`: of a file without a byte-order mark; UTF-8 if None."""
        self.path, self.rows, self.encoding = path, rows, encoding
        self.count = 0
        self.position = 0

    @abstractmethod
    def documents(self, start: int) -> Iterator[Document]:
        """All documents but the first `start`. Afterwards `count` is the number of documents in the file."""

    def _bad_file(self, problem: str, start: int) -> Iterator[Document]:
        """The file, or the rest of it, cannot be read: it counts as one document, which says so."""
        self.count += 1
        if self.count > start:
            yield self.rows.bad(f"{self.path} {problem}", is_file=True)
