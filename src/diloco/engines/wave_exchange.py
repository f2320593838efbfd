"""One vector averaged among the ranks of a lane, wave by wave: parts to their reducers, means back, all point to point.

While one wave is reduced the next ones travel, several of them: on a link with latency a single one leaves it idle.
Contributions and means go over connections of their own, so that neither waits for the other. A vector on a GPU that
gloo must carry is copied to pinned CPU memory wave by wave, and its parts are reduced on the GPU: the bits are the same
wherever that is done.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.engines.behind_training import threads_behind_training
from diloco.engines.process_groups import new_group
from diloco.engines.reduction import WAVES_AHEAD, Decision, Wave, compare_nothing, reduce_parts, waves
from diloco.engines.rounds import Comparison
from diloco.errors import EngineError
from diloco.memory import mapped

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
        """Collective over the whole world, in the same order everywhere; None where this rank is not among `ranks`.

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


class WaveExchange:
    """Worker `worker`'s end of a lane. Keeps pinned memory from one round to the next."""

    def __init__(self, groups: LaneGroups, worker: int, backend: str) -> None:
        self._groups = groups
        self._ranks = groups.ranks
        self._worker = worker
        self._workers = len(self._ranks)
        self._backend = backend
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self.reduce_seconds: float | None = None
        """How long this worker reduced in its latest exchange; None with NCCL, whose kernels run beside the program."""

    def average(self, vector: EncodedVector, decision: Decision, deadline: float) -> Comparison:
        """Put the encoded mean into `vector.mean`, mostly in place of this worker's own contribution.

        Returns the comparison of the contributions in all parts.
        """
        part = vector.layout.part_elements
        told = compare_nothing(len(decision.contributors))
        if self._workers == 1:  # its mean is its own contribution, encoded once more: nothing leaves the device
            if vector.mean is not vector or not vector.codec.stable:
                reduce_parts(vector.codec, [vector.data], decision.weights, part, vector.mean.data)
            return told
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
            told += memory.reduce(own, [(w, contributions[w]) for w in decision.contributors], decision)
            reducing += time.monotonic() - started
            if number + WAVES_AHEAD < len(plan):  # into the inbox that is free now
                ahead.append(self._scatter(memory, number + WAVES_AHEAD))
            gathers += self._swap([memory.means[own]] * self._workers, wave.split(memory.means), _MEANS)
        sums = [torch.tensor(told.numbers, dtype=torch.float64) for _ in range(self._workers)]
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
        """Pinned memory for inboxes, a contribution and a mean; the latter two are one where the vector's are."""
        shapes = [inboxes, vector.shape]
        shapes += [] if vector.mean is vector else [vector.mean.shape]
        sizes = [math.prod(shape) for shape in shapes]
        if self._pinned.numel() < sum(sizes):
            self._pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
        flats = torch.split_with_sizes(self._pinned[: sum(sizes)], sizes)
        taken = [flat.view(shape) for flat, shape in zip(flats, shapes, strict=True)]
        return taken[0], taken[1], taken[-1]

    def _scatter(self, memory: "_Memory", number: int) -> tuple[list[Tensor], list[dist.Work]]:
        """Every worker's contribution to what this worker reduces of a wave; there when the works are done."""
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
            there = (self._worker + distance) % self._workers
            back = (self._worker - distance) % self._workers
            if len(outgoing[there]):
                transfers.append(dist.P2POp(dist.isend, outgoing[there], self._ranks[there], group, tag))
            if len(incoming[back]):
                transfers.append(dist.P2POp(dist.irecv, incoming[back], self._ranks[back], group, tag))
        return dist.batch_isend_irecv(transfers) if transfers else []


class _Memory(ABC):
    """What a vector's parts are sent from and received into, and where they are reduced."""

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
        """The mean of (worker, its parts) into `means[rows]`, which then may be sent; their comparison."""

    def _reduce(self, rows: slice, parts: Sequence[Tensor], decision: Decision, out: Tensor) -> Comparison:
        codec = self.vector.codec
        part = self.vector.layout.part_elements
        scales, merge = decision.scales, decision.merge
        return reduce_parts(
            codec, parts, decision.weights, part, out, scales=scales, merge=merge, first_part=rows.start
        )

    @abstractmethod
    def finish(self) -> None:
        """The whole mean is in `means`."""


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
    def _copy_down(there: Tensor, here: Tensor) -> torch.cuda.Event:
        here.copy_(there, non_blocking=True)
        done: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return done

    def wait_until_sendable(self, wave: int) -> None:
        self._copied[wave].synchronize()

    def reduce(self, rows: slice, contributions: Sequence[tuple[int, Tensor]], decision: Decision) -> Comparison:
        own, device = self.vector.data[rows], self.vector.data.device
        parts = [own if w == self._worker else data.to(device, non_blocking=True) for w, data in contributions]
        mean = self.vector.mean.data[rows]
        told = self._reduce(rows, parts, decision, mean)
        self._copy_down(mean, self.means[rows]).synchronize()
        return told

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
