"""The last rounds, kept for workers that missed their end: plans, and the encoded means.

A member that fetches this worker's state is held the means of all rounds since: it asks for them when it has the state,
however many rounds that takes. What is more than fits into memory is on the disk, in files without a name, which are
gone with this process.
"""

import asyncio
import errno
import logging
import mmap
import os
import shutil
import tempfile
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from diloco.memory import blank
from diloco.swarm.node import clock
from diloco.swarm.protocol.certificate import Bytes, Certificate
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

MAX_ROUNDS = 8
MAX_BYTES = 1 << 30
MAX_HELD_ROUNDS = 64
"""The most rounds that are kept for a member that fetches the state."""
_FREE_SHARE = 0.1
"""The share of the disk that means leave free for others."""


@dataclass(frozen=True)
class EndedRound:
    plan: Plan
    mean: Bytes
    """Empty if the round had none."""
    certificate: Certificate


@dataclass
class _Held:
    """The means that are kept for one member."""

    first: int
    """The first round that is not in the state which it fetches."""
    touched: float = field(default_factory=clock.now)
    """When it last asked for something, or took a piece of the state."""


class RecentRounds:
    """Keeps the last round in any case; else at most eight, of at most 1 GiB, and more for members that fetch the
    state."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: for means on the disk."""
        self._folder = folder
        self._held: dict[str, _Held] = {}
        self._on_disk: set[int] = set()
        """The rounds whose means are on the disk."""
        self._rounds: OrderedDict[int, EndedRound] = OrderedDict()
        self.next_to_merge: int | None = None
        """The round after the last one that this worker's trainer has merged; None: it may have merged none."""
        self.max_mean_bytes = 1 << 40
        """A longer mean is refused before it is read."""
        self._copying: list[asyncio.Future[None]] = []

    def add_copy(self, plan: Plan, mean: SharedMemory, certificate: Certificate) -> None:
        """Keep a copy of `mean`, which must not change before `copied`: a thread makes it while the trainer goes on."""
        copy = self._room_for(plan.key.sequence, mean.num_bytes)
        self.add(plan, copy, certificate)
        if copy:
            self._copying.append(asyncio.get_running_loop().run_in_executor(None, _copy, copy, mean))

    async def copied(self) -> None:
        while self._copying:
            await self._copying[0]
            self._copying = [copy for copy in self._copying if not copy.done()]

    def add(self, plan: Plan, mean: Bytes, certificate: Certificate) -> None:
        self._rounds[plan.key.sequence] = EndedRound(plan, mean, certificate)
        self._drop_old()

    def _drop_old(self) -> None:
        first_held = min((held.first for held in self._held.values()), default=None)
        while len(self._rounds) > 1:
            oldest = next(iter(self._rounds))
            is_held = first_held is not None and oldest >= first_held
            few = len(self._rounds) <= (MAX_HELD_ROUNDS if is_held else MAX_ROUNDS)
            if few and (is_held or self._memory_bytes() <= MAX_BYTES):
                return
            del self._rounds[oldest]
            self._on_disk.discard(oldest)

    def _memory_bytes(self) -> int:
        return sum(len(ended.mean) for sequence, ended in self._rounds.items() if sequence not in self._on_disk)

    def _room_for(self, sequence: int, num_bytes: int) -> memoryview:
        """Find memory for a mean: on the disk if a member needs earlier means too and memory is full. If the disk has
        no room, no means are kept for such members any more."""
        if self._held and self._folder is not None and self._memory_bytes() + num_bytes > MAX_BYTES:
            try:
                room = on_disk(self._folder, num_bytes)
            except OSError as problem:
                logger.warning("no room to keep means for members that join (they begin again): %s", problem)
                self._held.clear()
            else:
                self._on_disk.add(sequence)
                return room
        return blank(num_bytes)

    # Members that fetch the state

    def hold(self, peer: str, first: int) -> None:
        """Keep the means from this round on: `peer` fetches the state before it."""
        self._held[peer] = _Held(first)

    def touch(self, peer: str) -> None:
        """The member still fetches."""
        if peer in self._held:
            self._held[peer].touched = clock.now()

    def held(self) -> dict[str, int]:
        """Return a map: member -> the first round that is kept for it."""
        return {peer: held.first for peer, held in self._held.items()}

    def idle_seconds(self, peer: str) -> float:
        return clock.now() - self._held[peer].touched

    def release(self, peer: str) -> None:
        del self._held[peer]
        self._drop_old()

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._rounds

    def get(self, sequence: int) -> EndedRound | None:
        return self._rounds.get(sequence)


def on_disk(folder: Path, num_bytes: int) -> memoryview:
    """Map memory in a file without a name. Raises OSError if the disk has no room for it: the blocks are taken at
    once, so that no later write fails."""
    usage = shutil.disk_usage(folder)
    if usage.free - num_bytes < _FREE_SHARE * usage.total:
        raise OSError(errno.ENOSPC, f"{num_bytes} bytes in {folder}, which has {usage.free} of {usage.total} left")
    with tempfile.TemporaryFile(dir=folder, prefix="mean-") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, num_bytes))
        return memoryview(mmap.mmap(file.fileno(), max(1, num_bytes)))[:num_bytes]


def _copy(into: memoryview, memory: SharedMemory) -> None:
    """Torch copies, and lets other threads go on meanwhile."""
    torch.frombuffer(into, dtype=torch.uint8).copy_(torch.frombuffer(memory.view, dtype=torch.uint8))
