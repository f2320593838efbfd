"""Files and folders that appear whole or not at all. Standard library only.

New content is written under a hidden temporary name in the same folder and then renamed over the old:

    .NAME.1f2e3d4c.partial  ->  NAME

A process that is killed in between leaves the old content, and the temporary beside it; an error removes the temporary.
`durable=True` also survives a power cut: the file, then its name in the folder, is forced to the disk (fsync).
"""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PARTIAL = ".partial"
"""Ends the name of every temporary file or folder."""
PRIVATE = 0o600
"""The mode of a file that only its owner may read."""
_WRITE_BYTES = 1 << 24
_WORTH_A_THREAD = 1 << 20


@dataclass(frozen=True)
class FileDigest:
    """Size and SHA-256."""

    bytes: int
    sha256: str


class PartialFile:
    """A file that is being written; `replace_file` makes it."""

    def __init__(self, path: Path, descriptor: int, durable: bool) -> None:
        self._path = path
        self._descriptor = descriptor
        self._durable = durable
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._hashing = ThreadPoolExecutor(1, "diloco-hash")  # its thread starts with the first large piece

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _WRITE_BYTES):
            piece = view[start : start + _WRITE_BYTES]
            if len(piece) < _WORTH_A_THREAD:
                self._write(piece)
                self._hash.update(piece)
                continue
            hashed = self._hashing.submit(self._hash.update, piece)  # while it is written
            try:
                self._write(piece)
            finally:
                hashed.result()

    def _write(self, piece: memoryview) -> None:
        with _naming(self._path):
            _write_all(self._descriptor, piece)
        self._bytes += len(piece)

    def close(self) -> None:
        self._hashing.shutdown()
        os.close(self._descriptor)

    def finish(self) -> FileDigest:
        """Size and SHA-256 of what was written, which is on the disk if the file is durable."""
        if self._durable:
            with _naming(self._path):
                os.fsync(self._descriptor)
            self._durable = False
        return FileDigest(self._bytes, self._hash.hexdigest())


@contextmanager
def replace_file(
    path: Path, *, durable: bool = False, mode: int = 0o666, overwrite: bool = True
) -> Iterator[PartialFile]:
    """Write to the yielded file; it becomes `path` when the block ends without an error.

    `mode` is limited by the umask. `overwrite=False` raises FileExistsError if there is a file by then.
    """
    partial = _partial(path)
    with _naming(path):
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    file = PartialFile(path, descriptor, durable)
    try:
        try:
            yield file
            file.finish()
        finally:
            file.close()
        if overwrite:
            partial.replace(path)
        else:
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        sync_folder(path.parent)


def write_file(
    path: Path, content: bytes | str, *, durable: bool = False, mode: int = 0o666, overwrite: bool = True
) -> FileDigest:
    """Write a file in one go; see `replace_file`."""
    with replace_file(path, durable=durable, mode=mode, overwrite=overwrite) as file:
        file.write(content.encode() if isinstance(content, str) else content)
        return file.finish()


def append_file(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Append, on the disk when this returns. Lines that several processes append at the same time do not mix."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, mode)
    try:
        new = not os.fstat(descriptor).st_size
        with _naming(path):
            _write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if new:
        sync_folder(path.parent)


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Write into the yielded new folder; it becomes `path` when the block ends without an error."""
    partial = _partial(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        move_folder(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder and remove the one that was there.

    A folder with content cannot be renamed over, so it is renamed first. A kill between the two renames leaves it under
    a temporary name, and no `target`.
    """
    try:
        source.rename(target)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    former = _partial(target)
    target.rename(former)
    try:
        source.rename(target)
    except OSError:
        former.rename(target)
        raise
    shutil.rmtree(former, ignore_errors=True)


def digest_file(path: Path) -> FileDigest:
    """Digest a file as it is now."""
    with path.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return FileDigest(file.tell(), sha256)


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _partial(path: Path) -> Path:
    """Random, since other processes, perhaps on other machines, may write the same file."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the name of the file to an error: the system reports a full disk without saying which file was written."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
