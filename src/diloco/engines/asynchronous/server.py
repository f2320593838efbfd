"""The anchor of asynchronous workers: every outer gradient that arrives moves it, and the sender gets it back.

It is in worker 0's process. Requests are answered one after another, in the order in which they arrive; none waits for
another worker, but for the end: a worker that has taken all its steps waits until every other has, or is lost.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.fragments import Fragment
from diloco.engines.header import Header, unpack
from diloco.errors import EngineError

Kind = Literal["arrive", "done", "confirm"]
SERVED_ANCHOR = "global"
"""The name under which worker 0 saves the anchor; its own anchor is where it began its steps."""
_RECENT_NORMS = 9
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """`payload`: an encoded outer gradient; empty where there is none."""

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
    """Thread-safe. The memory is its own: the fragment of worker 0 goes on training from older parameters."""

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
        """Why an outer gradient is not applied; empty if it is."""
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
        """Wait, with the lock, until all workers are as far, or lost."""
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
        """Its connection has ended."""
        with self._changed:
            self._lost.add(worker)
            self._headers.pop(worker, None)
            self._changed.notify_all()

    # Saving

    def save(self) -> int:
        """Into the outer state of worker 0's fragment; the arrivals so far."""
        with self._changed:
            for name, buffer in (*self._state.items(), (SERVED_ANCHOR, self._anchor)):
                self._fragment.state[name].copy_(buffer)
            return self.arrivals

    def load(self, arrivals: int) -> None:
        with self._changed:
            self.arrivals = arrivals
            for name, buffer in (*self._state.items(), (SERVED_ANCHOR, self._anchor)):
                buffer.copy_(self._fragment.state[name])
