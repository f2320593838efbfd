"""What the swarm needs of a network: calls with an answer, and streams of bytes, between peers that are known by name.

A peer's name is its libp2p peer id, and the transport vouches for it: nobody can call in another's name. What is
carried is bytes; who may say what is decided above (trust.py), what is said is in wire.py. The one implementation for
the internet is daemon.py (Hivemind's p2pd); tests have one in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

MAX_CALL_BYTES = 1 << 20
"""Of a call and of its answer; what is longer goes over a stream."""


class Unreachable(Exception):
    """The peer is not there, or the way to it broke. `gone`: it is known to be dead, not only silent."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


class CallRefused(Exception):
    """The peer answered, and said no; the text is its reason."""


class Stream(ABC):
    """Bytes to and from one peer, in order. No method waits longer than it is told to."""

    peer: str
    bytes_sent: int
    bytes_received: int

    @abstractmethod
    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        """Returns once the bytes are on their way; raises Unreachable after `seconds` without progress."""

    @abstractmethod
    async def read(self, size: int, seconds: float) -> bytes:
        """Exactly `size` bytes; raises Unreachable at the end of the stream or after `seconds` without progress."""

    @abstractmethod
    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        """The same, into memory that is there already."""

    @abstractmethod
    def close(self) -> None: ...


OnCall = Callable[[str, bytes], Awaitable[bytes]]
"""(peer, request) -> answer. An exception becomes the caller's CallRefused, with its text."""
OnStream = Callable[[Stream], Awaitable[None]]
"""A peer has opened a stream; it is closed when this returns."""


class Transport(ABC):
    peer: str
    """This peer's own name."""

    @abstractmethod
    async def serve(self, on_call: OnCall, on_stream: OnStream) -> None:
        """Answer others from now on."""

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Where others can reach this peer now (multiaddrs that end in /p2p/PEER)."""

    @abstractmethod
    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None:
        """Connect to a peer at one of these addresses; raises Unreachable."""

    async def disconnect(self, peer: str) -> None:  # noqa: B027 - a transport without connections has nothing to do
        """Drop the connections with a peer that is silent or not wanted; a later call connects anew."""

    @abstractmethod
    async def call(self, peer: str, request: bytes, seconds: float) -> bytes:
        """Raises Unreachable or CallRefused."""

    @abstractmethod
    async def open_stream(self, peer: str, seconds: float) -> Stream:
        """Raises Unreachable."""

    @abstractmethod
    async def close(self) -> None: ...
