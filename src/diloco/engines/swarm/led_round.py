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
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.engines.rounds import RoundKey
from diloco.engines.swarm.plan import MAX_NOTE_BYTES, Authority, Entry, Plan, parse_header
from diloco.engines.swarm.transport import CallRefused, Unreachable
from diloco.engines.swarm.wire import Malformed, Message, pack

if TYPE_CHECKING:
    from diloco.engines.swarm.leading import Leading

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_LEAST_GRACE = 0.6  # times `lost_seconds`
_TRIES_WITH_TROUBLE = 2
_SLOWEST = 20.0  # times the usual inner step: nobody is waited for longer than this after it was called
_MISSES_IN_A_ROW = 2


class SteppedDown(Exception):
    """Somebody else leads this round, or it has ended already."""


@dataclass(frozen=True)
class _LeftOut:
    """Who cannot be in the next attempt, and why."""

    peers: dict[str, str]
    lie: bool = False
    lost: bool = False
    """For as long as it is."""


class LedRound:
    """One round under this node's lead."""

    def __init__(self, leading: "Leading", sequence: int) -> None:
        self.leading, self.sequence = leading, sequence
        self.membership, self.taking_part = leading.membership, leading.taking_part
        self.readies: dict[str, Entry] = {}
        self.ratios: dict[str, float | None] = {}
        self._accusers: dict[str, set[str]] = {}
        self.completes: set[str] = set()
        self.troubles: list[tuple[str, str, str, bool]] = []
        self.plan: Plan | None = None
        self.phase = "gathering"
        self.authority = Authority(1, -self.membership.status.number)
        self._tries: Counter[str] = Counter()
        self._half_ready_at: float | None = None

    def check(self, entry: Entry) -> None:
        """Only what trains the same thing may be in a round; says so to whoever does not, where that is known yet."""
        own = self.taking_part.rounds.get(self.sequence)
        reference = None if own is None else parse_header(0, own.posting.header).layout_digest
        if reference is None and self.plan is not None:
            reference = self.plan.entries[0].parsed.layout_digest
        if reference is not None and entry.parsed.layout_digest != reference:
            raise CallRefused(
                f"worker {entry.number} trains something else than the others (layout {entry.parsed.layout_digest} "
                f"against {reference}): model, data, codec, schedule and outer optimizer must be the same everywhere; "
                "compare the workers' config.toml and versions"
            )

    async def run(self) -> None:
        try:
            async with asyncio.timeout(self.leading.settings.timeout_seconds):
                await self.leading.earlier_round(self.sequence)
                if await self._inquire():
                    return
                await self._gather()
                await self._conclude()
        except SteppedDown as why:
            logger.info("round %d: %s", self.sequence, why)
        except TimeoutError:
            logger.warning("round %d did not end within the time that a round may take", self.sequence)
        except Exception:
            logger.exception("leading round %d", self.sequence)
        finally:
            self.leading.over(self, self._half_ready_at)

    # Before a plan

    async def _inquire(self) -> bool:
        """Whether the round has ended with what is there already."""
        own = self.taking_part.rounds.get(self.sequence)
        if own is not None:
            self.authority = self.authority._replace(term=own.authority.term + 1)
        data = pack("inquire", sequence=self.sequence, authority=list(self.authority))
        answers = await self._ask([self.membership.me, *(peer.name for peer in self.membership.live())], data)
        complete: dict[str, Plan] = {}
        for peer, answer in answers.items():
            match answer.text("state"):
                case "ended":
                    if own is not None and peer != self.membership.me:
                        await self.taking_part.missed(own)
                    if own is None or own.ended.done() or self.membership.most_ended(self.sequence):
                        raise SteppedDown("it has ended already")
                case "led":
                    if own is not None:
                        own.leader = answer.text("leader")
                    raise SteppedDown(f"{answer.text('leader')} leads it")
                case "posted":
                    number = self.membership.number_of(peer)
                    entry = Entry(peer, number, answer.data("header"), answer.data("note", MAX_NOTE_BYTES))
                    self.check(entry)
                    self.readies.setdefault(peer, entry)
                    self.ratios.setdefault(peer, answer.real("ratio") if answer.has("ratio") else None)
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
                logger.info("round %d: %s does not answer: %s", self.sequence, peer, problem)
                if isinstance(problem, Unreachable):
                    self.membership.suspect(peer, problem)
                return None

        answers = await asyncio.gather(*(ask(peer) for peer in peers))
        return {peer: answer for peer, answer in zip(peers, answers, strict=True) if answer is not None}

    async def _gather(self) -> None:
        called_at: float | None = None
        while missing := self._missing():
            now = time.monotonic()
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
                    self.leading.call(name, self.sequence)
            if called_at is not None and now - called_at > self._grace(missing):
                self.leading.misses.update(missing)
                break
            await self.membership.wait_for_change(_POLL_SECONDS)
        self._half_ready_at = self._half_ready_at or time.monotonic()

    def _grace(self, missing: list[str]) -> float:
        """How long those who were called may take: the inner step that they are in."""
        steps = {peer.name: peer.status.step_seconds for peer in self.membership.live()}
        steps[self.membership.me] = self.membership.status.step_seconds
        longest = max((steps.get(name, 0.0) for name in missing), default=0.0)
        likely = min(3 * longest, _SLOWEST * statistics.median(steps.values()))  # whatever one of them says
        settings = self.leading.settings
        return min(max(_LEAST_GRACE * settings.lost_seconds, likely), settings.timeout_seconds / 4)

    def _ready_members(self) -> list[str]:
        return [name for name in self.readies if self.membership.is_live(name)]

    def _missing(self) -> list[str]:
        """Members that take part in rounds, and have not posted this one."""
        here = [peer.name for peer in self.membership.live() if peer.status.holds]
        if self.membership.status.holds:
            here.append(self.membership.me)
        unheard = [name for name in here if name not in self.readies]
        return [name for name in unheard if self.leading.misses[name] < _MISSES_IN_A_ROW]

    # Plans

    def _same(self, entries: list[Entry]) -> tuple[RoundKey, float | None, list[Entry]]:
        """The round as this worker has posted it, or else as most have; and those who have posted the same."""

        def rules(entry: Entry) -> tuple[RoundKey, str, float | None]:
            return entry.parsed.key, entry.parsed.layout_digest, self.ratios.get(entry.peer)

        own = next((entry for entry in entries if entry.peer == self.membership.me), None)
        told = Counter(rules(entry) for entry in sorted(entries, key=lambda entry: entry.number))
        chosen = rules(own) if own is not None else told.most_common(1)[0][0]
        return chosen[0], chosen[2], [entry for entry in entries if rules(entry) == chosen]

    async def _conclude(self) -> None:
        excluded: dict[int, str] = {}
        gone: set[str] = set()
        while True:
            await self._until_it_may_go_on()
            here = [e for e in self.readies.values() if e.peer not in gone and self.membership.is_live(e.peer)]
            if not here:
                raise SteppedDown("nobody is left in it")
            self.authority = self.authority._replace(attempt=self.authority.attempt + 1)
            key, ratio, same = self._same(here)
            entries = tuple(sorted(same, key=lambda entry: entry.number))
            roster = tuple(sorted({*self.membership.roster(), *(entry.number for entry in entries)}))
            self.plan = Plan(key, self.authority, self.membership.me, entries, excluded, roster, ratio)
            left_out = await self._attempt(self.plan)
            if left_out is None:
                await self._commit(self.plan)
                return
            for peer, reason in left_out.peers.items():
                logger.info("round %d goes on without %s: %s", self.sequence, peer, reason)
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
        began = time.monotonic()
        half_at: float | None = None
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
                if half_at is None and 2 * len(self.completes) >= len(plan.entries):
                    half_at = time.monotonic()
                if half_at is not None and time.monotonic() - half_at > self._rest_seconds(half_at - began):
                    return _LeftOut(dict.fromkeys(alive, "it is much slower than the others"))
                await self.membership.wait_for_change(_POLL_SECONDS)
        finally:
            for offer in offers:
                offer.cancel()

    def _rest_seconds(self, half_seconds: float) -> float:
        """How long the rest may take when half have the whole mean."""
        return max(4 * self.leading.settings.lost_seconds, 3 * half_seconds)

    async def _offer(self, plan: Plan, peer: str, refusals: dict[str, str]) -> None:
        answers = await self._ask([peer], pack("plan", **plan.to_wire()))
        if peer in answers and (state := answers[peer].text("state")) != "ok":
            refusals[peer] = state
            self.membership.changed()

    async def _judge(self, plan: Plan) -> _LeftOut | None:
        """What follows from the troubles that were told of."""
        if any(lie for _, _, _, lie in self.troubles):
            return self._lies(plan)
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

    def _lies(self, plan: Plan) -> _LeftOut:
        """One alone is not believed, but for this node itself: others look at the same parts in the next attempt. Who
        accuses again and is again the only one is left out, without blame."""
        contributors, me = {entry.peer for entry in plan.contributors}, self.membership.me
        told = [(s, peer, reason) for s, peer, reason, lie in self.troubles if lie and {s, peer} <= contributors]
        self.troubles = []
        for sender, peer, reason in told:
            accusers = self._accusers.setdefault(peer, set())
            if peer != me and (sender in (me, peer) or len(accusers | {sender}) > 1 or len(contributors) == 2):
                return _LeftOut({peer: reason}, lie=True)
            if peer == me or sender in accusers:
                return _LeftOut({sender: "it accuses others, and nobody else does"})
            accusers.add(sender)
        return _LeftOut({})

    async def _commit(self, plan: Plan) -> None:
        """Tell all others first, and count it here when at least one of them has heard."""
        self.phase = "committing"
        others = [e.peer for e in plan.entries if e.peer != self.membership.me and self.membership.is_live(e.peer)]
        data = pack("commit", sequence=self.sequence, authority=list(self.authority), of=list(plan.authority))
        told = [asyncio.create_task(self._ask([peer], data)) for peer in others]
        heard = not others
        for next_one in asyncio.as_completed(told):
            for answer in (await next_one).values():
                if answer.text("state") == "superseded":
                    raise SteppedDown("another leads it by now")
                heard = True
            if heard:
                break
        own = self.taking_part.rounds.get(self.sequence)
        if own is not None and own.complete == plan.authority and own.plan is not None:
            self.taking_part.settle(own, own.plan)
        elif plan.entry(self.membership.me) is None:
            self.taking_part.passed_by(self.sequence)
        await asyncio.gather(*told)
