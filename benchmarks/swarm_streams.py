"""The least that a round can cost over p2pd: its bytes through plain streams between two peers, and nothing else.

As in a round, each of two peers opens a stream to the other, sends its parts of the other's range and gets the mean of
that range back at the same time. p2pd encrypts them (TLS 1.3); nothing is encoded, reduced, hashed or checked.
"""

import asyncio
import time
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.network.transport import Stream
from diloco.swarm.settings import Settings
from swarm_hivemind import Exchange

_SECONDS = 120.0


def pass_streams(settings: Settings, pipe: Connection, num_bytes: int, first: tuple[str, list[str]] | None) -> None:
    """`num_bytes`: that a peer sends in a round. Says (its name, its addresses), and hears the other's name.

    Then for every command a round: "ready", and after another command its Exchange.
    """
    asyncio.run(_pass(settings, pipe, num_bytes // 2, first))


async def _pass(settings: Settings, pipe: Connection, half: int, first: tuple[str, list[str]] | None) -> None:
    outgoing, incoming = memoryview(bytes(half)), [memoryview(bytearray(half)) for _ in range(2)]
    served: asyncio.Queue[None] = asyncio.Queue()

    async def both_ways(stream: Stream, into: memoryview) -> None:
        sending: Coroutine[Any, Any, None] = stream.write(outgoing, _SECONDS)
        await asyncio.gather(sending, stream.read_into(into, _SECONDS))

    async def serve(stream: Stream) -> None:
        await both_ways(stream, incoming[0])
        await served.put(None)

    async def refuse(_peer: str, _data: bytes) -> bytes:
        raise NotImplementedError

    key = Path(settings.folder) / "streams.key"
    transport = await P2pdTransport.create(key, protocol_of("streams"), ListenConfig(host="127.0.0.1"))
    try:
        await transport.serve(refuse, serve)
        if first is not None:
            await transport.connect(*first, _SECONDS)
        pipe.send((True, (transport.peer, await transport.addresses())))
        other_peer = await asyncio.to_thread(pipe.recv)
        while await asyncio.to_thread(pipe.recv) is not None:
            pipe.send((True, "ready"))
            await asyncio.to_thread(pipe.recv)
            started = time.monotonic()
            stream = await transport.open_stream(other_peer, _SECONDS)
            async with asyncio.timeout(_SECONDS):
                await asyncio.gather(both_ways(stream, incoming[1]), served.get())
            stream.close()
            pipe.send((True, Exchange(time.monotonic() - started, 2 * half)))
        pipe.send((True, None))
    finally:
        await transport.close()
