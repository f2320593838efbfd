"""What the workers of a plan report to its leader, and which of them are left out of the next attempt.

A worker that several others cannot exchange parts with is left out, after a second attempt. A worker that two others
accuse of a lie has lied: it is left out and that counts as an offence, with both accusers' signatures. One accuser is
not believed more than the accused: the two have a quarrel, which the leader remembers, and one of them is left out.

A worker that answers and does not send the mean of its range, as two others say, reduces nothing in the next attempt
(shares.py); one that does not send its parts is left out of it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.membership.attendance import Attendance
from diloco.engines.swarm.node.membership.members import Members
from diloco.engines.swarm.node.messages import Trouble, Withheld
from diloco.engines.swarm.node.plan import Entry, Offence, Plan
from diloco.engines.swarm.node.proofs.liars import ACCUSERS
from diloco.engines.swarm.node.rounds.inquiry import POLL_SECONDS
from diloco.engines.swarm.node.rounds.shares import Shares

logger = logging.getLogger(__name__)

_MAX_TROUBLES = 2
_MAX_QUARRELS = 256
_TOGETHER = 8  # every so many rounds


@dataclass(frozen=True)
class Dropped:
    """Workers that cannot be in the next attempt, and why."""

    peers: dict[str, str]
    offences: list[Offence] = field(default_factory=list)
    lost: bool = False
    """They may come back: left out only while they are lost."""


class Troubles:
    """Of one round."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._reported: list[tuple[str, Trouble]] = []
        """Sender and message, about the current plan."""
        self._times: Counter[str] = Counter()

    def begin(self) -> None:
        """Another attempt begins."""
        self._reported = []

    def add(self, sender: str, trouble: Trouble) -> None:
        if sender != trouble.peer:
            self._reported.append((sender, trouble))

    def accusers(self, plan: Plan) -> dict[str, dict[str, Trouble]]:
        """Accused of a lie -> accuser -> what it says."""
        found: dict[str, dict[str, Trouble]] = {}
        for sender, one in self._reported:
            if one.signature is not None and plan.entry(one.peer) is not None:
                found.setdefault(one.peer, {})[sender] = one
        return found

    async def judge(
        self, plan: Plan, shares: Shares, quarrels: "Quarrels", is_majority: Callable[[Collection[str]], bool]
    ) -> Dropped | None:
        """The workers to leave out of the next attempt; Dropped({}) to try again with all, None to go on.

        `is_majority`: whether these workers are enough for a plan.
        """
        if not self._reported:
            return None
        if self.accusers(plan):
            await self._wait_for_accusers(plan)
            return self._judge_lies(plan, quarrels)
        await asyncio.sleep(2 * POLL_SECONDS)  # a dead worker is found out in this time
        if any(not self._members.is_live(entry.peer) for entry in plan.entries):
            return None
        if (late := self._withholding(plan, "parts")) is not None:
            return Dropped({late: "it does not send its parts to several workers"})
        if (late := self._withholding(plan, "mean")) is not None and shares.record_withheld(late):
            self._members.emit_about("reducer_passed_over", late, round=plan.key.sequence)
            return Dropped({})  # it reduces nothing in the next attempt
        news = [shares.record_failure(*pair) for pair in self._pairs(plan)]
        cut_off = shares.cut_off(plan.entries)
        if cut_off not in (None, self._members.me) and is_majority([e.peer for e in plan.entries if e.peer != cut_off]):
            return Dropped({cut_off: "others cannot exchange parts with it"})
        return Dropped({}) if True in news else self._judge_pairs(plan)  # bad pairs exchange no parts from now on

    async def _wait_for_accusers(self, plan: Plan) -> None:
        """One alone proves nothing; others find the same lie at about the same time."""
        end = clock.now() + self._members.settings.lost_seconds
        while clock.now() < end and max(map(len, self.accusers(plan).values())) < ACCUSERS:
            await self._members.wait_for_change(POLL_SECONDS)

    def _withholding(self, plan: Plan, what: Withheld) -> str | None:
        """The worker that several others wait for."""
        waiting: dict[str, set[str]] = {}
        for sender, one in self._reported:
            if one.withheld == what and plan.entry(one.peer) is not None and one.peer != self._members.me:
                waiting.setdefault(one.peer, set()).add(sender)
        worst = max(waiting, key=lambda peer: (len(waiting[peer]), self._members.number_of(peer)), default=None)
        return worst if worst is not None and len(waiting[worst]) >= ACCUSERS else None

    def _judge_lies(self, plan: Plan, quarrels: "Quarrels") -> Dropped:
        accused = self.accusers(plan)
        for peer, accusers in accused.items():
            if len(accusers) >= ACCUSERS:
                return Dropped({peer: "several workers accuse it of a lie"}, [_offence(plan, peer, accusers)])
        for peer, accuser in [(peer, one) for peer, accusers in accused.items() for one in accusers]:
            quarrels.record(peer, accuser, plan.key.sequence)
        return Dropped({})

    def _pairs(self, plan: Plan) -> list[tuple[str, str]]:
        """Workers that cannot exchange parts with each other, as one of them says."""
        return [(sender, one.peer) for sender, one in self._reported if plan.entry(one.peer) is not None]

    def _judge_pairs(self, plan: Plan) -> Dropped | None:
        """Dropped({}) to try the same plan again."""
        accused = Counter(one.peer for _, one in self._reported if plan.entry(one.peer))
        senders = Counter(sender for sender, _ in self._reported)
        me, self._reported = self._members.me, []
        if not accused:
            return None
        worst = max(accused, key=lambda peer: (accused[peer], self._members.number_of(peer)))
        if worst == me:
            worst = senders.most_common(1)[0][0]
        self._times[worst] += 1
        if self._times[worst] < _MAX_TROUBLES or worst == me:
            return Dropped({})
        return Dropped({worst: "others cannot exchange parts with it"})


