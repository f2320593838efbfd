"""File formats: plain text (one document), JSON lines and Parquet (one document per row).

Text and JSON lines may be compressed: .gz, .xz, .bz2, .zst. A broken line or row is an error that names the file and
the line; skipping it would hide lost data. Parquet needs pyarrow and .zst zstandard (the extra `data`).
"""

import bz2
import gzip
import io
import json
import lzma
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, ClassVar, final

from diloco.data.sources.base import Document, Fields
from diloco.errors import DataError, install_hint

TEXT_SUFFIXES: tuple[str, ...] = (
    "",  # README, LICENSE, enwik8
    *(".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc", ".log"),
    *(".html", ".htm", ".xml", ".css", ".csv", ".tsv", ".json", ".toml", ".yaml", ".yml", ".ini", ".cfg"),
    *(".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"),
    *(".js", ".ts", ".jsx", ".tsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".el"),
    *(".sh", ".bash", ".sql", ".swift", ".lisp", ".cmake"),
)
"""Text files are recognised by suffix alone, without opening them."""

EXPANSION = 3
"""Approximate bytes of text per byte of a compressed file."""


class NotText(Exception):
    """The content of a text file is not UTF-8 text."""


class DocumentFile(ABC):
    """One file. `count`: documents skipped or yielded so far; `position`: approximate bytes read."""

    has_fields: ClassVar[bool] = True

    def __init__(self, path: Path, fields: Fields) -> None:
        self.path, self.fields = path, fields
        self.count = 0
        self.position = 0

    @abstractmethod
    def documents(self, start: int) -> Iterator[Document]:
        """All documents but the first `start`. Afterwards `count` is the number of documents in the file."""


@final
class TextFile(DocumentFile):
    has_fields = False

    def documents(self, start: int) -> Iterator[Document]:
        with _open_decompressed(self.path) as (stream, raw):
            content = stream.read()
            self.position = raw.tell()
        if b"\0" in content:
            raise NotText
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise NotText from error
        self.count = 1
        if start == 0:
            yield Document(text)


@final
class JsonLines(DocumentFile):
    def documents(self, start: int) -> Iterator[Document]:
        with _open_decompressed(self.path) as (stream, raw):
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                self.count += 1
                self.position = raw.tell()
                if self.count > start:
                    yield self._document(line, number)

    def _document(self, line: bytes, number: int) -> Document:
        where = f"{self.path}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not a line of JSON ({error}); repair or remove it") from error
        return self.fields.document(row, where)


@final
class Parquet(DocumentFile):
    BATCH_ROWS = 1024

    def documents(self, start: int) -> Iterator[Document]:
        parquet = _import_parquet()
        size = self.path.stat().st_size
        try:
            with parquet.ParquetFile(self.path) as file:
                self.fields.document(dict.fromkeys(file.schema_arrow.names, ""), str(self.path))  # do they exist?
                for row in self._rows(file, start):
                    self.position = size * self.count // file.metadata.num_rows
                    yield self.fields.document(row, f"{self.path}, row {self.count}")
        except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path} cannot be read as Parquet: {error}; repair or remove it") from error

    def _rows(self, file: Any, start: int) -> Iterator[object]:
        for group in range(file.num_row_groups):
            rows = file.metadata.row_group(group).num_rows
            if self.count + rows <= start:  # skipped without reading
                self.count += rows
                continue
            for batch in file.iter_batches(self.BATCH_ROWS, row_groups=[group], columns=self.fields.names):
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


FORMATS: dict[str, type[DocumentFile]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".parquet": Parquet,
    **dict.fromkeys(TEXT_SUFFIXES, TextFile),
}
"""By suffix. Only text and JSON lines may be compressed; Parquet has its own compression."""


@final
class _ZstdStream(io.RawIOBase):
    """Reads consecutive .zst frames. zstandard's own reader does not notice that a file is cut short."""

    def __init__(self, raw: IO[bytes]) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise DataError(f".zst files need zstandard, which is not installed: {install_hint('data')}") from error
        self._error: type[Exception] = zstandard.ZstdError
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._raw, self._input, self._output = raw, b"", b""
        self._frame: Any = self._new_frame()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            chunk = self._input or self._raw.read(1 << 16)
            if not chunk:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._output = self._frame.decompress(chunk)
            except self._error as error:
                raise EOFError(str(error)) from error
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


COMPRESSIONS: dict[str, Callable[[IO[bytes]], Any]] = {
    ".gz": lambda raw: gzip.GzipFile(fileobj=raw),
    ".xz": lzma.LZMAFile,
    ".bz2": bz2.BZ2File,
    ".zst": lambda raw: io.BufferedReader(_ZstdStream(raw), 1 << 18),
}


def format_of(path: Path) -> type[DocumentFile] | None:
    """The format of a file, by its suffix; None if unknown."""
    suffix = path.suffix.lower()
    if suffix not in COMPRESSIONS:
        return FORMATS.get(suffix)
    # README without a suffix is text, but the content of x.gz is unknown.
    inner = FORMATS.get(Path(path.stem).suffix.lower()) if Path(path.stem).suffix else None
    return inner if inner in (TextFile, JsonLines) else None


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in COMPRESSIONS or path.suffix.lower() == ".parquet"


def stem_of(path: Path) -> str:
    """The name without the suffixes of format and compression."""
    return Path(path.stem).stem if path.suffix.lower() in COMPRESSIONS else path.stem


def known_suffixes() -> str:
    """The suffixes that can be read, for messages."""
    return f"{' '.join(suffix or '(none)' for suffix in FORMATS)}, and text or .jsonl with {' '.join(COMPRESSIONS)}"


@contextmanager
def _open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """The decompressed content of a file, and the raw file, whose position is the progress."""
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
        reason = error.strerror or str(error)  # gzip's and bz2's errors have no strerror
        raise DataError(f"cannot read {path}: {reason}; make it readable, repair it or move it away") from error
