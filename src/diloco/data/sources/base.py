"""The contract of a source: whole documents, always in the same order, and an identity for the cache.

A source decides nothing about tokens, splits or shards. It can start at any document, so that an interrupted
preparation can continue; earlier documents are skipped, without decoding them if possible. Unusable input is an error
that names it, or is counted in `skipped`; it is never repaired.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from diloco.data.config import DataConfig
from diloco.errors import DataError


class Document(NamedTuple):
    text: str
    label: str | None = None
    """The origin of the document, if the source knows it; used to measure a partition."""


class Fields(NamedTuple):
    """The names of the text and label fields of a row."""

    text: str = "text"
    label: str | None = None

    @classmethod
    def of(cls, config: DataConfig) -> "Fields":
        return cls(config.text_field, config.label_field)

    @property
    def names(self) -> list[str]:
        return [self.text] if self.label is None else [self.text, self.label]

    def document(self, row: object, where: str) -> Document:
        """The document of one row; `where` names the row in messages."""
        if not isinstance(row, dict):
            raise DataError(f"{where} is not an object with fields, but {_shortened(row)}")
        text = self._value(row, self.text, "data.text_field", where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where}: field {self.text!r} is not Unicode text ({error}); repair the row") from error
        label = None if self.label is None else self._value(row, self.label, "data.label_field", where)
        return Document(text, label)

    @staticmethod
    def _value(row: dict[str, object], name: str, option: str, where: str) -> str:
        if name not in row:
            there = ", ".join(map(str, row)) or "none"
            raise DataError(f"{where} has no field {name!r}; its fields are: {there}. Choose one with --{option}")
        value = row[name]
        if option == "data.label_field" and isinstance(value, int):
            return str(value)
        if not isinstance(value, str):
            raise DataError(f"{where}: field {name!r} is {_shortened(value)}, not a text; repair or remove the row")
        return value


class Source(ABC):
    """Documents in a fixed order. `skipped` counts, by reason, what the last walk left out."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()

    @classmethod
    @abstractmethod
    def open(cls, config: DataConfig) -> "Source | None":
        """The source that `config.source` names; None if it names another kind of source.

        DataError if it names this kind, but there is nothing to read.
        """

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """JSON that changes whenever the documents may have changed. Called at every start: must not read the files."""

    @property
    @abstractmethod
    def size_bytes(self) -> int | None:
        """Approximate size of the text, for the size of passages and samples; None if unknown."""

    @abstractmethod
    def documents(self, start: int = 0) -> Iterator[Document]:
        """All documents but the first `start`; the same ones at every call."""

    @abstractmethod
    def progress(self) -> tuple[int, int | None]:
        """(done, total) of the current walk, in a unit of the source's choice; total is None if unknown."""

    def fingerprint(self) -> str:
        """A revision that `identity` cannot know without a network; if it changes, a preparation starts again."""
        return ""


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
