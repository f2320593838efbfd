"""What the swarm needs of a network: calls with an answer, and streams of bytes, between peers that are known by id.

The transport guarantees the id: no peer can call under another's (libp2p peer ids are made of public keys). Which peer
may say what is decided in trust/permissions.py; the messages are in protocol/messages.py. For the internet there is
p2pd/transport.py (Hivemind's p2pd); tests have a transport in memory.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable

MAX_CALL_BYTES = 1 << 20
"""The limit for a call and for its answer; anything longer goes over a stream."""

LEAST_RATE = 4096.0
"""Bytes a second: a stream that brings less, after a time of grace, makes no progress."""


class Unreachable(Exception):
    """The peer does not answer.

    `gone`: it is known to be dead, not only silent. `broken`: the connection broke, and another call tells whether the
    peer is dead.
    """

    def __init__(self, reason: str, *, gone: bool = False, broken: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone
        self.broken = broken


class CallRefused(Exception):
    """The peer answered with a refusal: a code, which programs decide by, and a sentence for people.

    It travels as the text `code: sentence`; without a code ("") something went wrong at the peer. Whatever a program
    does not know the code of, it tries again later: only protocol/refusals.py names codes that end something.
    """

    def __init__(self, sentence: str, code: str = "") -> None:
        super().__init__(f"{code}: {sentence}" if code else sentence)
        self.code = code

    @classmethod
    def read(cls, text: str) -> "CallRefused":
        """Read the refusal from the text that has arrived."""
        code = _CODE.match(text)
        return cls(text) if code is None else cls(text[code.end() :], code[1])


_CODE = re.compile(r"([a-z]{1,20}): ")


class Stream(ABC):
    """A stream of bytes to and from one peer, in order. No method waits longer than `seconds` without progress."""

    peer: str
    bytes_sent: int
    bytes_received: int

    @abstractmethod
    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        """Return when the bytes have been handed over; raise Unreachable after `seconds` without progress."""

    async def write_both(self, head: bytes, data: bytes | memoryview, seconds: float) -> None:
        """Write a few bytes and what follows them, in one piece where that costs less."""
        await self.write(head, seconds)
        if len(data):
            await self.write(data, seconds)

    @abstractmethod
    async def read(self, size: int, seconds: float) -> bytes:
        """Read exactly `size` bytes; raise Unreachable if the stream ends, or after `seconds` without progress."""

    @abstractmethod
    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        """Fill existing memory; raise Unreachable as `read` does."""

    @abstractmethod
    def close(self) -> None: ...


OnCall = Callable[[str, bytes], Awaitable[bytes]]
"""(peer, request) -> answer. An exception becomes the caller's CallRefused, with its text."""
OnStream = Callable[[Stream], Awaitable[None]]
"""A peer has opened a stream; it is closed when this returns."""


class Transport(ABC):
    """Calls and streams between this peer and others."""

    peer: str
    """This peer's own id."""

    @abstractmethod
    async def serve(self, on_call: OnCall, on_stream: OnStream) -> None:
        """Answer other peers from now on."""

    @abstractmethod
    async def addresses(self) -> list[str]:
        """Return where others can reach this peer now (multiaddrs that end in /p2p/PEER)."""

    @abstractmethod
    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None:
        """Connect to a peer at one of these addresses, or raise Unreachable."""

    async def disconnect(self, peer: str) -> None:  # noqa: B027 - a transport without connections has nothing to do
        """Drop the connections with a peer; a later call connects again."""

    def heard_at(self, peer: str) -> float:
        """Return when bytes of a stream last came from a peer, on the loop's clock; 0.0 if none is open."""
        del peer
        return 0.0

    @abstractmethod
    async def call(self, peer: str, request: bytes, seconds: float) -> bytes:
        """Return the peer's answer, or raise Unreachable or CallRefused."""

    @abstractmethod
    async def open_stream(self, peer: str, seconds: float) -> Stream:
        """Open a stream to this peer, or raise Unreachable."""

    @abstractmethod
    async def close(self) -> None: ...
