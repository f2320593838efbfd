"""The file formats, by suffix: the documents of one file, from any of them on.

text        a file is a document
JSON        lines (.jsonl), or a file with one array, one object or several (.json). An element of the array is a row.
            Values are read one after another: memory holds one chunk and one row, whatever the size of the file
tables      CSV, TSV and Parquet, with named columns: a row is a document. The first line of a CSV file has the names of
            the columns, and a field in quotation marks may hold line ends and delimiters. Parquet needs pyarrow (the
            extra `data`)

A format that is read as a stream may be compressed: .gz, .xz, .bz2, .zst. Which file has which format is decided by
`format_of`, at the end.
"""

import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, ClassVar, final

from diloco.data.sources.base import Document
from diloco.data.sources.decoding import (
    COMPRESSIONS,
    NotText,
    TextReader,
    decode,
    encoding_of,
    open_decompressed,
    splits_at_line_ends,
)
from diloco.data.sources.rows import Rows
from diloco.errors import DataError, install_hint

LONGEST_ROW = 1 << 28
"""Characters; a longer value is refused, for example one whose quotation mark is missing."""

_NEAR_END = 12
"""An error this close to the end of what was read may be due to the cut: -Infinity, \\u00e9."""
_SPACE = " \t\n\r"
LONGEST_FIELD = 1 << 26
"""Characters of a field of a CSV file; longer ones have lost a quotation mark."""


class DocumentFile(ABC):
    """The documents of one file. `count`: documents skipped or yielded so far; `position`: approximate bytes read."""

    has_fields: ClassVar[bool] = True

    def __init__(self, path: Path, rows: Rows, encoding: str | None = None) -> None:
        """`encoding`: of a file without a byte-order mark; UTF-8 if None."""
        self.path = path
        self.rows = rows
        self.encoding = encoding
        self.count = 0
        self.position = 0

    @abstractmethod
    def documents(self, start: int) -> Iterator[Document]:
        """Yield all documents but the first `start`. Afterwards `count` is the number of documents in the file."""

    def _bad_file(self, problem: str, start: int) -> Iterator[Document]:
        """Yield a file, or the rest of it, that cannot be read: it counts as one document, which says so."""
        self.count += 1
        if self.count > start:
            yield self.rows.bad(f"{self.path} {problem}", is_file=True)


# Text


@final
class TextFile(DocumentFile):
    """A whole file as a document."""

    has_fields = False

    def documents(self, start: int) -> Iterator[Document]:
        if start > 0:
            self.count = 1
            return
        with open_decompressed(self.path) as (stream, raw):
            content = stream.read()
            self.position = raw.tell()
        try:
            text = decode(content, self.encoding)
        except NotText as error:
            yield from self._bad_file(str(error), start)
            return
        self.count = 1
        yield Document(text)


# JSON


@final
class JsonLines(DocumentFile):
    """A row on each line."""

    def documents(self, start: int) -> Iterator[Document]:
        with open_decompressed(self.path) as (stream, raw):
            try:
                for number, line in enumerate(self._lines(stream), 1):
                    if not line.strip():
                        continue
                    self.count += 1
                    self.position = raw.tell()
                    if self.count > start:
                        yield self._document(line, f"{self.path}, line {number}")
            except NotText as error:
                yield from self._bad_file(str(error), start)

    def _lines(self, stream: IO[bytes]) -> Iterator[bytes | str]:
        """Yield lines as bytes where that is possible: then a line in another encoding is one bad row."""
        first = stream.readline()
        self._encoding, mark = encoding_of(first, self.encoding)
        if splits_at_line_ends(self._encoding):
            yield first[mark:]
            yield from stream
        else:
            yield from TextReader(_ReadAgain(first, stream), self.encoding).lines()

    def _document(self, line: bytes | str, where: str) -> Document:
        try:
            row = json.loads((line if isinstance(line, str) else line.decode(self._encoding)).rstrip("\r\n"))
        except UnicodeDecodeError as error:
            problem = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1} is not {self._encoding}"
            return self.rows.bad(f"{where} is not a line of JSON: {problem}; name the encoding with --data.encoding")
        except (ValueError, RecursionError) as error:
            return self.rows.bad(f"{where} is not a line of JSON ({error}); repair or remove it")
        return self.rows.document(row, where)


