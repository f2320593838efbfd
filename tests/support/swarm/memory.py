"""A network in memory, with peers that can be killed and cut off, and nodes on it with scripted trainers."""

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.header import pack as pack_header
from diloco.engines.rounds import Contribution, RoundKey
from diloco.engines.swarm.network.transport import CallRefused, OnCall, OnStream, Stream, Transport, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.node import Node
from diloco.engines.swarm.node.plan import Authority, Entry, Plan
from diloco.engines.swarm.node.trainer import PostedRound, PresentWorker, RoundOutcome, Snapshot
from diloco.engines.swarm.run_files import INVITATION_FILE, write_private
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.shared_memory import SharedMemory
from diloco.engines.swarm.trust.invitation import Invitation, invite
from diloco.engines.swarm.trust.permissions import Permissions
from diloco.engines.swarm.trust.run_key import RunKey


def date() -> float:
    """Seconds since 1970 on the virtual clock, for invitations."""
    return 1_800_000_000.0 + clock.now()


LATENCY_SECONDS = 0.001
"""One way. Not 0: two peers that ask each other again and again must not stop the virtual clock."""


class MemoryNetwork:
    """Peers by name. `cut` peers hear and say nothing, `dead` ones are known to be gone."""

    def __init__(self) -> None:
        self.peers: dict[str, MemoryTransport] = {}
        self.cut: set[str] = set()
        self.dead: set[str] = set()
        self._operations = 0
        self._at: int | None = None
        self._action: Callable[[], None] = lambda: None

    def after(self, operations: int, action: Callable[[], None]) -> None:
        """Do something in the middle of what goes on: after so many more reads, writes and calls."""
        self._at, self._action = self._operations + operations, action

    def way(self, one: str, other: str) -> None:
        if other in self.dead or one in self.dead:
            raise Unreachable("connection refused", gone=True)

    def silent(self, one: str, other: str) -> bool:
        self._operations += 1
        if self._at is not None and self._operations >= self._at:
            self._at = None
            self._action()
        return one in self.cut or other in self.cut

    def kill(self, name: str) -> None:
        self.dead.add(name)
        for pipe in self.peers[name].pipes:
            pipe.break_()


class _Pipe:
    """Bytes one way."""

    def __init__(self, network: MemoryNetwork, ends: tuple[str, str]) -> None:
        self.network, self.ends = network, ends
        self.data = bytearray()
        self.news = asyncio.Event()
        self.closed = False

    def break_(self) -> None:
        self.closed = True
        self.news.set()

    async def put(self, data: bytes | memoryview, seconds: float) -> None:
        end = clock.now() + seconds
        while len(self.data) > 1 << 18 or self.network.silent(*self.ends):
            if self.closed or clock.now() > end:
                raise Unreachable("no progress in writing", gone=self.closed)
            await asyncio.sleep(0.005)
        if self.closed:
            raise Unreachable("stream reset", gone=True)
        self.data += data
        self.news.set()
        await asyncio.sleep(0)

    async def take(self, size: int, seconds: float) -> bytes:
        end = clock.now() + seconds
        while len(self.data) < size or self.network.silent(*self.ends):
            if self.closed:
                raise Unreachable("stream reset", gone=True)
            if clock.now() > end:
                raise Unreachable("no progress in reading")
            self.news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self.news.wait()
        taken = bytes(self.data[:size])
        del self.data[:size]
        return taken


class MemoryStream(Stream):
    def __init__(self, peer: str, outgoing: _Pipe, incoming: _Pipe) -> None:
        self.peer, self._out, self._in = peer, outgoing, incoming
        self.bytes_sent = self.bytes_received = 0

    async def write(self, data: bytes | memoryview, seconds: float) -> None:
        for first in range(0, len(data), 1 << 16):
            await self._out.put(data[first : first + (1 << 16)], seconds)
        self.bytes_sent += len(data)

    async def read(self, size: int, seconds: float) -> bytes:
        data = await self._in.take(size, seconds)
        self.bytes_received += size
        return data

    async def read_into(self, buffer: memoryview, seconds: float) -> None:
        for first in range(0, len(buffer), 1 << 16):
            piece = buffer[first : first + (1 << 16)]
            piece[:] = await self.read(len(piece), seconds)

    def close(self) -> None:
        self._out.break_()


