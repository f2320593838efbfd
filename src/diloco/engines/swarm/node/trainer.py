"""The swarm as one worker's trainer sees it, and the trainer as its sidecar's node sees it.

`node.py` is the node: membership, rounds, states. `sidecar.py` connects it with the trainer over `link.py`; the
trainer's end is `engines/hivemind.py`. Everything here is plain data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from diloco.engines.rounds import RoundKey


@dataclass(frozen=True)
class Posting:
    """A round as the trainer posts it. `contribution` and `mean` are memory that both processes see."""

    key: RoundKey
    header: bytes
    """As engines/header.py packs it."""
    note: bytes
    """Opaque: what the trainer has to tell the other trainers with this round (how far it has read, say)."""
    codec: str
    part_elements: int
    num_parts: int
    part_bytes: int
    contribution: memoryview
    """[num_parts × part_bytes]; not changed by anyone until the round has ended."""
    mean: memoryview
    """The same size; holds the encoded mean when the round has ended well."""
    max_norm_ratio: float | None
    deadline_seconds: float


@dataclass(frozen=True)
class Present:
    """A worker that was heard in a round: its number, header and note."""

    worker: int
    header: bytes
    note: bytes


@dataclass(frozen=True)
class Ended:
    """How a round ended for this worker. `failure` None: the mean is in the posting's memory (if total_weight > 0)."""

    key: RoundKey
    failure: str | None = None
    resync: bool = False
    """The others have gone on without this worker, or its anchor differs: it must fetch the state."""
    fatal: bool = False
    """It will not get better: banned, revoked, or a model of its own."""
    contributors: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    total_weight: float = 0.0
    present: tuple[Present, ...] = ()
    """All that were heard, in worker order."""
    roster: tuple[int, ...] = ()
    """All members at that time, also those that missed the round."""
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """A worker's global state at one moment, for a joiner: safetensors bytes in shared memory."""

    data: memoryview
    numbers: Mapping[str, int]
    """As GlobalState.numbers; "sequence" is the first round whose mean is not in it."""
    layout_digest: str
    note: bytes
    """Opaque: what the source's trainer tells a joiner's trainer (how far all shards have been read, say)."""


@dataclass(frozen=True)
class Arrived:
    """A state that was fetched, and the means of the rounds that ended while it was on its way, oldest first."""

    snapshot: Snapshot | None
    """None: what the trainer has is right, and only the means are missing."""
    means: tuple[tuple[RoundKey, bytes], ...]
    sequence: int
    """The next round to post, after the snapshot and the means."""
    position: int
    """Where the others are in the schedule now, as far as they have told."""


class Trainer(Protocol):
    """What the node asks of its trainer; over the link, so none of it blocks training."""

    def called(self, sequence: int) -> None:
        """The others are in this round and wait no longer: post it at the next step, with the work there is."""

    async def snapshot(self) -> Snapshot | None:
        """The global state now; None while it has none yet, or the trainer does not answer in time."""

    def happened(self, type_: str, fields: Mapping[str, Any]) -> None:
        """Something for events.jsonl: a join, a leave, a refusal, a ban."""
