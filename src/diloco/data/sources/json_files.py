"""JSON: lines (.jsonl), or a file with one array, one object or several (.json). An element of the array is a row.

Values are read one after another: memory holds one chunk and one row, whatever the size of the file.
"""

import json
from collections.abc import Iterator
from typing import IO, Any, final

from diloco.data.sources.base import Document
from diloco.data.sources.compression import open_decompressed
from diloco.data.sources.document_file import DocumentFile
from diloco.data.sources.encoding import NotText, TextReader, encoding_of, splits_at_line_ends
from diloco.errors import DataError

LONGEST_ROW = 1 << 28
"""Characters; a longer value is refused, for example one whose quotation mark is missing."""

_NEAR_END = 12
"""An error this close to the end of what was read may be due to the cut: -Infinity, \\u00e9."""
_SPACE = " \t\n\r"


@final
class JsonLines(DocumentFile):
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
        """As bytes where that is possible: then a line in another encoding is one bad row."""
        first = stream.readline()
        self._encoding, mark = encoding_of(first, self.encoding)
        if splits_at_line_ends(self._encoding):
            yield first[mark:]
            yield from stream
        else:
            yield from TextReader(_Again(first, stream), self.encoding).lines()

    def _document(self, line: bytes | str, where: str) -> Document:
        try:
            row = json.loads((line if isinstance(line, str) else line.decode(self._encoding)).rstrip("\r\n"))
        except UnicodeDecodeError as error:
            problem = f"byte 0x{error.object[error.start]:02x} at column {error.start + 1} is not {self._encoding}"
            return self.rows.bad(f"{where} is not a line of JSON: {problem}; name the encoding with --data.encoding")
        except (ValueError, RecursionError) as error:
            return self.rows.bad(f"{where} is not a line of JSON ({error}); repair or remove it")
        return self.rows.document(row, where)


class _Again:
    """A stream whose first bytes were already read."""

    def __init__(self, first: bytes, rest: IO[bytes]) -> None:
        self._first, self._rest = first, rest

    def read(self, size: int) -> bytes:
        found, self._first = self._first, b""
        return found + self._rest.read(size)


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
    pass


@final
class JsonValues:
    """The elements of one array, or the values that follow one another without one."""

    def __init__(self, reader: TextReader) -> None:
        self._reader = reader
        self._decoder = json.JSONDecoder()
        self._text, self._at, self._before, self._more = "", 0, 0, True

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
            after = self._next_character()
            if not is_array:
                continue
            self._at += 1
            if after == "]":
                self._check_end()
                return
            if after == "," and self._next_character():
                continue
            if after:
                raise _BrokenJson(f"',' or ']' is missing at character {self._before + self._at:,}")
        if is_array:
            raise _BrokenJson("the array has no end")

    def _check_end(self) -> None:
        if self._next_character():
            raise _BrokenJson(f"there is more after the end of the array, at character {self._before + self._at + 1:,}")

    def _next_character(self) -> str:
        """The next one that is no space, not taken; empty at the end of the file."""
        while True:
            while self._at < len(self._text):
                if self._text[self._at] not in _SPACE:
                    return self._text[self._at]
                self._at += 1
            if not self._read_more():
                return ""

    def _value(self) -> Any:
        """The value that begins here. As long as it may be cut off, twice as much is read."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except RecursionError as error:
                raise _BrokenJson(f"it is nested too deeply at character {self._before + self._at + 1:,}") from error
            except json.JSONDecodeError as error:
                place = self._before + error.pos + 1
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _NEAR_END
                if cut and len(self._text) - self._at > LONGEST_ROW:
                    raise _BrokenJson(f"a row is longer than {LONGEST_ROW >> 20} Mi characters") from error
                if not (cut and self._read_more()):
                    raise _BrokenJson(f"{error.msg} at character {place:,}") from error
            except ValueError as error:  # a number of thousands of digits
                raise _BrokenJson(f"{error}, in the value at character {self._before + self._at + 1:,}") from error
            else:
                if end < len(self._text) or not self._read_more():  # a number may go on
                    self._at = end
                    return value

    def _read_more(self) -> bool:
        """Drop what was taken, and read at least as much as is left. Returns whether anything came."""
        kept = self._text[self._at :]
        self._before, self._at = self._before + self._at, 0
        parts, wanted = [kept], max(1, len(kept))
        while self._more and wanted > 0:
            chunk = self._reader.read()
            self._more = bool(chunk)
            parts.append(chunk)
            wanted -= len(chunk)
        self._text = "".join(parts)
        return len(self._text) > len(kept)
