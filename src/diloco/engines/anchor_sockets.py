"""The way to the anchor between processes: worker 0 listens, every other worker has one TCP connection to it.

Connections do not depend on each other, so that a worker that is slow or dies holds up no other. Messages have fixed
headers and lengths, nothing is unpickled, and a connection must begin with the run's token, which the workers share
over torch.distributed when they start.
"""

import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from diloco.engines.asynchronous import AnchorLink, AnchorServer, Kind, Reply, Request
from diloco.engines.header import HEADER_BYTES
from diloco.errors import DiLoCoError, EngineError

logger = logging.getLogger(__name__)

_TOKEN_BYTES = 32
_ADDRESS_BYTES = 256
_REQUEST = struct.Struct("<BQdQ")  # kind, worker, quiet seconds, bytes of the payload
_REPLY = struct.Struct("<QQQQ")  # headers, arrivals, bytes of the reason of a refusal, bytes of the anchor
_ERROR = 2**63  # in place of the number of headers: the reason is an error
_KINDS: tuple[Kind, ...] = ("arrive", "done", "confirm")
_IDLE_SECONDS = 1.0
_MOST_HEADERS = 1 << 16
_MOST_REASON_BYTES = 1 << 20
_STEP_BYTES = 1 << 24  # of memory that is taken at a time


