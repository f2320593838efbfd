"""The bytes of one attempt at a round: encoded parts to their reducers, and the means back.

Each contributor reduces a range of parts. Between two workers there is one stream in each direction: the opener sends
its parts of the other's range, and gets the mean of that range back, chunk by chunk as it is ready. A reducer
accumulates in fp32 in worker order and encodes once, so that all decode the same bytes; all engines use
`engines.reduction.reduce_parts`, so the bits are those of the local engine.

The audit is asked about what arrives (audit.py), and may find that a worker lies (Lie). Any other failure names a
worker too (TransferFailed); the leader decides what follows.

All waits are bounded. A reducer that must wait for others sends an empty frame every second, which is no progress: it
names the contributor whose parts do not come before the others, which wait longer, name the reducer itself.
"""

import asyncio
import logging
import math
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from diloco.codecs.registry import codec
from diloco.core.merging import num_products
from diloco.engines.reduction import reduce_parts
from diloco.engines.rounds import Comparison
from diloco.memory import blank
from diloco.swarm import timing
from diloco.swarm.network.transport import Stream, Transport, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.audit import Lie, TransferAudit
from diloco.swarm.node.frames import DataFrames, Quiet, read_frame, write_frame
from diloco.swarm.protocol.certificate import Notary, RangeSignatures, SignedRange, Vote
from diloco.swarm.protocol.messages import OpenParts, Withheld
from diloco.swarm.protocol.plan import Entry, Plan
from diloco.swarm.protocol.wire import Malformed, encode
from diloco.swarm.trainer import PostedRound

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 1 << 22
BATCH_ELEMENTS = 1 << 19  # decoded at a time: as many as scratch memory has
_CHUNKS, _LEAST_ELEMENTS = 16, 1 << 16  # a range in as many chunks: means travel back while parts still arrive
_LEAST_MEASURED_BYTES = 1 << 16
_EXPECTED = (Unreachable, Malformed)  # any other exception is a fault of this worker's program, and blames no peer
# One thread, which gives torch large pieces: each operation takes the GIL from the transfers.
_reducer = ThreadPoolExecutor(1, "diloco-reduce")


class TransferFailed(Exception):
    """The transfer with one worker failed: it is lost or cut off, or sends what cannot be read.

    `withheld`: it answers, and does not send its parts, or the mean of its range.
    """

    def __init__(self, peer: str, reason: str, *, withheld: Withheld | None = None) -> None:
        super().__init__(reason)
        self.peer = peer
        self.withheld = withheld


