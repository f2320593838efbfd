"""Whole files of a run in its bucket: its description, tokenizer and text, and the tensors of states."""

import asyncio
import hashlib
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from diloco.bucket.store import REQUESTS_AT_ONCE, Malformed, Store
from diloco.errors import EngineError

_READ_BYTES = 1 << 22


async def put_files(store: Store, files: Mapping[str, Path], always: Collection[str] = ()) -> None:
    """Put these files into the bucket, by name and in this order, unless ones of their size are there; those that this
    machine does not have are passed over. `always`: names that are written also where there is one of their size."""
    there = {stored.name: stored.size for stored in await store.list("files/")}
    for name, path in files.items():
        if path.exists() and (name in always or there.get(f"files/{name}") != path.stat().st_size):
            await store.put(f"files/{name}", path)


async def fetch_file(store: Store, name: str, path: Path, most_bytes: int = 1 << 42, digest: str | None = None) -> None:
    """Fetch a file of the run (with that sha256); `path` then holds all of it, or does not exist."""
    stored = [each for each in await store.list("files/") if each.name == f"files/{name}"]
    if not stored:
        raise EngineError(f"the bucket has no file {name}: the run's first worker writes it when it starts")
    if stored[0].size > most_bytes:
        raise EngineError(f"the bucket's file {name} has {stored[0].size:,} bytes, and may have {most_bytes:,} at most")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    wanted = None if digest is None else bytes.fromhex(digest)
    try:
        await download(store, stored[0].name, stored[0].size, partial, wanted)
        partial.replace(path)
    except Malformed as problem:
        raise EngineError(f"{name} cannot be fetched: {problem}") from problem
    finally:
        partial.unlink(missing_ok=True)


async def read_whole(store: Store, name: str, num_bytes: int) -> bytearray | None:
    """Read the first bytes of an object, some ranges at a time; all of it if it is shorter. None: it is not there."""
    starts = range(0, num_bytes, _READ_BYTES)
    ends = [min(start + _READ_BYTES, num_bytes) for start in starts]
    ranges = await asyncio.gather(*(store.read_range(name, *each) for each in zip(starts, ends, strict=True)))
    return None if None in ranges else bytearray(b"".join(data for data in ranges if data is not None))


async def download(store: Store, name: str, num_bytes: int, path: Path, digest: bytes | None = None) -> None:
    """A whole object into a file, some ranges at a time. `digest`: the SHA-256 that it must have."""
    hashed = hashlib.sha256()
    starts = range(0, num_bytes, _READ_BYTES)

    async def read(start: int) -> bytes:
        data = await store.read_range(name, start, min(start + _READ_BYTES, num_bytes))
        if data is None:
            raise Malformed(f"{name} is gone")
        return data

    with path.open("wb") as file:
        for first in range(0, len(starts), REQUESTS_AT_ONCE):
            for data in await asyncio.gather(*map(read, starts[first : first + REQUESTS_AT_ONCE])):
                hashed.update(data)
                await asyncio.to_thread(file.write, data)
    if digest is not None and hashed.digest() != digest:
        raise Malformed(f"{name} has another digest than it must have")
