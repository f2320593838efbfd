"""The few operations on a bucket that a run needs, over obstore: S3, R2, GCS, Azure, MinIO, or a shared folder.

One of them is atomic and decides everything: `create` writes an object if there is none of that name. A store without
it is refused at the start. Times are the store's own: when it wrote an object, never what a worker's clock says.
"""

import asyncio
import logging
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from diloco.errors import ConfigError, EngineError, install_hint

if TYPE_CHECKING:
    from obstore.store import ObjectStore as AnyStore

logger = logging.getLogger(__name__)

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

REQUESTS_AT_ONCE = 8
"""Objects, or ranges of them, that a worker reads at a time."""
_REQUEST_SECONDS = 120.0
"""A single request is repeated, or given up, after this time: no request but `put` moves more than a few MiB."""
_PART_BYTES, _PARTS_AT_ONCE = 1 << 23, 4
"""A large object is sent in parts of this size, so many at a time."""
_THREAD_SECONDS = 0.1
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0


class Stored(NamedTuple):
    """An object, as a listing shows it."""

    name: str
    size: int
    modified: float
    """Seconds since 1970, by the store's clock."""


class StoreUnavailable(Exception):
    """The store did not answer, or not now: the same request may succeed later."""


class Malformed(ValueError):
    """An object that no worker of this version writes."""


