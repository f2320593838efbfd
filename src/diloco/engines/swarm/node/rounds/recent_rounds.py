"""The last rounds, kept for workers that missed their end: plans, and the encoded means."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

import torch

from diloco.codecs.encoded import blank
from diloco.engines.swarm.node.plan import Plan
from diloco.engines.swarm.node.proofs.certificate import Bytes, Certificate
from diloco.engines.swarm.shared_memory import SharedMemory

MAX_ROUNDS = 8
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class EndedRound:
    plan: Plan
    mean: Bytes
    """Empty if the round had none."""
    certificate: Certificate


class RecentRounds:
    """At least the last round; at most eight rounds, and at most 1 GiB."""

    def __init__(self) -> None:
        self._rounds: OrderedDict[int, EndedRound] = OrderedDict()
        self.next_to_merge: int | None = None
        """The round after the last one that this worker's trainer has merged; None: it may have merged none."""
        self.max_mean_bytes = 1 << 40
        """A longer mean is refused before it is read."""
        self._copying: list[asyncio.Future[None]] = []

    def add_copy(self, plan: Plan, mean: SharedMemory, certificate: Certificate) -> None:
        """Keep a copy of `mean`, which must not change before `copied`: a thread makes it while the trainer goes on."""
        copy = blank(mean.num_bytes)
        self.add(plan, copy, certificate)
        if copy:
            self._copying.append(asyncio.get_running_loop().run_in_executor(None, _copy, copy, mean))

    async def copied(self) -> None:
        while self._copying:
            await self._copying[0]
            self._copying = [copy for copy in self._copying if not copy.done()]

    def add(self, plan: Plan, mean: Bytes, certificate: Certificate) -> None:
        self._rounds[plan.key.sequence] = EndedRound(plan, mean, certificate)
        while len(self._rounds) > 1 and (
            len(self._rounds) > MAX_ROUNDS or sum(len(ended.mean) for ended in self._rounds.values()) > MAX_BYTES
        ):
            self._rounds.popitem(last=False)

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._rounds

    def get(self, sequence: int) -> EndedRound | None:
        return self._rounds.get(sequence)


def _copy(into: memoryview, memory: SharedMemory) -> None:
    """By torch, which lets other threads go on."""
    torch.frombuffer(into, dtype=torch.uint8).copy_(torch.frombuffer(memory.view, dtype=torch.uint8))
