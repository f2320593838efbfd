"""Files that members serve to each other: the configuration, the tokenizer, shards of the corpus. Data, never code.

A node serves only the files that its trainer has named, under names that are no paths. A file arrives under a temporary
name, is compared with its SHA-256, and appears whole or not at all.
"""

import asyncio
import hashlib
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from diloco.atomic_files import PartialFile, replace_file
from diloco.errors import EngineError
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Stream, Transport, Unreachable
from diloco.swarm.node.frames import read_frame, write_frame
from diloco.swarm.protocol.messages import FileHead, NotHere, OpenFile, decode
from diloco.swarm.protocol.wire import Malformed, encode

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 20
_LARGEST_FILE = 1 << 42
_MAX_FILES = 70_000


@dataclass(frozen=True)
class _Digested:
    stamp: tuple[int, int]
    digest: str


class SharedFiles:
    """The files that this node serves."""

    def __init__(self) -> None:
        self._paths: dict[str, Path] = {}
        self._digests: dict[str, _Digested] = {}

    def serve(self, files: Mapping[str, Path]) -> None:
        if len(self._paths) + len(files) > _MAX_FILES:
            raise ValueError(f"more than {_MAX_FILES} files to share")
        self._paths.update(files)

    def names(self) -> list[str]:
        return sorted(self._paths)

    async def send(self, stream: Stream, request: OpenFile, stall_seconds: float) -> None:
        name = request.name
        path = self._paths.get(name)
        if path is None or not path.is_file():
            await write_frame(stream, encode(NotHere()), stall_seconds)
            return
        size = path.stat().st_size
        digest = await asyncio.get_running_loop().run_in_executor(None, self._digest, name, path)
        await write_frame(stream, encode(FileHead(size, digest)), stall_seconds)
        with path.open("rb") as file:
            left = size
            while left:
                data = file.read(min(_CHUNK_BYTES, left))
                if not data:
                    return  # the file has become shorter; the receiver sees the stream end too early
                await stream.write(data, stall_seconds)
                left -= len(data)
        await stream.read(1, stall_seconds)

    def _digest(self, name: str, path: Path) -> str:
        status = path.stat()
        stamp = (status.st_mtime_ns, status.st_size)
        known = self._digests.get(name)
        if known is None or known.stamp != stamp:
            with path.open("rb") as file:
                known = _Digested(stamp, hashlib.file_digest(file, "sha256").hexdigest())
            self._digests[name] = known
        return known.digest


class Fetched(NamedTuple):
    bytes: int
    digest: str


async def fetch_file(
    transport: Transport,
    peers: list[str],
    name: str,
    path: Path,
    stall_seconds: float,
    most_bytes: int = _LARGEST_FILE,
    digest: str | None = None,
) -> Fetched:
    """Fetch a file from the first of `peers` that has it, of at most `most_bytes` and, if given, with that SHA-256.

    Raises EngineError, or OSError if it cannot be written; `path` is then unchanged.
    """
    problems = []
    for peer in peers:
        try:
            fetched = await _fetch_from(transport, peer, name, path, stall_seconds, most_bytes, digest)
        except (Unreachable, CallRefused, Malformed) as problem:
            problems.append(f"{peer[-8:]}: {problem}")
        else:
            if fetched is not None:
                return fetched
            problems.append(f"{peer[-8:]}: does not have it")
    raise EngineError(f"no worker of the swarm can give '{name}' ({'; '.join(problems) or 'none is live'})")


async def _fetch_from(
    transport: Transport,
    peer: str,
    name: str,
    path: Path,
    stall_seconds: float,
    most_bytes: int,
    wanted: str | None,
) -> Fetched | None:
    stream = await transport.open_stream(peer, stall_seconds)
    try:
        await write_frame(stream, encode(OpenFile(name)), stall_seconds)
        head = decode(await read_frame(stream, 1 << 12, timing.HEAD_SHARE * stall_seconds))
        if not isinstance(head, FileHead):
            return None
        size = head.size
        digest = head.digest
        if size > most_bytes:
            raise Malformed(f"a file of {size} bytes, more than {most_bytes}")
        if wanted not in (None, digest):
            raise Malformed(f"another file of that name, with the SHA-256 {digest}")
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < size:
            raise OSError(
                f"'{name}' has {size} bytes, and {path.parent} has {free} bytes left: free some space, or choose "
                "another place with --out or --data.cache-dir"
            )
        with replace_file(path, durable=True) as file:
            await _receive(stream, file, size, digest, stall_seconds)
            await stream.write(b"\1", stall_seconds)
        return Fetched(size, digest)
    finally:
        stream.close()


async def _receive(stream: Stream, file: PartialFile, size: int, digest: str, stall_seconds: float) -> None:
    left = size
    while left:
        data = await stream.read(min(_CHUNK_BYTES, left), stall_seconds)
        file.write(data)
        left -= len(data)
    if file.finish().sha256 != digest:
        raise Malformed(f"a file whose SHA-256 is not the {digest} that was announced")
