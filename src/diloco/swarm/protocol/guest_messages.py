"""The messages for guests (`diloco join`, `status` and `doctor`); messages.py has them too."""

from typing import Annotated

from msgspec import Meta

from diloco.swarm.protocol.status import RunStatus
from diloco.swarm.protocol.wire import PeerMessage

MAX_MEASURED_BYTES = 512 << 10
Text = Annotated[str, Meta(max_length=512)]


class AskStatus(PeerMessage, frozen=True):
    pass


class StatusAnswer(PeerMessage, frozen=True):
    status: RunStatus


class AskFiles(PeerMessage, frozen=True):
    pass


class FileNames(PeerMessage, frozen=True):
    names: Annotated[tuple[Text, ...], Meta(max_length=8192)]


class AskTime(PeerMessage, frozen=True):
    pass


class Time(PeerMessage, frozen=True):
    """Seconds since 1970."""

    time: float


class Measure(PeerMessage, frozen=True):
    """Answered by Measured with `size` bytes: a test of the bandwidth in both directions."""

    size: Annotated[int, Meta(ge=0, le=MAX_MEASURED_BYTES)]
    padding: Annotated[bytes, Meta(max_length=MAX_MEASURED_BYTES)] = b""


class Measured(PeerMessage, frozen=True):
    data: bytes
