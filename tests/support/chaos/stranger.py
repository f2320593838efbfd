"""A peer that was not invited, and knows everything else: the run's name, its workers' addresses, the protocol.

It says hello with a credential of its own making, asks for everything a member may ask for, sends a plan and parts of
a round, and takes what it can get. `intrude` tells what it got, which must be nothing.
"""

import asyncio
from multiprocessing.connection import Connection

from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd.transport import P2pdTransport, protocol_of
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node.frames import write_frame
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.certificate import Certificate
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.status import Status
from diloco.swarm.protocol.wire import PROTOCOL, encode
from diloco.swarm.settings import Settings
from diloco.swarm.trainer import PresentWorker
from diloco.swarm.trust.invitation import invite
from diloco.swarm.trust.run_key import RunKey
from diloco.version import __version__
from support.chaos.worker import Story, Task

_SECONDS = 5.0


def intrude(settings: Settings, pipe: Connection, task: Task, run: str, addresses: list[str]) -> None:
    """A line "error" with what it was told, or a line "start" if any worker gave it anything."""
    del pipe
    story = Story(task)
    got, refusals = asyncio.run(_attempts(settings, run, addresses))
    if got:
        story.tell("start", number=-1, sequence=-1, digest="", got=got)
    if refusals:
        story.tell("error", error="CallRefused", text=refusals[0], refusals=len(refusals))


async def _attempts(settings: Settings, run: str, addresses: list[str]) -> tuple[list[str], list[str]]:
    listen = ListenConfig(settings.host, None)
    transport = await P2pdTransport.create(settings.path("stranger.key"), protocol_of(run), listen)
    got: list[str] = []
    refusals: list[str] = []

    async def nobody_calls(peer: str, data: bytes) -> bytes:
        raise CallRefused(f"{peer} says {len(data)} bytes to a stranger")

    async def nobody_streams(stream: Stream) -> None:
        stream.close()

    await transport.serve(nobody_calls, nobody_streams)
    for address in addresses:
        peer = address.rpartition("/p2p/")[2]
        try:
            await transport.connect(peer, [address], _SECONDS)
        except Unreachable:
            continue
        for name, request in _requests(transport.peer).items():
            try:
                await transport.call(peer, request, _SECONDS)
                got.append(name)
            except CallRefused as refusal:
                refusals.append(f"{name}: {refusal}")
            except Unreachable:
                continue
        got += await _streams(transport, peer)
    await transport.close()
    return got, refusals


def _requests(me: str) -> dict[str, bytes]:
    """Whatever could let it in, lead, contribute, or put others out."""
    forged = invite(RunKey.create(), [], 3600.0, 0.0).credential(me).data()
    hello = messages.Hello(PROTOCOL, __version__, "worker", forged, (), Status(number=0, has_state=True))
    authority = Authority(1 << 40, 0, 0)
    return {
        "hello": encode(hello),
        "status": encode(messages.AskStatus()),
        "files": encode(messages.AskFiles()),
        "number": encode(messages.AskNumber(0)),
        "ready": encode(messages.Ready(PresentWorker(0, b"", b""), None)),
        "inquire": encode(messages.Inquire(1, authority)),
        "commit": encode(messages.Commit(1, authority, bytes(32), Certificate(0, (), {}))),
        "outcome": encode(messages.AskOutcome(0)),
        "post now": encode(messages.PostNow(1 << 40)),
        "goodbye": encode(messages.Goodbye()),
        "large": b"x" * 100_000,
    }


async def _streams(transport: P2pdTransport, peer: str) -> list[str]:
    """Those that gave a byte."""
    got = []
    heads = {
        "state": encode(messages.OpenState()),
        "mean": encode(messages.OpenMean(0)),
        "parts": encode(messages.OpenParts(1, Authority(1, 0, 1))),
    }
    for name, head in heads.items():
        try:
            stream = await transport.open_stream(peer, _SECONDS)
            await write_frame(stream, head, _SECONDS)
            await stream.read(1, _SECONDS)
            got.append(f"a stream of {name}")
        except Unreachable:
            continue
    return got
