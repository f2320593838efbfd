"""The swarm's transport on the internet: Hivemind's p2pd, which brings libp2p's connections, encryption and relays.

Peers are authenticated and traffic is encrypted by libp2p (TLS 1.3). Whether a peer may say something is decided above;
here are only the limits that keep a stranger from costing much: on the size of a call, and on how many calls and
streams of one peer and of all are handled at a time. Hivemind's Python package is not imported, only its daemon is run.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

from diloco.engines.swarm.network import hole_punching as punching
from diloco.engines.swarm.network import identity, multiaddr
from diloco.engines.swarm.network import reachability as reaching
from diloco.engines.swarm.network.addresses import ListenConfig, listen_addresses
from diloco.engines.swarm.network.limits import ConcurrencyLimit, LruCache
from diloco.engines.swarm.network.p2pd import Daemon
from diloco.engines.swarm.network.p2pd_control import Control, DaemonError, DaemonGone, HandlerError
from diloco.engines.swarm.network.reachability import Reach, Seen
from diloco.engines.swarm.network.relaying import Standing
from diloco.engines.swarm.network.streams import SocketStream
from diloco.engines.swarm.network.transport import (
    MAX_CALL_BYTES,
    CallRefused,
    OnCall,
    OnStream,
    Stream,
    Transport,
    Unreachable,
)
from diloco.errors import RendezvousError

log = logging.getLogger(__name__)

CALLS_PER_PEER, CALLS_IN_ALL = 32, 512
STREAMS_PER_PEER, STREAMS_IN_ALL = 64, 512
_OVERHEAD = 64 << 10
"""Of a message around a call's bytes, generously."""
_RECONNECT_SECONDS = 3.0
_ASK_SECONDS = 5.0
_MAX_KNOWN = 4096
"""Peers whose addresses are remembered."""


def protocol_of(run_id: str) -> str:
    """Peers of other runs are not even heard."""
    return f"/diloco/{run_id}"


