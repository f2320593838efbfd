"""Workers that meet in a bucket: a folder, a server of moto's, or a store in memory that fails as it is told to."""

import asyncio
import atexit
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco.bucket import records
from diloco.bucket.engine import BucketEngine
from diloco.bucket.records import Post, RoundPlan, VectorEncoding
from diloco.bucket.settings import BucketSettings
from diloco.bucket.store import Buffer, Store, Stored, StoreUnavailable
from diloco.engines.header import pack
from diloco.engines.rounds import Contribution, RoundKey
from support.swarm.engines import ElasticWorkers

QUICK: dict[str, Any] = {
    "beat_seconds": 0.2,
    "lost_seconds": 30.0,
    "late_seconds": 10.0,
    "least_poll_seconds": 0.02,
    "patience": 1000.0,
    "timeout_seconds": 60.0,
}
"""Times for workers that are all on this machine."""
SMALL_CHUNK_BYTES = 1 << 10
"""Small vectors have several chunks then, and all workers a range of their mean."""


def bucket_settings(url: str, folder: Path, **changed: Any) -> BucketSettings:
    return BucketSettings(url, folder, **{**QUICK, **changed})


class LoopbackBucket(ElasticWorkers):
    """`workers` engines in one bucket, by default in a folder of its own."""

    def __init__(self, workers: int, *, store: "Callable[[], Store] | None" = None, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="diloco-bucket-"))
        self.engines: list[BucketEngine] = []
        self._settings = {"url": f"file://{self.folder}/bucket", **settings}
        self._store = store
        self._chunk_bytes = records._LEAST_CHUNK_BYTES
        records._LEAST_CHUNK_BYTES = SMALL_CHUNK_BYTES
        self.events: list[tuple[str, dict[str, Any]]] = []
        atexit.register(self.close)
        for machine in range(workers):
            self.add(machine)

    def add(self, machine: int) -> BucketEngine:
        settings = bucket_settings(folder=self.folder / f"machine-{machine}", **self._settings)
        store = None if self._store is None else self._store()
        engine = BucketEngine(settings, store=store, on_event=lambda type_, told: self.events.append((type_, {**told})))
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        atexit.unregister(self.close)
        records._LEAST_CHUNK_BYTES = self._chunk_bytes
        for engine in self.engines:
            engine.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> "LoopbackBucket":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclass
class Objects:
    """The contents of a store in memory, with the clock of its server."""

    by_name: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    created: dict[str, float] = field(default_factory=dict)
    """When there was first an object of this name."""
    now: Callable[[], float] = time.time
    lock: threading.Lock = field(default_factory=threading.Lock)


class MemoryStore(Store):
    """One worker's way to `objects`. The worst that an object store may do is switched on by attributes."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.failures = 0
        """So many of the next requests fail; every second one has been carried out all the same."""
        self.lag_seconds = 0.0
        """Listings show an object of another worker so late."""
        self.overwrites = False
        """`create` puts the object in place of one that is there."""
        self.before: Callable[[str, str], None] = lambda _request, _name: None
        """Called with the request and the object's name before each."""
        self.alter: Callable[[str, bytes], bytes] = lambda _name, data: data
        """What is written instead of an object's content."""
        self._own: set[str] = set()

    async def _request(self, request: str, name: str) -> bool:
        """Whether an answer reaches the worker."""
        await asyncio.sleep(0)
        self.before(request, name)
        if self.failures:
            self.failures -= 1
            if self.failures % 2:
                raise StoreUnavailable(f"503 for {request} {name}")
            return False
        return True

    def _write(self, name: str, data: Buffer) -> None:
        self._own.add(name)
        self.objects.created.setdefault(name, self.objects.now())
        self.objects.by_name[name] = (self.alter(name, bytes(data)), self.objects.now())

    async def create(self, name: str, data: Buffer) -> bool:
        answered = await self._request("create", name)
        with self.objects.lock:
            there = self.objects.by_name.get(name)
            if there is None or self.overwrites:
                self._write(name, data)
        if not answered:
            raise StoreUnavailable(f"the answer to create {name} was lost")
        return there is None or self.overwrites or there[0] == bytes(data)

    async def put(self, name: str, data: Buffer | Path) -> None:
        answered = await self._request("put", name)
        with self.objects.lock:
            self._write(name, data.read_bytes() if isinstance(data, Path) else data)
        if not answered:
            raise StoreUnavailable(f"the answer to put {name} was lost")

    async def read(self, name: str) -> bytes | None:
        if not await self._request("read", name):
            raise StoreUnavailable("500")
        return self.objects.by_name.get(name, (None, 0.0))[0]

    async def read_range(self, name: str, start: int, end: int) -> bytes | None:
        data = await self.read(name)
        return None if data is None else data[start:end]

    async def list(self, prefix: str) -> list[Stored]:
        if not await self._request("list", prefix):
            raise StoreUnavailable("500")
        with self.objects.lock:
            there = list(self.objects.by_name.items())
        shown = self.objects.now() - self.lag_seconds
        hidden = {name for name, first in self.objects.created.items() if first > shown} - self._own
        return sorted(
            Stored(name, len(data), modified)
            for name, (data, modified) in there
            if name.startswith(prefix) and name not in hidden
        )

    async def delete(self, names: Sequence[str]) -> None:
        await self._request("delete", "")
        with self.objects.lock:
            for name in names:
                self.objects.by_name.pop(name, None)


def post_of(worker: int, key: RoundKey, *, layout: str = "same", anchor: str = "same") -> Post:
    """A post of 12 parts, of which there are no data anywhere."""
    encoding = VectorEncoding("fp32", 1024, 12)
    header = pack(key, Contribution(None, 1.0, 1.0, anchor, layout))  # type: ignore[arg-type]
    return Post(worker, header, b"", f"{worker:016x}", encoding, (bytes(32),) * len(encoding.chunks()))


def plan_of(key: RoundKey, workers: Sequence[int]) -> RoundPlan:
    return RoundPlan(key, tuple(post_of(worker, key) for worker in workers), None)
