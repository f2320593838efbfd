"""Compressed files as streams: .gz, .xz, .bz2, and .zst (which needs pyarrow, the extra `data`).

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
from typing import IO, Any

from diloco.errors import DataError, install_hint


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
