"""Averaging over torch.distributed (gloo or nccl) among a fixed set of workers.

A round is a gather of headers, then, wave by wave, a reduce-scatter of encoded parts, fp32 accumulation, and an
all-gather of the encoded means, all point to point, so that one wave travels while another is reduced. It moves encoded
bytes only: 2 (k − 1) / k of a vector each way.
Rounds run one after another in a thread that sits in C++ most of the time, so training goes on beside them.

While one wave is reduced the next ones travel, several of them: on a link with latency a single one leaves it idle.
Contributions and means go over connections of their own, so that neither waits for the other. A vector on a GPU that
gloo must carry is copied to pinned CPU memory wave by wave, and its parts are reduced on the GPU: the bits are the same
wherever that is done.

The membership is fixed: when a worker dies or stays silent beyond the deadline, no later round is possible, `wait`
raises EngineError, and the run must end. No wait is without a bound.
"""

import atexit
import math
import queue
import struct
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from diloco.codecs.encoded import EncodedVector
from diloco.core.merging import Decision, decide
from diloco.engines.anchor_sockets import SocketLink
from diloco.engines.asynchronous import AnchorLink, FixedEngine
from diloco.engines.base import PendingRound
from diloco.engines.behind_training import stay_behind_training, threads_behind_training
from diloco.engines.header import check_same_layout, check_same_round, pack, unpack
from diloco.engines.process_groups import end_group, first_line, new_group
from diloco.engines.reduction import WAVES_AHEAD, Wave, reduce_parts, result_of, run_ends, waves
from diloco.engines.rounds import (
    Comparison,
    Contribution,
    GlobalState,
    Member,
    RoundKey,
    RoundPhases,
    RoundResult,
)
from diloco.errors import EngineError, RoundFailed
from diloco.memory import mapped

T = TypeVar("T")
_CLOSE_SECONDS = 5.0
_CONTRIBUTIONS, _MEANS, _COMPARISONS = 1, 2, 3  # tags: a mean never takes the place of a contribution to a later wave


@dataclass(frozen=True)
class LaneGroups:
    """Some global ranks, one of each worker and in the workers' order, and what they talk over."""

    ranks: tuple[int, ...]
    control: dist.ProcessGroup
    contributions: dist.ProcessGroup
    means: dist.ProcessGroup

    @staticmethod
    def new(ranks: Sequence[int], backend: str, timeout_seconds: float) -> "LaneGroups | None":
        """Make the groups of some ranks. Collective over the whole world, in the same order everywhere; None where
        this rank is not among `ranks`.

        A gloo group has one thread and one connection to each peer, so a second group doubles what travels at a time.
        If its thread woke up in place of one that holds a connection's lock, it would spin until that one goes on.
        """
        with threads_behind_training():
            control = new_group(ranks, "gloo", timeout_seconds)
            other = new_group(ranks, backend, timeout_seconds) if len(ranks) > 1 else control
        if control is None or other is None:
            return None
        return LaneGroups(tuple(ranks), control, control if backend == "gloo" else other, other)

    def all(self) -> set[dist.ProcessGroup]:
        return {self.control, self.contributions, self.means}


