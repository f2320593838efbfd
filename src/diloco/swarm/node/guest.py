"""A guest of a swarm: it has an invitation, asks members for the status, the time and files, and takes part in nothing.

For `diloco join`, before this machine has anything of the run, and for `diloco status`. A guest has an identity of its
own for the visit, answers no peer, and is forgotten. The event loop runs in a thread; every call is bounded.
"""

import asyncio
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Literal, TypeVar

from diloco.errors import EngineError, Excluded, RendezvousError
from diloco.own_command import command
from diloco.swarm import timing
from diloco.swarm.network.known_peers import KnownPeer, write_peers
from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node.file_transfer import fetch_file
from diloco.swarm.protocol.messages import AskFiles, AskStatus, AskTime, FileNames, Hello, StatusAnswer, Time, expect
from diloco.swarm.protocol.refusals import NOT_ADMITTED
from diloco.swarm.protocol.status import RunStatus, Status
from diloco.swarm.protocol.wire import PROTOCOL, Malformed, PeerMessage, encode
from diloco.swarm.trust.invitation import Invitation
from diloco.version import __version__

T = TypeVar("T")
Answer = TypeVar("Answer", bound=PeerMessage)


class Guest:
    """A context. Raises RendezvousError with what to do if no member admits it."""

    def __init__(self, invitation: Invitation, network: ListenConfig | None = None, *, joins: bool = False) -> None:
        """`joins`: a worker comes with this invitation next; Excluded if its seat is taken."""
        self._invitation = invitation
        self._network = replace(network or ListenConfig(), guest=True)
        self._role: Literal["joiner", "guest"] = "joiner" if joins else "guest"
        self._hosts: list[str] = []
        """The members that have admitted this guest."""

    def __enter__(self) -> "Guest":
        if not self._invitation.addresses:
            raise RendezvousError(
                "the invitation has no address of a worker; the copy in a run folder (swarm/*.invitation) may have "
                f"none. Make an invitation for others with {command('invite', 'RUN')}"
            )
        self._folder = TemporaryDirectory(prefix="diloco-guest-")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="diloco-guest", daemon=True)
        self._thread.start()
        self._transport: P2pdTransport | None = None
        try:
            self._run(self._begin(), timing.GUEST_START_SECONDS)
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    # Questions

    @property
    def run_public(self) -> bytes:
        """The run's public key, with which its description is checked."""
        return self._invitation.run_public

    @property
    def hosts(self) -> int:
        """The number of members that have admitted this guest."""
        return len(self._hosts)

    def clock(self) -> float:
        """Ask for the members' time, in seconds since 1970, corrected by half the duration of the call.

        Of several answers the one nearest to this machine's clock: one member that lies cannot keep a guest out.
        """
        times = []
        problem = EngineError("no member has admitted this guest")
        for peer in self._hosts:
            started = time.monotonic()
            try:
                theirs = self._ask(AskTime(), Time, [peer]).time
            except EngineError as error:
                problem = error
            else:
                times.append(theirs + (time.monotonic() - started) / 2)
        if not times:
            raise problem
        return min(times, key=lambda theirs: abs(theirs - time.time()))

    def status(self) -> RunStatus:
        return self._ask(AskStatus(), StatusAnswer).status

    def files(self) -> list[str]:
        return list(self._ask(AskFiles(), FileNames).names)

    def fetch(
        self, name: str, path: Path, most_bytes: int = 1 << 42, digest: str | None = None, *, first: int = 0
    ) -> None:
        """Fetch a file (with that sha256) from any member that has it, whole or not at all. Raises EngineError or
        OSError.

        `first`: the index of the member that is asked first.
        """
        assert self._transport is not None
        hosts = self._hosts[first:] + self._hosts[:first]
        work = fetch_file(self._transport, hosts, name, path, timing.GUEST_STALL_SECONDS, most_bytes, digest)
        self._run(work, None)

    def remember(self, path: Path) -> None:
        """Write the members' addresses into a peers.json."""
        known = [
            KnownPeer(member.peer, member.number if member.number >= 0 else None, member.addresses, seen=time.time())
            for member in self.status().members
            if member.live
        ]
        write_peers(path, known)

    # Calls

    async def _begin(self) -> None:
        key = Path(self._folder.name) / "guest.key"
        self._transport = await P2pdTransport.create(key, protocol_of(self._invitation.run_id), self._network)
        await self._transport.serve(_refuse_call, _refuse_stream)
        addresses_of: dict[str, list[str]] = {}
        for address in self._invitation.addresses:
            addresses_of.setdefault(address.rpartition("/p2p/")[2], []).append(address)
        problems = await self._greet_all(addresses_of)
        if not self._hosts:
            refused = next((problem for problem in problems if isinstance(problem, CallRefused)), None)
            if refused is not None and refused.code in NOT_ADMITTED:
                raise Excluded(f"the swarm does not admit this machine: {refused}")
            if refused is not None:
                raise RendezvousError(f"the swarm does not admit this machine now: {refused}; try again")
            where = ", ".join(self._invitation.addresses)
            raise RendezvousError(
                f"no worker of this run answers at {where}: the run has ended (its members' run folders say how), or "
                f"its port is not open to this machine. Ask for a fresh invitation ({command('invite', 'RUN')}), and "
                f"see {command('doctor', '-')}"
            )

    async def _greet_all(self, addresses_of: dict[str, list[str]]) -> list[Exception | None]:
        """Say hello to all members at once; silent ones are not waited for when others have admitted this guest."""
        greetings = [asyncio.create_task(self._greet(peer, addresses)) for peer, addresses in addresses_of.items()]
        done = set[asyncio.Task[Exception | None]]()
        waiting = set(greetings)
        while waiting:
            more, waiting = await asyncio.wait(
                waiting,
                timeout=timing.GUEST_LATER_SECONDS if self._hosts else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not more:
                break
            done |= more
        for silent in waiting:
            silent.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return [greeting.result() for greeting in greetings if greeting in done]

    async def _greet(self, peer: str, addresses: list[str]) -> Exception | None:
        assert self._transport is not None
        credential = self._invitation.credential(self._transport.peer, "guest").data()
        hello = Hello(PROTOCOL, __version__, self._role, credential, (), Status())
        try:
            await self._transport.connect(peer, addresses, timing.GUEST_CALL_SECONDS)
            expect(await self._transport.call(peer, encode(hello), timing.GUEST_CALL_SECONDS), Hello)
        except (Unreachable, CallRefused, Malformed) as problem:
            return problem
        self._hosts.append(peer)
        return None

    def _ask(self, request: PeerMessage, type_: type[Answer], peers: list[str] | None = None) -> Answer:
        """Return the answer of the first of `peers` (or of all that have admitted this guest) that gives one."""
        assert self._transport is not None
        problems = []
        for peer in self._hosts if peers is None else peers:
            try:
                call = self._transport.call(peer, encode(request), timing.GUEST_CALL_SECONDS)
                return expect(self._run(call, 2 * timing.GUEST_CALL_SECONDS), type_)
            except (Unreachable, CallRefused, Malformed) as problem:
                problems.append(f"{peer[-8:]}: {problem}")
        raise EngineError(f"the swarm no longer answers ({'; '.join(problems)}): try again")

    def _run(self, work: Coroutine[Any, Any, T], seconds: float | None) -> T:
        """`seconds` None: the work has bounds of its own."""
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
            self._run(end(), timing.GUEST_CALL_SECONDS)
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timing.GUEST_CALL_SECONDS)
            self._loop.close()
            self._folder.cleanup()


async def _refuse_call(peer: str, request: bytes) -> bytes:
    del peer, request
    raise CallRefused("a guest answers nothing")


async def _refuse_stream(stream: Stream) -> None:
    stream.close()
