"""p2pd's control socket: requests to the daemon, calls that it carries to and from others, and streams.

The protocol is Hivemind's (protobuf messages, each after its length). Calls share one lasting connection; each stream
is a connection of its own, over plain sockets, so that bytes go straight between memory and the daemon. Errors are
told as the daemon tells them (`DaemonError`); daemon.py decides what they mean.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from diloco.engines.swarm.network import multiaddr
from diloco.engines.swarm.network.p2pd import messages

_MAX_MESSAGE = 8 << 20
_SOCKET_BUFFER = 1 << 20
_READER_LIMIT = 4 << 20
_HEADER_SECONDS = 10.0

Message = Any
"""One of Hivemind's generated protobuf classes, which have no types."""
OnRequest = Callable[[str, bytes], Awaitable[bytes]]


class DaemonError(Exception):
    """The daemon could not do what was asked; the text is its own."""


class HandlerError(Exception):
    """The other peer's handler failed; the text is what it sent."""


class DaemonGone(Exception):
    """The connection to the daemon has broken."""


async def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, loop = memoryview(data), asyncio.get_running_loop()
    while view:
        got = await loop.sock_recv_into(sock, view)
        if got == 0:
            raise DaemonGone("p2pd closed the connection")
        view = view[got:]
    return bytes(data)


async def receive_message(sock: socket.socket, message: Message) -> Message:
    size = shift = 0
    while True:
        byte = (await _receive_exactly(sock, 1))[0]  # one at a time: what follows the message is not ours to read
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
        if shift > 28:
            raise DaemonGone("p2pd sent a length that makes no sense")
    if size > _MAX_MESSAGE:
        raise DaemonGone(f"p2pd sent a message of {size} bytes")
    message.ParseFromString(await _receive_exactly(sock, size))
    return message


def framed(message: Message) -> bytes:
    data: bytes = message.SerializeToString()
    return multiaddr.varint(len(data)) + data


