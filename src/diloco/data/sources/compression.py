"""Compressed files as streams: .gz, .xz, .bz2, and .zst (which needs zstandard, the extra `data`).

A file that is cut short or damaged is an error, never a shorter file.
"""

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, final

from diloco.errors import DataError, install_hint


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
"""By suffix."""


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
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