class _ReadAgain:
    """A stream whose first bytes were already read."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self._first = first
        self._rest = rest

    def read(self, size: int) -> bytes:
        first = self._first
        self._first = b""
        return first + self._rest.read(size)


@final
class JsonFile(DocumentFile):
    """An array is read element by element; objects that follow one another, as JSON lines do, one by one."""

    def documents(self, start: int) -> Iterator[Document]:
        with open_decompressed(self.path) as (stream, raw):
            try:
                for value in JsonValues(TextReader(stream, self.encoding)):
                    self.count += 1
                    self.position = raw.tell()
                    if self.count > start:
                        yield self.rows.document(value, f"{self.path}, row {self.count}")
            except NotText as error:
                yield from self._bad_file(str(error), start)
            except _BrokenJson as error:
                problem = f"cannot be read as JSON after row {self.count:,}: {error}; repair it or move it away"
                yield from self._bad_file(problem, start)


class _BrokenJson(DataError):
    """The rest of a file cannot be read."""


@final
class JsonValues:
    """The elements of one array, or the values that follow one another without one."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self._decoder = json.JSONDecoder()
        self._text = ""
        self._at = 0
        self._before = 0
        """Characters of the file before `_text`."""
        self._more = True

    def __iter__(self) -> Iterator[Any]:
        is_array = self._next_character() == "["
        if is_array:
            self._at += 1
            if self._next_character() == "]":
                self._at += 1
                self._check_end()
                return
        while self._next_character():
            yield self._value()
            separator = self._next_character()
            if not is_array:
                continue
            self._at += 1
            if separator == "]":
                self._check_end()
                return
            if separator == "," and self._next_character():
                continue
            if separator:
                raise _BrokenJson(f"',' or ']' is missing at character {self._before + self._at:,}")
        if is_array:
            raise _BrokenJson("the array has no end")

    def _check_end(self) -> None:
        if self._next_character():
            raise _BrokenJson(f"there is more after the end of the array, at character {self._before + self._at + 1:,}")

    def _next_character(self) -> str:
        """Return the next character that is no space, without taking it; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._read_more():
                return ""

    def _value(self) -> Any:
        """Take the value that begins here. As long as it may be cut off, twice as much is read."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise _BrokenJson(f"it is nested too deeply at character {self._before + self._at + 1:,}") from error
            except json.JSONDecodeError as error:
                place = self._before + error.pos + 1
                may_be_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _NEAR_END
                if may_be_cut and len(self._text) - self._at > LONGEST_ROW:
                    raise _BrokenJson(f"a row is longer than {LONGEST_ROW >> 20} Mi characters") from error
                if not (may_be_cut and self._read_more()):
                    raise _BrokenJson(f"{error.msg} at character {place:,}") from error
            except ValueError as error:  # a number of thousands of digits
                raise _BrokenJson(f"{error}, in the value at character {self._before + self._at + 1:,}") from error
            else:
                if end < len(self._text) or not self._read_more():  # a number may go on
                    self._at = end
                    return value

    def _read_more(self) -> bool:
        """Drop what was taken, and read at least as much as is left. Returns whether anything came."""
        remaining = self._text[self._at :]
        self._before += self._at
        self._at = 0
        parts = [remaining]
        missing = max(1, len(remaining))
        while self._more and missing > 0:
            chunk = self._reader.read()
            self._more = bool(chunk)
            parts.append(chunk)
            missing -= len(chunk)
        self._text = "".join(parts)
        return len(self._text) > len(remaining)


# Tables


