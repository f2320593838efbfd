"""Leading a round: when it begins, who is in it, and when its mean counts.

    inquire   ask everyone what there is of this round: whoever led it before may have come far. If somebody has ended
              it, it has ended; if all who live have all of a mean, that one counts
    gather    until all members are ready, or patience is over: then the slow ones are called, and post what they have
    attempt   a plan to all who are ready; whoever dies, freezes or lies meanwhile is left out of the next attempt
    commit    when all who live have the whole mean. This node counts it last: if it dies before anyone has heard,
              nobody has ended the round, and the next leader goes on

A leader that finds a higher authority at work, or the round ended, steps down. It need not be in the round itself.
"""

import asyncio
import logging
import statistics
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from diloco.engines.rounds import RoundKey
from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.membership import Membership
from diloco.engines.swarm.node.participant import TakingPart
from diloco.engines.swarm.node.plan import MAX_NOTE_BYTES, Authority, Entry, Plan, authority_from, parse_header
from diloco.engines.swarm.node.wire import Malformed, Message, pack

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_LEAST_PATIENCE = 0.2  # times `lost_seconds`
_LEAST_GRACE = 0.6
_TRIES_WITH_TROUBLE = 2


class SteppedDown(Exception):
    """Somebody else leads this round, or it has ended already."""


@dataclass(frozen=True)
class _LeftOut:
    """Who cannot be in the next attempt, and why."""

    peers: dict[str, str]
    lie: bool = False
    lost: bool = False
    """For as long as it is."""


class Leading:
    """The rounds that this node leads at the moment."""

    def __init__(self, membership: Membership, taking_part: TakingPart, call: Callable[[str, int], None]) -> None:
        """`call(peer, sequence)`: have a slow worker post what it has."""
        self.membership, self.taking_part, self.call = membership, taking_part, call
        self.settings = membership.settings
        self._leads: dict[int, _Lead] = {}
        self._usual: deque[float] = deque(maxlen=5)  # seconds between the end of a round and half being ready again
        self._began = clock.now()
        self._last_end: float | None = None  # of a round, led here or elsewhere
        self._tasks: set[asyncio.Task[None]] = set()

    # What members say

    async def told(self, sender: str, message: Message) -> bytes:
        """ready, complete, trouble."""
        if message.kind == "ready":
            return pack("answer", **self._ready(sender, message))
        lead = self._leads.get(message.number("sequence"))
        authority = authority_from(message.items("authority"))
        if lead is not None and lead.authority == authority and lead.plan is not None and lead.plan.entry(sender):
            if message.kind == "complete":
                lead.completes.add(sender)
            else:
                lead.troubles.append((sender, message.text("peer"), message.text("reason"), message.flag("lie")))
            self.membership.changed()
        return pack("answer", state="heard")

    def _ready(self, sender: str, message: Message) -> dict[str, object]:
        sequence, status = message.number("sequence"), self.membership.status
        if self.taking_part.kept.has(sequence) or sequence <= status.ended:
            return {"state": "ended"}
        lead = self._leads.get(sequence)
        ahead = [peer for peer in self.membership.live() if peer.status.ended > status.ended]
        if lead is None and (self.membership.leader() != self.membership.me or (ahead and sequence > status.ended + 1)):
            return {"state": "elsewhere"}
        number = self.membership.number_of(sender)
        entry = Entry(sender, number, message.data("header"), message.data("note", MAX_NOTE_BYTES))
        key = RoundKey(sequence, message.number("fragment", low=-1))
        if number < 0 or entry.parsed.key != key:
            raise Malformed("a header of another round, or of a peer without a number")
        ratio = message.real("ratio") if message.has("ratio") else None
        if lead is None:
            lead = self._leads[sequence] = _Lead(self, key, ratio)
            self._start(lead.run())
        lead.check(entry, key)
        lead.readies.setdefault(sender, entry)
        self.membership.changed()
        return {"state": "waiting"}

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def over(self, lead: "_Lead", half_ready_at: float | None) -> None:
        self._leads.pop(lead.key.sequence, None)
        if half_ready_at is not None and self._last_end is not None:
            self._usual.append(half_ready_at - self._last_end)
        self._last_end = clock.now()
        self.membership.changed()

    def noticed(self, sequence: int) -> None:
        """This worker has ended a round that another leads: should that one be lost, this one knows what is usual."""
        own = self.taking_part.rounds.get(sequence)
        if own is None or sequence in self._leads:
            return
        if self._last_end is not None:
            self._usual.append(max(0.0, own.started - self._last_end))
        self._last_end = clock.now()

    def leads(self, sequence: int) -> bool:
        return sequence in self._leads

    def in_progress(self) -> dict[int, str]:
        """For those who watch: what this node leads, and how far it is."""
        return {sequence: lead.phase for sequence, lead in self._leads.items()}

    @property
    def patience_seconds(self) -> float:
        usual = statistics.median(self._usual) if self._usual else clock.now() - (self._last_end or self._began)
        return max(_LEAST_PATIENCE * self.settings.lost_seconds, self.settings.patience * usual)

    async def earlier_round(self, sequence: int) -> None:
        """Rounds end in their order, also where several are on their way."""
        while any(other < sequence for other in self._leads):
            await self.membership.wait_for_change(_POLL_SECONDS)


