"""Snapshots of the global state for joiners: safetensors bytes in shared memory, made in a thread beside training.

The trainer's provider returns a consistent state at any time. Bytes that came over the network are read, and checked,
by the safetensors library; nothing is unpickled.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diloco.engines.rounds import GlobalState
from diloco.errors import EngineError, RoundFailed
from diloco.safetensors_files import make_header
from diloco.swarm import timing
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar.messages import SnapshotMade
from diloco.swarm.trainer import Snapshot

logger = logging.getLogger(__name__)

Provider = Callable[[], GlobalState]
"""Gives the trainer's state now; raises RoundFailed if there is none."""


@torch.no_grad()
def write(tensors: Mapping[str, Tensor]) -> SharedMemory:
    """Make a safetensors file in memory: each tensor is copied once, from its device into the shared memory."""
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
    """Read the tensors as views of this memory on the CPU, without a copy."""
    try:
        with safe_open(f"/proc/self/fd/{memory.fd}", framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
    except SafetensorError as error:
        raise EngineError(f"the state that arrived is damaged ({error}): start this worker again") from error


class SnapshotMaker:
    """Answers requests for snapshots in a thread of its own; requests for the same state share one snapshot."""

    def __init__(self, send: Callable[[SnapshotMade], object]) -> None:
        self._send = send
        self.paused = False
        """Requests are answered as if there was no state."""
        self._provider: Provider | None = None
        self._version = 0
        """Counts the changes of the state."""
        self._latest: Snapshot | None = None
        """The snapshot of the state as it is; None: none was made since the last change."""
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def serve(self, provider: Provider) -> None:
        with self._lock:
            self._provider = provider
        self.invalidate()

    def invalidate(self) -> None:
        """The state has changed: free the latest snapshot, and make a new one for the next request."""
        with self._lock:
            self._version += 1
            self._latest = None

    def request(self, number: int) -> None:
        """Have request `number` answered by the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="diloco-snapshots", daemon=True)
            self._thread.start()
        self._requests.put(number)

    def close(self) -> None:
        self._requests.put(None)  # ends the thread
        with self._lock:
            self._provider = None
            self._latest = None
        if self._thread is not None:
            self._thread.join(timing.WRITER_SECONDS)  # a large copy that is not done by then is left to end by itself

    def _work(self) -> None:
        while (number := self._requests.get()) is not None:
            try:
                snapshot = self._snapshot()
            except RoundFailed as reason:
                logger.info("no snapshot for a joiner now: %s", reason)
                snapshot = None
            except Exception:  # the joiner asks another worker; training goes on
                logger.exception("no snapshot for a joiner")
                snapshot = None
            self._send(SnapshotMade(number, snapshot))

    def _snapshot(self) -> Snapshot | None:
        with self._lock:
            provider = self._provider
            version = self._version
            latest = self._latest
        if provider is None or self.paused:
            return None
        if latest is not None:
            return latest
        state = provider()
        snapshot = Snapshot(write(state.tensors), dict(state.numbers), state.layout_digest, state.note)
        with self._lock:
            if self._version == version:
                self._latest = snapshot
        return snapshot
