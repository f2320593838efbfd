"""The swarm's transport on the internet: Hivemind's p2pd, with libp2p's connections, encryption and relays.

libp2p authenticates peers and encrypts all traffic (TLS 1.3). Which peer may say what is decided above; the limits here
(`IncomingRequests`) keep an unknown peer from costing much: on the size of a call, and on how many calls and streams
are handled at a time. Hivemind's Python package is not imported, only its daemon is run.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path

from diloco.errors import RendezvousError
from diloco.swarm import timing
from diloco.swarm.network import identity, multiaddr
from diloco.swarm.network.limits import ConcurrencyLimit, LruCache
from diloco.swarm.network.listening import ListenConfig, listen_addresses
from diloco.swarm.network.p2pd import hole_punching
from diloco.swarm.network.p2pd.control import (
    Control,
    DaemonError,
    DaemonGone,
    HandlerError,
    is_not_served,
    is_only_backoff,
    to_unreachable,
    was_never_sent,
)
from diloco.swarm.network.p2pd.daemon import Daemon, relay_limit, start_daemon
from diloco.swarm.network.p2pd.hole_punching import Endpoint, HolePuncher
from diloco.swarm.network.p2pd.reachability import (
    DialBack,
    DialBackResult,
    Reachability,
    ReachabilityMonitor,
    decode_dial_back,
    encode_dial_back,
    guess_reachability,
)
from diloco.swarm.network.p2pd.streams import FIRST_WINDOW, PacedStream, SocketStream
from diloco.swarm.network.transport import (
    MAX_CALL_BYTES,
    CallRefused,
    OnCall,
    OnStream,
    Stream,
    Transport,
    Unreachable,
)

log = logging.getLogger(__name__)

CALLS_PER_PEER = 32
CALLS_IN_ALL = 512
STREAMS_PER_PEER = 64
STREAMS_IN_ALL = 512
_OVERHEAD_BYTES = 64 << 10
"""More than the message around a call's bytes."""
_MAX_KNOWN = 4096
"""Peers whose addresses are remembered."""
COMMON_FLAGS = [
    "-noise=0",  # TLS only: with the processor's AES it is the faster one
    f"-persistentConnMaxMsgSize={MAX_CALL_BYTES + _OVERHEAD_BYTES}",
    "-idleTimeout=60s",
]


def protocol_of(run_id: str) -> str:
    """Return the libp2p protocol of a run: peers of other runs do not answer it."""
    return f"/diloco/{run_id}"


class IncomingRequests:
    """Calls and streams that other peers open, handed to the node within limits; and all streams that are open now.

    `on_call` and `on_stream` are the node's handlers.
    """

    def __init__(self) -> None:
        self.on_call: OnCall | None = None
        self.on_stream: OnStream | None = None
        self._calls = ConcurrencyLimit(CALLS_PER_PEER, CALLS_IN_ALL)
        self._streams = ConcurrencyLimit(STREAMS_PER_PEER, STREAMS_IN_ALL)
        self._open: set[PacedStream] = set()
        self._windows: LruCache[int] = LruCache(STREAMS_IN_ALL)
        """The window of the last stream with each peer."""

    async def register(self, control: Control, protocol: str) -> None:
        await control.accept_streams(f"{protocol}/stream", self._accept)
        await control.answer_calls(f"{protocol}/call", self._answer)

    async def _answer(self, peer: str, request: bytes) -> bytes:
        try:
            return await self._answer_now(peer, request)
        except CallRefused as refused:
            if refused.code == "busy":  # so that a peer that calls again at every answer gets few; it holds no place
                await asyncio.sleep(timing.BUSY_SECONDS)
            raise

    async def _answer_now(self, peer: str, request: bytes) -> bytes:
        assert self.on_call is not None
        if len(request) > MAX_CALL_BYTES:
            raise CallRefused(f"a call of {len(request)} bytes; at most {MAX_CALL_BYTES} are allowed")
        if not self._calls.acquire(peer):
            raise CallRefused("too many calls at a time", "busy")
        try:
            reply = await self.on_call(peer, request)
        finally:
            self._calls.release(peer)
        if len(reply) > MAX_CALL_BYTES:
            raise CallRefused(f"the answer would have {len(reply)} bytes; at most {MAX_CALL_BYTES} are allowed")
        return reply

    async def _accept(self, peer: str, sock: socket.socket) -> None:
        assert self.on_stream is not None
        if not self._streams.acquire(peer):
            log.debug("a stream of %s is refused: too many at a time", peer)
            sock.close()
            return
        stream = self.track(peer, sock, incoming=True)
        try:
            await self.on_stream(stream)
        except (Unreachable, CallRefused) as error:
            log.debug("a stream of %s: %s", peer, error)
        finally:
            stream.close()

    def track(self, peer: str, sock: socket.socket, *, incoming: bool = False) -> PacedStream:
        """Return a stream over this socket, which `close_streams` will close."""

        def on_close() -> None:
            self._open.discard(stream)
            self._windows.put(peer, stream.window)
            if incoming:
                self._streams.release(peer)

        stream = PacedStream(SocketStream(peer, sock, on_close), self._windows.get(peer) or FIRST_WINDOW)
        self._open.add(stream)
        return stream

    def heard_at(self, peer: str) -> float:
        return max((stream.heard_at for stream in self._open if stream.peer == peer), default=0.0)

    def close_streams(self) -> None:
        for stream in list(self._open):
            stream.raw.close()


