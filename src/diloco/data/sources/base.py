"""The contract of a source: whole documents, always in the same order, and who it is.

A source decides nothing about tokens, splits or shards. It must be able to begin at any document, so that an
interrupted preparation goes on where it was; the documents before it are passed over, not decoded where that can be
helped. What cannot be used is an error that names it, or counted in `skipped`: never repaired.
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
    """Where it comes from, if the source knows: shows how well a partition separates."""


class Fields(NamedTuple):
    """Which fields of a row are its text and its label."""

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
            raise DataError(f"{where} is not an object with fields, but {_abridged(row)}")
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
            raise DataError(f"{where}: field {name!r} is {_abridged(value)}, not a text; repair or remove the row")
        return value


class Source(ABC):
    """Documents in a fixed order. `skipped` counts by reason what the last walk over them left out."""

    def __init__(self) -> None:
        self.skipped: Counter[str] = Counter()

    @classmethod
    @abstractmethod
    def open(cls, config: DataConfig) -> "Source | None":
        """The source that `config.source` names, or None where this is not the kind that it means.

        DataError where it is the kind, but there is nothing to be had.
        """

    @abstractmethod
    def identity(self) -> dict[str, object]:
        """JSON that changes whenever the documents may have changed. Runs at every start: read nothing."""

    @property
    @abstractmethod
    def size_bytes(self) -> int | None:
        """About how much text there is, for the size of passages and samples; None where nobody knows."""

    @abstractmethod
    def documents(self, start: int = 0) -> Iterator[Document]:
        """All documents but the first `start`. May be walked several times and gives the same each time."""

    @abstractmethod
    def progress(self) -> tuple[int, int | None]:
        """How far the walk has come and how far it goes, in a unit of its own; None where nobody knows."""

    def fingerprint(self) -> str:
        """What `identity` cannot know without a network: if it changes, a preparation starts again."""
        return ""


def _abridged(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