class Control:
    """The client's end. `path` is the daemon's socket, `streams` the one where it brings us others' streams."""

    def __init__(self, path: str, streams: str) -> None:
        self._path, self._streams_path = path, streams
        self._messages: ModuleType = messages()
        self._waiting: dict[bytes, asyncio.Future[bytes]] = {}
        self._handlers: dict[str, OnRequest] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    async def connect(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_READER_LIMIT)
        request = self._messages.Request(type=self._messages.Request.PERSISTENT_CONN_UPGRADE)
        self._writer.write(framed(request))
        answer = self._messages.Response()
        answer.ParseFromString(await self._next_frame(reader))
        self._raise_if_failed(answer)
        self._start(self._read(reader))

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        for task in [*self._tasks.values(), *self._background]:
            task.cancel()
        if self._background:
            await asyncio.wait(self._background, timeout=1)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        if self._listener is not None:
            self._listener.close()
        self._fail_all("this transport has been closed")

    # Requests, each on a connection of its own

    async def _ask(self, request: Message) -> tuple[Message, socket.socket]:
        """The answer, and the connection, which is then a stream for those requests that open one."""
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, self._path)
            await loop.sock_sendall(sock, framed(request))
            answer = await receive_message(sock, self._messages.Response())
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

    async def _ask_only(self, kind: str, **fields: Message) -> Message:
        answer, sock = await self._ask(self._messages.Request(type=getattr(self._messages.Request, kind), **fields))
        sock.close()
        return answer

    async def identify(self) -> tuple[str, list[str]]:
        """This peer's name and its addresses, without the ones in forms that we do not know."""
        answer = await self._ask_only("IDENTIFY")
        found = []
        for address in answer.identify.addrs:
            with contextlib.suppress(ValueError):
                found.append(multiaddr.to_text(address))
        return multiaddr.peer_id_to_text(answer.identify.id), found

    async def connect_peer(self, peer: str, ways: list[str], seconds: float) -> None:
        request = self._messages.ConnectRequest(
            peer=multiaddr.peer_id_to_bytes(peer),
            addrs=[multiaddr.to_bytes(way) for way in ways],
            timeout=max(1, round(seconds)),
        )
        await self._ask_only("CONNECT", connect=request)

    async def disconnect_peer(self, peer: str) -> None:
        request = self._messages.DisconnectRequest(peer=multiaddr.peer_id_to_bytes(peer))
        await self._ask_only("DISCONNECT", disconnect=request)

    async def list_peers(self) -> dict[str, list[str]]:
        """The peers that the daemon is connected with now, and how."""
        answer = await self._ask_only("LIST_PEERS")
        return {multiaddr.peer_id_to_text(p.id): [multiaddr.to_text(a) for a in p.addrs] for p in answer.peers}

    async def open_stream(self, peer: str, protocol: str, seconds: float) -> socket.socket:
        request = self._messages.StreamOpenRequest(
            peer=multiaddr.peer_id_to_bytes(peer), proto=[protocol], timeout=max(1, round(seconds))
        )
        kind = self._messages.Request.STREAM_OPEN
        _, sock = await self._ask(self._messages.Request(type=kind, streamOpen=request))
        return sock

    # Streams that others open

    async def accept_streams(self, protocol: str, on_stream: Callable[[str, socket.socket], Awaitable[None]]) -> None:
        """`on_stream` owns the socket that it is given."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(self._streams_path)
        self._listener.listen(128)
        self._start(self._accept(self._listener, on_stream))
        request = self._messages.StreamHandlerRequest(
            addr=multiaddr.to_bytes(f"/unix{self._streams_path}"), proto=[protocol], balanced=False
        )
        await self._ask_only("STREAM_HANDLER", streamHandler=request)

    async def _accept(self, listener: socket.socket, on_stream: Callable[..., Awaitable[None]]) -> None:
        while True:
            sock, _ = await asyncio.get_running_loop().sock_accept(listener)
            sock.setblocking(False)
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
            self._start(self._introduce(sock, on_stream))

    async def _introduce(self, sock: socket.socket, on_stream: Callable[..., Awaitable[None]]) -> None:
        try:
            async with asyncio.timeout(_HEADER_SECONDS):
                header = await receive_message(sock, self._messages.StreamInfo())
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
        name = secrets.token_bytes(16)  # the other peer's daemon tells calls apart by it, whoever they come from
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[name] = future
        try:
            await self._send(self._messages.PersistentConnectionRequest(callId=name, **fields))
            return await future
        except asyncio.CancelledError:
            cancel = self._messages.PersistentConnectionRequest(callId=name, cancel=self._messages.Cancel())
            if self._writer is not None and not self._writer.is_closing():
                self._writer.write(framed(cancel))
            raise
        finally:
            self._waiting.pop(name, None)

    async def _send(self, message: Message) -> None:
        if self._writer is None or self._writer.is_closing():
            raise DaemonGone("p2pd has closed the connection")
        try:
            self._writer.write(framed(message))
            await self._writer.drain()
        except OSError as error:
            raise DaemonGone(f"p2pd has closed the connection ({error})") from error

    async def _next_frame(self, reader: asyncio.StreamReader) -> bytes:
        size = shift = 0
        while True:
            byte = (await reader.readexactly(1))[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                break
        return await reader.readexactly(size)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                message = self._messages.PersistentConnectionResponse()
                message.ParseFromString(await self._next_frame(reader))
                self._take(message)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            if self._writer is not None:
                self._writer.close()
            self._fail_all("p2pd has closed the connection")

    def _fail_all(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(DaemonGone(reason))

    def _take(self, message: Message) -> None:
        name, kind = message.callId, message.WhichOneof("message")
        if kind == "requestHandling":
            task = asyncio.create_task(self._answer(name, message.requestHandling))
            self._tasks[name] = task
            task.add_done_callback(lambda _: self._tasks.pop(name, None))
            return
        if kind == "cancel" and name in self._tasks:
            self._tasks[name].cancel()
            return
        future = self._waiting.get(name)
        if future is None or future.done():
            return  # its caller waits no longer
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
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the caller's to know
            response.error = str(error).encode()[:2000]
        with contextlib.suppress(DaemonGone):
            await self._send(self._messages.PersistentConnectionRequest(callId=name, unaryResponse=response))
