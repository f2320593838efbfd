"""The mean of a planned round: each contributor reduces a range; one that does not come is computed by another worker.

Which contributions are in the mean, in what order and with what weights, the plan says; so every worker that computes a
range gives it the same bits. What comes from the bucket is checked against the digests in the plan.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.bucket import rules
from diloco.bucket.members import Emit
from diloco.bucket.records import Malformed, MeanRange, Post, RoundPlan, join_mean, round_prefix, split_mean
from diloco.bucket.settings import BucketSettings
from diloco.bucket.store import Store, StoreUnavailable
from diloco.codecs.registry import codec
from diloco.engines.reduction import reduce_parts
from diloco.engines.rounds import Comparison

_CHUNKS_AHEAD = 2
"""Chunks that are read while the one before them is reduced."""


@dataclass(frozen=True)
class CollectedMean:
    """What is known of a mean that is here."""

    comparison: Comparison
    reduce_seconds: float | None
    """How long this worker's own range took; None if it has none."""


class MeanCollector:
    """Brings the mean of one round into memory."""

    def __init__(
        self,
        store: Store,
        settings: BucketSettings,
        plan: RoundPlan,
        worker: int,
        own_data: Tensor | None,
        emit: Emit,
    ) -> None:
        """`own_data`: the encoded contribution of worker `worker`, this one, if it is in memory."""
        self._store = store
        self._settings = settings
        self._plan = plan
        self._worker = worker
        self._own_data = own_data
        self._emit = emit
        self._prefix = f"{round_prefix(plan.key)}mean/"
        self._ranges = plan.ranges()
        self._missing = {index for index, chunks in enumerate(self._ranges) if chunks}
        # The mean may take the memory of `own_data`: ranges wait here until nothing of it is read any more.
        self._arrived: dict[int, Tensor] = {}
        self._comparisons: dict[int, Comparison] = {}

    async def collect(
        self, out: Tensor, clock: Callable[[], float], now: Callable[[], float], made_at: float
    ) -> CollectedMean:
        """Put the whole mean into `out`. `made_at`: when the plan was made, on the store's clock `now`."""
        settings = self._settings
        began = clock()
        reduce_seconds: float | None = None
        for index, post in enumerate(self._plan.contributors):
            if post.worker == self._worker and index in self._missing:
                await self._compute(index)
                reduce_seconds = clock() - began
        patience = settings.late_seconds + 2 * (reduce_seconds or 0.0)
        waiting_since = clock()
        while self._missing:
            if await self._fetch_ready() or not self._missing:
                continue
            if now() - made_at > patience:
                late = sorted(self._missing)
                await self._compute(late[self._worker % len(late)])
                continue
            waited = clock() - waiting_since
            await asyncio.sleep(rules.poll_seconds(waited, settings.least_poll_seconds, settings.most_poll_seconds))
        for index, mean in self._arrived.items():
            chunks = self._ranges[index]
            rows = out[chunks[0].start : chunks[-1].stop]
            rows.copy_(mean.view(rows.shape))
        total = Comparison.empty(len(self._plan.contributors))
        for index in sorted(self._comparisons):
            total = total + self._comparisons[index]
        return CollectedMean(total, reduce_seconds)

    async def _fetch_ready(self) -> bool:
        """Read the ranges that others have computed; whether there were any."""
        there = {stored.name.removeprefix(self._prefix) for stored in await self._store.list(self._prefix)}
        ready = sorted(index for index in self._missing if str(index) in there)
        contents = await asyncio.gather(*(self._store.read(f"{self._prefix}{index}") for index in ready))
        for index, content in zip(ready, contents, strict=True):
            if content is None:
                continue
            try:
                self._open(index, content)
            except Malformed as problem:
                about = {"round": self._plan.key.sequence, "range": index, "reason": str(problem)}
                self._emit("false_range", about)
                await self._reduce(index)
            self._missing.discard(index)
        return bool(ready)

    def _open(self, index: int, content: bytes) -> None:
        """Take a range of the mean that another worker has computed."""
        chunks = self._ranges[index]
        rows = chunks[-1].stop - chunks[0].start
        head, data = split_mean(content, rows * self._plan.encoding.mean_part_bytes)
        count = len(self._plan.contributors)
        if len(head.comparison) != count * (count + 1) // 2 + count + 1:
            raise Malformed(f"a comparison of {len(head.comparison)} numbers for {count} contributors")
        self._comparisons[index] = Comparison.of_numbers(head.comparison, count)
        self._arrived[index] = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    async def _compute(self, index: int) -> None:
        """Compute a range, and put it into the bucket unless another worker has."""
        await self._reduce(index)
        content = bytes(memory_of(self._arrived[index]))
        digest = (await asyncio.to_thread(hashlib.sha256, content)).digest()
        head = MeanRange(self._worker, tuple(self._comparisons[index].numbers), digest)
        await self._store.create(f"{self._prefix}{index}", join_mean(head, content))
        self._missing.discard(index)

    async def _reduce(self, index: int) -> None:
        """Compute a range from the contributions, chunk by chunk."""
        plan = self._plan
        encoding = plan.encoding
        decision = plan.decision
        chunks = self._ranges[index]
        first = chunks[0].start
        out = torch.empty((chunks[-1].stop - first, encoding.mean_part_bytes), dtype=torch.uint8)
        total = Comparison.empty(len(plan.contributors))
        how = codec(encoding.codec)
        reading = [asyncio.ensure_future(self._read_chunk(chunk)) for chunk in chunks[:_CHUNKS_AHEAD]]
        try:
            for position, chunk in enumerate(chunks):
                encoded = await reading[position]
                ahead = position + _CHUNKS_AHEAD
                if ahead < len(chunks):
                    reading.append(asyncio.ensure_future(self._read_chunk(chunks[ahead])))
                total = total + await asyncio.to_thread(
                    reduce_parts,
                    how,
                    encoded,
                    decision.weights,
                    encoding.part_elements,
                    out[chunk.start - first : chunk.stop - first],
                    scales=decision.scales,
                    merge=decision.merge,
                    first_part=chunk.start,
                )
        finally:
            for request in reading:
                request.cancel()
        self._arrived[index] = out
        self._comparisons[index] = total

    async def _read_chunk(self, chunk: range) -> list[Tensor]:
        """The parts of a chunk from all contributions, in worker order."""
        return list(await asyncio.gather(*(self._read_parts(post, chunk) for post in self._plan.contributors)))

    async def _read_parts(self, post: Post, chunk: range) -> Tensor:
        if self._own_data is not None and post.worker == self._worker:
            return self._own_data[chunk.start : chunk.stop]
        size = post.encoding.part_bytes
        data = await self._store.read_range(post.data_name, chunk.start * size, chunk.stop * size)
        digest = post.digests[post.encoding.chunks().index(chunk)]
        if data is None or hashlib.sha256(data).digest() != digest:
            raise StoreUnavailable(f"{post.data_name} is not there, or not what worker {post.worker} has posted")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(chunk), size)


def memory_of(data: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor."""
    view: memoryview = data.view(-1).numpy().data if data.numel() else memoryview(b"")
    return view