class P2pdTransport(Transport):
    """Made by `create`. `ended` is done, with a reason, when p2pd has died: nothing works from then on."""

    def __init__(self, key: Path, protocol: str, network: ListenConfig) -> None:
        self.peer = identity.load_or_create(key)
        self.reach = reaching.first_guess(network)
        self._flags = [f"-id={key}", *_COMMON]
        self._protocol, self._network = protocol, network
        self._daemon: Daemon | None = None
        self._care: asyncio.Task[None] | None = None
        self._addresses: list[str] = []
        self._control = Control("", "")
        self._handlers: tuple[OnCall, OnStream] | None = None
        self._dial_back = reaching.DialBack()
        self._puncher = punching.Puncher(self.peer, protocol)
        self._known: LruCache[list[str]] = LruCache(_MAX_KNOWN)
        self._unpunched: LruCache[None] = LruCache(_MAX_KNOWN)
        self._gone: set[str] = set()
        """Whose dials were refused last: for a while p2pd then says no more than that it does not try again."""
        self._calls = ConcurrencyLimit(CALLS_PER_PEER, CALLS_IN_ALL)
        self._streams = ConcurrencyLimit(STREAMS_PER_PEER, STREAMS_IN_ALL)
        self._open: set[SocketStream] = set()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def create(
        cls, key: Path, protocol: str, network: ListenConfig, seeds: Sequence[str] = ()
    ) -> "P2pdTransport":
        """`key`: the file of this peer's identity, made if missing. `protocol` names the run: others hear nothing.

        `seeds` are addresses of peers that may be up: one of them is asked whether this machine can be reached, and
        if it cannot, they pass on what is for it. Nothing is raised if none of them answers.
        """
        transport = cls(key, protocol, network)
        await transport._start()
        if network.guest:
            return transport
        try:
            standing = Standing(transport, network)
            await standing.find_out(seeds)
        except BaseException:
            await transport.close()
            raise
        transport._care = asyncio.create_task(standing.look_after())
        return transport

    async def restart(self, reach: Reach, network: ListenConfig) -> None:
        """All connections end."""
        self.reach, self._network = reach, network
        await self._stop()
        await self._start()

    def give_up(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    def known(self) -> list[str]:
        """Addresses of all that this peer was introduced to, and of the relays it has had."""
        peers = ((peer, self._known.get(peer) or []) for peer in list(self._known))
        return [*self.reach.relays, *(f"{way}/p2p/{peer}" for peer, ways in peers for way in ways)]

    async def _start(self) -> None:
        self._daemon = daemon = await reaching.start(self.reach, self._network, self._flags)
        self._control = Control(daemon.control, daemon.streams)
        daemon.ended.add_done_callback(self._died)
        try:
            await self._control.connect()
            name, _ = await self._control.identify()
            assert name == self.peer
            if self._handlers is not None:
                await self._register(*self._handlers)
        except (DaemonError, DaemonGone, OSError, asyncio.IncompleteReadError) as error:
            await self._stop()
            raise RendezvousError(f"p2pd started but does not answer ({error}){daemon.last_words()}") from error

    def _died(self, ended: "asyncio.Future[str]") -> None:
        if not ended.cancelled():
            self.give_up(ended.result())

    async def own(self) -> tuple[int, list[str]]:
        """The port that others would call, and the addresses that this machine knows of itself."""
        with self._mapped(self.peer):
            _, ways = await self._control.identify()
        direct = [way for way in ways if "/tcp/" in way and multiaddr.CIRCUIT not in way]
        direct = [way for way in direct if not _loopback(way)] or direct
        ports = [int(way.split("/tcp/")[1].split("/")[0]) for way in sorted(direct)]
        return next(iter(ports), 0), direct

    async def ask_reach(self, peer: str) -> Seen | None:
        """Has that peer call back to where it sees this one; None: it cannot tell."""
        port, _ = await self.own()
        with self._mapped(peer, _ASK_SECONDS):
            async with asyncio.timeout(_ASK_SECONDS):
                request = reaching.ask(port)
                return reaching.answered(await self._control.call(peer, f"{self._protocol}/reach", request))

    async def relay_limit(self, peer: str) -> int:
        """How many bytes a connection through that peer may carry; 0: it relays nothing."""
        with self._mapped(peer, _ASK_SECONDS):
            async with asyncio.timeout(_ASK_SECONDS):
                return await reaching.relay_limit(self._control, peer)

    async def serve(self, on_call: OnCall, on_stream: OnStream) -> None:
        self._handlers = (on_call, on_stream)
        await self._register(on_call, on_stream)

    async def _register(self, on_call: OnCall, on_stream: OnStream) -> None:
        async def answer(peer: str, request: bytes) -> bytes:
            if len(request) > MAX_CALL_BYTES:
                raise CallRefused(f"a call of {len(request)} bytes; at most {MAX_CALL_BYTES} are allowed")
            if not self._calls.take(peer):
                raise CallRefused("too many calls at a time")
            try:
                reply = await on_call(peer, request)
            finally:
                self._calls.give_back(peer)
            if len(reply) > MAX_CALL_BYTES:
                raise CallRefused(f"the answer would have {len(reply)} bytes; at most {MAX_CALL_BYTES} are allowed")
            return reply

        async def accept(peer: str, sock: socket.socket) -> None:
            if not self._streams.take(peer):
                log.debug("a stream of %s is refused: too many at a time", peer)
                sock.close()
                return
            stream = self._stream(peer, sock, counted=True)
            try:
                await on_stream(stream)
            except (Unreachable, CallRefused) as error:
                log.debug("a stream of %s: %s", peer, error)
            except Exception:
                log.exception("a stream of %s failed", peer)
            finally:
                stream.close()

        await self._control.accept_streams(f"{self._protocol}/stream", accept)
        await self._control.answer_calls(f"{self._protocol}/call", answer)
        await self._control.answer_calls(f"{self._protocol}/reach", self._answer_reach)
        await self._control.answer_calls(f"{self._protocol}/punch", self._answer_punch)
        await self._control.answer_calls(f"{self._protocol}/punched", self._answer_punched)

    async def _answer_reach(self, peer: str, request: bytes) -> bytes:
        return await self._dial_back.answer(self._control, peer, request)

    async def _answer_punch(self, peer: str, request: bytes) -> bytes:
        return await self._puncher.relay(self._control, peer, request)

    async def _answer_punched(self, peer: str, request: bytes) -> bytes:
        if not any(relay.endswith(f"/p2p/{peer}") for relay in self.reach.relays):
            raise CallRefused("not a relay of this peer")
        return self._puncher.target(self._control, request, await self._inside())

    def _stream(self, peer: str, sock: socket.socket, *, counted: bool) -> SocketStream:
        def closed() -> None:
            self._open.discard(stream)
            if counted:
                self._streams.give_back(peer)

        stream = SocketStream(peer, sock, closed)
        self._open.add(stream)
        return stream

    async def addresses(self) -> list[str]:
        """Public ones first; loopback only if there is nothing else. While p2pd starts anew, those it had."""
        try:
            _, found = await self._control.identify()
        except (DaemonError, DaemonGone):
            return self._addresses
        useful = [way for way in found if not _loopback(way)] or found
        ordered = sorted(
            dict.fromkeys(useful), key=lambda way: (multiaddr.CIRCUIT in way, not multiaddr.is_public(way))
        )
        self._addresses = [f"{way}/p2p/{self.peer}" for way in ordered]
        return self._addresses

    async def connections(self) -> dict[str, list[str]]:
        """The peers that this one is connected with now, and over which addresses."""
        with self._mapped(self.peer):
            return await self._control.list_peers()

    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None:
        ways = [way for way in (multiaddr.route_to(peer, address) for address in addresses) if way is not None]
        if not ways:
            raise Unreachable(f"no address of {peer} is known", gone=True)
        self._known.put(peer, ways)
        with self._mapped(peer, seconds):
            async with asyncio.timeout(seconds):
                if self.reach.kind == "closed" and await self._punched(peer, ways):
                    return
                await self._control.connect_peer(peer, ways, seconds)
                used = (await self._control.list_peers()).get(peer, [])
                # An address inside another network leads nowhere, or to somebody else, and waiting for it takes long.
                self._known.put(peer, [way for way in ways if way in used or multiaddr.is_public(way)] or ways)

    async def _punched(self, peer: str, ways: list[str]) -> bool:
        """Two that are both behind routers may still get a direct connection; see punching.py."""
        relays = punching.relays_in(ways)
        if not relays or peer in self._unpunched or peer in await self._control.list_peers():
            return False
        if await self._puncher.connect(self._control, relays[0], peer, await self._inside()):
            return True
        self._unpunched.put(peer, None)  # once is enough: the next one would take as long
        return False

    async def _inside(self) -> tuple[str, int]:
        """Where this machine's own p2pd listens, for one who is on it."""
        port, _ = await self.own()
        first = multiaddr.ip_of(listen_addresses(self._network.host, port or None)[0])
        return "127.0.0.1" if first is None or first.is_unspecified else str(first), port

    async def disconnect(self, peer: str) -> None:
        with contextlib.suppress(DaemonError, DaemonGone, TimeoutError):
            async with asyncio.timeout(_RECONNECT_SECONDS):
                await self._control.disconnect_peer(peer)

    async def call(self, peer: str, request: bytes, seconds: float) -> bytes:
        if len(request) > MAX_CALL_BYTES:  # p2pd would end over it
            raise ValueError(f"a call of {len(request)} bytes; at most {MAX_CALL_BYTES} are allowed")
        with self._mapped(peer, seconds):
            async with asyncio.timeout(seconds):
                protocol = f"{self._protocol}/call"
                try:
                    return await self._control.call(peer, protocol, request)
                except DaemonError as error:
                    await self._reconnect(peer, error)
                    if not _never_sent(error):  # it may have been carried out: the caller must know
                        raise Unreachable(f"the connection with {peer} broke during a call, and is up again") from error
                return await self._control.call(peer, protocol, request)

    async def open_stream(self, peer: str, seconds: float) -> Stream:
        with self._mapped(peer, seconds):
            async with asyncio.timeout(seconds):
                protocol = f"{self._protocol}/stream"
                try:
                    sock = await self._control.open_stream(peer, protocol, seconds)
                except DaemonError as error:
                    await self._reconnect(peer, error)
                    sock = await self._control.open_stream(peer, protocol, seconds)
        return self._stream(peer, sock, counted=False)

    async def _reconnect(self, peer: str, error: DaemonError) -> None:
        """The daemon forgets addresses when a connection ends; we do not. Raises what came out if it is not up."""
        if "protocols not supported" in str(error):
            raise error
        try:
            async with asyncio.timeout(_RECONNECT_SECONDS):
                await self._control.connect_peer(peer, self._known.get(peer) or [], _RECONNECT_SECONDS)
        except DaemonError as again:
            raise error if _only_backoff(str(again)) else again from None
        except TimeoutError:
            raise Unreachable(f"the connection with {peer} broke, and could not be made anew at once") from None

    @contextlib.contextmanager
    def _mapped(self, peer: str, seconds: float = 0.0) -> Iterator[None]:
        try:
            yield
            self._gone.discard(peer)
        except HandlerError as error:
            raise CallRefused(str(error)) from None
        except DaemonError as error:
            unreachable = _unreachable(peer, str(error), gone_before=peer in self._gone)
            (self._gone.add if unreachable.gone else self._gone.discard)(peer)
            raise unreachable from None
        except DaemonGone as error:
            raise Unreachable(f"this machine's p2pd has gone: {error}") from None
        except TimeoutError:
            raise Unreachable(f"{peer} did not answer within {seconds:g} s") from None

    async def close(self) -> None:
        if self._care is not None:
            self._care.cancel()
            await asyncio.wait([self._care])
        await self._stop()

    async def _stop(self) -> None:
        self._puncher.close()
        for stream in list(self._open):
            stream.close()
        if self._daemon is not None:
            self._daemon.ended.remove_done_callback(self._died)
            await self._control.close()
            await self._daemon.stop()
            self._daemon = None


_COMMON = [
    "-noise=0",  # TLS only: with the processor's AES it is the faster one
    f"-persistentConnMaxMsgSize={MAX_CALL_BYTES + _OVERHEAD}",
    "-idleTimeout=60s",
]


def _loopback(way: str) -> bool:
    ip = multiaddr.ip_of(way)
    return ip is not None and ip.is_loopback


def _never_sent(error: DaemonError) -> bool:
    return "failed to dial" in str(error)


_BACKOFF = "dial backoff"
_LOST_RELAY = "error opening hop stream to relay"


def _only_backoff(text: str) -> bool:
    """p2pd has failed to reach that peer a moment ago and does not try again yet."""
    dials = text.splitlines()[1:] or [text]
    return all(_BACKOFF in line for line in dials)


_DEAD = ("connection refused", "peer id mismatch", "NO_RESERVATION", "stream reset", "connection reset", "no addresses")


def _unreachable(peer: str, text: str, *, gone_before: bool) -> Unreachable:
    """What the daemon says, in a line, and whether it means that nobody is there."""
    if "protocols not supported" in text:
        return Unreachable(f"{peer} is there but takes no part in this run, or not yet")
    lines = [line.strip(" *") for line in text.splitlines()]
    dials = [line for line in lines[1:] if line and _BACKOFF not in line]
    if _only_backoff(text):
        return Unreachable(f"{peer} could not be reached a moment ago", gone=gone_before)
    gone = _LOST_RELAY not in text and all(any(sign in line for sign in _DEAD) for line in dials or lines)
    reasons = "; ".join(dict.fromkeys(line.rpartition("] ")[2] for line in dials)) or lines[0]
    return Unreachable(f"{peer} cannot be reached: {reasons[:300]}", gone=gone)
