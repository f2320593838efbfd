"""Attacks on a worker that fetches the state: the bad member says that it is ahead, so that it is asked first."""

import asyncio
from collections.abc import Callable
from typing import Any

from msgspec import structs

from attacks import has_begun, instead_of
from diloco.swarm.network.transport import Stream
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.state_transfer import SharedSnapshot, StateTransfer
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.wire import encode
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.trainer import Snapshot

_AHEAD = 3
_TIB = 1 << 40


def wrong_state() -> None:
    """Its state has every sign turned around, and is said to be of a later round than any other member's."""

    @instead_of(SharedSnapshot, "take")
    async def snapshot(honest: Callable[..., Any], self: SharedSnapshot) -> Snapshot | None:
        honest_snapshot: Snapshot | None = await honest(self)
        if honest_snapshot is None or not has_begun():
            return honest_snapshot
        data = bytearray(honest_snapshot.data.view)
        first = 8 + int.from_bytes(data[:8], "little")  # behind the header of a safetensors file
        for place in range(first + 3, len(data), 4):
            data[place] ^= 0x80
        numbers = {**honest_snapshot.numbers, "sequence": honest_snapshot.numbers["sequence"] + _AHEAD}
        return structs.replace(honest_snapshot, data=SharedMemory.copy_of(bytes(data)), numbers=numbers)

    _claim_to_be_ahead()


def huge_slow_state() -> None:
    """It offers a state of 1 TiB, and sends a byte of it every five seconds."""

    @instead_of(StateTransfer, "serve")
    async def serve(honest: Callable[..., Any], self: StateTransfer, stream: Stream) -> None:
        snapshot = await self.snapshot.take()
        if snapshot is None or not has_begun():
            await honest(self, stream)
            return
        numbers = {**snapshot.numbers, "sequence": snapshot.numbers["sequence"] + _AHEAD}
        head = messages.StateHead(numbers, snapshot.layout_digest, snapshot.note, _TIB, bytes(32))
        await _drip(stream, head)

    _claim_to_be_ahead()


def slow_state() -> None:
    """It offers a state of the right size, and sends a byte of it every five seconds."""

    @instead_of(StateTransfer, "serve")
    async def serve(honest: Callable[..., Any], self: StateTransfer, stream: Stream) -> None:
        snapshot = await self.snapshot.take()
        if snapshot is None or not has_begun():
            await honest(self, stream)
            return
        digest = await self.audit.digest_of(snapshot)
        size = len(snapshot.data.view)
        head = messages.StateHead(dict(snapshot.numbers), snapshot.layout_digest, snapshot.note, size, digest)
        await _drip(stream, head)

    _claim_to_be_ahead()


async def _drip(stream: Stream, head: messages.StateHead) -> None:
    await write_frame(stream, encode(head), 5.0)
    while True:
        await stream.write(b"\0", 5.0)
        await asyncio.sleep(5.0)


def _claim_to_be_ahead() -> None:
    def ahead(message: Any) -> Any:
        status = message.status
        status_ahead = structs.replace(status, ended_round=status.ended_round + _AHEAD, has_state=True)
        return structs.replace(message, status=status_ahead)

    for name in ("hello", "_beat_for"):

        @instead_of(Heartbeats, name)
        def with_status(honest: Callable[..., Any], self: Heartbeats, *arguments: Any) -> Any:
            message = honest(self, *arguments)
            return ahead(message) if has_begun() else message
