"""The engine of asynchronous workers: a "round" is one worker's outer gradient, and its result the anchor after it.

It wraps an engine of a fixed set of workers, which still brings them together at the start. `start_round` sends this
worker's outer gradient to the anchor (server.py) and waits for no other worker. An `AnchorLink` is the way there: a
call in the same process (LocalLink), or a connection to worker 0's process (sockets.py).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.engines.asynchronous.server import AnchorServer, Kind, Reply, Request
from diloco.engines.base import Engine, PendingRound
from diloco.engines.header import HEADER_BYTES, pack, unpack
from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult
from diloco.errors import EngineError, RoundFailed

_START_SECONDS = 60.0


class AnchorLink(ABC):
    """One worker's way to the anchor."""

    @abstractmethod
    def open(self, server: AnchorServer | None) -> None:
        """Collective: worker 0 brings the server, the others None."""

    @abstractmethod
    def ask(self, request: Request, seconds: float) -> Reply:
        """The answer, within so many seconds; EngineError if the anchor is gone."""

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
        """Nothing is open."""


class FixedEngine(Engine):
    """An engine of a fixed set of workers that can be asynchronous."""

    @abstractmethod
    def heard(self, members: tuple[Member, ...]) -> None:
        """Take what was learnt of the workers: the next `members()`."""

    @abstractmethod
    def anchor_link(self, timeout_seconds: float) -> AnchorLink:
        """This worker's way to the anchor; not open yet."""


class AsynchronousEngine(Engine):
    """`base` with another way to average."""

    def __init__(self, base: FixedEngine, link: AnchorLink) -> None:
        self.base = base
        self._link = link
        self.worker = base.worker
        self.workers = base.workers
        self._members: tuple[Member, ...] = ()
        self.arrivals = 0
        """Outer gradients that have moved the anchor, as last heard."""
        self.server: AnchorServer | None = None

    def open(self, server: AnchorServer | None) -> None:
        """Collective, after the optimizer is built. Worker 0 gives the server."""
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
            raise RoundFailed(
                f"round {key.sequence}: the contribution of worker {self.worker} was refused: {reply.refused}"
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
        """Wait until every other worker is done, or lost; the anchor, which then stays as it is."""
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
    """The exchange takes place when it is waited for, which is at once."""

    def __init__(self, exchange: Callable[[], RoundResult]) -> None:
        self._exchange = exchange

    def wait(self) -> RoundResult:
        return self._exchange()


def _as_vector(anchor: Tensor, like: EncodedVector) -> EncodedVector:
    vector = EncodedVector(codec("fp32"), like.layout)
    vector.encode(0, anchor)
    return vector
