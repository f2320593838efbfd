"""How a round ended, as the others tell it: what is believed of it, and the mean of it.

One member's word is not enough to put a mean into another worker: a plan and the digest of its mean count when more
than half of the others that have the state name the same, and what arrives is held against that digest
and against the norms that were claimed. Who has the whole mean of that very plan already needs nobody's bytes.
"""

import asyncio
import hashlib
import logging
import math
from collections import Counter
from dataclasses import dataclass

import torch

from diloco.codecs.registry import codec
from diloco.engines.swarm.kept import KeptRounds
from diloco.engines.swarm.membership import Membership
from diloco.engines.swarm.plan import Plan
from diloco.engines.swarm.transport import CallRefused, Unreachable
from diloco.engines.swarm.wire import Malformed, Message, pack, read_frame_into, write_frame
from diloco.engines.swarm.worker import Posting

logger = logging.getLogger(__name__)

_ASK_AT_MOST = 16
_NORM_SLACK = 1.25
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Outcome:
    plan: Plan
    digest: str
    """Of the encoded mean."""
    told_by: tuple[str, ...]
    most: bool
    """More than half of all others that have the state say so."""


class Outcomes:
    def __init__(self, membership: Membership, kept: KeptRounds) -> None:
        self.membership, self.kept = membership, kept

    def who_ended(self, sequence: int) -> list[str]:
        return [p.name for p in self.membership.live() if p.status.holds and p.status.ended >= sequence]

    async def of(self, sequence: int) -> Outcome | None:
        """What most of those who have ended a round say of it; None if nobody keeps it."""
        asked = self.who_ended(sequence)[:_ASK_AT_MOST]
        answers = [a for a in await asyncio.gather(*(self._ask(peer, sequence) for peer in asked)) if a is not None]
        if not answers:
            return None
        (identity, count), *_ = Counter((pack("plan", **plan.to_wire()), d) for _, plan, d in answers).most_common(1)
        same = [(p, plan) for p, plan, d in answers if (pack("plan", **plan.to_wire()), d) == identity]
        holders = sum(peer.status.holds for peer in self.membership.live())
        return Outcome(same[0][1], identity[1], tuple(peer for peer, _ in same), 2 * count > holders)

    async def _ask(self, peer: str, sequence: int) -> tuple[str, Plan, str] | None:
        try:
            data = pack("outcome", sequence=sequence)
            answer = Message.unpack(
                await self.membership.transport.call(peer, data, self.membership.settings.lost_seconds)
            )
            if answer.text("state") != "kept":
                return None
            plan = Plan.from_wire(answer.map("plan"))
            return (peer, plan, answer.text("digest")) if plan.key.sequence == sequence else None
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("round %d: its outcome cannot be had from %s: %s", sequence, peer, problem)
            if isinstance(problem, Unreachable):
                self.membership.suspect(peer, problem)
            return None

    async def fetch_mean(self, outcome: Outcome) -> bytes:
        """From any of those who told of it; raises Malformed if none gives what was told."""
        problems = []
        for peer in outcome.told_by:
            try:
                data = await self._fetch_from(outcome.plan.key.sequence, peer)
            except (Unreachable, Malformed) as problem:
                problems.append(str(problem))
                continue
            if hashlib.sha256(data).hexdigest() == outcome.digest:
                return data
            problems.append("a mean that is not what was told")
        raise Malformed("; ".join(problems))

    async def _fetch_from(self, sequence: int, peer: str) -> bytes:
        stall = 4 * self.membership.settings.lost_seconds
        stream = await self.membership.transport.open(peer, stall)
        try:
            await write_frame(stream, pack("mean", sequence=sequence), stall)
            size = int.from_bytes(await stream.read(8, stall), "little")
            if size > self.kept.largest:
                raise Malformed(f"a mean of {size} bytes")
            data = bytearray(size)
            view, got = memoryview(data), 0
            while got < size:
                more = await read_frame_into(stream, view[got:], stall)
                if not more:
                    raise Malformed("a mean with nothing in it")
                got += more
            await stream.write(b"\1", stall)
            return bytes(data)
        finally:
            stream.close()


@torch.no_grad()
def check_mean(plan: Plan, posting: Posting, data: bytes) -> None:
    """A mean is never longer than the longest of what it is a mean of."""
    if len(data) != posting.num_parts * posting.part_bytes:
        raise Malformed(f"a mean of {len(data)} bytes instead of {posting.num_parts * posting.part_bytes}")
    longest = max(entry.parsed.claim.norm for entry in plan.contributors)
    how, squares = codec(posting.codec), 0.0
    rows = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(posting.num_parts, -1)
    values = torch.empty(_ROWS_AT_ONCE, posting.part_elements)
    for first in range(0, posting.num_parts, _ROWS_AT_ONCE):
        part = rows[first : first + _ROWS_AT_ONCE]
        how.decode(part, values[: len(part)])
        squares += float(torch.linalg.vector_norm(values[: len(part)])) ** 2
    if not (math.isfinite(squares) and math.sqrt(squares) <= longest * _NORM_SLACK):
        raise Malformed(f"a mean that is longer than any contribution ({longest:.3g})")
