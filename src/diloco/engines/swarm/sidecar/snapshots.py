"""A global state as safetensors bytes in shared memory, and back; and the thread that makes one when a joiner asks.

Training goes on meanwhile: what the trainer's provider of states promises (a state of one moment) is all that is
relied on. Bytes that came over the network are read by the safetensors library, which checks them; nothing is
unpickled.
"""

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.engines.rounds import GlobalState
from diloco.engines.swarm.shared_memory import SharedMemory
from diloco.engines.swarm.sidecar.messages import SnapshotMade
from diloco.errors import EngineError, RoundFailed
from diloco.safetensors_files import make_header

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0

Provider = Callable[[], GlobalState]


@torch.no_grad()
def write(tensors: Mapping[str, Tensor]) -> SharedMemory:
    """A safetensors file in memory: each tensor is copied once, from wherever it is to where it is sent from."""
    header, ordered = make_header(tensors)
    offset = len(header)
    memory = SharedMemory.create(offset + sum(tensor.nbytes for tensor in ordered.values()))
    memory.view[:offset] = header
    for tensor in ordered.values():
        if tensor.numel():
            target = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
            target.view(tensor.shape).copy_(tensor)
        offset += tensor.nbytes
    return memory


def read(memory: SharedMemory) -> dict[str, Tensor]:
    """Tensors on the CPU that are this memory, without a copy."""
    try:
        with safe_open(f"/proc/self/fd/{memory.fd}", framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
    except SafetensorError as error:
        raise EngineError(f"the state that arrived is damaged ({error}): start this worker again") from error


def rows(memory: SharedMemory | None, sizes: list[int]) -> list[Tensor]:
    """Blocks of bytes that lie one after another, as uint8 tensors."""
    if memory is None or not math.fsum(sizes):
        return [torch.empty(0, dtype=torch.uint8) for _ in sizes]
    return list(torch.frombuffer(memory, dtype=torch.uint8, count=sum(sizes)).split_with_sizes(sizes))


@dataclass(frozen=True)
class _Made:
    version: int
    message: SnapshotMade


class SnapshotMaker:
    """Answers requests for snapshots in a thread of its own; requests at the same state share one."""

    def __init__(self, send: Callable[[SnapshotMade], object]) -> None:
        self._send = send
        self.held_back = False
        """No snapshots now, though there is a state."""
        self._provider: Provider | None = None
        self._version = 0
        self._made: _Made | None = None
        self._lock = threading.Lock()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def serve(self, provider: Provider) -> None:
        with self._lock:
            self._provider = provider
        self.changed()

    def changed(self) -> None:
        """The state is not what it was: the next request gets a new snapshot. Lets go of the old one."""
        with self._lock:
            self._version += 1
            self._made = None

    def want(self, number: int) -> None:
        """Answer this request, soon."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="diloco-snapshots", daemon=True)
            self._thread.start()
        self._wanted.put(number)

    def close(self) -> None:
        self._wanted.put(None)
        with self._lock:
            self._provider = self._made = None
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)  # it may be in the middle of a large copy; nobody waits for that

    def _work(self) -> None:
        while (number := self._wanted.get()) is not None:
            try:
                self._send(self._snapshot(number))
            except RoundFailed as reason:
                logger.info("no snapshot for a joiner now: %s", reason)
                self._send(SnapshotMade(number))
            except Exception:  # a joiner then asks somebody else; training is not concerned
                logger.exception("no snapshot for a joiner")
                self._send(SnapshotMade(number))

    def _snapshot(self, number: int) -> SnapshotMade:
        with self._lock:
            provider, version, made = self._provider, self._version, self._made
        if provider is None or self.held_back:
            return SnapshotMade(number)
        if made is None or made.version != version:
            state = provider()
            made = _Made(
                version,
                SnapshotMade(0, write(state.tensors), dict(state.numbers), state.layout_digest, state.note),
            )
            with self._lock:
                if self._version == version:
                    self._made = made
        told = made.message
        return SnapshotMade(number, told.memory, told.numbers, told.layout_digest, told.note)