class P2pdTransport(Transport):
    """One peer's transport, made by `create`. `ended` gets a reason when p2pd has died: from then on nothing works."""

    def __init__(self, key: Path, protocol: str, config: ListenConfig) -> None:
        self.peer = identity.load_or_create(key)
        self.reachability = guess_reachability(config)
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._flags = [f"-id={key}", *COMMON_FLAGS]
        self._protocol = protocol
        self._config = config
        self._daemon: Daemon | None = None
        self._control = Control("", "")
        self._restarting = asyncio.Lock()
        self._monitoring: asyncio.Task[None] | None = None
        self._addresses: list[str] = []
        self._incoming = IncomingRequests()
        self._dial_back = DialBack()
        self._puncher = HolePuncher(self.peer, protocol)
        self._known: LruCache[list[str]] = LruCache(_MAX_KNOWN)
        """Addresses by peer, without /p2p/PEER."""
        self._not_punchable: LruCache[None] = LruCache(_MAX_KNOWN)
        """Peers with which hole punching has failed."""
        self._gone: LruCache[None] = LruCache(_MAX_KNOWN)
        """Peers whose last dial was refused: for a while p2pd then says only that it does not try again."""

    @classmethod
    async def create(cls, key: Path, protocol: str, config: ListenConfig, seeds: Sequence[str] = ()) -> "P2pdTransport":
        """Start p2pd with the identity in the file `key`, which is made if missing. `protocol` names the run.

        `seeds` are addresses of peers that may be up: one of them is asked whether this machine can be reached, and
        if it cannot, they relay for it. Nothing is raised if none of them answers.
        """
        transport = cls(key, protocol, config)
        await transport._start()
        if config.guest:
            return transport
        try:
            monitor = ReachabilityMonitor(transport, config)
            await monitor.find_out(seeds)
        except BaseException:
            await transport.close()
            raise
        transport._monitoring = asyncio.create_task(monitor.run())
        return transport

    # p2pd's life

    async def _start(self) -> None:
        daemon = await start_daemon(self.reachability, self._config, self._flags)
        self._daemon = daemon
        self._control = Control(daemon.control, daemon.streams)
        daemon.ended.add_done_callback(self._on_daemon_end)
        try:
            await self._control.connect()
            peer, _ = await self._control.identify()
            assert peer == self.peer
            if self._incoming.on_call is not None:
                await self._register()
        except (DaemonError, DaemonGone, OSError, asyncio.IncompleteReadError) as error:
            await self._stop()
            raise RendezvousError(f"p2pd started but does not answer ({error}){daemon.recent_output()}") from error

    def _on_daemon_end(self, ended: "asyncio.Future[str]") -> None:
        if not ended.cancelled():
            self.fail(ended.result())

    def fail(self, reason: str) -> None:
        if not self.ended.done():
            self.ended.set_result(reason)

    async def restart(self, reachability: Reachability, config: ListenConfig) -> None:
        """Restart p2pd: all connections end. What is asked meanwhile waits for it, within its own time limit."""
        async with self._restarting:
            self.reachability = reachability
            self._config = config
            await self._stop()
            await self._start()

    async def close(self) -> None:
        if self._monitoring is not None:
            self._monitoring.cancel()
            await asyncio.wait([self._monitoring])
        await self._stop()

    async def _stop(self) -> None:
        self._puncher.close()
        self._incoming.close_streams()
        if self._daemon is not None:
            self._daemon.ended.remove_done_callback(self._on_daemon_end)
            await self._control.close()
            await self._daemon.stop()
            self._daemon = None

    # Answers to others

    async def serve(self, on_call: OnCall, on_stream: OnStream) -> None:
        self._incoming.on_call = on_call
        self._incoming.on_stream = on_stream
        await self._register()

    async def _register(self) -> None:
        control = self._control
        await self._incoming.register(control, self._protocol)
        await control.answer_calls(f"{self._protocol}/reach", partial(self._dial_back.answer, control))
        await control.answer_calls(f"{self._protocol}/punch", partial(self._puncher.answer_as_relay, control))
        await control.answer_calls(f"{self._protocol}/punched", self._answer_punched)

    async def _answer_punched(self, peer: str, request: bytes) -> bytes:
        if not any(relay.endswith(f"/p2p/{peer}") for relay in self.reachability.relays):
            raise CallRefused("not a relay of this peer")
        return self._puncher.answer_as_target(self._control, request, await self._p2pd_endpoint())

    # Addresses

    async def addresses(self) -> list[str]:
        """This peer's addresses, public ones first; loopback only if there are no others.

        While p2pd restarts, they are those that it had.
        """
        try:
            _, addresses = await self._control.identify()
        except (DaemonError, DaemonGone):
            return self._addresses
        useful = [address for address in addresses if not multiaddr.is_loopback(address)] or addresses
        ordered = sorted(dict.fromkeys(useful), key=lambda a: (multiaddr.CIRCUIT in a, not multiaddr.is_public(a)))
        self._addresses = [f"{address}/p2p/{self.peer}" for address in ordered]
        return self._addresses

    async def port_and_addresses(self) -> tuple[int, list[str]]:
        """Return the port that others would call, and the direct addresses that this machine knows of itself."""
        async with self._control_for(self.peer) as control:
            _, addresses = await control.identify()
        direct = [address for address in addresses if "/tcp/" in address and multiaddr.CIRCUIT not in address]
        direct = [address for address in direct if not multiaddr.is_loopback(address)] or direct
        ports = [int(address.split("/tcp/")[1].split("/")[0]) for address in sorted(direct)]
        return next(iter(ports), 0), direct

    def known_addresses(self) -> list[str]:
        """Return the addresses of this peer's relays and of all peers that it was told to connect to."""
        peers = ((peer, self._known.get(peer) or []) for peer in list(self._known))
        return [*self.reachability.relays, *(f"{route}/p2p/{peer}" for peer, routes in peers for route in routes)]

    async def connections(self) -> dict[str, list[str]]:
        """Return the peers that this one is connected to now, and over which addresses."""
        async with self._control_for(self.peer) as control:
            return await control.list_peers()

    async def _p2pd_endpoint(self) -> Endpoint:
        """Return where this machine's own p2pd listens, for a connection from this machine."""
        port, _ = await self.port_and_addresses()
        first = multiaddr.ip_of(listen_addresses(self._config.host, port or None)[0])
        return "127.0.0.1" if first is None or first.is_unspecified else str(first), port

    def heard_at(self, peer: str) -> float:
        return self._incoming.heard_at(peer)

    # Calls and streams to others

    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None:
        routes = [route for route in (multiaddr.route_to(peer, address) for address in addresses) if route is not None]
        if not routes:
            raise Unreachable(f"no address of {peer} is known", gone=True)
        self._known.put(peer, routes)
        async with self._control_for(peer, seconds) as control:
            if self.reachability.kind == "private" and await self._punch(peer, routes):
                return
            await control.connect_peer(peer, routes, seconds)
            used = (await control.list_peers()).get(peer, [])
            # A private address of another network leads nowhere or to another machine, and waiting for it is slow.
            useful = [route for route in routes if route in used or multiaddr.is_public(route)]
            self._known.put(peer, useful or routes)

    async def _punch(self, peer: str, routes: list[str]) -> bool:
        """Try once for each peer whether two private ones can get a direct connection; see hole_punching.py."""
        relays = hole_punching.relays_in(routes)
        if not relays or peer in self._not_punchable or peer in await self._control.list_peers():
            return False
        if await self._puncher.connect(self._control, relays[0], peer, await self._p2pd_endpoint()):
            return True
        self._not_punchable.put(peer, None)
        return False

    async def disconnect(self, peer: str) -> None:
        with contextlib.suppress(DaemonError, DaemonGone, TimeoutError):
            async with asyncio.timeout(timing.RECONNECT_SECONDS):
                await self._control.disconnect_peer(peer)

    async def call(self, peer: str, request: bytes, seconds: float) -> bytes:
        if len(request) > MAX_CALL_BYTES:  # p2pd would end over it
            raise ValueError(f"a call of {len(request)} bytes; at most {MAX_CALL_BYTES} are allowed")
        async with self._control_for(peer, seconds) as control:
            protocol = f"{self._protocol}/call"
            try:
                return await control.call(peer, protocol, request)
            except DaemonError as error:
                await self._reconnect(peer, error)
                if not was_never_sent(error):  # it may have been carried out: the caller must know
                    raise Unreachable(f"the connection with {peer} broke during a call, and is up again") from error
            return await control.call(peer, protocol, request)

    async def open_stream(self, peer: str, seconds: float) -> Stream:
        async with self._control_for(peer, seconds) as control:
            protocol = f"{self._protocol}/stream"
            try:
                sock = await control.open_stream(peer, protocol, seconds)
            except DaemonError as error:
                await self._reconnect(peer, error)
                sock = await control.open_stream(peer, protocol, seconds)
        return self._incoming.track(peer, sock)

    async def _reconnect(self, peer: str, error: DaemonError) -> None:
        """p2pd forgets a peer's addresses when the connection ends; we do not. Raises if the peer stays unreachable."""
        if is_not_served(error):
            raise error
        try:
            async with asyncio.timeout(timing.RECONNECT_SECONDS):
                await self._control.connect_peer(peer, self._known.get(peer) or [], timing.RECONNECT_SECONDS)
        except DaemonError as again:
            raise error if is_only_backoff(again) else again from None
        except TimeoutError:
            raise Unreachable(f"the connection with {peer} broke, and could not be made again at once") from None

    async def ask_dial_back(self, peer: str) -> DialBackResult | None:
        """Have that peer connect back to where it sees this one; None: it cannot tell."""
        port, _ = await self.port_and_addresses()
        async with self._control_for(peer) as control:
            answer = await control.call(peer, f"{self._protocol}/reach", encode_dial_back(port))
            return decode_dial_back(answer)

    async def relay_limit(self, peer: str) -> int:
        """Return how many bytes a connection through that peer may carry; 0: it relays nothing."""
        async with self._control_for(peer) as control:
            return await relay_limit(control, peer)

    @contextlib.asynccontextmanager
    async def _control_for(self, peer: str, seconds: float = timing.DAEMON_ASK_SECONDS) -> AsyncIterator[Control]:
        """Give p2pd's control for a request about this peer, once p2pd runs: its errors become Unreachable and
        CallRefused. The request has `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                async with self._restarting:
                    control = self._control
                yield control
            self._gone.drop(peer)
        except HandlerError as error:
            raise CallRefused.read(str(error)) from None
        except DaemonError as error:
            unreachable = to_unreachable(peer, error, gone_before=peer in self._gone)
            if unreachable.gone:
                self._gone.put(peer, None)
            else:
                self._gone.drop(peer)
            raise unreachable from None
        except DaemonGone as error:
            raise Unreachable(f"this machine's p2pd has ended, or is starting again: {error}") from None
        except TimeoutError:
            raise Unreachable(f"{peer} did not answer within {seconds:g} s") from None
