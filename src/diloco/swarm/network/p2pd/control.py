"""p2pd's control socket: requests to the daemon, calls that it carries to and from other peers, and streams.

The protocol is Hivemind's: protobuf messages, each after its length. All calls share one connection; each stream is a
connection of its own, over a plain socket, so that bytes go directly between memory and the daemon. The daemon's errors
are raised as they are (`DaemonError`); `to_unreachable` says what they mean for a call to another peer: is it
unreachable for now, or known to be dead? Hivemind's Python package is not imported, only its file of messages.
"""

import asyncio
import contextlib
import importlib.util
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from diloco.errors import EngineError, install_hint
from diloco.swarm import timing
from diloco.swarm.network import multiaddr
from diloco.swarm.network.transport import Unreachable

Message = Any
"""One of Hivemind's generated protobuf classes, which have no types."""
OnRequest = Callable[[str, bytes], Awaitable[bytes]]
"""(peer, request) -> answer."""

_MAX_MESSAGE_BYTES = 8 << 20
_SOCKET_BUFFER = 1 << 20
_READER_LIMIT = 4 << 20
# Pieces of p2pd's error texts, which are all that it says of a failure.
_BACKOFF = "dial backoff"
_LOST_RELAY = "error opening hop stream to relay"
_NOT_SERVED = "protocols not supported"
_SIGNS_OF_DEATH = ("connection refused", "peer id mismatch", "NO_RESERVATION", "no addresses")
_SIGNS_OF_A_BREAK = ("stream reset", "connection reset")
"""The peer may have died, or dropped the connection while this process was frozen: the next call tells."""


def hivemind_folder() -> Path:
    """Find the folder of Hivemind's package without importing it.

    Importing it takes seconds, imports torch, and sets logging and fork hooks of its own.
    """
    spec = importlib.util.find_spec("hivemind")
    if spec is None or spec.origin is None:
        raise EngineError(f"the swarm needs the package hivemind: {install_hint('swarm')}")
    return Path(spec.origin).parent


def messages() -> ModuleType:
    """Hivemind's generated protobuf module with the messages of p2pd's control socket, loaded from its file."""
    name = "diloco_p2pd_messages"
    if name not in sys.modules:
        path = hivemind_folder() / "proto" / "p2pd_pb2.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # protobuf may be missing, or be of another version
            raise EngineError(
                f"hivemind's messages cannot be loaded ({error}); reinstall: {install_hint('swarm')}"
            ) from error
        sys.modules[name] = module
    return sys.modules[name]


# p2pd's errors


class DaemonError(Exception):
    """p2pd could not do what was asked; the text is p2pd's own."""


class HandlerError(Exception):
    """The other peer's handler failed; the text is what it sent."""


class DaemonGone(Exception):
    """The connection to p2pd has broken."""


def was_never_sent(error: DaemonError) -> bool:
    """Whether the call did not reach the other peer, so that it is safe to send it again."""
    return "failed to dial" in str(error)


def is_not_served(error: DaemonError) -> bool:
    """Whether the other peer runs, but does not answer this protocol: it is of another run, or is still starting."""
    return _NOT_SERVED in str(error)


def is_only_backoff(error: DaemonError) -> bool:
    """Whether p2pd did not try now, since it failed to reach that peer a moment ago."""
    first, *dials = str(error).splitlines() or [""]
    return all(_BACKOFF in line for line in dials or [first])


def to_unreachable(peer: str, error: DaemonError, *, gone_before: bool) -> Unreachable:
    """Return the error in one line. It is `gone` only if every address that p2pd tried says that no peer is there.

    `gone_before` is what the last attempt said, which holds if p2pd did not try this time. A failed dial has a line for
    each address:

        failed to dial: failed to dial 12D3KooW...: all dials failed
          * [/ip4/203.0.113.7/tcp/4000] dial tcp4 203.0.113.7:4000: connect: connection refused
          * [/ip4/192.168.1.5/tcp/4000] dial backoff
    """
    if is_not_served(error):
        return Unreachable(f"{peer} is there but takes no part in this run, or not yet")
    if is_only_backoff(error):
        return Unreachable(f"{peer} could not be reached", gone=gone_before)
    text = str(error)
    lines = [line.strip(" *") for line in text.splitlines()]
    dials = [line for line in lines[1:] if line and _BACKOFF not in line]
    gone = _LOST_RELAY not in text and all(any(sign in line for sign in _SIGNS_OF_DEATH) for line in dials or lines)
    reasons = "; ".join(dict.fromkeys(line.rpartition("] ")[2] for line in dials)) or lines[0]
    broken = any(sign in text for sign in _SIGNS_OF_A_BREAK)
    return Unreachable(f"{peer} cannot be reached: {reasons[:300]}", gone=gone, broken=broken)


