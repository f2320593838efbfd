"""A look at a swarm from outside, with an invitation and without becoming a member: who is there, the time, files.

For `diloco join`, before this machine has anything of the run, and for `diloco status`. A guest has a name of its own
for the visit, listens to nobody, and is forgotten. The event loop runs in a thread; every call is bounded.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, TypeVar

from diloco.engines.swarm.network.addresses import ListenConfig
from diloco.engines.swarm.network.known_peers import KnownPeer, write_peers
from diloco.engines.swarm.network.p2pd_transport import P2pdTransport, protocol_of
from diloco.engines.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.engines.swarm.node.file_transfer import fetch_file
from diloco.engines.swarm.node.status import Status
from diloco.engines.swarm.node.wire import PROTOCOL, Malformed, Message, pack, texts
from diloco.engines.swarm.trust.invitation import Invitation
from diloco.errors import EngineError, RendezvousError
from diloco.version import __version__

_CALL_SECONDS = 10.0
_STALL_SECONDS = 30.0
_START_SECONDS = 60.0
_MEMBERS = 1024

T = TypeVar("T")


class Guest:
    """Of one swarm; a context. Raises RendezvousError with what to do if nobody lets it in."""

    def __init__(self, invitation: Invitation, network: ListenConfig | None = None) -> None:
        self._invitation, self._network = invitation, replace(network or ListenConfig(), guest=True)
        self._hosts: list[str] = []
        """Who has answered."""

    def __enter__(self) -> "Guest":
        self._folder = TemporaryDirectory(prefix="diloco-guest-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diloco-guest", daemon=True)
        self._thread.start()
        self._transport: P2pdTransport | None = None
        try:
            self._run(self._begin(), _START_SECONDS)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # What can be asked

    @property
    def hosts(self) -> int:
        """How many have let this guest in."""
        return len(self._hosts)

    def clock(self) -> float:
        """The time there, as seconds since 1970, corrected by half of what the question took.

        Of several that are told, the one nearest to this machine's: one who lies cannot keep anybody out.
        """
        told, problem = [], EngineError("nobody is there")
        for peer in self._hosts:
            started = time.monotonic()
            try:
                there = self._ask(pack("clock"), [peer]).real("time")
            except (EngineError, Malformed) as error:
                problem = EngineError(str(error))
            else:
                told.append(there + (time.monotonic() - started) / 2)
        if not told:
            raise problem
        return min(told, key=lambda there: abs(there - time.time()))

    def status(self) -> dict[str, Any]:
        """As Node.status gives it."""
        message = self._ask(pack("status"))
        return {
            "run": message.text("run"),
            "members": [_member(entry) for entry in message.maps("members")[:_MEMBERS]],
            "leader": message.text("leader") if message.has("leader") else None,
            "leading": {str(key): str(value)[:64] for key, value in message.plain("leading").items()},
        }

    def files(self) -> list[str]:
        return texts(self._ask(pack("files")).items("names"))

    def fetch(
        self, name: str, path: Path, most_bytes: int = 1 << 42, digest: str | None = None, *, first: int = 0
    ) -> None:
        """A file from whoever has it (with that sha256); whole or not at all. Raises EngineError or OSError.

        `first`: which of those who let this guest in is asked first.
        """
        assert self._transport is not None
        hosts = self._hosts[first:] + self._hosts[:first]
        work = fetch_file(self._transport, hosts, name, path, _STALL_SECONDS, most_bytes, digest)
        self._run(work, None)

    def remember(self, path: Path) -> None:
        """Where the members are, into a peers.json."""
        known = [
            KnownPeer(
                one["peer"], one["number"] if one["number"] >= 0 else None, tuple(one["addresses"]), seen=time.time()
            )
            for one in self.status()["members"]
            if one["live"]
        ]
        write_peers(path, known)

    # How

    async def _begin(self) -> None:
        key = Path(self._folder.name) / "guest.key"
        self._transport = await P2pdTransport.create(key, protocol_of(self._invitation.run_id), self._network)
        await self._transport.serve(_nothing, _no_stream)
        at: dict[str, list[str]] = {}
        for address in self._invitation.addresses:
            at.setdefault(address.rpartition("/p2p/")[2], []).append(address)
        problems = await asyncio.gather(*(self._greet(peer, addresses) for peer, addresses in at.items()))
        if not self._hosts:
            refused = next((problem for problem in problems if isinstance(problem, CallRefused)), None)
            if refused is not None:
                raise RendezvousError(f"the swarm does not let this machine in: {refused}")
            raise RendezvousError(
                f"nobody of this run answers at {', '.join(self._invitation.addresses) or 'any address'}: is a worker "
                "of it running there, and its port open? Ask for a fresh invitation (diloco invite RUN), and see "
                "diloco doctor INVITATION"
            )

    async def _greet(self, peer: str, addresses: list[str]) -> Exception | None:
        assert self._transport is not None
        hello = pack(
            "hello",
            protocol=PROTOCOL,
            version=__version__,
            role="guest",
            credential=self._invitation.credential(self._transport.peer).data(),
            addresses=[],
            status=Status().to_wire(),
            time=time.time(),
            revocations=[],
        )
        try:
            await self._transport.connect(peer, addresses, _CALL_SECONDS)
            Message.unpack(await self._transport.call(peer, hello, _CALL_SECONDS))
        except (Unreachable, CallRefused, Malformed) as problem:
            return problem
        self._hosts.append(peer)
        return None

    def _ask(self, request: bytes, peers: list[str] | None = None) -> Message:
        """The first of those (or of all who let us in) that still answers."""
        assert self._transport is not None
        problems = []
        for peer in self._hosts if peers is None else peers:
            try:
                answer = self._run(self._transport.call(peer, request, _CALL_SECONDS), 2 * _CALL_SECONDS)
                return Message.unpack(answer)
            except (Unreachable, CallRefused, Malformed) as problem:
                problems.append(f"{peer[-8:]}: {problem}")
        raise EngineError(f"the swarm no longer answers ({'; '.join(problems)}): try again")

    def _run(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        """`seconds` None: the work is bounded by itself."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            future.cancel()
            raise EngineError(f"the swarm did not answer within {seconds:g} s: try again") from None

    def _close(self) -> None:
        async def end() -> None:
            if self._transport is not None:
                await self._transport.close()

        try:
            self._run(end(), _CALL_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CALL_SECONDS)
            self._loop.close()
            self._folder.cleanup()


def _member(entry: Message) -> dict[str, Any]:
    status = Status.from_wire(entry)
    return {
        **status.to_wire(),
        "peer": entry.text("peer"),
        "live": entry.flag("live"),
        "left": entry.flag("left"),
        "silent_seconds": entry.real("silent_seconds"),
        "latency_seconds": entry.real("latency_seconds"),
        "addresses": texts(entry.items("addresses")),
    }


async def _nothing(peer: str, request: bytes) -> bytes:
    del peer, request
    raise CallRefused("a guest answers nothing")


async def _no_stream(stream: Stream) -> None:
    stream.close()
