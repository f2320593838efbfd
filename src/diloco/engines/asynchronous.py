"""Averaging without rounds: one anchor, which every outer gradient moves when it arrives.

The anchor is in worker 0's process (`AnchorServer`). The engine of each worker (`AsynchronousEngine`) wraps one of a
fixed set of workers, which still brings them together at the start; a "round" is one worker's outer gradient, and its
result the anchor after it. `start_round` waits for no other worker. An `AnchorLink` is the way to the anchor: a call in
the same process (`LocalLink`), or a connection to worker 0's process (anchor_sockets.py).

The result depends on the order of arrivals: `replay` fixes it, for workers of given speeds in one thread.
"""

import heapq
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import Fragment
from diloco.engines.base import Engine, PendingRound
from diloco.engines.header import HEADER_BYTES, Header, pack, unpack
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult
from diloco.errors import EngineError, RoundFailed

_START_SECONDS = 60.0
Kind = Literal["arrive", "done", "confirm"]
SERVED_ANCHOR = "global"
"""The name under which worker 0 saves the anchor; its own anchor is where it began its steps."""
_RECENT_NORMS = 9
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """What a worker asks of the anchor. `payload`: an encoded outer gradient; empty where there is none."""

    kind: Kind
    worker: int
    header: bytes
    payload: Tensor
    quiet_seconds: float
    """How long another worker may be silent before this one, which is done, no longer waits for it."""


@dataclass(frozen=True)
class Reply:
    headers: Mapping[int, bytes]
    """The latest of every worker that has been heard of."""
    arrivals: int
    anchor: Tensor
    """Flat, fp32, on the CPU."""
    refused: str = ""
    """Why the outer gradient was not applied."""


