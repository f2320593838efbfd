"""Calls and streams that other peers open, handed to the node within limits; and all streams that are open now."""

import asyncio
import logging
import socket

from diloco.swarm.network.limits import ConcurrencyLimit, LruCache
from diloco.swarm.network.p2pd.control import Control
from diloco.swarm.network.p2pd.pacing import FIRST_WINDOW, PacedStream
from diloco.swarm.network.p2pd.streams import SocketStream
from diloco.swarm.network.transport import MAX_CALL_BYTES, CallRefused, OnCall, OnStream, Unreachable
from diloco.swarm.protocol import timing

log = logging.getLogger(__name__)

CALLS_PER_PEER, CALLS_IN_ALL = 32, 512
STREAMS_PER_PEER, STREAMS_IN_ALL = 64, 512


class IncomingRequests:
    """`on_call` and `on_stream` are the node's handlers."""

    def __init__(self) -> None:
        self.on_call: OnCall | None = None
        self.on_stream: OnStream | None = None
        self._calls = ConcurrencyLimit(CALLS_PER_PEER, CALLS_IN_ALL)
        self._streams = ConcurrencyLimit(STREAMS_PER_PEER, STREAMS_IN_ALL)
        self._open: set[PacedStream] = set()
        self._windows: LruCache[int] = LruCache(STREAMS_IN_ALL)
        """Of the last stream with each peer."""

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
        """A stream over this socket, which `close_streams` will close."""

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
