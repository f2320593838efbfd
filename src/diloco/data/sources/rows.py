"""A row of a file or dataset as a document, and what becomes of a row that cannot be one.

`Rows` is the contract; TextRows is for rows with a text, chat_rows.py has those for conversations.
"""

from abc import ABC, abstractmethod
from typing import Any, final

from diloco.data.sources.base import Document
from diloco.errors import DataError


class Rows(ABC):
    """How rows are read."""

    needs_fields = True
    """Whether a text without fields cannot be a row."""
    chat_template: str | None = None
    """That writes conversations, if rows have them."""

    def __init__(self, label: str | None = None, *, skip: bool = False) -> None:
        """`label`: the field with the label. `skip`: leave bad rows out instead of raising DataError."""
        self.label, self.skip = label, skip

    @property
    @abstractmethod
    def names(self) -> list[str] | None:
        """The fields to read of a table; None: all, because rows may differ."""

    @abstractmethod
    def read(self, row: object, where: str) -> Document:
        """The document of one row, without its label; DataError if it has none. `where` names the row in messages."""

    @abstractmethod
    def identity(self) -> object:
        """JSON of everything but the rows that determines the documents."""

    def document(self, row: object, where: str) -> Document:
        """The document of one row with its label, or its problem."""
        try:
            found = self.read(row, where)
            if self.label is None:
                return found
            if not isinstance(row, dict):
                raise DataError(f"{where} has no fields, hence no label (data.label_field {self.label!r})")
            return found._replace(label=self._label(row, where))
        except DataError as error:
            return self.bad(str(error))

    def check_columns(self, columns: list[str]) -> None:
        """Refuse a table that lacks a field, which concerns all its rows; the message goes on after its name."""
        for name, option in self._needed():
            if name not in columns:
                raise DataError(missing_field(dict.fromkeys(columns), name, option, "").lstrip())

    def _needed(self) -> list[tuple[str, str]]:
        """Fields that a table must have, with the options that name them."""
        return [] if self.label is None else [(self.label, "data.label_field")]

    def bad(self, problem: str, *, is_file: bool = False) -> Document:
        """A row or file that cannot be used: raises DataError, or returns the document that says so."""
        if self.skip:
            return Document("", problem=problem, is_file=is_file)
        what = "files" if is_file else "rows"
        raise DataError(f"{problem}. To leave such {what} out: --data.on_bad_row skip")

    def _label(self, row: dict[str, Any], where: str) -> str:
        assert self.label is not None
        value = field_of(row, self.label, "data.label_field", where)
        if not isinstance(value, str | int) or value == "":
            raise DataError(
                f"{where}: field {self.label!r} is {shortened(value)}, not a label; repair or remove the row"
            )
        return checked_text(str(value), self.label, where)


@final
class TextRows(Rows):
    """Rows with a text, in the field `text`; a row that is a text itself needs no field."""

    needs_fields = False

    def __init__(self, text: str = "text", label: str | None = None, *, skip: bool = False) -> None:
        super().__init__(label, skip=skip)
        self.text = text

    @property
    def names(self) -> list[str]:
        return [self.text] if self.label is None else [self.text, self.label]

    def identity(self) -> object:
        return self.names

    def _needed(self) -> list[tuple[str, str]]:
        return [(self.text, "data.text_field"), *super()._needed()]

    def read(self, row: object, where: str) -> Document:
        if isinstance(row, str):
            return Document(checked_text(row, "", where))
        if not isinstance(row, dict):
            raise DataError(f"{where} is neither a text nor an object with fields, but {shortened(row)}")
        value = field_of(row, self.text, "data.text_field", where)
        return Document(checked_text(value, self.text, where))


def field_of(row: dict[str, Any], name: str, option: str, where: str) -> Any:
    if name not in row:
        raise DataError(missing_field(row, name, option, where))
    return row[name]


def missing_field(row: dict[str, Any], name: str, option: str, where: str) -> str:
    """Says which fields there are, and what to do about it."""
    there = ", ".join(map(str, row)) or "none"
    message = f"{where} has no field {name!r}; its fields are: {there}. Choose one with --{option}"
    lists = [key for key, value in row.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    if "messages" in row or "conversations" in row:
        return f"{message}; for conversations: --data.format chat"
    if "prompt" in row and "completion" in row:
        return f"{message}; for prompts and completions: --data.format completion"
    if len(lists) == 1:
        return f"{message}; if {lists[0]!r} holds the rows, take them out: jq -c '.{lists[0]}[]' FILE > rows.jsonl"
    return message


def checked_text(value: object, name: str, where: str) -> str:
    """A value that must be Unicode text; `name` is its field."""
    field = f": field {name!r}" if name else ""
    if not isinstance(value, str):
        raise DataError(f"{where}{field} is {shortened(value)}, not a text; repair or remove the row")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}{field} is not Unicode text ({error}); repair the row") from error
    return value


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