# Frames


async def _read_frame(read_exactly: Callable[[int], Awaitable[bytes]]) -> bytes:
    """Read one message: its length as a varint, then that many bytes. Nothing that follows it is read."""
    size = 0
    shift = 0
    while True:
        byte = (await read_exactly(1))[0]
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise DaemonGone("p2pd sent a message length that is not valid")
    if size > _MAX_MESSAGE_BYTES:
        raise DaemonGone(f"p2pd sent a message of {size} bytes; at most {_MAX_MESSAGE_BYTES} are allowed")
    return await read_exactly(size)


async def _receive_message(sock: socket.socket, message: Message) -> Message:
    loop = asyncio.get_running_loop()

    async def read_exactly(size: int) -> bytes:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = await loop.sock_recv_into(sock, view)
            if count == 0:
                raise DaemonGone("p2pd closed the connection")
            view = view[count:]
        return bytes(data)

    message.ParseFromString(await _read_frame(read_exactly))
    return message


def _frame(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return multiaddr.varint(len(data)) + data


class Control:
    """A client of p2pd. `path` is p2pd's socket; at `streams` we accept the streams that other peers open."""

    def __init__(self, path: str, streams: str) -> None:
        self._path = path
        self._streams_path = streams
        self._messages: ModuleType = messages()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        """The answers that this peer waits for, by the id of the call."""
        self._handlers: dict[str, OnRequest] = {}
        """The handlers of other peers' calls, by libp2p protocol."""
        self._answering: dict[bytes, asyncio.Task[None]] = {}
        """The calls of other peers that are being answered, by id."""
        self._writer: asyncio.StreamWriter | None = None
        """To the connection that all calls share."""
        self._background: set[asyncio.Task[None]] = set()
        """The tasks that read that connection and accept streams."""
        self._listener: socket.socket | None = None

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_READER_LIMIT)
        request = self._messages.Request(type=self._messages.Request.PERSISTENT_CONN_UPGRADE)
        self._writer.write(_frame(request))
        answer = self._messages.Response()
        answer.ParseFromString(await _read_frame(reader.readexactly))
        self._raise_if_failed(answer)
        self._start(self._read(reader))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        for task in [*self._answering.values(), *self._background]:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=timing.DAEMON_CLOSE_SECONDS)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._listener is not None:
            self._listener.close()
        self._fail_all("this transport was closed")

    # Requests, each on a connection of its own

    async def _ask(self, request: Message) -> tuple[Message, socket.socket]:
        """Return the answer, and the connection: after a request to open a stream it is that stream."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._path)
            await loop.sock_sendall(sock, _frame(request))
            answer = await _receive_message(sock, self._messages.Response())
            self._raise_if_failed(answer)
        except OSError as error:
            sock.close()
            raise DaemonGone(f"p2pd does not answer ({error})") from error
        except BaseException:
            sock.close()
            raise
        return answer, sock

    def _raise_if_failed(self, answer: Message) -> None:
        if answer.type == self._messages.Response.ERROR:
            raise DaemonError(answer.error.msg)

    async def _ask_once(self, kind: str, **fields: Message) -> Message:
        """Return the answer to a request that opens no stream."""
        answer, sock = await self._ask(self._messages.Request(type=getattr(self._messages.Request, kind), **fields))
        sock.close()
        return answer

    async def identify(self) -> tuple[str, list[str]]:
        """This peer's id and its addresses, without those of unknown kinds."""
        answer = await self._ask_once("IDENTIFY")
        addresses = []
        for address in answer.identify.addrs:
            with contextlib.suppress(ValueError):
                addresses.append(multiaddr.to_text(address))
        return multiaddr.peer_id_to_text(answer.identify.id), addresses

    async def connect_peer(self, peer: str, addresses: list[str], seconds: float) -> None:
        request = self._messages.ConnectRequest(
            peer=multiaddr.peer_id_to_bytes(peer),
            addrs=[multiaddr.to_bytes(address) for address in addresses],
            timeout=max(1, round(seconds)),
        )
        await self._ask_once("CONNECT", connect=request)

    async def disconnect_peer(self, peer: str) -> None:
        request = self._messages.DisconnectRequest(peer=multiaddr.peer_id_to_bytes(peer))
        await self._ask_once("DISCONNECT", disconnect=request)

    async def list_peers(self) -> dict[str, list[str]]:
        """Return the peers that p2pd is connected to now, and over which addresses."""
        answer = await self._ask_once("LIST_PEERS")
        return {multiaddr.peer_id_to_text(p.id): [multiaddr.to_text(a) for a in p.addrs] for p in answer.peers}

    async def open_stream(self, peer: str, protocol: str, seconds: float) -> socket.socket:
        request = self._messages.StreamOpenRequest(
            peer=multiaddr.peer_id_to_bytes(peer), proto=[protocol], timeout=max(1, round(seconds))
        )
        kind = self._messages.Request.STREAM_OPEN
        _, sock = await self._ask(self._messages.Request(type=kind, streamOpen=request))
        return sock

    # Streams that other peers open

    async def accept_streams(self, protocol: str, on_stream: Callable[[str, socket.socket], Awaitable[None]]) -> None:
        """Accept the streams of this protocol from now on; `on_stream` owns the socket that it is given."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(self._streams_path)
        self._listener.listen(128)
        self._start(self._accept(self._listener, on_stream))
        request = self._messages.StreamHandlerRequest(
            addr=multiaddr.to_bytes(f"/unix{self._streams_path}"), proto=[protocol], balanced=False
        )
        await self._ask_once("STREAM_HANDLER", streamHandler=request)

    async def _accept(self, listener: socket.socket, on_stream: Callable[..., Awaitable[None]]) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
            self._start(self._read_header(sock, on_stream))

    async def _read_header(self, sock: socket.socket, on_stream: Callable[..., Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(timing.STREAM_HEADER_SECONDS):
                header = await _receive_message(sock, self._messages.StreamInfo())
        except (TimeoutError, DaemonGone, OSError):
            sock.close()
            return
        except BaseException:
            sock.close()
            raise
        await on_stream(multiaddr.peer_id_to_text(header.peer), sock)

    # Calls, all over one connection

    async def call(self, peer: str, protocol: str, data: bytes) -> bytes:
        request = self._messages.CallUnaryRequest(peer=multiaddr.peer_id_to_bytes(peer), proto=protocol, data=data)
        return await self._exchange(callUnary=request)

    async def answer_calls(self, protocol: str, handler: OnRequest) -> None:
        self._handlers[protocol] = handler
        await self._exchange(addUnaryHandler=self._messages.AddUnaryHandlerRequest(proto=protocol, balanced=False))

    async def _exchange(self, **fields: Message) -> bytes:
        name = secrets.token_bytes(16)  # tells calls apart, also at the other peer's daemon
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        try:
            await self._send(self._messages.PersistentConnectionRequest(callId=name, **fields))
            return await future
        except asyncio.CancelledError:
            cancel = self._messages.PersistentConnectionRequest(callId=name, cancel=self._messages.Cancel())
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(_frame(cancel))
            raise
        finally:
            self._waiting.pop(name, None)

    async def _send(self, message: Message) -> None:
        if self._writer is None or self._writer.is_closing():
            raise DaemonGone("p2pd has closed the connection")
        try:
            self._writer.write(_frame(message))
            await self._writer.drain()
        except OSError as error:
            raise DaemonGone(f"p2pd has closed the connection ({error})") from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = self._messages.PersistentConnectionResponse()
                message.ParseFromString(await _read_frame(reader.readexactly))
                self._dispatch(message)
        except (asyncio.IncompleteReadError, DaemonGone, OSError):
            pass
        finally:
            if self._writer is not None:
                self._writer.close()
            self._fail_all("p2pd has closed the connection")

    def _fail_all(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(DaemonGone(reason))

    def _dispatch(self, message: Message) -> None:
        name = message.callId
        kind = message.WhichOneof("message")
        if kind == "requestHandling":
            task = asyncio.create_task(self._answer(name, message.requestHandling))
            self._answering[name] = task
            task.add_done_callback(lambda _: self._answering.pop(name, None))
            return
        if kind == "cancel" and name in self._answering:
            self._answering[name].cancel()
            return
        future = self._waiting.get(name)
        if future is None or future.done():
            return  # the caller has stopped waiting
        if kind == "daemonError":
            future.set_exception(DaemonError(message.daemonError.message))
        elif kind == "callUnaryResponse" and message.callUnaryResponse.WhichOneof("result") == "error":
            future.set_exception(HandlerError(message.callUnaryResponse.error.decode(errors="replace")))
        else:
            future.set_result(message.callUnaryResponse.response if kind == "callUnaryResponse" else b"")

    async def _answer(self, name: bytes, request: Message) -> None:
        response = self._messages.CallUnaryResponse()
        try:
            handler = self._handlers[request.proto]
            response.response = await handler(multiaddr.peer_id_to_text(request.peer), request.data)
        except Exception as error:  # noqa: BLE001 - the caller gets the error
            response.error = str(error).encode()[:2000]
        with contextlib.suppress(DaemonGone):
            await self._send(self._messages.PersistentConnectionRequest(callId=name, unaryResponse=response))
