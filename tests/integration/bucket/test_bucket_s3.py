"""Workers that meet in a bucket of a real S3 server, over HTTP."""

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.bucket.files import download
from diloco.bucket.store import ObjectStore, check_store
from diloco.core.config import SyncConfig
from diloco.errors import EngineError
from support.bucket import LoopbackBucket
from support.problem import train
from support.s3 import S3Server, s3_server
from support.threads import in_threads

pytest.importorskip("moto", reason="moto is in the extra dev")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


def test_a_trajectory_over_s3_is_the_local_engines_bit_for_bit(server: S3Server) -> None:
    sync = SyncConfig(4, "int4", fragments=2, overlap_steps=1)
    with LoopbackBucket(2, url="s3://bucket/run", options=server.options, least_poll_seconds=0.05) as world:
        stories, _ = world.train(sync, 14, 0)
    local = in_threads(2, lambda engine: train(engine, sync, 14).without_mean())
    for mine, theirs in zip(stories, local, strict=True):
        assert replace(mine.without_mean(), bytes_sent=0) == replace(theirs, bytes_sent=0)


def test_an_object_in_s3_is_created_once_read_in_ranges_and_sent_in_parts(server: S3Server, tmp_path: Path) -> None:
    content = secrets.token_bytes((17 << 20) + 5)
    (tmp_path / "sent").write_bytes(content)

    async def use() -> None:
        store = ObjectStore("s3://bucket/objects", server.options)
        await check_store(store)
        assert await store.create("a/b", b"first") and not await store.create("a/b", b"second")
        assert await store.create("a/b", b"first"), "a repetition of a request whose answer was lost"
        assert await store.read_range("a/b", 1, 3) == b"ir"
        assert await store.read_range("a/b", 3, 99) == b"st" and await store.read_range("a/b", 7, 9) == b""
        assert await store.read("a/c") is None and await store.read_range("a/c", 0, 1) is None
        await store.put("large", tmp_path / "sent")
        assert [(each.name, each.size) for each in await store.list("")] == [("a/b", 5), ("large", len(content))]
        await download(store, "large", len(content), tmp_path / "got")
        await store.delete(["large", "a/b", "a/c"])
        assert await store.list("") == []

    asyncio.run(use())
    assert (tmp_path / "got").read_bytes() == content


def test_a_bucket_that_is_not_there_is_told_as_such(server: S3Server) -> None:
    with pytest.raises(EngineError, match="has no bucket or folder to write into: make it first"):
        LoopbackBucket(1, url="s3://nowhere/run", options=server.options, timeout_seconds=1.0)