class SocketLink(AnchorLink):
    """A worker's connection to the anchor, and at worker 0 all others' to it. `gather` is collective: the bytes of
    every worker, in worker order."""

    def __init__(self, worker: int, gather: Callable[[bytes], list[bytes]], timeout_seconds: float) -> None:
        self._worker = worker
        self._gather = gather
        self._timeout = timeout_seconds
        self._server: AnchorServer | None = None
        self._listener: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._served: list[socket.socket] = []  # the other workers' connections, at worker 0
        self._closed = threading.Event()
        self._sent = threading.Condition()
        self._told: set[int] = set()  # workers that have the last answer

    def open(self, server: AnchorServer | None) -> None:
        mine = b""
        if server is not None:
            self._server = server
            mine = self._listen()
        address = self._gather(mine.ljust(_ADDRESS_BYTES, b"\0"))[0].rstrip(b"\0").decode()
        host, port, token = address.split(" ")
        if server is None:
            try:
                self._connection = socket.create_connection((host, int(port)), self._timeout)
                self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._connection.sendall(token.encode() + struct.pack("<Q", self._worker))
            except OSError as error:
                raise EngineError(f"worker {self._worker} cannot reach the anchor at {host}:{port}: {error}") from error

    def ask(self, request: Request, seconds: float) -> Reply:
        if self._server is not None:
            reply = self._server.handle(request)
            if request.kind == "confirm":  # this process may end now: the others' answers go out first
                live = self._server.live
                with self._sent:
                    self._sent.wait_for(lambda: live() <= self._told | {self._worker}, self._timeout)
                    self._told.clear()
            return reply
        assert self._connection is not None
        try:
            self._connection.settimeout(seconds)
            kind = _KINDS.index(request.kind)
            head = _REQUEST.pack(kind, request.worker, request.quiet_seconds, request.payload.numel())
            self._connection.sendall(head + request.header)
            self._connection.sendall(request.payload.numpy().data)
            return _read_reply(self._connection)
        except OSError as error:
            self._connection.close()
            raise EngineError(
                f"worker {self._worker} has lost worker 0, which holds the anchor ({error or type(error).__name__}): "
                "start the run again"
            ) from error

    def close(self) -> None:
        self._closed.set()
        for connection in (self._listener, self._connection, *self._served):
            if connection is not None:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads from it
                connection.close()

    # Worker 0

    def _listen(self) -> bytes:
        """Start listening; returns the address and the token, as text."""
        host = os.environ.get("MASTER_ADDR", "127.0.0.1")
        local = host in ("127.0.0.1", "localhost", "::1")
        self._listener = socket.create_server(("127.0.0.1" if local else "", 0))
        token = secrets.token_hex(_TOKEN_BYTES // 2)
        threading.Thread(target=self._accept, args=(token.encode(),), name="diloco-anchor", daemon=True).start()
        return f"{host} {self._listener.getsockname()[1]} {token}".encode()

    def _accept(self, token: bytes) -> None:
        assert self._listener is not None
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            self._served.append(connection)
            threading.Thread(target=self._serve, args=(connection, token), daemon=True).start()

    def _serve(self, connection: socket.socket, token: bytes) -> None:
        """Serve one worker's connection until it ends."""
        worker: int | None = None
        assert self._server is not None
        try:
            connection.settimeout(self._timeout)
            greeting = _read(connection, _TOKEN_BYTES + 8)
            if not hmac.compare_digest(greeting[:_TOKEN_BYTES], token):
                return
            worker = struct.unpack("<Q", greeting[_TOKEN_BYTES:])[0]
            while (request := self._read_request(connection, worker)) is not None:
                _send_reply(connection, self._server, request)
                if request.kind == "confirm":
                    with self._sent:
                        self._told.add(worker)
                        self._sent.notify_all()
        except (OSError, struct.error, IndexError) as error:
            logger.warning("the connection of worker %s has ended: %s", worker, error)
        finally:
            self._served.remove(connection)
            connection.close()
            if worker is not None:
                self._server.lose(worker)

    def _read_request(self, connection: socket.socket, worker: int) -> Request | None:
        """Receive the next request; None if the connection or this link has ended. Between two requests a worker
        trains."""
        connection.settimeout(_IDLE_SECONDS)
        while True:
            try:
                first = connection.recv(1)
                break
            except TimeoutError:
                if self._closed.is_set():
                    return None
        if not first:
            return None
        connection.settimeout(self._timeout)
        kind, _, quiet, size = _REQUEST.unpack(first + _read(connection, _REQUEST.size - 1))
        if self._server is None or size > self._server.num_bytes:
            raise ConnectionError(f"an outer gradient of {size} bytes does not fit this model")
        return Request(
            _KINDS[kind], worker, bytes(_read(connection, HEADER_BYTES)), _read_tensor(connection, size), quiet
        )


def _send_reply(connection: socket.socket, server: AnchorServer, request: Request) -> None:
    try:
        reply = server.handle(request)
    except DiLoCoError as error:
        reason = str(error).encode()
        connection.sendall(_REPLY.pack(_ERROR, 0, len(reason), 0) + reason)
        return
    reason = reply.refused.encode()
    data = reply.anchor.view(torch.uint8)
    connection.sendall(_REPLY.pack(len(reply.headers), reply.arrivals, len(reason), data.numel()))
    for worker, header in reply.headers.items():
        connection.sendall(struct.pack("<Q", worker) + header)
    connection.sendall(reason)
    connection.sendall(data.numpy().data)


def _read_reply(connection: socket.socket) -> Reply:
    """Receive a reply. Raises ConnectionError (an OSError), and EngineError with the server's reason."""
    count, arrivals, length, size = _REPLY.unpack(_read(connection, _REPLY.size))
    if length > _MOST_REASON_BYTES or (count > _MOST_HEADERS and count != _ERROR) or size % 4:
        raise ConnectionError(f"a reply of {count} headers, {length} bytes of a reason and {size} of an anchor")
    if count == _ERROR:
        raise EngineError(bytes(_read(connection, length)).decode(errors="replace"))
    headers = {}
    for _ in range(count):
        worker = struct.unpack("<Q", _read(connection, 8))[0]
        headers[worker] = bytes(_read(connection, HEADER_BYTES))
    refused = bytes(_read(connection, length)).decode(errors="replace")
    return Reply(headers, arrivals, _read_tensor(connection, size).view(torch.float32), refused)


def _read_tensor(connection: socket.socket, size: int) -> Tensor:
    return torch.frombuffer(_read(connection, size), dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)


def _read(connection: socket.socket, size: int) -> bytearray:
    """Receive `size` bytes. Memory is taken as they arrive, and not for all that were announced."""
    data = bytearray(min(size, _STEP_BYTES))
    got = 0
    while got < size:
        if got == len(data):
            data.extend(bytes(min(size - got, max(got, _STEP_BYTES))))
        with memoryview(data) as view, view[got:] as rest:
            count = connection.recv_into(rest)
        if not count:
            raise ConnectionError("the other end has closed the connection")
        got += count
    return data