class Transfer:
    """`run` returns when the whole mean is here; other workers may send and fetch parts until `close`."""

    def __init__(
        self,
        plan: Plan,
        posted: PostedRound,
        transport: Transport,
        stall_seconds: float,
        notary: Notary,
        audit: TransferAudit,
        parts_seconds: float,
    ) -> None:
        """`parts_seconds`: how long the next parts of a contributor may take."""
        self.plan = plan
        self.posted = posted
        self._transport = transport
        self._stall = stall_seconds
        self.audit = audit
        self._parts_seconds = parts_seconds
        self._codec = codec(posted.codec)
        self._means = self._codec.for_means
        self._width = self._codec.part_bytes(posted.part_elements)
        self._mean_width = self._means.part_bytes(posted.part_elements)
        self._ranges = plan.ranges(posted.num_parts)
        self._mine = self._ranges.get(transport.peer, range(0))
        size = len(self._mine) * self._width
        self._parts: dict[str, memoryview] = {}
        """The parts of this worker's range, by contributor; its own are there already."""
        for entry in plan.contributors:
            is_own = entry.peer == transport.peer
            self._parts[entry.peer] = self._contribution(self._mine) if is_own else blank(size)
        self._arrived = {peer: len(self._mine) if peer == transport.peer else 0 for peer in self._parts}
        self._own_comparison = self._others_comparison = Comparison.empty(len(plan.contributors))
        self._reduced = 0
        self._signatures = RangeSignatures(plan, posted.num_parts, self._mean_width, notary)
        self._news = asyncio.Event()
        self._trouble: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Read, also if `run` is over.
        self._trouble.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._streams = set[Stream]()
        self._tasks = list[asyncio.Task[None]]()
        self.bytes_sent = self.bytes_received = 0
        self.reduce_seconds = 0.0
        self.rates: dict[str, float] = {}  # bytes a second at which the parts of others have arrived

    def _contribution(self, rows: range) -> memoryview:
        return self.posted.contribution.view[rows.start * self._width : rows.stop * self._width]

    def _mean(self, rows: range) -> memoryview:
        return self.posted.mean.view[rows.start * self._mean_width : rows.stop * self._mean_width]

    @property
    def _chunk_rows(self) -> int:
        """Few enough that the first means are soon on their way; each chunk costs several turns of the loop."""
        wanted = max(-(-len(self._mine) // _CHUNKS), _LEAST_ELEMENTS // self.posted.part_elements)
        return max(1, min(_CHUNK_BYTES // max(self._width, self._mean_width), wanted))

    # As a contributor

    async def run(self) -> None:
        """Raises TransferFailed or Lie; the exchange then goes on until `close`, so that others find the same."""
        contributors = self.plan.contributors
        me = self._transport.peer
        others = [entry for entry in contributors if entry.peer != me and len(self._ranges[entry.peer])]
        tasks = [asyncio.create_task(work) for work in (self._reduce(), *(self._exchange(e) for e in others))]
        self._tasks = tasks
        waiting = {*tasks, asyncio.ensure_future(self._trouble)}
        while any(not task.done() for task in tasks):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _exchange(self, reducer: Entry) -> None:
        """Send this worker's parts of the reducer's range, and fetch the mean of that range."""
        rows = self._ranges[reducer.peer]
        try:
            stream = await self._transport.open_stream(reducer.peer, self._stall)
            self._streams.add(stream)
            opening = OpenParts(self.plan.key.sequence, self.plan.authority)
            await write_frame(stream, encode(opening), self._stall)
            contributes = self._transport.peer in self._parts
            async with asyncio.TaskGroup() as both:
                if contributes:
                    await write_frame(stream, self.audit.commit(rows), self._stall)
                    both.create_task(self._send(stream, self._contribution(rows)))
                both.create_task(self._fetch(stream, rows))
            self._close_stream(stream)
            self.audit.check_mean(reducer.peer)
        except (Unreachable, Malformed, ExceptionGroup) as problem:
            if not isinstance(cause := _first(problem), _EXPECTED):
                raise cause from None
            withheld: Withheld | None = "mean" if isinstance(cause, Quiet) else None
            raise TransferFailed(reducer.peer, str(cause), withheld=withheld) from None

    async def _send(self, stream: Stream, data: memoryview) -> None:
        for first in range(0, len(data), _CHUNK_BYTES):
            await stream.write(data[first : first + _CHUNK_BYTES], self._stall)

    async def _fetch(self, stream: Stream, rows: range) -> None:
        """Receive the mean of these rows. What has come is hashed and audited while the rest arrives."""
        into = self._mean(rows)
        width = self._mean_width
        loop = asyncio.get_running_loop()
        contributors = len(self.plan.contributors)
        received = checked = 0  # bytes, rows
        frames = DataFrames(stream, self._stall, timing.MEAN_SHARE * self._parts_seconds)
        taken: list[asyncio.Future[None]] = []
        while received < len(into):
            received += await frames.read_into(into[received:])
            if received // width - checked >= self._chunk_rows or received == len(into):
                part = range(rows.start + checked, rows.start + received // width)
                taken.append(loop.run_in_executor(_reducer, self._take_mean, part, stream.peer))
                checked = received // width
        if rows:
            data = await read_frame(stream, comparison_bytes(contributors), self._stall)
            self._others_comparison += unpack_comparison(data, contributors, len(rows))
        await asyncio.gather(*taken)
        if rows:
            told = await read_frame(stream, self._signatures.told_bytes, self._stall)
            self._signatures.record(stream.peer, told)

    @property
    def vote(self) -> Vote:
        """This worker's vote for the mean, once `run` has returned."""
        return self._signatures.vote()

    @property
    def ranges(self) -> tuple[SignedRange, ...]:
        """The signed ranges of the mean, once `run` has returned."""
        return self._signatures.ranges

    @property
    def comparison(self) -> Comparison:
        """The comparison of the contributions, once `run` has returned; the reducers may lie about it."""
        return self._others_comparison + self._own_comparison

    # As a reducer

    async def serve(self, stream: Stream) -> None:
        """A worker of this round has opened a stream: receive its parts, send the mean of this worker's range."""
        self._streams.add(stream)
        try:
            async with asyncio.TaskGroup() as both:
                if stream.peer in self._parts:
                    both.create_task(self._receive(stream))
                both.create_task(self._send_mean(stream))
        except ExceptionGroup as problem:
            incomplete = self._arrived.get(stream.peer, math.inf) < len(self._mine)
            expected = isinstance(cause := _first(problem), _EXPECTED)
            silent = isinstance(cause, Unreachable) and not (cause.broken or cause.gone)
            withheld: Withheld | None = "parts" if silent else None
            if incomplete and not self._trouble.done():
                failed = TransferFailed(stream.peer, str(cause), withheld=withheld)
                self._trouble.set_exception(failed if expected else cause)
            if not expected:
                raise cause from None
        finally:
            self._close_stream(stream)

    async def _receive(self, stream: Stream) -> None:
        into = self._parts[stream.peer]
        width = self._width
        commitment = await read_frame(stream, self.audit.commitment_bytes, self._stall)
        self.audit.read_commitment(stream.peer, commitment)
        await stream.read_into(into[:1], self._stall)
        started = clock.now()
        for first in range(0, len(self._mine), self._chunk_rows):
            last = min(first + self._chunk_rows, len(self._mine))
            await stream.read_into(into[max(1, first * width) : last * width], self._stall)
            self._arrived[stream.peer] = last
            self._notify()
        if len(into) >= _LEAST_MEASURED_BYTES:
            self.rates[stream.peer] = len(into) / max(clock.now() - started, 1e-6)

    async def _send_mean(self, stream: Stream) -> None:
        sent = 0
        width = self._mean_width
        mean = self._mean(self._mine)
        while sent < len(self._mine):
            await self._wait_until(partial(self._is_reduced, sent + 1), timing.ALIVE_SECONDS)
            last = min(self._reduced, sent + self._chunk_rows)
            await write_frame(stream, mean[sent * width : last * width], self._stall)
            sent = last
        if len(self._mine):
            await write_frame(stream, pack_comparison(self._own_comparison), self._stall)
            await write_frame(stream, self._signatures.own(self._transport.peer), self._stall)

    async def _reduce(self) -> None:
        """Reduce this worker's range. Only this task writes into the mean: a thread may outlive an attempt, and must
        not disturb the next one."""
        loop = asyncio.get_running_loop()
        width = self._mean_width
        into = self._mean(self._mine)
        for first in range(0, len(self._mine), self._chunk_rows):
            last = min(first + self._chunk_rows, len(self._mine))
            if not await self._wait_until(partial(self._have_arrived, last), self._parts_seconds):
                late = min(self._arrived, key=lambda peer: self._arrived[peer])
                raise TransferFailed(late, "its parts do not come", withheld="parts")
            started = clock.now()
            mean, squares, comparison = await loop.run_in_executor(_reducer, self._reduce_rows, range(first, last))
            self.reduce_seconds += clock.now() - started
            if (lie := self.audit.find_long(squares)) is not None:
                raise await self._proved(lie, last)
            self._own_comparison += comparison
            into[first * width : last * width] = mean.view(-1).numpy().data
            if last == len(self._mine):
                self.audit.check_range()
                told = await loop.run_in_executor(_reducer, self.audit.compare_directions, self._parts)
                self._signatures.sign(self._transport.peer, told)
            self._reduced = last
            self._notify()

    async def _proved(self, lie: Lie, rows: int) -> Lie:
        """Return the lie of a contributor of whose parts `rows` are reduced: with its proof, if all of the range
        arrive."""
        if not await self._wait_until(lambda: self._arrived[lie.peer] == len(self._mine), self._parts_seconds):
            return lie
        parts = self._parts[lie.peer]
        rest = parts[rows * self._width :]
        return await asyncio.get_running_loop().run_in_executor(_reducer, self.audit.prove_long, lie, parts, rest)

    def _is_reduced(self, rows: int) -> bool:
        return self._reduced >= rows

    def _have_arrived(self, rows: int) -> bool:
        return min(self._arrived.values()) >= rows

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def _wait_until(self, met: Callable[[], bool], seconds: float) -> bool:
        """Return when `met()`, or after `seconds`; whether it is met."""
        try:
            async with asyncio.timeout(seconds):
                while not met():
                    await self._news.wait()
        except TimeoutError:
            return met()
        return True

    # Arithmetic, in the reducing threads

    @torch.no_grad()
    def _reduce_rows(self, rows: range) -> tuple[Tensor, list[float], Comparison]:
        """Compute the mean of these rows of this worker's range, the squared norm of each contribution, and a
        comparison."""
        squares = [0.0] * len(self.plan.contributors)
        place = slice(rows.start * self._width, rows.stop * self._width)
        pieces = {entry.peer: self._parts[entry.peer][place] for entry in self.plan.contributors}
        self.audit.add_parts(pieces)
        mean = torch.empty(len(rows), self._mean_width, dtype=torch.uint8)
        weights = self.plan.decision.weights
        part = self.posted.part_elements
        first = self._mine.start + rows.start
        comparison = reduce_parts(
            self._codec,
            [_rows(piece, len(rows)) for piece in pieces.values()],
            weights,
            part,
            mean,
            scales=self.plan.decision.scales,
            merge=self.plan.decision.merge,
            squares=squares,
            first_part=first,
            batch_elements=BATCH_ELEMENTS,
        )
        self._signatures.add(self._transport.peer, mean.view(-1).numpy().data)
        return mean, squares, comparison

    def _take_mean(self, rows: range, reducer: str) -> None:
        """Take these rows of the mean into the digest of the reducer's range."""
        mean = self._mean(rows)
        self._signatures.add(reducer, mean)
        self.audit.add_mean(reducer, mean)

    # The end

    def _close_stream(self, stream: Stream) -> None:
        if stream in self._streams:
            self._streams.discard(stream)
            self.bytes_sent += stream.bytes_sent
            self.bytes_received += stream.bytes_received
            stream.close()

    def close(self) -> None:
        """The round has ended, or goes on with another attempt."""
        for task in self._tasks:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
            task.cancel()
        for stream in list(self._streams):
            self._close_stream(stream)
        if not self._trouble.done():
            self._trouble.cancel()


def _rows(memory: memoryview, count: int) -> Tensor:
    """Return a memory of encoded parts as [count, part_bytes] uint8."""
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, -1)


def _first(problem: Exception) -> Exception:
    """Find the cause, where a group of tasks has failed with it."""
    while isinstance(problem, ExceptionGroup):
        problem = problem.exceptions[0]
    return problem


# The comparison of a round's contributions as bytes: every reducer sends that of its parts, and a worker adds them up.
# It is a statistic, never a proof: a reducer may lie about it, within the bounds of `unpack_comparison`.


def comparison_bytes(contributors: int) -> int:
    return _comparison_form(contributors).size


def pack_comparison(told: Comparison) -> bytes:
    return _comparison_form(len(told.replaced)).pack(*told.products, *told.replaced)


def unpack_comparison(data: bytes, contributors: int, parts: int) -> Comparison:
    """Read the comparison of so many contributions in so many parts. Raises Malformed."""
    if len(data) != comparison_bytes(contributors):
        raise Malformed(f"a comparison of {len(data)} bytes instead of {comparison_bytes(contributors)}")
    told = Comparison.of_numbers([*_comparison_form(contributors).unpack(data), parts], contributors)
    if max(told.replaced) > parts:
        raise Malformed(f"a contribution that counts as the others' mean in {max(told.replaced)} of {parts} parts")
    return told


def _comparison_form(contributors: int) -> struct.Struct:
    """Inner products, and in how many parts each contribution was replaced."""
    return struct.Struct(f"<{num_products(contributors)}d{contributors}I")
