"""The messages between a trainer and its sidecar, one type each.

A message with a `number` is a request, or the answer with the same number: `Failed` in place of any other answer.
"""

from typing import Any

from msgspec import Struct

from diloco.swarm.protocol.status import RunStatus
from diloco.swarm.settings import Settings
from diloco.swarm.trainer import FetchedState, PostedRound, RoundOutcome, Snapshot


class _Message(Struct, tag=True, tag_field="message", frozen=True):
    pass


# Sent by the trainer


class StartNode(_Message, frozen=True):
    """The first message, sent once; the answer is Started."""

    number: int
    settings: Settings
    next_round: int | None = None
    """The first round that the trainer has not merged, if it was in this swarm before."""


class PostRound(_Message, frozen=True):
    """A contribution to a round; the answer is RoundEnded."""

    number: int
    round: PostedRound


class FetchState(_Message, frozen=True):
    """A request for the state; the answer is StateFetched. One of more than `most_bytes` cannot be of this run."""

    number: int
    most_bytes: int | None = None


class FetchRunFile(_Message, frozen=True):
    """A request to fetch the file of this name into `path`; the answer is RequestDone."""

    number: int
    name: str
    path: str


class Leave(_Message, frozen=True):
    """A request to leave: the answer is RequestDone when the others have been told; then the sidecar ends."""

    number: int


class ServeFiles(_Message, frozen=True):
    """The files to serve to other workers: name -> path."""

    files: dict[str, str]


class ReportProgress(_Message, frozen=True):
    """The trainer's progress, for the other workers."""

    inner_steps: int
    tokens: int
    loss: float
    step_seconds: float
    run_tokens: int = 0


class SnapshotMade(_Message, frozen=True):
    """The answer to MakeSnapshot; `snapshot` is None if there is no state now."""

    number: int
    snapshot: Snapshot | None = None


# Sent by the sidecar


class Started(_Message, frozen=True):
    """The answer to StartNode, with this worker's number in the swarm."""

    number: int
    worker: int


class Failed(_Message, frozen=True):
    """The answer to a request that failed: `kind` is the name of a class in diloco.errors, or "" for other errors."""

    number: int
    kind: str
    text: str


class RequestDone(_Message, frozen=True):
    """The answer to FetchRunFile and Leave."""

    number: int


class RoundEnded(_Message, frozen=True):
    """The answer to PostRound."""

    number: int
    outcome: RoundOutcome


class StateFetched(_Message, frozen=True):
    """The answer to FetchState; `state` is None if this worker has the state already."""

    number: int
    state: FetchedState | None = None


class PostAtOnce(_Message, frozen=True):
    """The news that the others are in this round and wait no longer for this worker."""

    sequence: int


class MakeSnapshot(_Message, frozen=True):
    """A request for a snapshot; the answer is SnapshotMade. The numbers are the sidecar's own."""

    number: int


class NodeEvent(_Message, frozen=True):
    """An event for the run's log."""

    type: str
    fields: dict[str, Any]


class StatusReport(_Message, frozen=True):
    """The run's status, every second and after every change; None: the node is starting.

    It is also a sign that the sidecar is alive.
    """

    status: RunStatus | None


FromTrainer = StartNode | PostRound | FetchState | FetchRunFile | Leave | ServeFiles | ReportProgress | SnapshotMade
Answer = Started | Failed | RequestDone | RoundEnded | StateFetched
FromSidecar = Answer | PostAtOnce | MakeSnapshot | NodeEvent | StatusReport
Message = FromTrainer | FromSidecar
