"""What a trainer and its sidecar say to each other: one dataclass a message, of plain values, bytes and shared memory.

A message with a `number` is a request; its answer, or the `Failed` in its place, has the same number.
"""

from dataclasses import dataclass
from typing import Any

from diloco.engines.swarm.shared_memory import SharedMemory

# The trainer says


@dataclass(frozen=True)
class Start:
    """First of all, once. Answered by Started."""

    number: int
    settings: dict[str, Any]
    held: int | None = None
    """The first round that the trainer has not merged, if it was in this swarm before."""


@dataclass(frozen=True)
class Post:
    """See worker.Posting. Answered by RoundEnded."""

    number: int
    sequence: int
    fragment: int
    header: bytes
    note: bytes
    codec: str
    part_elements: int
    num_parts: int
    part_bytes: int
    contribution: SharedMemory
    mean: SharedMemory
    max_norm_ratio: float | None
    deadline_seconds: float


@dataclass(frozen=True)
class FetchState:
    """Answered by StateFetched."""

    number: int


@dataclass(frozen=True)
class FetchFile:
    """Answered by Done."""

    number: int
    name: str
    path: str


@dataclass(frozen=True)
class Leave:
    """Answered by Done, when the others have been told; then the sidecar ends."""

    number: int


@dataclass(frozen=True)
class ServeFiles:
    files: dict[str, str]


@dataclass(frozen=True)
class Progress:
    inner_steps: int
    tokens: int
    loss: float
    step_seconds: float


@dataclass(frozen=True)
class SnapshotMade:
    """The answer to SnapshotWanted; without memory there is no state (yet)."""

    number: int
    memory: SharedMemory | None = None
    numbers: dict[str, int] | None = None
    layout_digest: str = ""
    note: bytes = b""


# The sidecar says


@dataclass(frozen=True)
class Started:
    number: int
    worker: int


@dataclass(frozen=True)
class Failed:
    """A request was not met: `kind` is the name of an error of diloco.errors, `text` its message."""

    number: int
    kind: str
    text: str


@dataclass(frozen=True)
class Done:
    number: int


@dataclass(frozen=True)
class RoundEnded:
    """See worker.Ended; `refused` has pairs (worker, reason), `present` triples (worker, header, note)."""

    number: int
    failure: str | None
    resync: bool
    fatal: bool
    contributors: list[int]
    refused: list[tuple[int, str]]
    total_weight: float
    present: list[tuple[int, bytes, bytes]]
    roster: list[int]
    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True)
class StateFetched:
    """See worker.Arrived. The means are one after another in their memory."""

    number: int
    holds: bool = False
    """This worker has the state: nothing else is said."""
    memory: SharedMemory | None = None
    numbers: dict[str, int] | None = None
    layout_digest: str = ""
    note: bytes = b""
    means: list[tuple[int, int, int]] | None = None
    """(sequence, fragment, bytes) of each."""
    means_memory: SharedMemory | None = None
    sequence: int = 0
    position: int = 0


@dataclass(frozen=True)
class Called:
    sequence: int


@dataclass(frozen=True)
class SnapshotWanted:
    number: int


@dataclass(frozen=True)
class Happened:
    type: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Status:
    """Once a second and after every change: what the node says of itself, and that the sidecar is alive."""

    values: dict[str, Any]


Message = (
    Start
    | Post
    | FetchState
    | FetchFile
    | Leave
    | ServeFiles
    | Progress
    | SnapshotMade
    | Started
    | Failed
    | Done
    | RoundEnded
    | StateFetched
    | Called
    | SnapshotWanted
    | Happened
    | Status
)
