"""The mean of a planned round: each contributor reduces a range; one that does not come is computed by another worker.

Which contributions are in the mean, in what order and with what weights, the plan says; so every worker that computes a
range gives it the same bits. What comes from the bucket is checked against the digests in the plan. Data that does not
have them is in no mean: the worker that finds it so creates that verdict where the range of the mean would be, and so
all workers see the one or the other; after a verdict all reduce the round again, without that contribution.

Every worker computes one chunk of the mean itself, chosen at random, and compares it with what it was given. A range
with a wrong one is computed anew, put in place of the wrong one, and its author is named in an event. That finds broken
machines and crude lies; it is no protection against members of the run that lie in few chunks.
"""

import asyncio
import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.bucket import rules
from diloco.bucket.files import read_whole
from diloco.bucket.members import Emit
from diloco.bucket.records import Malformed, MeanRange, Post, RoundPlan, join_mean, round_prefix, split_mean
from diloco.bucket.settings import BucketSettings
from diloco.bucket.store import Store
from diloco.codecs.registry import codec
from diloco.engines.reduction import reduce_parts
from diloco.engines.rounds import Comparison

_CHUNKS_AHEAD = 2
"""Chunks that are read while the one before them is reduced."""


@dataclass(frozen=True)
class CollectedMean:
    """What is known of a mean that is here."""

    plan: RoundPlan
    """The plan, without contributions whose data could not be used."""
    comparison: Comparison
    reduce_seconds: float | None
    """How long this worker's own range took; None if it has none."""


class UnusableData(Exception):
    """A contribution's data is not what its worker has posted. `author`: the worker that says so."""

    def __init__(self, worker: int, author: int) -> None:
        super().__init__(worker, author)
        self.worker = worker
        self.author = author


class RoundRemoved(Exception):
    """The round is so old that it was removed while this worker was in it."""


async def collect_mean(
    store: Store,
    settings: BucketSettings,
    plan: RoundPlan,
    worker: int,
    own_data: Tensor | None,
    out: Tensor,
    *,
    emit: Emit,
    clock: Callable[[], float],
    seconds_since_plan: Callable[[], float],
) -> CollectedMean:
    """Put the whole mean of a round into `out`, which may be the memory of `own_data`; raises RoundRemoved.

    `own_data`: the encoded contribution of worker `worker`, this one, if it is in memory.
    """
    while True:
        mean = _Mean(store, settings, plan, worker, own_data, emit, clock)
        try:
            return await mean.collect(out, seconds_since_plan)
        except UnusableData as problem:
            told = {"member": problem.worker, "round": plan.key.sequence, "told_by": problem.author}
            emit("unusable_data", told)
            plan = plan.without(problem.worker)