class TorchDistributedEngine(FixedEngine):
    """One lane of an initialised torch.distributed world: by default all its ranks, one worker a rank."""

    def __init__(
        self,
        *,
        backend: str = "gloo",
        timeout_seconds: float = 600.0,
        owns_world: bool = False,
        groups: LaneGroups | None = None,
    ) -> None:
        """Collective: every rank builds it at the same point. `backend` is for the payload, headers go over gloo.

        `owns_world`: close() also ends torch.distributed, which was initialised for this engine alone.
        """
        if not dist.is_initialized():
            raise EngineError("torch.distributed is not initialised: use diloco.connect(), which does it")
        groups = groups or LaneGroups.new(range(dist.get_world_size()), backend, timeout_seconds)
        assert groups is not None
        self._ranks = groups.ranks
        self._groups = groups
        self.worker = self._ranks.index(dist.get_rank())
        self.workers = len(self._ranks)
        self._exchange = WaveExchange(groups, self.worker, backend)
        self._stream: torch.cuda.Stream | None = None
        self._owns_world = owns_world
        self._hidden: dist.ProcessGroup | None = None
        self._timeout_seconds = timeout_seconds
        self._members: tuple[Member, ...] = ()
        self._provider: Callable[[], GlobalState] | None = None
        self._source = 0  # whose state counts, at the start and after a divergence
        self._broken: EngineError | None = None
        self._links: list[AnchorLink] = []  # of asynchronous optimizers
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="diloco-rounds", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # its threads must end before the interpreter does

    # The contract

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        seconds = min(deadline_seconds, self._timeout_seconds) + contribution.patience_seconds
        posted = time.monotonic()
        device = contribution.vector.device
        alone_on_gpu = self.workers == 1 and device.type == "cuda"  # nothing to wait for: in the trainer's own stream
        encoded = None if alone_on_gpu else _mark(device)
        future = self._submit(
            lambda: self._round(key, contribution, encoded, posted, seconds), seconds, in_this_thread=alone_on_gpu
        )
        return _Pending(future)

    def members(self) -> tuple[Member, ...]:
        return self._members

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self._provider = provider

    def fetch_state(self) -> GlobalState | None:
        """Make every worker's state that of the source, in place; the source gets None. Collective."""
        return self._submit(self._broadcast_state, self._timeout_seconds).result()

    def heard(self, members: tuple[Member, ...]) -> None:
        """Take what another way of averaging has taught this worker of the others."""
        self._members = members

    def anchor_link(self, timeout_seconds: float) -> AnchorLink:
        def gather(mine: bytes) -> list[bytes]:
            deadline = time.monotonic() + self._timeout_seconds
            return self._submit(lambda: self._gather(mine, deadline), self._timeout_seconds).result()

        self._links.append(SocketLink(self.worker, gather, timeout_seconds))
        return self._links[-1]

    @property
    def broken(self) -> bool:
        """Whether a peer was lost, or this worker left the others in the middle of a round."""
        return self._broken is not None

    def close(self) -> None:
        """Leave, after the round that is being averaged, or after five seconds if that takes longer."""
        atexit.unregister(self.close)
        if self.closed:
            return
        self.closed = True
        for link in self._links:
            link.close()
        self._jobs.put(None)
        if not self.broken:
            self._thread.join(_CLOSE_SECONDS)
        for group in {*self._groups.all(), self._hidden}:
            end_group(group, self.broken)
        self._thread.join(_CLOSE_SECONDS)  # it gets an error if it still waits for a peer
        if self._owns_world and self._hidden is None and dist.is_initialized():
            dist.destroy_process_group()
        del self._groups, self._exchange, self._hidden

    def hide_world(self) -> None:
        """Hide the torch.distributed world from other code in this process; rounds go on in the groups held here."""
        self._hidden = dist.group.WORLD
        dist.group.WORLD = None

    # The thread

    def _work(self) -> None:
        stay_behind_training()
        while (job := self._jobs.get()) is not None:
            job()

    def _submit(self, work: Callable[[], T], seconds: float, *, in_this_thread: bool = False) -> "Future[T]":
        """Run `work`, which waits `seconds` for the others, in the thread of the rounds, or in this one."""
        if self._broken is not None:
            raise self._broken
        if self.closed:
            raise EngineError(f"the engine of worker {self.worker} is closed: no round can follow")
        future: Future[T] = Future()

        def job() -> None:
            try:
                if self._broken is not None:
                    raise self._broken
                future.set_result(work())
            except RoundFailed as failure:
                future.set_exception(failure)
            except EngineError as error:
                self._broken = error
                future.set_exception(error)
            except RuntimeError as error:  # what torch.distributed raises for a lost peer or a timeout
                self._broken = EngineError(
                    f"worker {self.worker} lost the others: one of {self.workers} workers died, left or did not answer "
                    f"within {seconds:.0f} s ({first_line(error)}). torch.distributed cannot go on "
                    "without it; start the run again"
                )
                future.set_exception(self._broken)
            except Exception as error:  # noqa: BLE001  the waiting trainer must hear of it, whatever it is
                self._broken = EngineError(f"worker {self.worker} left the others in the middle of a round: {error!r}")
                self._broken.__cause__ = error
                traceback.clear_frames(error.__traceback__)  # they hold the process groups
                future.set_exception(self._broken)

        if in_this_thread:
            job()
        else:
            self._jobs.put(job)
        return future

    def _round(
        self,
        key: RoundKey,
        contribution: Contribution,
        encoded: "torch.cuda.Event | None",
        posted: float,
        seconds: float,
    ) -> RoundResult:
        """Take part in a round. `posted`: when, on time.monotonic()'s clock; the round fails if it takes `seconds`
        from then."""
        started = time.monotonic()
        deadline = posted + seconds
        rows = self._gather(pack(key, contribution), deadline)
        heard = time.monotonic()
        headers = [unpack(worker, row) for worker, row in enumerate(rows)]
        check_same_round(headers, headers[self.worker])
        claims = [header.claim for header in headers]
        decision = decide(range(self.workers), claims, contribution.max_norm_ratio, contribution.merge)
        self._members = tuple(header.member for header in headers)
        if decision.resync and decision.contributors:
            self._source = decision.contributors[0]
        if not decision.contributors and decision.refused:
            raise RoundFailed(
                f"round {key.sequence}: every contribution was refused: {decision.refused}",
                stopping=run_ends(self._members),
                resync=decision.resync,
            )
        comparison = Comparison.empty(len(decision.contributors))
        phases = RoundPhases(others_seconds=heard - posted)
        if decision.total_weight > 0 and contribution.vector.num_bytes:
            with self._own_stream(contribution.vector.device, encoded):
                comparison = self._exchange.average(contribution.vector, decision, deadline)
            if self.workers > 1:
                phases = self._phases(posted, heard)
        return result_of(
            decision,
            contribution.vector,
            contribution.vector.mean,
            self._members,
            self.worker,
            resync=decision.resync,
            seconds=time.monotonic() - started,
            comparison=comparison,
            phases=phases,
        )

    def _phases(self, posted: float, heard: float) -> RoundPhases:
        """Return the phases of a round whose exchange of parts ends now."""
        reduced = self._exchange.reduce_seconds
        sent = None if reduced is None else time.monotonic() - heard - reduced
        return RoundPhases(heard - posted, sent, reduced)

    @contextmanager
    def _own_stream(self, device: torch.device, after: "torch.cuda.Event | None") -> Iterator[None]:
        """Enter a stream beside the trainer's on a GPU, once `after` has happened and drained on leaving.

        The same one for all rounds: memory that one stream has used does not serve another.
        """
        if after is None:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            yield
        self._stream.synchronize()

    def _gather(self, mine: bytes, deadline: float) -> list[bytes]:
        """Gather bytes from every worker, in worker order; all must give the same number."""
        if self.workers == 1:
            return [mine]
        own = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = [torch.empty_like(own) for _ in range(self.workers)]
        options = AllgatherOptions()
        options.asyncOp = True
        options.timeout = time_left(deadline)  # the group's own limit may be shorter
        finish(self._groups.control.allgather([rows], [own], options), deadline)
        return [bytes(row.tolist()) for row in rows]

    def _broadcast_state(self) -> GlobalState | None:
        assert self._provider is not None
        state = self._provider()
        deadline = time.monotonic() + self._timeout_seconds
        rows = self._gather(state.layout_digest.encode().ljust(16) + struct.pack("<q", len(state.tensors)), deadline)
        check_same_layout({w: row[:16].decode("ascii", "replace") for w, row in enumerate(rows)}, self.worker)
        counts = [struct.unpack("<q", row[16:])[0] for row in rows]
        if len(set(counts)) > 1:
            raise EngineError(
                f"the workers offer {counts} tensors to start from: build DiLoCo with the same `restoring` on every one"
            )
        numbers = torch.tensor(list(state.numbers.values()), dtype=torch.int64)
        source = self._ranks[self._source]
        finish(dist.broadcast(numbers, source, group=self._groups.control, async_op=True), deadline)
        for tensor in state.tensors.values():
            self._broadcast(tensor, deadline)
        if self.worker == self._source:
            return None
        return replace(state, numbers=dict(zip(state.numbers, numbers.tolist(), strict=True)))

    def _broadcast(self, tensor: Tensor, deadline: float) -> None:
        """Broadcast a tensor as bytes, since gloo does not know every dtype."""
        staged = tensor.cpu().contiguous()
        if staged.numel():
            data = staged.view(-1).view(torch.uint8)
            source = self._ranks[self._source]
            finish(dist.broadcast(data, source, group=self._groups.control, async_op=True), deadline)
        if staged is not tensor:
            tensor.copy_(staged)


