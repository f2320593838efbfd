"""A file's bytes to characters: decompressed (.gz, .xz, .bz2, and .zst, which needs pyarrow, the extra `data`), then
decoded as UTF-8, the encoding that `data.encoding` names, or the one that a byte-order mark names.

A compressed file that is cut short or damaged is an error, never a shorter file. A byte-order mark (UTF-8, UTF-16,
UTF-32) comes first: it says what the file is, whatever the option says, and is not part of the text. Of several
encodings a file has the first one that fits all of it. Bytes that do not fit are named by their offset in the file;
they are never replaced.
"""

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, final

from diloco.errors import DataError, install_hint

CHUNK_BYTES = 1 << 20
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins like that of UTF-16
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def _zstd_stream(raw: IO[bytes]) -> Any:
    """Read .zst frames, one after another; a file that is cut short is noticed."""
    try:
        import pyarrow
    except ImportError as error:
        raise DataError(f".zst files need pyarrow, which is not installed: {install_hint('data')}") from error
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), 1 << 18)


COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": _zstd_stream,
}
"""How a compressed file is opened, by suffix."""


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Yield the decompressed content of a file, and the raw file, whose position is the progress."""
    try:
        with path.open("rb") as raw:
            decompress = COMPRESSIONS.get(path.suffix.lower())
            if decompress is None:
                yield raw, raw
                return
            with decompress(raw) as stream:
                yield stream, raw
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path} is damaged or cut short: {error}; fetch it again") from error
    except OSError as error:
        if error.errno is None:  # of gzip, bz2 and pyarrow, not of the system
            raise DataError(f"{path} is damaged or cut short: {error}; fetch it again") from error
        raise DataError(f"cannot read {path}: {error.strerror}; make it readable or move it away") from error


class Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class NotText(Exception):
    """Says which byte of a file does not fit its encoding, and the remedy."""


def decode(content: bytes, encoding: str | None) -> str:
    """Decode a whole file."""
    name, mark = encoding_of(content, encoding)
    try:
        text = content[mark:].decode(name)
    except UnicodeDecodeError as error:
        raise _not_text(name, mark + error.start, error) from error
    if "\0" in text:
        at = content.index(b"\0")
        guess = _guess(content)
        raise NotText(
            f"is not {_display(name)} text: it has a zero byte at offset {at}, as binary files have; "
            + (f"it may be {guess} (--data.encoding {guess})" if guess else "move it away")
        )
    return text


def encoding_of(head: bytes, encoding: str | None) -> tuple[str, int]:
    """Return the encoding of a file that begins with `head`, and the length of its byte-order mark."""
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name, len(mark)
    return encoding or "utf-8", 0


def splits_at_line_ends(encoding: str) -> bool:
    """Whether the byte b"\\n" is always the end of a line, so that lines can be told apart before they are decoded."""
    return "a\n".encode(encoding) == b"a\n"


def fits(stream: Readable, encoding: str) -> bool:
    """Whether all bytes of a stream are text in this encoding."""
    reader = TextReader(stream, encoding)
    try:
        while chunk := reader.read():
            if "\0" in chunk:
                return False
    except NotText:
        return False
    return True


@final
class TextReader:
    """The characters of a stream, a chunk at a time."""

    def __init__(self, stream: Readable, encoding: str | None) -> None:
        self._stream = stream
        self._head = stream.read(CHUNK_BYTES)
        self.encoding, mark = encoding_of(self._head, encoding)
        self._head = self._head[mark:]
        self._decoder = codecs.getincrementaldecoder(self.encoding)()
        self._offset = mark

    def read(self) -> str:
        """Read the next characters; an empty text at the end. Raises NotText."""
        while True:
            chunk = self._head or self._stream.read(CHUNK_BYTES)
            self._head = b""
            waiting = len(self._decoder.getstate()[0])
            try:
                text = self._decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise _not_text(self.encoding, self._offset - waiting + error.start, error) from error
            self._offset += len(chunk)
            if text or not chunk:
                return text

    def lines(self) -> Iterator[str]:
        """Yield lines with their ends. A line ends at "\\n" only."""
        parts: list[str] = []
        while chunk := self.read():
            *complete, rest = chunk.split("\n")
            for line in complete:
                yield "".join([*parts, line, "\n"])
                parts.clear()
            if rest:
                parts.append(rest)
        if parts:
            yield "".join(parts)


def _not_text(encoding: str, offset: int, error: UnicodeDecodeError) -> NotText:
    byte = error.object[error.start : error.start + 1]
    guess = "latin-1, cp1252, …; utf-8,latin-1 for a mixture" if encoding == "utf-8" else "utf-8, latin-1, …"
    return NotText(
        f"is not {_display(encoding)} text: byte 0x{byte.hex()} at offset {offset} does not fit ({error.reason}); name "
        f"its encoding with --data.encoding ({guess}), or convert it (iconv -t UTF-8)"
    )


def _display(encoding: str) -> str:
    return encoding.upper() if encoding.lower().startswith("utf") else encoding


def _guess(content: bytes) -> str | None:
    """UTF-16 without a byte-order mark: in most scripts every other byte is zero."""
    sample = content[: 1 << 12]
    for name, zeros in (("utf-16-le", sample[1::2]), ("utf-16-be", sample[::2])):
        if zeros.count(0) > len(zeros) // 2:
            return name
    return None
