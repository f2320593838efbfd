"""This worker's last contributions: while others check a mean, they may ask for a part of each contribution to it.

A contribution is copied when its worker follows a plan, since the trainer writes the next one into the same memory. How
many are kept follows from their size, which is the same for all workers of a round: so every member knows which rounds
a worker must still show a part of, and takes no honest one for a liar (mean_check.py).
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from itertools import chain, pairwise

import torch

from diloco.memory import blank
from diloco.swarm.audit import merkle
from diloco.swarm.node import clock
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.trainer import PostedRound

_MOST_KEPT = 64
_MOST_BYTES = 1 << 28
_MOST_PLANS = 64
_THREADS = 2


def num_kept(num_bytes: int) -> int:
    """Return the number of rounds for which a contribution of this size is kept: 256 MiB of equal ones, and two in any
    case."""
    return max(2, min(_MOST_KEPT, _MOST_BYTES // max(1, num_bytes)))


async def hash_parts(posted: PostedRound) -> merkle.Tree:
    """Make the tree over all parts. A round begins with it, so that more than one thread hashes them; it is kept, so
    that no question for a part costs the event loop more than a look."""
    loop = asyncio.get_running_loop()
    contribution = posted.contribution
    parts = posted.num_parts
    width = contribution.num_bytes // max(1, parts)
    pieces = pairwise(parts * index // _THREADS * width for index in range(_THREADS + 1))
    hashing = [loop.run_in_executor(None, merkle.leaves, contribution.view[a:b], width) for a, b in pieces]
    leaves = list(chain.from_iterable(await asyncio.gather(*hashing)))
    return await loop.run_in_executor(None, merkle.Tree, leaves)


@dataclass(eq=False)
class OwnContribution:
    sequence: int
    """The number of its round."""
    leaves: merkle.Tree
    """The tree over the posted parts; each post has one of its own."""
    data: memoryview
    """A copy of the posted parts, once `copying` is done."""
    copying: "asyncio.Future[None]"
    since: float = field(default_factory=clock.now)
    """When this worker began to follow a plan with it."""
    plans: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MOST_PLANS))
    """The digests of all attempts at its round."""


class OwnContributions:
    def __init__(self) -> None:
        self._kept: list[OwnContribution] = []

    def keep(self, plan: Plan, posted: PostedRound, leaves: merkle.Tree) -> OwnContribution:
        """Keep a copy of the contribution, under this plan too. The posted memory must not change before `copied`."""
        own = next((kept for kept in self._kept if kept.leaves is leaves), None)
        if own is None:
            sequence = posted.key.sequence
            self._kept = [kept for kept in self._kept if abs(sequence - kept.sequence) < num_kept(len(kept.data))]
            data = blank(posted.contribution.num_bytes)
            copying = asyncio.get_running_loop().run_in_executor(None, _copy, data, posted.contribution.view)
            own = OwnContribution(sequence, leaves, data, copying)
            self._kept.append(own)
        if plan.digest not in own.plans:
            own.plans.append(plan.digest)
        return own

    async def find(self, plan: bytes) -> OwnContribution | None:
        own = next((kept for kept in self._kept if plan in kept.plans), None)
        if own is not None:
            await asyncio.shield(own.copying)
        return own

    async def copied(self) -> None:
        """Returns when the trainer may write into the memory of all rounds."""
        await asyncio.gather(*(asyncio.shield(own.copying) for own in self._kept if not own.copying.done()))


def _copy(into: memoryview, data: memoryview) -> None:
    """Torch copies, and lets other threads go on meanwhile."""
    if data:
        torch.frombuffer(into, dtype=torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))