class MemoryTransport(Transport):
    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self.network, self.peer = network, name
        self.pipes: list[_Pipe] = []
        self.on_call: OnCall | None = None
        self.on_stream: OnStream | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        network.peers[name] = self
        network.dead.discard(name)

    async def serve(self, on_call: OnCall, on_stream: OnStream) -> None:
        self.on_call, self.on_stream = on_call, on_stream

    async def addresses(self) -> list[str]:
        return [f"/ip4/127.0.0.1/tcp/1/p2p/{self.peer}"]

    async def connect(self, peer: str, addresses: list[str], seconds: float) -> None:
        del addresses
        await self._reach(peer, seconds)

    async def _reach(self, peer: str, seconds: float) -> "MemoryTransport":
        await asyncio.sleep(LATENCY_SECONDS)
        self.network.way(self.peer, peer)
        other = self.network.peers.get(peer)
        if other is None or other.on_call is None:
            raise Unreachable("connection refused", gone=True)
        end = clock.now() + seconds
        while self.network.silent(self.peer, peer):
            if clock.now() > end:
                raise Unreachable("no answer")
            await asyncio.sleep(0.02)
        return other

    async def call(self, peer: str, request: bytes, seconds: float) -> bytes:
        other = await self._reach(peer, seconds)
        assert other.on_call is not None
        try:
            async with asyncio.timeout(seconds):
                answer = await other.on_call(self.peer, request)
        except TimeoutError:
            raise Unreachable("no answer") from None
        except (Unreachable, AssertionError):
            raise
        except Exception as error:  # noqa: BLE001 - what a handler raises is told to the caller
            raise CallRefused.read(str(error)) from None
        await self._reach(peer, seconds)
        return answer

    async def open_stream(self, peer: str, seconds: float) -> Stream:
        other = await self._reach(peer, seconds)
        there, back = _Pipe(self.network, (self.peer, peer)), _Pipe(self.network, (peer, self.peer))
        for transport in (self, other):
            transport.pipes += [there, back]
        theirs = MemoryStream(self.peer, back, there)

        async def serve() -> None:
            assert other.on_stream is not None
            try:
                await other.on_stream(theirs)
            finally:
                theirs.close()

        task = asyncio.create_task(serve())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return MemoryStream(peer, there, back)

    async def close(self) -> None:
        self.network.kill(self.peer)


@dataclass
class ScriptedTrainer:
    """Remembers what the node tells it, and serves a state that is the list of all means so far."""

    sequence: int = 0
    calls: list[int] = field(default_factory=list)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    means: list[bytes] = field(default_factory=list)

    def post_now(self, sequence: int) -> None:
        self.calls.append(sequence)

    async def snapshot(self) -> Snapshot | None:
        data = b"".join(len(mean).to_bytes(8, "little") + mean for mean in self.means)
        return Snapshot(
            SharedMemory.copy_of(data), {"sequence": self.sequence, "inner_steps": 10 * self.sequence}, "same", b"n"
        )

    def emit(self, type_: str, fields: Mapping[str, Any]) -> None:
        self.events.append((type_, dict(fields)))


NUMEL = 3000
NAMES = [f"12D3KooW{'ABCDEFGHJKLMNPQRSTUVWXYZ'[i] * 44}" for i in range(24)]