class _Pending(PendingRound):
    def __init__(self, future: "Future[RoundResult]") -> None:
        self._future = future

    def wait(self) -> RoundResult:
        return self._future.result()  # bounded: every collective behind it has the round's deadline

    def arrived_mean(self) -> EncodedVector | None:
        failed = self._future.exception()
        return None if failed is not None or not self._future.result().total_weight else self._future.result().mean


def _mark(device: torch.device) -> "torch.cuda.Event | None":
    """Mark the moment at which the trainer's stream has written what it was given so far; only a GPU needs that."""
    if device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


# The exchange of parts


class WaveExchange:
    """One worker's end of a lane, which exchanges parts wave by wave. Keeps pinned memory from one round to the
    next."""

    def __init__(self, groups: LaneGroups, worker: int, backend: str) -> None:
        self._groups = groups
        self._ranks = groups.ranks
        self._worker = worker
        self._workers = len(self._ranks)
        self._backend = backend
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self.reduce_seconds: float | None = None
        """The seconds for which this worker reduced in its latest exchange; None with NCCL, whose kernels run beside
        it."""

    def average(self, vector: EncodedVector, decision: Decision, deadline: float) -> Comparison:
        """Put the encoded mean into `vector.mean`, mostly in place of this worker's own contribution.

        Returns the comparison of the contributions in all parts.
        """
        part = vector.layout.part_elements
        comparison = Comparison.empty(len(decision.contributors))
        if self._workers == 1:  # its mean is its own contribution, encoded once more: nothing leaves the device
            if vector.mean is not vector or not vector.codec.stable:
                reduce_parts(vector.codec, [vector.data], decision.weights, part, vector.mean.data)
            return comparison
        plan = list(waves(vector, self._workers))
        memory = self._memory(vector, plan)
        ahead = deque(self._scatter(memory, number) for number in range(min(WAVES_AHEAD, len(plan))))
        gathers: list[dist.Work] = []
        reducing = 0.0
        for number, wave in enumerate(plan):
            contributions, arriving = ahead.popleft()
            _finish_all(arriving, deadline)
            own = wave.rows(self._worker)
            started = time.monotonic()
            comparison += memory.reduce(own, [(w, contributions[w]) for w in decision.contributors], decision)
            reducing += time.monotonic() - started
            if number + WAVES_AHEAD < len(plan):  # into the inbox that is free now
                ahead.append(self._scatter(memory, number + WAVES_AHEAD))
            gathers += self._swap([memory.means[own]] * self._workers, wave.split(memory.means), _MEANS)
        sums = [torch.tensor(comparison.numbers, dtype=torch.float64) for _ in range(self._workers)]
        gathers += self._swap([sums[self._worker].clone()] * self._workers, sums, _COMPARISONS)
        _finish_all(gathers, deadline)
        memory.finish()
        self.reduce_seconds = reducing if self._backend == "gloo" else None
        return Comparison.of_numbers(torch.stack(sums).sum(0).tolist(), len(decision.contributors))

    def _memory(self, vector: EncodedVector, plan: Sequence[Wave]) -> "_Memory":
        shape = (min(WAVES_AHEAD, len(plan)), self._workers - 1, plan[0].counts[self._worker], vector.shape[1])
        on_gpu = vector.device.type == "cuda"
        if self._backend != "gloo" or not on_gpu:
            if self._backend == "nccl" and not on_gpu:
                raise EngineError("backend nccl sends from a GPU, but the model is on the CPU: use gloo")
            inboxes = vector.data.new_empty(shape) if on_gpu else mapped(math.prod(shape)).view(shape)
            return _OwnMemory(vector, plan, inboxes)
        inboxes, data, means = self._take_pinned(shape, vector)
        return _PinnedMemory(vector, plan, inboxes, data, means, self._worker)

    def _take_pinned(self, inboxes: tuple[int, ...], vector: EncodedVector) -> tuple[Tensor, Tensor, Tensor]:
        """Return pinned memory for inboxes, a contribution and a mean; the latter two are one where the vector's
        are."""
        shapes = [inboxes, vector.shape]
        shapes += [] if vector.mean is vector else [vector.mean.shape]
        sizes = [math.prod(shape) for shape in shapes]
        if self._pinned.numel() < sum(sizes):
            self._pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        flats = torch.split_with_sizes(self._pinned[: sum(sizes)], sizes)
        taken = [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
        return taken[0], taken[1], taken[-1]

    def _scatter(self, memory: "_Memory", number: int) -> tuple[list[Tensor], list[dist.Work]]:
        """Begin to receive every worker's contribution to what this worker reduces of a wave; there when the works are
        done."""
        wave = memory.plan[number]
        inbox = memory.inboxes[number % len(memory.inboxes)]
        memory.wait_until_sendable(number)
        pieces = wave.split(memory.data)
        own = pieces[self._worker]
        distances = [(w - self._worker) % self._workers for w in range(self._workers)]
        contributions = [inbox[d - 1, : len(own)] if d else own for d in distances]
        return contributions, self._swap(pieces, contributions, _CONTRIBUTIONS)

    def _swap(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], tag: int) -> "list[dist.Work]":
        """Begin to send outgoing[j] to every other worker j and to receive incoming[j] from it.

        Point to point rather than all-to-all: straight from and into the vector, without copies, and several at once.
        """
        group = {_CONTRIBUTIONS: self._groups.contributions, _MEANS: self._groups.means}.get(tag, self._groups.control)
        transfers = []
        for distance in range(1, self._workers):  # so that not all begin with the same peer
            to = (self._worker + distance) % self._workers
            back = (self._worker - distance) % self._workers
            if len(outgoing[to]):
                transfers.append(dist.P2POp(dist.isend, outgoing[to], self._ranks[to], group, tag))
            if len(incoming[back]):
                transfers.append(dist.P2POp(dist.irecv, incoming[back], self._ranks[back], group, tag))
        return dist.batch_isend_irecv(transfers) if transfers else []


