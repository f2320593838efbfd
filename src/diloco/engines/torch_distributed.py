"""Averaging over torch.distributed (gloo or nccl) among a fixed set of workers.

A round is a gather of headers, then, wave by wave, a reduce-scatter of encoded parts, fp32 accumulation, and an
all-gather of the encoded means, all point to point, so that one wave travels while another is reduced. It moves encoded
bytes only: 2 (k − 1) / k of a vector each way.
Rounds run one after another in a thread that sits in C++ most of the time, so training goes on beside them.

The membership is fixed: when a worker dies or stays silent beyond the deadline, no later round is possible, `wait`
raises EngineError, and the run must end. No wait is without a bound.
"""

import atexit
import queue
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from diloco.codecs.encoded import EncodedVector
from diloco.engines.asynchronous.engine import AnchorLink, Fixed
from diloco.engines.asynchronous.sockets import SocketLink
from diloco.engines.base import PendingRound
from diloco.engines.behind_training import stay_behind_training
from diloco.engines.header import HEADER_BYTES, check_same_layout, check_same_round, pack, unpack
from diloco.engines.process_groups import end_group
from diloco.engines.reduction import compare_nothing, decide, run_ends, traffic
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundPhases, RoundResult
from diloco.engines.wave_exchange import LaneGroups, WaveExchange, finish, time_left
from diloco.errors import EngineError, RoundFailed

T = TypeVar("T")
_CLOSE_SECONDS = 5.0


class TorchDistributedEngine(Fixed):
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
        vector = contribution.vector
        if self.workers == 1 and vector.device.type == "cuda":  # nothing to wait for: kernels in the trainer's stream
            return _Pending(
                self._submit(lambda: self._round(key, contribution, None, posted, seconds), seconds, here=True)
            )
        encoded = _mark(vector.device)
        return _Pending(self._submit(lambda: self._round(key, contribution, encoded, posted, seconds), seconds))

    def members(self) -> tuple[Member, ...]:
        return self._members

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self._provider = provider

    def fetch_state(self) -> GlobalState | None:
        """Collective: every worker's state becomes that of the source, in place. The source gets None."""
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
        """A peer was lost, or this worker left the others in the middle of a round."""
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
        """Others in this process then find no torch.distributed world; rounds go on in the groups held here."""
        self._hidden = dist.group.WORLD
        dist.group.WORLD = None

    # The thread

    def _work(self) -> None:
        stay_behind_training()
        while (job := self._jobs.get()) is not None:
            job()

    def _submit(self, work: Callable[[], T], seconds: float, *, here: bool = False) -> "Future[T]":
        """Run `work`, which waits `seconds` for the others, in the thread of the rounds, or in this one (`here`)."""
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
                    f"within {seconds:.0f} s ({_first_line(error)}). torch.distributed cannot go on "
                    "without it; start the run again"
                )
                future.set_exception(self._broken)
            except Exception as error:  # noqa: BLE001  the waiting trainer must hear of it, whatever it is
                self._broken = EngineError(f"worker {self.worker} left the others in the middle of a round: {error!r}")
                self._broken.__cause__ = error
                traceback.clear_frames(error.__traceback__)  # they hold the process groups
                future.set_exception(self._broken)

        if here:
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
        """`posted`: when, on time.monotonic()'s clock; the round fails if it takes `seconds` from then."""
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
        sent, received = 0, 0
        told = compare_nothing(len(decision.contributors))
        if decision.total_weight > 0 and contribution.vector.num_bytes:
            with self._own_stream(contribution.vector.device, encoded):
                told = self._exchange.average(contribution.vector, decision, deadline)
            sent, received = traffic(contribution.vector, self.workers, self.worker)
        overhead = HEADER_BYTES * (self.workers - 1)
        return RoundResult(
            mean=contribution.vector.mean,
            contributors=decision.contributors,
            refused=decision.refused,
            clipped=decision.clipped,
            merge=decision.merge,
            plain=decision.plain,
            total_weight=decision.total_weight,
            bytes_sent=sent + overhead,
            bytes_received=received + overhead,
            seconds=time.monotonic() - started,
            members=self._members,
            resync=decision.resync,
            comparison=told,
            phases=self._phases(posted, heard) if sent else RoundPhases(others_seconds=heard - posted),
        )

    def _phases(self, posted: float, heard: float) -> RoundPhases:
        """At the end of an exchange of parts."""
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
        """The bytes of every worker, in worker order; all must give the same number."""
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
