"""A look into a run's bucket from outside: its files, and how far its workers are. Imports no torch for the files."""

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from diloco.bucket.files import fetch_file, put_files
from diloco.bucket.store import (
    ObjectStore,
    PatientStore,
    Store,
    StoreUnavailable,
    check_installed,
    check_store,
    let_threads_end,
)
from diloco.errors import EngineError

if TYPE_CHECKING:
    from diloco.swarm.protocol.status import RunStatus

T = TypeVar("T")

_PATIENCE_SECONDS = 60.0
_FILE_SECONDS = 3600.0


class BucketVisit:
    """A run in a bucket, as a machine sees it that is no worker of it."""

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        check_installed()
        self.url = url
        self._options = dict(options or {})

    def check(self) -> None:
        """Refuse a bucket that cannot be written, or that no run can rest on."""
        self._run(check_store, _PATIENCE_SECONDS)

    def has(self, name: str) -> bool:
        """Whether the run has this file."""
        return self._run(lambda store: store.read_range(f"files/{name}", 0, 1), _PATIENCE_SECONDS) is not None

    def put(self, files: Mapping[str, Path], *, always: frozenset[str] = frozenset()) -> None:
        """Put files into the bucket. `always`: those that replace a file of their size too."""
        self._run(lambda store: put_files(store, files, always), _FILE_SECONDS)

    def fetch(
        self, name: str, path: Path, most_bytes: int = 1 << 42, digest: str | None = None, *, first: int = 0
    ) -> None:
        """Fetch a file (with that sha256), whole or not at all. `first` is for runs with several members to ask."""
        del first
        self._run(lambda store: fetch_file(store, name, path, most_bytes, digest), _FILE_SECONDS)

    def status(self) -> "RunStatus":
        """The workers, as their latest beats tell them."""
        from diloco.bucket.members import BucketMembers
        from diloco.bucket.settings import BucketSettings

        members = BucketMembers(BucketSettings(self.url, Path()), lambda _type, _fields: None, time.time)
        self._run(members.listen, _PATIENCE_SECONDS)
        return members.others_status()

    def _run(self, work: "Callable[[Store], Any]", seconds: float) -> Any:
        async def patiently() -> Any:
            store = ObjectStore(self.url, self._options)
            return await work(PatientStore(store, asyncio.get_running_loop().time() + seconds))

        try:
            return asyncio.run(patiently())
        except StoreUnavailable as problem:
            raise EngineError(f"{self.url} cannot be reached: {problem}") from problem
        finally:
            let_threads_end()