@dataclass
class MemoryWorker:
    node: Node
    trainer: ScriptedTrainer
    codec: str = "fp32"

    @property
    def name(self) -> str:
        return self.node.transport.peer

    def posting(
        self,
        values: torch.Tensor,
        *,
        weight: float = 1.0,
        claimed: float | None = None,
        digest: str = "anchor",
        layout: str = "same",
        seconds: float = 30.0,
        sequence: int | None = None,
        round_weight: float = 1.0,
    ) -> PostedRound:
        vector = EncodedVector(codec(self.codec), PartLayout(values.numel()))
        vector.encode(0, values)
        norm = float(torch.linalg.vector_norm(values.double())) if claimed is None else claimed
        key = RoundKey(self.trainer.sequence if sequence is None else sequence, 0)
        contribution = Contribution(vector, weight, norm, digest, layout, 1000.0, round_weight=round_weight)
        header = pack_header(key, contribution)
        data = SharedMemory.copy_of(memoryview(vector.data.numpy().reshape(-1)))
        parts = len(vector.data)
        mean = SharedMemory.create(vector.mean.num_bytes)
        return PostedRound(
            key, header, b"note", self.codec, vector.layout.part_elements, parts, data, mean, 1000.0,
            seconds,
        )  # fmt: skip

    async def post(self, values: torch.Tensor, **options: Any) -> tuple[RoundOutcome, bytes]:
        posting = self.posting(values, **options)
        ended = await self.node.post(posting)
        if ended.failure is None:
            if ended.total_weight > 0:
                self.trainer.means.append(bytes(posting.mean.view))
            self.trainer.sequence = posting.key.sequence + 1
        return ended, bytes(posting.mean.view)

    async def catch_up(self) -> None:
        arrived = await self.node.fetch_state()
        if arrived is None:
            return
        if arrived.snapshot is not None:
            self.trainer.means, data = [], bytes(arrived.snapshot.data.view)
            while data:
                size = int.from_bytes(data[:8], "little")
                self.trainer.means.append(data[8 : 8 + size])
                data = data[8 + size :]
        self.trainer.means += [bytes(mean.data.view) for mean in arrived.means]
        self.trainer.sequence = arrived.sequence


def plan(workers: list[int], sequence: int = 0, weight: float = 1.0) -> Plan:
    """As worker 0 makes it when all have posted `values` of norm 1."""
    key = RoundKey(sequence, 0)
    vector = EncodedVector(codec("fp32"), PartLayout(NUMEL))
    header = pack_header(key, Contribution(vector, weight, 1.0, "anchor", "same", 1000.0))
    entries = tuple(Entry(NAMES[worker], PresentWorker(worker, header, b"note")) for worker in workers)
    return Plan(key, Authority(1, 0, 1), NAMES[0], entries, (), tuple(workers), 1000.0)


class MemorySwarm:
    """Workers with numbers 0, 1, … as they are started."""

    def __init__(self, folder: Path | None = None, **settings: Any) -> None:
        self.network = MemoryNetwork()
        self.run_key = RunKey.create()
        self.folder = folder or Path(tempfile.mkdtemp())
        self.workers: list[MemoryWorker] = []
        self.settings = settings

    def invitation(self) -> Invitation:
        known = [f"/ip4/127.0.0.1/tcp/1/p2p/{worker.name}" for worker in self.workers]
        return invite(self.run_key, known, 3600.0, date())

    async def start(self, *, name: str | None = None, credential_of: RunKey | None = None, **more: Any) -> MemoryWorker:
        index = len(self.workers)
        name = name or NAMES[index]
        again = more.pop("folder", None)
        folder = Path(again) if again is not None else self.folder / f"machine-{index}-{name[-1]}"
        invitation = self.invitation()
        if again is None:
            write_private(folder / INVITATION_FILE, invitation.text())
        options: dict[str, Any] = {"lost_seconds": 1.0, "beat_seconds": 0.2, **self.settings, **more}
        settings = Settings(str(folder), "worker-0", founder=index == 0, **options)
        mine = invitation if credential_of is None else invite(credential_of, [], 3600.0, date())
        trainer = ScriptedTrainer()
        credential = mine.credential(name)
        public = self.run_key.public if credential_of is None else credential_of.public
        permissions = Permissions(public, name, credential, settings.refusals_to_ban, date)
        if credential_of is not None:
            permissions.run_public = self.run_key.public
        node = Node(MemoryTransport(self.network, name), permissions, settings, trainer)
        await node.start()
        worker = MemoryWorker(node, trainer)
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self.workers:
            for task in worker.node._tasks:
                task.cancel()


def values(worker: int, sequence: int = 0, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * sequence + worker)) * (1 + worker / 10)