class _Mean:
    """Brings the mean of one plan into memory."""

    def __init__(
        self,
        store: Store,
        settings: BucketSettings,
        plan: RoundPlan,
        worker: int,
        own_data: Tensor | None,
        emit: Emit,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._plan = plan
        self._worker = worker
        self._own_data = own_data
        self._emit = emit
        self._clock = clock
        without = "".join(f"-{worker}" for worker in plan.unusable)
        self._prefix = f"{round_prefix(plan.key)}mean{without}/"
        self._ranges = plan.ranges()
        self._missing = {index for index, chunks in enumerate(self._ranges) if chunks}
        # The mean may take the memory of `own_data`: ranges wait here until nothing of it is read any more.
        self._arrived: dict[int, Tensor] = {}
        self._comparisons: dict[int, Comparison] = {}
        self._authors: dict[int, int] = {}
        """Range -> the other worker that has computed it."""

    async def collect(self, out: Tensor, seconds_since_plan: Callable[[], float]) -> CollectedMean:
        settings = self._settings
        began = self._clock()
        reduce_seconds: float | None = None
        for index, post in enumerate(self._plan.contributors):
            if post.worker == self._worker and index in self._missing:
                await self._compute(index)
                reduce_seconds = self._clock() - began
        patience = settings.late_seconds + 2 * (reduce_seconds or 0.0)
        waiting_since = self._clock()
        while self._missing:
            if await self._fetch_ready() or not self._missing:
                continue
            if seconds_since_plan() > patience:
                late = sorted(self._missing)
                await self._compute(late[self._worker % len(late)])
                continue
            waited = self._clock() - waiting_since
            await asyncio.sleep(rules.poll_seconds(waited, settings.least_poll_seconds, settings.most_poll_seconds))
        if self._own_data is not None:  # a mean of earlier rounds was checked by those that were in them
            await self._check_some()
        for index, mean in self._arrived.items():
            chunks = self._ranges[index]
            rows = out[chunks[0].start : chunks[-1].stop]
            rows.copy_(mean.view(rows.shape))
        total = Comparison.empty(len(self._plan.contributors))
        for index in sorted(self._comparisons):
            total = total + self._comparisons[index]
        return CollectedMean(self._plan, total, reduce_seconds)

    # Ranges that other workers have computed

    async def _fetch_ready(self) -> bool:
        """Read the ranges that others have computed; whether there were any."""
        sizes = {stored.name.removeprefix(self._prefix): stored.size for stored in await self._store.list(self._prefix)}
        ready = sorted(index for index in self._missing if str(index) in sizes)
        for index in ready:
            content = await self._read_range_of_mean(index, sizes[str(index)])
            if content is None:  # it was replaced by a right one, or the round is removed
                continue
            try:
                self._open(index, content)
            except Malformed as problem:
                self._tell_false(index, str(problem))
                await self._replace(index)
            self._missing.discard(index)
        return bool(ready)

    async def _read_range_of_mean(self, index: int, size: int | None = None) -> bytearray | None:
        """None: it is gone. The rest of one that is longer than it can be is not read."""
        head = 4096 + 9 * len(self._plan.contributors) ** 2
        most = head + self._rows(index) * self._plan.encoding.mean_part_bytes
        return await read_whole(self._store, f"{self._prefix}{index}", most if size is None else min(size, most))

    def _rows(self, index: int) -> int:
        chunks = self._ranges[index]
        return chunks[-1].stop - chunks[0].start

    def _open(self, index: int, content: bytearray) -> None:
        """Take a range of the mean that another worker has computed; raises UnusableData if it is a verdict."""
        head, data = split_mean(content, self._rows(index) * self._plan.encoding.mean_part_bytes)
        workers = [post.worker for post in self._plan.contributors]
        if head.unusable is not None:
            if head.unusable not in workers:
                raise Malformed(f"a verdict on worker {head.unusable}, which has not contributed")
            raise UnusableData(head.unusable, head.author)
        count = len(workers)
        sound = all(map(math.isfinite, head.comparison)) and min(head.comparison[-count - 1 :], default=-1) >= 0
        if len(head.comparison) != count * (count + 1) // 2 + count + 1 or not sound:
            raise Malformed(f"a comparison that {count} contributors cannot have")
        self._comparisons[index] = Comparison.of_numbers(head.comparison, count)
        self._arrived[index] = torch.frombuffer(data, dtype=torch.uint8)
        self._authors[index] = head.author

    async def _check_some(self) -> None:
        """Compare one chunk of what others have computed with what it must be; its range is computed anew if it is
        wrong."""
        given = [(index, chunk) for index in self._authors for chunk in self._ranges[index]]
        if not given:
            return
        index, chunk = random.choice(given)  # any other worker checks others
        first = self._ranges[index][0].start
        size = self._plan.encoding.mean_part_bytes
        right = torch.empty((len(chunk), size), dtype=torch.uint8)
        try:
            await self._reduce_chunk(chunk, await self._read_chunk(chunk, patience=0.0), right)
        except UnusableData:  # contributions are there for a few rounds only
            return
        there = self._arrived[index].view(-1, size)[chunk.start - first : chunk.stop - first]
        if not torch.equal(right, there):
            self._tell_false(index, "it is not the mean of the contributions", member=self._authors[index])
            await self._replace(index)

    def _tell_false(self, index: int, reason: str, **more: int) -> None:
        self._emit("false_range", {"round": self._plan.key.sequence, "range": index, "reason": reason, **more})

    async def _replace(self, index: int) -> None:
        """Compute a range that another worker has got wrong, and put it in place of the wrong one."""
        await self._reduce(index)
        await self._store.put(f"{self._prefix}{index}", await self._content(index))

    # Ranges that this worker computes

    async def _compute(self, index: int) -> None:
        """Compute a range, and put it into the bucket unless another worker has."""
        name = f"{self._prefix}{index}"
        try:
            await self._reduce(index)
            content = await self._content(index)
        except UnusableData as problem:
            nothing = hashlib.sha256().digest()
            content = join_mean(MeanRange(self._worker, (), nothing, unusable=problem.worker), b"")
        if not await self._store.create(name, content):
            there = await self._read_range_of_mean(index)
            content = content if there is None else bytes(there)
        # Data that is gone may be that of a round which is removed as a whole: its plan goes first.
        if await self._store.read_range(f"{round_prefix(self._plan.key)}plan", 0, 1) is None:
            await self._store.delete([name])
            raise RoundRemoved(f"round {self._plan.key.sequence} was removed")
        try:
            self._open(index, bytearray(content))
        except Malformed as problem:
            self._tell_false(index, str(problem))
            await self._replace(index)
        if self._authors.get(index) == self._worker:
            del self._authors[index]
        self._missing.discard(index)

    async def _content(self, index: int) -> bytes:
        data = bytes(memory_of(self._arrived[index]))
        digest = (await asyncio.to_thread(hashlib.sha256, data)).digest()
        return join_mean(MeanRange(self._worker, tuple(self._comparisons[index].numbers), digest), data)

    async def _reduce(self, index: int) -> None:
        """Compute a range from the contributions, chunk by chunk.

        This worker's own contribution is taken from memory for its own range alone. One that it computes in place of
        another worker follows from the bucket, so that both would come to the same: data may be cut there.
        """
        plan = self._plan
        is_own = plan.contributors[index].worker == self._worker
        chunks = self._ranges[index]
        first = chunks[0].start
        out = torch.empty((self._rows(index), plan.encoding.mean_part_bytes), dtype=torch.uint8)
        total = Comparison.empty(len(plan.contributors))
        reading = [
            asyncio.ensure_future(self._read_chunk(chunk, from_memory=is_own)) for chunk in chunks[:_CHUNKS_AHEAD]
        ]
        try:
            for position, chunk in enumerate(chunks):
                encoded = await reading[position]
                ahead = position + _CHUNKS_AHEAD
                if ahead < len(chunks):
                    reading.append(asyncio.ensure_future(self._read_chunk(chunks[ahead], from_memory=is_own)))
                total = total + await self._reduce_chunk(chunk, encoded, out[chunk.start - first : chunk.stop - first])
        finally:
            for request in reading:
                request.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        self._arrived[index] = out
        self._comparisons[index] = total
        self._authors.pop(index, None)

    async def _reduce_chunk(self, chunk: range, encoded: list[Tensor], out: Tensor) -> Comparison:
        plan = self._plan
        return await asyncio.to_thread(
            reduce_parts,
            codec(plan.encoding.codec),
            encoded,
            plan.decision.weights,
            plan.encoding.part_elements,
            out,
            scales=plan.decision.scales,
            merge=plan.decision.merge,
            first_part=chunk.start,
        )

    async def _read_chunk(
        self, chunk: range, patience: float | None = None, *, from_memory: bool = True
    ) -> list[Tensor]:
        """The parts of a chunk from all contributions, in worker order. `patience`: with what is not there yet.

        `from_memory`: this worker's own contribution is, if it is there.
        """
        seconds = self._settings.late_seconds if patience is None else patience
        own = self._worker if from_memory and self._own_data is not None else None
        reading = [self._read_parts(post, chunk, seconds, own) for post in self._plan.contributors]
        return list(await asyncio.gather(*reading))

    async def _read_parts(self, post: Post, chunk: range, patience: float, own: int | None) -> Tensor:
        """Raises UnusableData if they are not there, or not what was posted, also some time later: a shared folder may
        show a file late. Those of worker `own` are in memory."""
        if post.worker == own:
            assert self._own_data is not None
            return self._own_data[chunk.start : chunk.stop]
        settings = self._settings
        size = post.encoding.part_bytes
        digest = post.digests[post.encoding.chunks().index(chunk)]
        since = self._clock()
        while True:
            data = await self._store.read_range(post.data_name, chunk.start * size, chunk.stop * size)
            if data is not None and hashlib.sha256(data).digest() == digest:
                return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(len(chunk), size)
            waited = self._clock() - since
            if waited >= patience:
                raise UnusableData(post.worker, self._worker)
            await asyncio.sleep(rules.poll_seconds(waited, settings.least_poll_seconds, settings.most_poll_seconds))


def memory_of(data: Tensor) -> memoryview:
    """The memory of a contiguous uint8 tensor."""
    view: memoryview = data.view(-1).numpy().data if data.numel() else memoryview(b"")
    return view