class Store(ABC):
    """Objects below one run's prefix. Every method raises StoreUnavailable, or EngineError if no repetition helps."""

    @abstractmethod
    async def create(self, name: str, data: Buffer) -> bool:
        """Write an object if there is none of this name; False if there is one with other content."""

    @abstractmethod
    async def put(self, name: str, data: "Buffer | Path") -> None:
        """Write an object, in place of an earlier one; a file is sent in parts."""

    @abstractmethod
    async def read(self, name: str) -> bytes | None:
        """Read a whole object; None: there is none."""

    @abstractmethod
    async def read_range(self, name: str, start: int, end: int) -> bytes | None:
        """Read bytes `start` to `end` (exclusive), or those that the object has of them; None: there is none."""

    @abstractmethod
    async def list(self, prefix: str) -> list[Stored]:
        """List all objects below a prefix, in the order of their names."""

    @abstractmethod
    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there any more are passed over."""


class ObjectStore(Store):
    """A store that obstore can open."""

    def __init__(self, url: str, options: "dict[str, Any] | None" = None) -> None:
        self.url = url
        self._store = _open(url, options or {})
        self._reading = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def create(self, name: str, data: Buffer) -> bool:
        import obstore

        content = bytes(data)
        try:
            await self._call(obstore.put_async(self._store, name, content, mode="create", use_multipart=False))
        except FileExistsError:  # also after a repetition of a request whose answer was lost
            return await self.read(name) == content
        except FileNotFoundError as problem:
            raise self._no_bucket(problem) from None
        return True

    async def put(self, name: str, data: "Buffer | Path") -> None:
        import obstore

        sent = obstore.put_async(self._store, name, data, chunk_size=_PART_BYTES, max_concurrency=_PARTS_AT_ONCE)
        try:
            await self._call(sent, seconds=None)
        except FileNotFoundError as problem:
            raise self._no_bucket(problem) from None

    async def read(self, name: str) -> bytes | None:
        import obstore

        async def whole() -> bytes:
            answer = await obstore.get_async(self._store, name)
            return bytes(await answer.bytes_async())

        return await self._read(whole())

    async def read_range(self, name: str, start: int, end: int) -> bytes | None:
        import obstore

        async def some() -> bytes:
            try:
                return bytes(await obstore.get_range_async(self._store, name, start=start, end=end))
            except obstore.exceptions.GenericError:  # perhaps it has no byte from `start` on
                if (await obstore.head_async(self._store, name))["size"] <= start:
                    return b""
                raise

        return await self._read(some())

    def _no_bucket(self, problem: FileNotFoundError) -> EngineError:
        return EngineError(f"{self.url} has no bucket or folder to write into: make it first ({_first_line(problem)})")

    async def _read(self, request: Any) -> bytes | None:
        try:
            async with self._reading:
                data: bytes = await self._call(request)
        except FileNotFoundError:
            return None
        return data

    async def list(self, prefix: str) -> list[Stored]:
        import obstore

        async def everything() -> list[Stored]:
            stream = obstore.list(self._store, prefix)
            return [
                Stored(meta["path"], meta["size"], meta["last_modified"].timestamp())
                for metas in [await stream.collect_async()]
                for meta in metas
            ]

        listed: list[Stored] = await self._call(everything())
        return sorted(listed)

    async def delete(self, names: Sequence[str]) -> None:
        import obstore

        async def one(name: str) -> None:
            try:
                await self._call(obstore.delete_async(self._store, name))
            except FileNotFoundError:
                return

        await asyncio.gather(*map(one, names))

    async def _call(self, request: Any, *, seconds: float | None = _REQUEST_SECONDS) -> Any:
        """Await a request to the store; raises FileExistsError and FileNotFoundError as they are."""
        from obstore import exceptions

        try:
            async with asyncio.timeout(seconds):
                return await request
        except exceptions.AlreadyExistsError as problem:
            raise FileExistsError(str(problem)) from None
        except exceptions.NotFoundError as problem:
            raise FileNotFoundError(str(problem)) from None
        except FileNotFoundError:
            raise
        except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError) as problem:
            raise EngineError(
                f"{self.url} refuses this machine's credentials ({_first_line(problem)}): see docs/bucket.md for the "
                "permissions that a run needs"
            ) from None
        except exceptions.NotSupportedError as problem:
            raise EngineError(
                f"{self.url} cannot create an object only if there is none of its name ({_first_line(problem)}), which "
                "a run in a bucket rests on: use another store (docs/bucket.md lists those that can)"
            ) from None
        except (exceptions.BaseError, OSError, TimeoutError) as problem:
            raise StoreUnavailable(f"{self.url}: {_first_line(problem)}") from problem


def _first_line(problem: BaseException) -> str:
    return (str(problem).strip() or type(problem).__name__).splitlines()[0][:300]


def let_threads_end() -> None:
    """Wait for a moment after the last request, before the process may end.

    A thread of obstore that has just given an answer and still waits for the interpreter's lock when Python ends aborts
    the process (seen with obstore 0.12 on Python 3.11).
    """
    time.sleep(_THREAD_SECONDS)


def check_installed() -> None:
    """Refuse early, with what to install."""
    try:
        import msgspec
        import obstore
    except ImportError as error:
        raise ConfigError(f"--engine bucket needs the extra 'bucket' ({error}): {install_hint('bucket')}") from error
    del msgspec, obstore


def _open(url: str, options: "dict[str, Any]") -> "AnyStore":
    from obstore import exceptions
    from obstore.store import LocalStore, from_url

    try:
        if url.startswith("file://"):
            folder = Path(url.removeprefix("file://"))
            if not folder.is_absolute():
                raise ConfigError(f"bucket = {url}: a folder is named by its whole path, file:///mnt/share/run")
            folder.mkdir(parents=True, exist_ok=True)
            return LocalStore(folder)
        client = {"timeout": f"{_REQUEST_SECONDS:.0f} seconds"}
        if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1"):  # not heard beside other client options
            client["allow_http"] = "true"
        client |= options.get("client_options", {})
        return from_url(url, **{**options, "client_options": client})
    except (exceptions.BaseError, OSError, ValueError) as problem:
        raise ConfigError(
            f"bucket = {url} cannot be opened ({_first_line(problem)}): give s3://BUCKET/RUN, gs://BUCKET/RUN, "
            "az://CONTAINER/RUN or file:///FOLDER/RUN"
        ) from problem


async def check_store(store: Store) -> None:
    """Refuse a store that does not create only where there is nothing: two plans of a round would count."""
    name = f"checks/{os.getpid()}-{secrets.token_hex(8)}"
    try:
        first = await store.create(name, b"first")
        second = await store.create(name, b"second")
        kept = await store.read(name)
        await store.delete([name])
    except StoreUnavailable as problem:
        raise EngineError(f"the bucket cannot be used: {problem}") from problem
    if not first or second or kept != b"first":
        raise EngineError(
            "the bucket overwrites an object that it was asked to create only if there is none of its name, which a "
            "run in a bucket rests on: use another store (docs/bucket.md lists those that can)"
        )


class PatientStore(Store):
    """A store whose requests are repeated until they succeed or `deadline` (on the event loop's clock) is over.

    `sent_bytes` and `received_bytes` are the contents of its objects that travelled.
    """

    def __init__(self, store: Store, deadline: float) -> None:
        self._store = store
        self._deadline = deadline
        self.sent_bytes = 0
        self.received_bytes = 0

    async def create(self, name: str, data: Buffer) -> bool:
        created = await self._repeat(lambda: self._store.create(name, data))
        self.sent_bytes += len(data)
        return created

    async def put(self, name: str, data: "Buffer | Path") -> None:
        await self._repeat(lambda: self._store.put(name, data))
        self.sent_bytes += data.stat().st_size if isinstance(data, Path) else len(data)

    async def read(self, name: str) -> bytes | None:
        data = await self._repeat(lambda: self._store.read(name))
        self.received_bytes += len(data or b"")
        return data

    async def read_range(self, name: str, start: int, end: int) -> bytes | None:
        data = await self._repeat(lambda: self._store.read_range(name, start, end))
        self.received_bytes += len(data or b"")
        return data

    async def list(self, prefix: str) -> list[Stored]:
        return await self._repeat(lambda: self._store.list(prefix))

    async def delete(self, names: Sequence[str]) -> None:
        await self._repeat(lambda: self._store.delete(names))

    async def _repeat(self, request: Callable[[], Awaitable[T]]) -> T:
        clock = asyncio.get_running_loop().time
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await request()
            except StoreUnavailable as problem:
                if clock() + pause > self._deadline:
                    raise
                logger.info("%s: asked again in %.1f s", problem, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