class Csv(DocumentFile):
    """Fields apart by commas, or by semicolons or tabs if only then the header has the columns asked for."""

    DELIMITERS: ClassVar[str] = ",;\t"

    def documents(self, start: int) -> Iterator[Document]:
        csv.field_size_limit(LONGEST_FIELD)
        with open_decompressed(self.path) as (stream, raw):
            lines = TextReader(stream, self.encoding).lines()
            try:
                header = next(lines, "")
                if not header:
                    return
                try:
                    delimiter, columns = self._columns(header)
                except DataError as error:
                    yield from self._bad_file(str(error), start)
                    return
                reader = csv.reader(lines, delimiter=delimiter, strict=True)
                while (row := self._next(reader)) is not None:
                    if row == []:
                        continue  # an empty line
                    self.count += 1
                    self.position = raw.tell()
                    if self.count > start:
                        yield self._document(
                            columns, row, f"{self.path}, row {self.count} (to line {reader.line_num + 1})"
                        )
            except NotText as error:
                yield from self._bad_file(str(error), start)

    def _columns(self, header: str) -> tuple[str, list[str]]:
        """Find the delimiter and the names of the columns."""
        problem: DataError | None = None
        for delimiter in self.DELIMITERS:
            try:
                columns = next(csv.reader([header], delimiter=delimiter))
            except csv.Error as error:  # line ends of old Macs: the whole file is one line
                raise DataError(f"has a first line that is not one of CSV ({error}); repair its line ends") from error
            try:
                self.rows.check_columns(columns)
            except DataError as error:
                problem = problem or error
            else:
                if len(set(columns)) < len(columns):
                    raise DataError(f"has two columns of the same name: {', '.join(columns)}; rename one")
                return delimiter, columns
        assert problem is not None
        raise problem

    @staticmethod
    def _next(reader: Any) -> list[str] | str | None:
        """Return the fields of the next row; a text that says what is wrong with it; None at the end."""
        try:
            row: list[str] = next(reader)
        except StopIteration:
            return None
        except csv.Error as error:
            return str(error)
        return row

    def _document(self, columns: list[str], row: list[str] | str, where: str) -> Document:
        if isinstance(row, str):
            # A field that goes on to the end of the file, or of what is allowed, has swallowed other rows.
            lost = "unexpected end" in row or "field larger" in row
            reason = "a quotation mark has no end, so the following rows are lost" if lost else row
            return self.rows.bad(f"{where} is not a row of CSV ({reason}); repair or remove it", is_file=lost)
        if len(row) != len(columns):
            return self.rows.bad(
                f"{where} has {len(row)} fields, but the header has {len(columns)}; put quotation marks around fields "
                "with delimiters or line ends, or remove the row"
            )
        return self.rows.document(dict(zip(columns, row, strict=True)), where)


@final
class Tsv(Csv):
    """Fields apart by tabs."""

    DELIMITERS = "\t"


@final
class Parquet(DocumentFile):
    """A table that pyarrow reads, group by group."""

    BATCH_ROWS = 1024

    def documents(self, start: int) -> Iterator[Document]:
        parquet = _import_parquet()
        size = self.path.stat().st_size
        try:
            with parquet.ParquetFile(self.path) as file:
                try:
                    self.rows.check_columns(file.schema_arrow.names)
                except DataError as error:
                    yield from self._bad_file(str(error), start)
                    return
                for row in self._rows(file, start):
                    self.position = size * self.count // file.metadata.num_rows
                    yield self.rows.document(row, f"{self.path}, row {self.count}")
        except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path} cannot be read as Parquet: {error}; repair or remove it") from error

    def _rows(self, file: Any, start: int) -> Iterator[object]:
        names = self.rows.names
        columns = None if names is None else [name for name in names if name in file.schema_arrow.names]
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if self.count + rows <= start:  # skipped without reading
                self.count += rows
                continue
            for batch in file.iter_batches(self.BATCH_ROWS, row_groups=[group], columns=columns):
                for row in batch.to_pylist():
                    self.count += 1
                    if self.count > start:
                        yield row


def _import_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"Parquet files need pyarrow, which is not installed: {install_hint('data')}") from error
    return pyarrow.parquet


# Which file has which format

TEXT_SUFFIXES: tuple[str, ...] = (
    "",  # README, LICENSE, enwik8
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log"),
    *(".html", ".htm", ".xml", ".css", ".toml", ".yaml", ".yml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".el"),
    *(".sh", ".bash", ".sql", ".swift", ".lisp", ".cmake"),
)
"""Text files are recognised by suffix alone, without opening them."""

FORMATS: dict[str, type[DocumentFile]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": JsonFile,
    ".csv": Csv,
    ".tsv": Tsv,
    ".parquet": Parquet,
    **dict.fromkeys(TEXT_SUFFIXES, TextFile),
}
"""The formats by suffix. Parquet has its own compression."""


def format_of(path: Path) -> type[DocumentFile] | None:
    """Return the format of a file, by its suffix; None if unknown."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return FORMATS.get(suffix)
    # README without a suffix is text, but the content of x.gz is unknown.
    inner = FORMATS.get(Path(path.stem).suffix.lower()) if Path(path.stem).suffix else None
    return None if inner is Parquet else inner


def is_compressed(path: Path) -> bool:
    """Whether a file holds more text than it has bytes."""
    return path.suffix.lower() in COMPRESSIONS or path.suffix.lower() == ".parquet"


def stem_of(path: Path) -> str:
    """Return the name without the suffixes of format and compression."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSIONS else path.stem


def known_suffixes() -> str:
    """List the suffixes that can be read, for messages."""
    return f"{' '.join(suffix or '(none)' for suffix in FORMATS)}; all but .parquet also with {' '.join(COMPRESSIONS)}"