class AnchorServer:
    """Holds the anchor, and moves it by every outer gradient that arrives.

    Requests are answered one after another, in the order in which they arrive, from any thread; none waits for another
    worker, but for the end: a worker that has taken all its steps waits until every other has, or is lost. The memory
    is its own: the fragment of worker 0 goes on training from older parameters.
    """

    def __init__(self, workers: int, fragment: Fragment, vector: EncodedVector, max_norm_ratio: float | None) -> None:
        self._fragment = fragment
        self._outer = fragment.outer_opt
        self._ratio = max_norm_ratio
        self._vector = EncodedVector(vector.codec, vector.layout)
        self._anchor = fragment.anchor.to("cpu", copy=True)
        self._state = {name: torch.zeros(fragment.numel) for name in self._outer.state_names if name != SERVED_ANCHOR}
        self.num_bytes = self._vector.num_bytes
        self.arrivals = 0
        self._headers: dict[int, bytes] = {}
        self._norms: deque[float] = deque(maxlen=_RECENT_NORMS)
        self._heard_at = dict.fromkeys(range(workers), time.monotonic())
        self._done: set[int] = set()
        self._confirmed: set[int] = set()
        self._lost: set[int] = set()
        self._changed = threading.Condition()

    def handle(self, request: Request) -> Reply:
        with self._changed:
            self._headers[request.worker] = request.header
            self._heard_at[request.worker] = time.monotonic()
            self._lost.discard(request.worker)
            refused = ""
            if request.kind == "arrive":
                self._done.discard(request.worker)
                self._confirmed.discard(request.worker)
                refused = self._arrive(request)
            else:
                self._end(request)
            return Reply(dict(self._headers), self.arrivals, self._anchor.clone(), refused)

    def _arrive(self, request: Request) -> str:
        header = unpack(request.worker, request.header)
        others = [unpack(worker, other) for worker, other in self._headers.items()]
        if any(other.layout_digest != header.layout_digest for other in others):
            raise EngineError(
                f"worker {request.worker} trains something else than the others: model, data and options must be the "
                "same everywhere"
            )
        if header.claim.weight <= 0:
            return ""
        reason = self._fault(header, request.payload)
        if not reason:
            self._norms.append(header.claim.norm)
            self._step()
        return reason

    def _fault(self, header: Header, payload: Tensor) -> str:
        """Say why an outer gradient is not applied; empty if it is."""
        if payload.numel() != self._vector.num_bytes:
            return f"it has {payload.numel()} bytes instead of {self._vector.num_bytes}"
        self._vector.data.copy_(payload.view(self._vector.shape))
        if not self._vector.is_finite():
            return "the outer gradient is not finite"
        median = sorted(self._norms)[(len(self._norms) - 1) // 2] if len(self._norms) == _RECENT_NORMS else 0.0
        if self._ratio is not None and median > 0 and header.claim.norm > self._ratio * median:
            return f"norm {header.claim.norm:.3g} is above {self._ratio:g} x the median {median:.3g} of recent ones"
        return ""

    def _step(self) -> None:
        self.arrivals += 1
        for span in self._fragment.spans():
            delta = self._vector.decode(span.first_part, span.num_parts)
            state = {name: buffer[span.slice] for name, buffer in self._state.items()}
            self._outer.update(self._anchor[span.slice], delta, state, self.arrivals)

    # The end

    def _end(self, request: Request) -> None:
        """Wait, with the lock, until all workers have come to the same point, or are lost."""
        ended = self._done if request.kind == "done" else self._confirmed
        ended.add(request.worker)
        if request.kind == "confirm":
            self._done.add(request.worker)
        self._changed.notify_all()
        while waiting := self._heard_at.keys() - ended - self._lost:
            limit = max(self._heard_at[worker] for worker in waiting) + request.quiet_seconds
            if time.monotonic() > limit:
                self._lost |= waiting
                for worker in waiting:
                    self._headers.pop(worker, None)
                break
            self._changed.wait(_POLL_SECONDS)
        self._changed.notify_all()

    def live(self) -> set[int]:
        with self._changed:
            return set(self._heard_at) - self._lost

    def lose(self, worker: int) -> None:
        """Called when a worker's connection has ended."""
        with self._changed:
            self._lost.add(worker)
            self._headers.pop(worker, None)
            self._changed.notify_all()

    # Saving

    def save(self) -> int:
        """Save into the outer state of worker 0's fragment; returns the arrivals so far."""
        with self._changed:
            for name, buffer in (*self._state.items(), (SERVED_ANCHOR, self._anchor)):
                self._fragment.state[name].copy_(buffer)
            return self.arrivals

    def load(self, arrivals: int) -> None:
        with self._changed:
            self.arrivals = arrivals
            for name, buffer in (*self._state.items(), (SERVED_ANCHOR, self._anchor)):
                buffer.copy_(self._fragment.state[name])


class AnchorLink(ABC):
    """One worker's way to the anchor."""

    @abstractmethod
    def open(self, server: AnchorServer | None) -> None:
        """Open the way to the anchor. Collective: worker 0 brings the server, the others None."""

    @abstractmethod
    def ask(self, request: Request, seconds: float) -> Reply:
        """Ask the anchor, and wait `seconds` for the answer; EngineError if the anchor is gone."""

    @abstractmethod
    def close(self) -> None: ...


class LocalLink(AnchorLink):
    """All workers are in this process and share `place`, where worker 0 puts the server."""

    def __init__(self, place: "list[AnchorServer]", changed: threading.Condition) -> None:
        self._place = place
        self._changed = changed

    def open(self, server: AnchorServer | None) -> None:
        with self._changed:
            if server is not None:
                self._place[:] = [server]
                self._changed.notify_all()

    def ask(self, request: Request, seconds: float) -> Reply:
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._place), min(seconds, _START_SECONDS)):
                raise EngineError("worker 0, which holds the anchor, has not built its optimizer yet: build it first")
        return self._place[0].handle(request)

    def close(self) -> None:
        """Do nothing: nothing is open."""


class FixedEngine(Engine):
    """An engine of a fixed set of workers that can be asynchronous."""

    @abstractmethod
    def heard(self, members: tuple[Member, ...]) -> None:
        """Take what was learnt of the workers, as the next `members()`."""

    @abstractmethod
    def anchor_link(self, timeout_seconds: float) -> AnchorLink:
        """Build this worker's way to the anchor; it is not open yet."""


