"""Nodes of a swarm on a network in memory, with scripted trainers."""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import Merge
from diloco.core.fragments import PartLayout
from diloco.engines.header import pack as pack_header
from diloco.engines.rounds import Contribution, Report, RoundKey
from diloco.swarm.audit.auditor import Auditor
from diloco.swarm.network.identity import peer_id, save_seed
from diloco.swarm.node import clock
from diloco.swarm.node.audit import Audit, AuditedNode
from diloco.swarm.node.node import Node
from diloco.swarm.protocol.plan import Authority, Entry, Plan
from diloco.swarm.run_files import invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar.snapshots import read, write
from diloco.swarm.simulator.network import MemoryNetwork, MemoryTransport
from diloco.swarm.trainer import PostedRound, PresentWorker, RoundOutcome, Snapshot
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.permissions import Permissions
from diloco.swarm.trust.run_key import RunKey
from diloco.swarm.trust.signatures import public_key


def date() -> float:
    """Return seconds since 1970 on the virtual clock, for invitations."""
    return 1_800_000_000.0 + clock.now()


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
        means = b"".join(len(mean).to_bytes(8, "little") + mean for mean in self.means)
        data = write({"means": torch.frombuffer(bytearray(means), dtype=torch.uint8) if means else torch.empty(0)})
        return Snapshot(data, {"sequence": self.sequence, "inner_steps": 10 * self.sequence}, "same", b"")

    def emit(self, type_: str, fields: Mapping[str, Any]) -> None:
        self.events.append((type_, dict(fields)))


NUMEL = 3000
SEEDS = {peer_id(public_key(seed)): seed for seed in (bytes([number] * 32) for number in range(24))}
"""The private keys of the workers, by name."""
NAMES = sorted(SEEDS)


@dataclass
class MemoryWorker:
    node: Node
    trainer: ScriptedTrainer
    codec: str = "fp32"

    @property
    def name(self) -> str:
        return self.node.transport.peer

    @property
    def auditor(self) -> Auditor:
        """The audit of a worker that does not trust the others."""
        assert isinstance(self.node.audit, Auditor)
        return self.node.audit

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
        merge: Merge = "mean",
        fragment: int = 0,
        ratio: float | None = 1000.0,
        note: bytes = b"",
        report: Report | None = None,
    ) -> PostedRound:
        vector = EncodedVector(codec(self.codec), PartLayout(values.numel()))
        vector.encode(0, values)
        norm = float(torch.linalg.vector_norm(values.double())) if claimed is None else claimed
        key = RoundKey(self.trainer.sequence if sequence is None else sequence, fragment)
        told = report or Report()
        contribution = Contribution(vector, weight, norm, digest, layout, ratio, told, round_weight=round_weight)
        header = pack_header(key, contribution)
        data = SharedMemory.copy_of(vector.data.numpy().tobytes())
        parts = len(vector.data)
        mean = SharedMemory.create(vector.mean.num_bytes)
        return PostedRound(
            key, header, note, self.codec, vector.layout.part_elements, parts, data, mean, ratio,
            seconds, merge,
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
            self.trainer.means = []
            data = read(arrived.snapshot.data)["means"].numpy().tobytes()
            while data:
                size = int.from_bytes(data[:8], "little")
                self.trainer.means.append(data[8 : 8 + size])
                data = data[8 + size :]
        self.trainer.means += [bytes(mean.data.view) for mean in arrived.means]
        self.trainer.sequence = arrived.sequence


def plan(workers: list[int], sequence: int = 0, weight: float = 1.0) -> Plan:
    """Return the plan that worker 0 makes when all have posted `values` of norm 1."""
    key = RoundKey(sequence, 0)
    vector = EncodedVector(codec("fp32"), PartLayout(NUMEL))
    header = pack_header(key, Contribution(vector, weight, 1.0, "anchor", "same", 1000.0))
    entries = tuple(Entry(NAMES[worker], PresentWorker(worker, header, b"")) for worker in workers)
    return Plan(key, Authority(1, 0, 1), NAMES[0], entries, tuple(workers), False, 1000.0)


class MemorySwarm:
    """Workers with numbers 0, 1, … as they are started."""

    def __init__(
        self, folder: Path | None = None, *, audit: Callable[[AuditedNode], Audit] = Auditor, **settings: Any
    ) -> None:
        """`audit`: of its nodes; with `Audit` they trust each other."""
        self.audit = audit
        self.network = MemoryNetwork()
        self.run_key = RunKey.create()
        self.folder = folder or Path(tempfile.mkdtemp())
        if folder is None:
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
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
            write_private(folder / invitation_file(), invitation.text())
            save_seed(folder / "worker-0.key", SEEDS[name])
        options: dict[str, Any] = {"lost_seconds": 1.0, "beat_seconds": 0.2, **self.settings, **more}
        settings = Settings(str(folder), "worker-0", **{"founder": index == 0, **options})
        mine = invitation if credential_of is None else invite(credential_of, [], 3600.0, date())
        trainer = ScriptedTrainer()
        credential = mine.credential(name)
        public = self.run_key.public if credential_of is None else credential_of.public
        permissions = Permissions(public, name, credential, settings.refusals_to_ban, date)
        if credential_of is not None:
            permissions.run_public = self.run_key.public
        node = Node(MemoryTransport(self.network, name), permissions, settings, trainer, self.audit)
        try:
            await node.start()
        except BaseException:
            await node.transport.close()
            raise
        worker = MemoryWorker(node, trainer)
        self.workers.append(worker)
        return worker

    async def close(self) -> None:
        for worker in self.workers:
            for task in worker.node._tasks:
                task.cancel()


def values(worker: int, sequence: int = 0, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * sequence + worker)) * (1 + worker / 10)
