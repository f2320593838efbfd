"""The data that a trainer and its swarm node exchange, and what the node asks of the trainer (`Trainer`).

The same types are used by the engine (engine.py), on the link between the two processes (sidecar/messages.py) and by
the node. Large blocks of bytes are shared memory: both processes see them, and only a file descriptor travels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from msgspec import Struct

from diloco.core.config import Merge
from diloco.engines.rounds import RoundKey, RoundSummary
from diloco.swarm.shared_memory import SharedMemory


class PostedRound(Struct, frozen=True, eq=False):
    """A round as the trainer posts it."""

    key: RoundKey
    header: bytes
    """The header, packed by engines/header.py."""
    note: bytes
    """Passed on to the other trainers unread; how far this worker has read its data, for example."""
    codec: str
    part_elements: int
    num_parts: int
    contribution: SharedMemory
    """All parts as the codec encodes them; unchanged until the round has ended."""
    mean: SharedMemory
    """All parts as the codec's `for_means` encodes them, when the round has succeeded."""
    max_norm_ratio: float | None
    deadline_seconds: float
    merge: Merge = "mean"
    """The option of SyncConfig."""


class PresentWorker(Struct, frozen=True):
    """A worker whose header arrived in a round."""

    worker: int
    header: bytes
    note: bytes
    root: bytes = b""
    """Binds the worker to its encoded parts (audit/merkle.py)."""


@dataclass(frozen=True)
class RoundOutcome(RoundSummary):
    """How a round ended for this worker. With no `failure` and total_weight > 0 the mean is in the posted memory.

    With a failure, `resync` says that the others have gone on without this worker, or that its anchor differs.
    """

    key: RoundKey
    failure: str | None = None
    fatal: bool = False
    """No later round can succeed either: this worker is banned or revoked, or trains another model."""
    present: tuple[PresentWorker, ...] = ()
    """In worker order."""


class Snapshot(Struct, frozen=True, eq=False):
    """A worker's global state at one moment, for a joiner."""

    data: SharedMemory
    """A safetensors file."""
    numbers: dict[str, int]
    """See GlobalState.numbers; "sequence" is the first round whose mean is not in it."""
    layout_digest: str
    note: bytes
    """Passed on to the joiner's trainer unread; how far all shards have been read, for example."""


class RoundMean(Struct, frozen=True, eq=False):
    """The encoded mean of a round that has ended."""

    key: RoundKey
    data: SharedMemory
    plain: bool = False
    """See RoundResult.plain."""


class FetchedState(Struct, frozen=True, eq=False):
    """A state that was fetched, and the means of the rounds that ended during the transfer, oldest first."""

    snapshot: Snapshot | None
    """None: the trainer's own state is right, and lacks the means only."""
    means: tuple[RoundMean, ...]
    sequence: int
    """The next round to post, after the snapshot and the means."""
    position: int
    """The inner step that the other workers are at now, as far as they have reported it."""


class Trainer(Protocol):
    """What the node asks of its trainer, over the link; none of it blocks training."""

    def post_now(self, sequence: int) -> None:
        """The others are in this round and wait no longer: post it after this step, with the work done so far."""

    async def snapshot(self) -> Snapshot | None:
        """Return the global state now; None if the trainer has none yet, or does not answer in time."""

    def emit(self, type_: str, fields: Mapping[str, Any]) -> None:
        """Write an event to events.jsonl: a join, a leave, a refusal, a ban."""