class AsynchronousEngine(Engine):
    """The engine of an asynchronous worker: `base`, with another way to average."""

    def __init__(self, base: FixedEngine, link: AnchorLink) -> None:
        self.base = base
        self._link = link
        self.worker = base.worker
        self.workers = base.workers
        self._members: tuple[Member, ...] = ()
        self.arrivals = 0
        """Outer gradients that have moved the anchor, as last heard."""
        self.server: AnchorServer | None = None

    @property
    def mean_is_own(self) -> bool:
        """Always False: the anchor answers a single worker too."""
        return False

    def open(self, server: AnchorServer | None) -> None:
        """Open the way to the anchor after the optimizer is built. Collective: worker 0 gives the server."""
        self.server = server
        self._link.open(server)

    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        return _Arrival(lambda: self._arrive(key, contribution, deadline_seconds))

    def _arrive(self, key: RoundKey, contribution: Contribution, seconds: float) -> RoundResult:
        started = time.monotonic()
        vector = contribution.vector
        payload = vector.data.cpu().view(-1) if contribution.weight > 0 else torch.empty(0, dtype=torch.uint8)
        reply = self._ask("arrive", key, contribution, payload, seconds)
        if reply.refused:
            # Its own anchor is still good: nothing is missed, and there is no state of the others' to take over.
            raise RoundFailed(
                f"round {key.sequence}: the contribution of worker {self.worker} was refused: {reply.refused}",
                resync=False,
            )
        transfers = 0 if self.worker == 0 else 1  # worker 0 is where the anchor is
        return RoundResult(
            mean=_as_vector(reply.anchor, vector),
            contributors=(self.worker,) if contribution.weight > 0 else (),
            refused={},
            total_weight=contribution.weight,
            bytes_sent=transfers * (payload.numel() + HEADER_BYTES),
            bytes_received=transfers * (4 * reply.anchor.numel() + HEADER_BYTES * len(reply.headers)),
            seconds=time.monotonic() - started,
            members=self._members,
        )

    def end(self, kind: Kind, key: RoundKey, contribution: Contribution, quiet_seconds: float) -> Tensor:
        """Wait until every other worker is done, or lost; returns the anchor, which then stays as it is."""
        none = torch.empty(0, dtype=torch.uint8)
        longest = 86_400.0
        return self._ask(kind, key, contribution, none, longest, quiet_seconds).anchor

    def _ask(
        self, kind: Kind, key: RoundKey, contribution: Contribution, payload: Tensor, seconds: float, quiet: float = 0.0
    ) -> Reply:
        reply = self._link.ask(Request(kind, self.worker, pack(key, contribution), payload, quiet), seconds)
        self._members = tuple(unpack(worker, header).member for worker, header in sorted(reply.headers.items()))
        self.base.heard(self._members)
        self.arrivals = reply.arrivals
        return reply

    # What stays as it is

    def members(self) -> tuple[Member, ...]:
        return self.base.members()

    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        self.base.serve_state(provider)

    def fetch_state(self) -> GlobalState | None:
        return self.base.fetch_state()

    def close(self) -> None:
        self.closed = True
        self._link.close()
        self.base.close()


class _Arrival(PendingRound):
    """An exchange with the anchor, which takes place when it is waited for: at once."""

    def __init__(self, exchange: Callable[[], RoundResult]) -> None:
        self._exchange = exchange

    def wait(self) -> RoundResult:
        return self._exchange()


def _as_vector(anchor: Tensor, like: EncodedVector) -> EncodedVector:
    vector = EncodedVector(codec("fp32"), like.layout)
    vector.encode(0, anchor)
    return vector


def replay(
    step: Callable[[int], object], seconds: Sequence[float], until: float, taken: Sequence[int] | None = None
) -> None:
    """Call `step(worker)` for every inner step that ends by virtual time `until`, in the order of their ends.

    The workers, of given speeds, are in one thread, and no clock is read: a replay gives the same result every time.
    Worker i's n-th step ends at n · seconds[i]; of two that end together the lower worker's comes first. `taken`: the
    steps that each worker has taken before.
    """
    before = list(taken) if taken is not None else [0] * len(seconds)
    ends = [((count + 1) * seconds[worker], worker, count + 1) for worker, count in enumerate(before)]
    heapq.heapify(ends)
    while ends and ends[0][0] <= until:
        _, worker, count = heapq.heappop(ends)
        step(worker)
        heapq.heappush(ends, ((count + 1) * seconds[worker], worker, count + 1))