class _Memory(ABC):
    """The memory from which a vector's parts are sent, into which they are received, and where they are reduced."""

    data: Tensor
    """This worker's contribution: [parts, part_bytes]."""
    means: Tensor
    """The mean: the same memory, unless means have a codec of their own."""

    def __init__(self, vector: EncodedVector, plan: Sequence[Wave], inboxes: Tensor) -> None:
        """`inboxes`: the others' contributions to some waves, [waves, workers − 1, rows, part_bytes]."""
        self.vector = vector
        self.plan = plan
        self.inboxes = inboxes

    @abstractmethod
    def wait_until_sendable(self, wave: int) -> None: ...

    @abstractmethod
    def reduce(self, rows: slice, contributions: Sequence[tuple[int, Tensor]], decision: Decision) -> Comparison:
        """Put the mean of (worker, its parts) into `means[rows]`, which then may be sent; their comparison."""

    def _reduce(self, rows: slice, parts: Sequence[Tensor], decision: Decision, out: Tensor) -> Comparison:
        codec = self.vector.codec
        part = self.vector.layout.part_elements
        return reduce_parts(
            codec,
            parts,
            decision.weights,
            part,
            out,
            scales=decision.scales,
            merge=decision.merge,
            first_part=rows.start,
        )

    @abstractmethod
    def finish(self) -> None:
        """Called when the whole mean is in `means`."""