class Quarrels:
    """Of all rounds that this node leads: which worker has accused which, alone.

    One of the two lies, and no other worker can tell which. One of them is left out of each round: the one that has
    quarrels with more workers, since otherwise several would lie; else each in turn. No time is lost by it, as no plan
    has both. Every eighth round may have both; if it ends well the quarrel is over.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._rounds: dict[tuple[str, str], int] = {}
        """The two -> the last round in which one accused the other; the latest quarrel is the last one."""

    def record(self, one: str, other: str, sequence: int) -> None:
        pair = (min(one, other), max(one, other))
        self._rounds.pop(pair, None)
        self._rounds[pair] = sequence
        if len(self._rounds) > _MAX_QUARRELS:
            del self._rounds[next(iter(self._rounds))]

    def settle(self, names: Collection[str]) -> None:
        """These workers have been in a round together that ended well."""
        self._rounds = {pair: last for pair, last in self._rounds.items() if not set(pair) <= set(names)}

    def left_out(self, names: Sequence[str], sequence: int, is_majority: Callable[[Collection[str]], bool]) -> set[str]:
        """Of these workers. `is_majority`: whether some are enough for a plan."""
        quarrels = Counter(name for pair in self._rounds for name in pair)
        here = [
            pair
            for pair, last in self._rounds.items()
            if set(pair) <= set(names) and (last == sequence or sequence % _TOGETHER)
        ]
        out: set[str] = set()
        for pair in sorted(here, key=lambda pair: -max(quarrels[name] for name in pair)):
            if out.isdisjoint(pair):
                in_turn = sorted(set(pair) - {self._me}, reverse=bool(sequence % 2))
                worst = sorted(in_turn, key=lambda name: -quarrels[name])
                rests = [[name for name in names if name not in {*out, one}] for one in worst]
                out.add(next((one for one, rest in zip(worst, rests, strict=True) if is_majority(rest)), worst[0]))
        return out


def choose(
    here: list[Entry],
    sequence: int,
    quarrels: Quarrels,
    attendance: Attendance,
    is_majority: Callable[[Collection[str]], bool],
) -> list[Entry]:
    """The workers of a plan: without one of any two that quarrel, and without those that were left out of the last
    rounds, if the others are enough."""
    out = quarrels.left_out([entry.peer for entry in here], sequence, is_majority)
    if out:
        logger.info("round %d goes on without %s: one accuses another of a lie", sequence, sorted(out))
    here = [entry for entry in here if entry.peer not in out]
    kept = [entry for entry in here if attendance.takes(entry.peer)]
    if len(kept) == len(here) or not kept or not is_majority([entry.peer for entry in kept]):
        return here
    for entry in here:
        if entry not in kept:
            attendance.record_passed_over(entry.peer)
    return kept


def _offence(plan: Plan, peer: str, accusers: dict[str, Trouble]) -> Offence:
    entry = plan.entry(peer)
    assert entry is not None
    signatures = {name: one.signature for name, one in accusers.items() if one.signature is not None}
    reason = next(iter(accusers.values())).reason[:200]
    return Offence(peer, entry.number, reason, plan.digest, signatures)
