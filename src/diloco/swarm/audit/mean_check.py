"""Checks every mean after its round, beside training: has each reducer added up what the others contributed?

    project   each contributor tells all others the numbers of its parts (projections.py)
    compare   each worker compares them with the numbers of the mean that it has
    open      where a part differs, every contributor shows that part, with the proof that it is the one it was bound
              to before the round (merkle.py), and the worker adds it up again: either the reducer has lied, and is
              banned, or a contributor has told a wrong number

Every worker sees the same, and needs no other's word. A contributor that tells no numbers may want to hide what it
reduced: a random part of its range is opened. One that is live and shows no part commits an offence each time, as
long as it must have kept that contribution (own_contributions.py).

A check begins half a second after the round, or sooner where the transfer took less: the outer step, for which all
training waits, has the processor first.

A clipped mean (`sync.merge = clipped`) has several numbers for each part, which must be near those of a plain mean. A
mean that lacks values has none: a random part is opened now and then, so that this costs a hundredth of the bytes at
most.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from diloco.codecs.registry import codec
from diloco.core import merging
from diloco.engines.reduction import reduce_parts
from diloco.swarm import timing
from diloco.swarm.audit import directions, merkle, projections
from diloco.swarm.audit.liars import Liars
from diloco.swarm.audit.own_contributions import OwnContribution, OwnContributions, num_kept
from diloco.swarm.audit.projections import Numbers
from diloco.swarm.network.limits import LruCache, PeerRateLimit
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.calls import Calls
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.certificate import Agreed, Bytes, Certificate, SignedRange, compares_directions
from diloco.swarm.protocol.messages import AskPart, Done, NotHere, Part, Projections
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.wire import Malformed, PeerMessage
from diloco.swarm.trainer import PostedRound
from diloco.swarm.trust.permissions import MAX_PEERS

logger = logging.getLogger(__name__)

_KEPT = 8
_MAX_OPENED = 3
PARTS_AT_ONCE, PARTS_PER_SECOND = 64.0, 4.0
"""Shown to one member. An honest one asks for three of a round at most, and for none of most rounds."""
_PARTS_A_MESSAGE = 1 << 17
_MOST_COMPARED = 4
_FAR, _DEVIATIONS_FAR = 0.25, 3.0  # of a cosine from the one of the numbers: layers differ, and numbers are few
_WRONG_COSINE = 0.02
_OPENED_SHARE = 0.02  # of all parts, by all workers together: a hundredth of the bytes, there and back
_STEPS_OF_ROUNDING = 3.0


@dataclass
class _Counted:
    """A round whose mean this worker has counted."""

    agreed: Agreed
    posted: PostedRound
    mean: Bytes
    """The encoded mean; empty once it is checked."""
    processes: dict[str, str]
    """The process of each contributor: one that was restarted has forgotten its parts."""
    numbers: dict[str, Numbers] = field(default_factory=dict)
    """Contributor -> the numbers of one part after another."""

    @property
    def numbers_a_part(self) -> int:
        return projections.CLIPPED_NUMBERS if self.agreed.plan.decision.merge == "clipped" else 1

    @property
    def signs(self) -> torch.Tensor:
        return projections.signs(self.agreed.certificate.mean, self.posted.part_elements, self.numbers_a_part)


class MeanCheck:
    def __init__(self, members: Members, calls: Calls, liars: Liars) -> None:
        self._members = members
        self._calls = calls
        self._liars = liars
        self._me = members.me
        self._seconds = members.settings.stall_seconds
        self.own = OwnContributions()
        self._shown_to = PeerRateLimit(PARTS_AT_ONCE, PARTS_PER_SECOND, MAX_PEERS)
        self._rounds: LruCache[_Counted] = LruCache(_KEPT)
        self._early: LruCache[Numbers] = LruCache(64)
        """Numbers of rounds that have not ended here yet, by plan and sender."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._random = random.SystemRandom()
        self.bytes = 0
        """Sent and received for checks."""

    def begin(
        self,
        agreed: Agreed,
        posted: PostedRound,
        leaves: merkle.Tree,
        mean: Bytes,
        copied: Callable[[], Awaitable[None]],
    ) -> None:
        """The round has ended, and this worker has its mean, in `mean` once it is `copied`."""
        if not agreed.plan.has_mean or len(agreed.plan.contributors) < 2:
            return
        own = self.own.keep(agreed.plan, posted, leaves)
        processes = {entry.peer: self._process_of(entry.peer) for entry in agreed.plan.contributors}
        round_ = _Counted(agreed, posted, mean, processes)
        self._rounds.put(agreed.plan.digest.hex(), round_)
        # Beside training, and so after the outer step, which takes about as long as the transfer, or less.
        delay = min(timing.CHECK_DELAY_SECONDS, clock.now() - own.since)
        task = asyncio.create_task(self._check(round_, own, copied, delay))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # For the others

    def record(self, sender: str, message: Projections) -> PeerMessage:
        values = np.frombuffer(message.values, np.float32)
        round_ = self._rounds.get(message.plan.hex())
        if round_ is None:
            if message.first == 0:
                self._early.put(f"{message.plan.hex()} {sender}", values)
            return Done()
        self._add(round_, sender, message.first, values)
        return Done()

    def _add(self, round_: _Counted, sender: str, first: int, values: Numbers) -> None:
        if all(entry.peer != sender for entry in round_.agreed.plan.contributors):
            return
        missing = np.full(round_.posted.num_parts * round_.numbers_a_part, np.nan, np.float32)
        numbers = round_.numbers.setdefault(sender, missing)
        numbers[first : first + len(values)] = values[: max(0, len(numbers) - first)]

    async def show(self, peer: str, request: AskPart) -> PeerMessage:
        """Return one part of this worker's contribution, if it is still kept; CallRefused if `peer` asks for too
        many."""
        if peer != self._me and not self._shown_to.take(peer, clock.now()):
            raise CallRefused("too many parts in a short time: no honest member asks for so many", "busy")
        own = await self.own.find(request.plan)
        if own is None or request.part >= len(own.leaves):
            return NotHere()
        width = len(own.data) // len(own.leaves)
        self.bytes += width
        data = bytes(own.data[request.part * width : (request.part + 1) * width])
        return Part(data, merkle.prove(own.leaves, range(request.part, request.part + 1)))

    # The check

    async def _check(
        self, round_: _Counted, own: OwnContribution, copied: Callable[[], Awaitable[None]], delay: float
    ) -> None:
        plan = round_.agreed.plan
        used = codec(round_.posted.codec)
        has_numbers = not used.means_drop_values and not used.for_means.means_drop_values
        try:
            await copied()
            await asyncio.sleep(delay)
            if has_numbers:
                await self._tell_numbers(round_, own)
            del own  # for the others it is kept in `self.own`
            if has_numbers:
                suspects = await self._compare(round_)
            else:
                chance = _OPENED_SHARE * round_.posted.num_parts / len(plan.entries)
                suspects = [self._part_of(round_, None)] if self._random.random() < chance else []
            for part in suspects[:_MAX_OPENED]:
                if part is not None:
                    await self._open(round_, part)
            if has_numbers and not suspects:
                await self._check_directions(round_, self._far_directions(round_))
        except Exception as problem:  # the task ends here: whatever it was, an event says that this mean is unchecked
            logger.exception("the check of the mean of round %d", plan.key.sequence)
            reason = f"{type(problem).__name__}: {problem}"[:200]
            self._members.on_event("check_failed", {"round": plan.key.sequence, "reason": reason})
        round_.mean = b""

    async def _tell_numbers(self, round_: _Counted, own: OwnContribution) -> None:
        """Compute the numbers of this worker's own parts, and tell them to the others."""
        posted = round_.posted
        if any(entry.peer == self._me for entry in round_.agreed.plan.contributors):
            await asyncio.shield(own.copying)
            loop = asyncio.get_running_loop()
            used = codec(posted.codec)
            parts = posted.num_parts
            mine = await loop.run_in_executor(None, projections.project, used, own.data, parts, round_.signs)
            round_.numbers[self._me] = mine
            await self._tell(round_, mine)

    async def _compare(self, round_: _Counted) -> list[int | None]:
        """Compare the mean's numbers with the contributions'; return the parts to open, None for one that cannot be
        chosen."""
        plan = round_.agreed.plan
        posted = round_.posted
        loop = asyncio.get_running_loop()
        means = codec(posted.codec).for_means
        parts = posted.num_parts
        mean = memoryview(round_.mean)
        numbers, error, norms = await loop.run_in_executor(
            None, projections.project_mean, means, mean, parts, round_.signs
        )
        absent = await self._wait_for_numbers(round_)
        if absent:
            return [self._part_of(round_, peer) for peer in absent]
        self._check_lengths(round_)
        if plan.decision.merge == "clipped":
            return list(projections.clipped_suspects(plan, round_.numbers, numbers, error, norms))
        return list(projections.suspects(plan, projections.expected(plan, round_.numbers), numbers, error))

    def _check_lengths(self, round_: _Counted) -> None:
        """A contribution that is next to nothing counts for nothing, so that a worker may claim that it is longer."""
        for entry in round_.agreed.plan.contributors:
            length = projections.estimate_norm(round_.numbers[entry.peer], round_.numbers_a_part)
            claimed = entry.parsed.claim.norm
            if length is not None and length < merging.LEAST_NORM * claimed:
                self._liars.record_unproved(
                    entry.peer, f"its contribution has the norm {length:.3g}, not {claimed:.3g}"
                )

    async def _tell(self, round_: _Counted, numbers: Numbers) -> None:
        plan = round_.agreed.plan
        for first in range(0, len(numbers), _PARTS_A_MESSAGE):
            piece = numbers[first : first + _PARTS_A_MESSAGE].tobytes()
            others = [entry.peer for entry in plan.entries if entry.peer != self._me]
            message = Projections(plan.digest, first, piece)
            self.bytes += 2 * len(piece) * len(others)
            await asyncio.gather(*(self._ask(peer, message) for peer in others))

    async def _wait_for_numbers(self, round_: _Counted) -> list[str]:
        """Return the live contributors that have not told all their numbers in time; the others, if none of these is
        live."""
        plan = round_.agreed.plan
        end = clock.now() + self._seconds
        for entry in plan.contributors:
            early = self._early.get(f"{plan.digest.hex()} {entry.peer}")
            if early is not None:
                self._add(round_, entry.peer, 0, early)
        while True:
            names = [entry.peer for entry in plan.contributors]
            missing = [peer for peer in names if not _is_whole(round_.numbers.get(peer))]
            live = [peer for peer in missing if self._members.is_live(peer)]
            if not missing or not live or clock.now() > end:
                return live or missing
            await asyncio.sleep(timing.NUMBERS_POLL_SECONDS)

    def _part_of(self, round_: _Counted, peer: str | None) -> int | None:
        """Choose a random part of the range of `peer`, or with None of any other worker's range; None if there is no
        such part."""
        ranges = round_.agreed.plan.ranges(round_.posted.num_parts)
        parts = [part for name, rows in ranges.items() if name != self._me and peer in (None, name) for part in rows]
        return self._random.choice(parts) if parts else None

    # Directions

    def begin_opposed(
        self, plan: Plan, posted: PostedRound, ranges: tuple[SignedRange, ...], opposed: Collection[str]
    ) -> None:
        """A contribution was refused for its direction: have the reducers told the right one of this worker's pairs?

        Where more than half of many contributors tell, fewer than half that lie do not decide that.
        """
        names = [entry.peer for entry in plan.contributors]
        most_tell = 2 * sum(len(signed.directions) > 0 for signed in ranges) > len(names)
        if self._me not in names or (most_tell and len(names) > _MOST_COMPARED):
            return
        agreed = Agreed(plan, Certificate(posted.num_parts, ranges, {}))
        round_ = _Counted(agreed, posted, b"", {name: self._process_of(name) for name in names})
        others = [name for name in names if name != self._me and (self._me in opposed or name in opposed)]
        pairs = [(teller, other) for teller in names for other in others if teller != self._me]
        task = asyncio.create_task(self._check_directions(round_, pairs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _far_directions(self, round_: _Counted) -> list[tuple[str, str]]:
        """Find each reducer that told a cosine of this worker's pairs which is far from that of the numbers, with the
        other worker of the pair where it is farthest."""
        plan = round_.agreed.plan
        numbers = round_.numbers
        if not compares_directions(plan) or self._me not in numbers:
            return []
        far = []
        for teller, told in directions.told_of(plan, round_.agreed.certificate.ranges, self._me, round_.posted):
            distances = {}
            for other, cosine in told.items():
                estimate = projections.estimate_cosine(numbers[self._me], numbers[other])
                bound = _FAR + _DEVIATIONS_FAR / len(numbers[other]) ** 0.5
                distances[other] = abs(estimate - cosine) - bound
            farthest = max(distances, key=lambda other: distances[other])
            if distances[farthest] > 0:
                far.append((teller, farthest))
        return far[:_MAX_OPENED]

    async def _check_directions(self, round_: _Counted, pairs: Sequence[tuple[str, str]]) -> None:
        """Compare this worker's parts with the other's, in the parts that the reducer has compared."""
        plan = round_.agreed.plan
        posted = round_.posted
        cosines_of = dict(directions.told_of(plan, round_.agreed.certificate.ranges, self._me, posted))
        for teller, other in pairs:
            entry = plan.entry(other)
            parts = directions.sampled_parts(plan, teller, posted.num_parts)
            if entry is None or teller not in cosines_of or not parts:
                continue
            rows: dict[str, list[bytes]] = {self._me: [], other: []}
            for part in parts:
                own = await self.show(self._me, AskPart(plan.digest, part))
                shown = await self._shown_part(round_, other, entry.root, part)
                if not isinstance(own, Part) or shown is None:
                    break  # another worker may show its parts all the same
                rows[self._me].append(own.data)
                rows[other].append(shown)
            if len(rows[other]) < len(parts):
                continue
            right = directions.cosine_of(posted, rows[self._me], rows[other])
            told = cosines_of[teller][other]
            if abs(right - told) > _WRONG_COSINE:
                reason = (
                    f"round {plan.key.sequence}: it told the cosine {told:.2f} of two contributions, not {right:.2f}"
                )
                self._liars.ban(teller, reason)

    # Opening a part

    async def _open(self, round_: _Counted, part: int) -> None:
        """Add a part up again, and name the worker that has lied about it."""
        plan = round_.agreed.plan
        posted = round_.posted
        shown: dict[str, bytes] = {}
        for entry in plan.contributors:
            data = await self._shown_part(round_, entry.peer, entry.root, part)
            if data is None:
                logger.info("round %d: %s does not show part %d", plan.key.sequence, entry.peer, part)
                return
            shown[entry.peer] = data
        wrong = await asyncio.get_running_loop().run_in_executor(None, _differs, round_, part, list(shown.values()))
        reducer = next(peer for peer, rows in plan.ranges(posted.num_parts).items() if part in rows)
        if wrong and reducer != self._me:
            self._liars.ban(
                reducer, f"part {part} of the mean of round {plan.key.sequence} is not what was contributed"
            )
        elif not wrong:
            self._compare_numbers(round_, part, shown)

    def _compare_numbers(self, round_: _Counted, part: int, shown: dict[str, bytes]) -> None:
        """The mean is right: has a contributor told a wrong number?"""
        posted = round_.posted
        plan = round_.agreed.plan
        count = round_.numbers_a_part
        sign = round_.signs
        for peer, data in shown.items():
            told = round_.numbers.get(peer)
            if told is None:
                continue
            right = projections.project(codec(posted.codec), memoryview(bytearray(data)), 1, sign)
            for number, wanted in zip(told[part * count : (part + 1) * count].tolist(), right.tolist(), strict=True):
                if not abs(number - wanted) <= 1e-4 * plan.longest + 1e-3 * abs(wanted):
                    self._liars.record_unproved(peer, f"its number of part {part} is {number:.3g}, not {wanted:.3g}")
                    break

    async def _shown_part(self, round_: _Counted, peer: str, root: bytes, part: int) -> bytes | None:
        request = AskPart(round_.agreed.plan.digest, part)
        asked_at = clock.now()
        answer = await self.show(peer, request) if peer == self._me else await self._ask(peer, request)
        for pause in timing.PART_PAUSES:
            if isinstance(answer, Part) or peer == self._me:
                break
            await asyncio.sleep(pause)
            asked_at = clock.now()
            answer = await self._ask(peer, request)
        if not isinstance(answer, Part):
            known = self._members.peers.get(peer)
            answers = answer is not None or (known is not None and known.heard_at > asked_at)  # to other questions
            same = self._process_of(peer) == round_.processes[peer]
            if known is not None and known.live and answers and same and not self._is_old(round_):
                self._liars.record_unproved(peer, "it does not show a part of its contribution")
            return None
        self.bytes += len(answer.data)
        if len(answer.data) != round_.posted.contribution.num_bytes // round_.posted.num_parts:
            self._liars.record_unproved(peer, "it is bound to a part of another size")
            return None
        leaves = merkle.leaves(memoryview(answer.data), len(answer.data))
        total = round_.posted.num_parts
        try:
            if merkle.root_from(leaves, range(part, part + 1), total, answer.proof) == root:
                return answer.data
        except Malformed as problem:
            logger.info("%s: %s", peer, problem)
        self._liars.record_unproved(peer, "it shows another part than it was bound to")
        return None

    def _is_old(self, round_: _Counted) -> bool:
        """Whether honest workers may no longer keep their contributions to this round: half are far past it."""
        later = round_.posted.key.sequence + num_kept(round_.posted.contribution.num_bytes)
        statuses = [self._members.status, *(peer.status for peer in self._members.with_state())]
        return len(statuses) <= 2 * sum(status.has_posted(later) for status in statuses)

    def _process_of(self, peer: str) -> str:
        known = self._members.peers.get(peer)
        return "" if known is None else known.status.process

    async def _ask(self, peer: str, message: PeerMessage) -> PeerMessage | None:
        try:
            return await self._calls.ask(peer, message)
        except (Unreachable, CallRefused, Malformed) as problem:
            logger.info("%s: %s", peer, problem)
            return None


def _is_whole(numbers: Numbers | None) -> bool:
    return numbers is not None and not bool(np.isnan(numbers).any())


@torch.no_grad()
def _differs(round_: _Counted, part: int, contributions: list[bytes]) -> bool:
    """Whether a part of the mean is another than these contributions give, by more than rounding."""
    posted = round_.posted
    decision = round_.agreed.plan.decision
    own = codec(posted.codec)
    means = own.for_means
    elements = posted.part_elements
    encoded = [torch.frombuffer(bytearray(data), dtype=torch.uint8).view(1, -1) for data in contributions]
    width = means.part_bytes(elements)
    out = torch.empty(1, width, dtype=torch.uint8)
    reduce_parts(own, encoded, decision.weights, elements, out, scales=decision.scales, merge=decision.merge)
    claimed = torch.frombuffer(bytearray(round_.mean[part * width : (part + 1) * width]), dtype=torch.uint8).view(1, -1)
    if torch.equal(out, claimed):
        return False
    right = torch.empty(1, elements)
    theirs = torch.empty(1, elements)
    means.decode(out, right)
    means.decode(claimed, theirs)
    # A processor that fuses a multiplication with an addition rounds otherwise, and a codec may take another step then.
    allowed = _STEPS_OF_ROUNDING * means.error_bound(right) + 1e-5 * right.abs().max()
    return not bool(((theirs - right).abs() <= allowed).all())