class _OwnMemory(_Memory):
    """The vector itself: gloo sends from the CPU, NCCL from a GPU."""

    def __init__(self, vector: EncodedVector, plan: Sequence[Wave], inboxes: Tensor) -> None:
        super().__init__(vector, plan, inboxes)
        self.data = vector.data
        self.means = vector.mean.data

    def wait_until_sendable(self, wave: int) -> None: ...

    def reduce(self, rows: slice, contributions: Sequence[tuple[int, Tensor]], decision: Decision) -> Comparison:
        parts = [data for _, data in contributions]
        return self._reduce(rows, parts, decision, self.means[rows])

    def finish(self) -> None: ...


class _PinnedMemory(_Memory):
    """A copy of a GPU's vector in pinned CPU memory; use it in one stream, which is drained afterwards."""

    def __init__(
        self, vector: EncodedVector, plan: Sequence[Wave], inboxes: Tensor, data: Tensor, means: Tensor, worker: int
    ) -> None:
        super().__init__(vector, plan, inboxes)
        self.data = data
        self.means = means
        self._worker = worker
        ends = [(wave.first, wave.first + wave.num_parts) for wave in plan]
        self._copied = [self._copy_down(vector.data[a:b], data[a:b]) for a, b in ends]

    @staticmethod
    def _copy_down(on_gpu: Tensor, pinned: Tensor) -> torch.cuda.Event:
        pinned.copy_(on_gpu, non_blocking=True)
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def wait_until_sendable(self, wave: int) -> None:
        self._copied[wave].synchronize()

    def reduce(self, rows: slice, contributions: Sequence[tuple[int, Tensor]], decision: Decision) -> Comparison:
        own = self.vector.data[rows]
        device = self.vector.data.device
        parts = [own if w == self._worker else data.to(device, non_blocking=True) for w, data in contributions]
        mean = self.vector.mean.data[rows]
        comparison = self._reduce(rows, parts, decision, mean)
        self._copy_down(mean, self.means[rows]).synchronize()
        return comparison

    def finish(self) -> None:
        self.vector.mean.data.copy_(self.means, non_blocking=True)


def finish(work: "dist.Work | None", deadline: float) -> None:
    """Wait until time.monotonic() is `deadline` at most."""
    assert work is not None
    work.wait(time_left(deadline))


def time_left(deadline: float) -> timedelta:
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))


def _finish_all(works: Sequence["dist.Work"], deadline: float) -> None:
    for work in works:
        finish(work, deadline)