class _Lead:
    """One round under this node's lead."""

    def __init__(self, leading: Leading, key: RoundKey, ratio: float | None) -> None:
        self.leading, self.key, self.ratio = leading, key, ratio
        self.membership, self.taking_part = leading.membership, leading.taking_part
        self.readies: dict[str, Entry] = {}
        self.completes: set[str] = set()
        self.troubles: list[tuple[str, str, str, bool]] = []
        self.plan: Plan | None = None
        self.phase = "gathering"
        self.authority = Authority(1, -self.membership.status.number)
        self._tries: Counter[str] = Counter()
        self._half_ready_at: float | None = None

    def check(self, entry: Entry, key: RoundKey) -> None:
        """Only what trains the same thing may be in a round; says so to whoever does not."""
        if key != self.key:
            raise CallRefused(f"round {key.sequence} is of fragment {self.key.fragment} here, not {key.fragment}")
        layouts = Counter(known.parsed.layout_digest for known in self.readies.values())
        own = self.taking_part.rounds.get(self.key.sequence)
        mine = own and parse_header(0, own.posting.header).layout_digest
        reference = mine or (layouts.most_common(1)[0][0] if layouts else entry.parsed.layout_digest)
        if entry.parsed.layout_digest != reference:
            raise CallRefused(
                f"worker {entry.number} trains something else than the others (layout {entry.parsed.layout_digest} "
                f"against {reference}): model, data, codec, schedule and outer optimizer must be the same everywhere; "
                "compare the workers' config.toml and versions"
            )

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self.leading.settings.timeout_seconds):
                await self.leading.earlier_round(self.key.sequence)
                if await self._inquire():
                    return
                await self._gather()
                await self._conclude()
        except SteppedDown as why:
            logger.info("round %d: %s", self.key.sequence, why)
        except TimeoutError:
            logger.warning("round %d did not end within the time that a round may take", self.key.sequence)
        except Exception:
            logger.exception("leading round %d", self.key.sequence)
        finally:
            self.leading.over(self, self._half_ready_at)

    # Before a plan

    async def _inquire(self) -> bool:
        """Whether the round has ended with what is there already."""
        own = self.taking_part.rounds.get(self.key.sequence)
        if own is not None:
            self.authority = self.authority._replace(term=own.authority.term + 1)
        data = pack("inquire", sequence=self.key.sequence, authority=list(self.authority))
        answers = await self._ask([self.membership.me, *(peer.name for peer in self.membership.live())], data)
        complete: dict[str, Plan] = {}
        for peer, answer in answers.items():
            match answer.text("state"):
                case "ended":
                    if own is not None and peer != self.membership.me:
                        await self.taking_part.missed(own, peer)
                    if own is None or own.ended.done() or self.membership.most_ended(self.key.sequence):
                        raise SteppedDown("it has ended already")
                case "led":
                    if own is not None:
                        own.leader = answer.text("leader")
                    raise SteppedDown(f"{answer.text('leader')} leads it")
                case "posted":
                    number = self.membership.number_of(peer)
                    entry = Entry(peer, number, answer.data("header"), answer.data("note", MAX_NOTE_BYTES))
                    self.check(entry, entry.parsed.key)
                    self.readies.setdefault(peer, entry)
                    if answer.has("plan"):
                        complete[peer] = Plan.from_wire(answer.map("plan"))
        return await self._commit_what_is_there(complete)

    async def _commit_what_is_there(self, complete: dict[str, Plan]) -> bool:
        for plan in complete.values():
            alive = {entry.peer for entry in plan.entries if self.membership.is_live(entry.peer)}
            if alive and alive <= {peer for peer, other in complete.items() if other.authority == plan.authority}:
                await self._commit(plan)
                return True
        return False

    async def _ask(self, peers: list[str], data: bytes) -> dict[str, Message]:
        """The answers of those who give one."""

        async def ask(peer: str) -> Message | None:
            try:
                if peer == self.membership.me:
                    return Message(self.taking_part.heard_from_leader(peer, Message.unpack(data)))
                return await self.taking_part.tell(peer, data)
            except (Unreachable, CallRefused, Malformed) as problem:
                logger.info("round %d: %s does not answer: %s", self.key.sequence, peer, problem)
                if isinstance(problem, Unreachable):
                    self.membership.suspect(peer, problem)
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        return {peer: answer for peer, answer in zip(peers, answers, strict=True) if answer is not None}

    async def _gather(self) -> None:
        called_at: float | None = None
        while missing := self._missing():
            now = clock.now()
            if self._half_ready_at is None and len(self._ready_members()) >= len(missing):
                self._half_ready_at = now
            for name in missing:
                peer = self.membership.peers.get(name)
                if peer is not None and now - peer.heard > 0.6 * self.leading.settings.beat_seconds:
                    self.membership.beat_soon(name)
            since_half = 0.0 if self._half_ready_at is None else now - self._half_ready_at
            if called_at is None and since_half > self.leading.patience_seconds:
                called_at = now
                for name in missing:
                    self.leading.call(name, self.key.sequence)
            if called_at is not None and now - called_at > self._grace(missing):
                break
            await self.membership.wait_for_change(_POLL_SECONDS)
        self._half_ready_at = self._half_ready_at or clock.now()

    def _grace(self, missing: list[str]) -> float:
        """How long those who were called may take: the inner step that they are in."""
        steps = [self.membership.peers[name].status.step_seconds for name in missing if name in self.membership.peers]
        settings = self.leading.settings
        return min(max(_LEAST_GRACE * settings.lost_seconds, 3 * max(steps, default=0.0)), settings.timeout_seconds / 4)

    def _ready_members(self) -> list[str]:
        return [name for name in self.readies if self.membership.is_live(name)]

    def _missing(self) -> list[str]:
        """Members that take part in rounds, and have not posted this one."""
        here = [peer.name for peer in self.membership.live() if peer.status.holds]
        if self.membership.status.holds:
            here.append(self.membership.me)
        return [name for name in here if name not in self.readies]

    # Plans

    async def _conclude(self) -> None:
        excluded: dict[int, str] = {}
        gone: set[str] = set()
        while True:
            await self._until_it_may_go_on()
            here = [e for e in self.readies.values() if e.peer not in gone and self.membership.is_live(e.peer)]
            if not here:
                raise SteppedDown("nobody is left in it")
            self.authority = self.authority._replace(attempt=self.authority.attempt + 1)
            entries = tuple(sorted(here, key=lambda entry: entry.number))
            roster = tuple(sorted({*self.membership.roster(), *(entry.number for entry in entries)}))
            self.plan = Plan(self.key, self.authority, self.membership.me, entries, excluded, roster, self.ratio)
            left_out = await self._attempt(self.plan)
            if left_out is None:
                await self._commit(self.plan)
                return
            for peer, reason in left_out.peers.items():
                logger.info("round %d goes on without %s: %s", self.key.sequence, peer, reason)
                if not left_out.lost:
                    gone.add(peer)
                if left_out.lie:
                    excluded[self.readies[peer].number] = reason

    async def _until_it_may_go_on(self) -> None:
        lost = len(self.membership.live())
        while not self.membership.may_go_on():
            self.phase = "waiting: most others have fallen silent"
            await self.membership.wait_for_change(_POLL_SECONDS)
        if len(self.membership.live()) > lost:
            raise SteppedDown("others are back, and may have gone on")

    async def _attempt(self, plan: Plan) -> _LeftOut | None:
        """None: all who live have the whole mean."""
        self.phase = "averaging"
        self.completes, self.troubles = set(), []
        refusals: dict[str, str] = {}
        offers = [asyncio.create_task(self._offer(plan, entry.peer, refusals)) for entry in plan.entries]
        try:
            while True:
                waiting = [e.peer for e in plan.entries if e.peer not in self.completes]
                alive = [peer for peer in waiting if self.membership.is_live(peer)]
                if not alive and self.completes:
                    return None
                if dead := {peer: "it is lost" for peer in waiting if peer not in alive}:
                    return _LeftOut(dead, lost=True)
                if not {"superseded", "ended"}.isdisjoint(refusals.values()):
                    raise SteppedDown("another leads it by now, or it has ended")
                if refusals:
                    return _LeftOut(dict(refusals))
                if (left_out := await self._judge(plan)) is not None:
                    return left_out
                await self.membership.wait_for_change(_POLL_SECONDS)
        finally:
            for offer in offers:
                offer.cancel()

    async def _offer(self, plan: Plan, peer: str, refusals: dict[str, str]) -> None:
        answers = await self._ask([peer], pack("plan", **plan.to_wire()))
        if peer in answers and (state := answers[peer].text("state")) != "ok":
            refusals[peer] = state
            self.membership.changed()

    async def _judge(self, plan: Plan) -> _LeftOut | None:
        """What follows from the troubles that were told of."""
        liars = {peer: reason for _, peer, reason, lie in self.troubles if lie and plan.entry(peer)}
        if liars:
            return _LeftOut(liars, lie=True)
        if not self.troubles:
            return None
        await asyncio.sleep(2 * _POLL_SECONDS)  # whoever is dead is found out meanwhile
        if any(not self.membership.is_live(entry.peer) for entry in plan.entries):
            return None
        accused = Counter(peer for _, peer, _, _ in self.troubles if plan.entry(peer))
        accusers = Counter(sender for sender, _, _, _ in self.troubles)
        me, self.troubles = self.membership.me, []
        if not accused:
            return None
        worst = max(accused, key=lambda peer: (accused[peer], self.membership.number_of(peer)))
        if worst == me:
            worst = accusers.most_common(1)[0][0]
        self._tries[worst] += 1
        if self._tries[worst] < _TRIES_WITH_TROUBLE or worst == me:
            return _LeftOut({})  # the same once more
        return _LeftOut({worst: "others cannot exchange parts with it"})

    async def _commit(self, plan: Plan) -> None:
        """Tell all others first, and count it here when at least one of them has heard."""
        self.phase = "committing"
        others = [e.peer for e in plan.entries if e.peer != self.membership.me and self.membership.is_live(e.peer)]
        data = pack("commit", sequence=self.key.sequence, authority=list(plan.authority))
        told = [asyncio.create_task(self._ask([peer], data)) for peer in others]
        heard = not others
        for next_one in asyncio.as_completed(told):
            for answer in (await next_one).values():
                if answer.text("state") == "superseded":
                    raise SteppedDown("another leads it by now")
                heard = True
            if heard:
                break
        own = self.taking_part.rounds.get(self.key.sequence)
        if own is not None and own.complete == plan.authority and own.plan is not None:
            self.taking_part.settle(own, own.plan)
        elif plan.entry(self.membership.me) is None:
            self.taking_part.passed_by(self.key.sequence)
        await asyncio.gather(*told)
