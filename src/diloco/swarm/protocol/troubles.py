"""The reports of a plan's workers to its leader, and the workers that are left out of the next attempt for them.

A report is one worker's word against another's, and no number of members that lie together must gain by it. What can be
proved needs no report: its author is banned (audit/liars.py). What cannot be proved costs both alike:

    a lie         the two have a quarrel, and no plan has both of them (Quarrels)
    no exchange   the two reduce no parts, so that they need not exchange any (shares.py); if that does not help, they
                  have a quarrel in this round, and a lasting one from the third such round on
    withheld      what more than half of a plan's workers say is true, or the leader's own and another: a worker that
                  does not send the mean of its range reduces nothing in the next attempt, one that does not send its
                  parts is left out of it. What fewer say is a failed exchange of each of them with that worker
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from diloco.swarm.protocol.attendance import Attendance
from diloco.swarm.protocol.membership import Membership
from diloco.swarm.protocol.messages import Trouble, Withheld
from diloco.swarm.protocol.plan import Entry, Plan
from diloco.swarm.protocol.shares import Shares

_MAX_TROUBLES = 2
_MAX_QUARRELS = 256
_LASTING = 3  # a quarrel lasts once two workers could not exchange parts in so many rounds
_TOGETHER = 8  # every so many rounds a plan may have all workers that quarrel
_MOST_TRIED = 24  # in a larger knot of quarrels one small set that can rest is found, not the smallest

Pair = tuple[str, str]


@dataclass(frozen=True)
class Dropped:
    """Workers that cannot be in the next attempt, and why."""

    peers: dict[str, str]
    lost: bool = False
    """They may come back: left out only while they are lost."""
    withheld: str | None = None
    """A worker that reduces nothing in the next attempt, as it did not send its means."""


class Troubles:
    """The reports of one round."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._reported: list[tuple[str, Trouble]] = []
        """Sender and message, about the current plan."""
        self._times: Counter[Pair] = Counter()

    def begin(self) -> None:
        """Forget the reports of the last attempt: another one begins."""
        self._reported = []

    def add(self, sender: str, trouble: Trouble) -> None:
        if sender != trouble.peer:
            self._reported.append((sender, trouble))

    def accused(self, plan: Plan) -> dict[str, set[str]]:
        """Return a map: worker that is accused of a lie -> its accusers."""
        accusers: dict[str, set[str]] = {}
        for sender, report in self._reported:
            if report.lie and plan.entry(report.peer) is not None:
                accusers.setdefault(report.peer, set()).add(sender)
        return accusers

    @property
    def reported(self) -> bool:
        return bool(self._reported)

    def are_sure(self, plan: Plan) -> bool:
        """Whether most workers accuse one, or it is banned or lost: others find out a lie at about the same time, and
        the more of them do, the clearer it is which worker must rest."""
        accused = self.accused(plan)
        return any(not self._members.is_live(peer) or _are_most(plan, senders) for peer, senders in accused.items())

    def judge_failures(
        self, plan: Plan, shares: Shares, quarrels: "Quarrels", is_majority: Callable[[Collection[str]], bool]
    ) -> Dropped | None:
        """Return the workers to leave out of the next attempt; Dropped({}) to try again with all, None to go on.

        `is_majority`: whether these workers are enough for a plan.
        """
        if any(not self._members.is_live(entry.peer) for entry in plan.entries):
            return None
        if (late := self._that_most_miss(plan, "parts")) is not None:
            return Dropped({late: "it does not send its parts to several workers"})
        if (late := self._that_most_miss(plan, "mean")) is not None and shares.record_withheld(late):
            return Dropped({}, withheld=late)  # it reduces nothing in the next attempt
        pairs = self._pairs(plan)
        news = [shares.record_failure(*pair) for pair in pairs]
        cut_off = shares.cut_off(plan)
        rest = [entry.peer for entry in plan.entries if entry.peer not in cut_off]
        if cut_off and self._members.me not in cut_off and is_majority(rest):
            return Dropped(dict.fromkeys(sorted(cut_off), "others cannot exchange parts with it"))
        if True in news:  # bad pairs exchange no parts from now on
            return Dropped({})
        return self._judge_pairs(plan, pairs, quarrels)

    def _withheld(self, plan: Plan, what: Withheld) -> dict[str, set[str]]:
        """Return a map: worker that does not send `what` -> the workers that wait for it, as they report."""
        waiting: dict[str, set[str]] = {}
        for sender, report in self._reported:
            if report.withheld == what and plan.entry(report.peer) is not None and report.peer != self._members.me:
                waiting.setdefault(report.peer, set()).add(sender)
        return waiting

    def _that_most_miss(self, plan: Plan, what: Withheld) -> str | None:
        """Find the worker that more than half of the plan's workers wait for, or this node and another one; None if
        there is none."""
        waiting = self._withheld(plan, what)
        me = self._members.me
        sure = [peer for peer, names in waiting.items() if _are_most(plan, names) or (me in names and len(names) > 1)]
        return max(sure, key=lambda peer: (len(waiting[peer]), self._members.number_of(peer)), default=None)

    def judge_lies(self, plan: Plan, quarrels: "Quarrels") -> Dropped | None:
        """Record the accusations as quarrels. Dropped({}): make the next plan without one of each two that quarrel;
        None: go on."""
        accused = self.accused(plan)
        if any(not self._members.is_live(peer) for peer in accused):
            return None  # it was banned with a proof, or is lost
        for peer, accusers in accused.items():
            for accuser in sorted(accusers):
                quarrels.record(peer, accuser, plan.key.sequence, lasting=True)
        return Dropped({})

    def _pairs(self, plan: Plan) -> list[Pair]:
        """Pairs of workers that cannot exchange parts, as one of the two reports, and have to in this plan."""
        reported = [
            _pair(sender, report.peer) for sender, report in self._reported if plan.entry(report.peer) is not None
        ]
        return [pair for pair in dict.fromkeys(reported) if not plan.reducers.isdisjoint(pair)]

    def _judge_pairs(self, plan: Plan, pairs: list[Pair], quarrels: "Quarrels") -> Dropped | None:
        """Dropped({}): try again, the first time with both workers of each pair, then with one of them; None: go on."""
        self._reported = []
        self._times.update(pairs)
        for pair in pairs:
            if self._times[pair] >= _MAX_TROUBLES:
                quarrels.record(*pair, plan.key.sequence, lasting=False)
        return Dropped({}) if pairs else None


@dataclass
class _Quarrel:
    last: int
    """The last round in which one of the two reported the other."""
    rounds: int
    """The number of rounds in which that was so; at least `_LASTING` where the quarrel lasts."""

    def holds(self, sequence: int) -> bool:
        """Whether the two cannot be in that round together."""
        return self.last == sequence or self.rounds >= _LASTING


class Quarrels:
    """The workers that cannot be in a plan together, in all rounds that this node leads.

    One of two that quarrel lies, or neither does, and no third worker can tell. So one of them rests in each round, and
    no time is lost, as no plan has both. In a knot of quarrels either the fewest workers rest that leave no two that
    quarrel, or all its others; the more workers there are on a side, the more seldom it rests: both sides together
    lose as many rounds. So f members that lie keep out f others at most, on average over rounds, however many they
    accuse, and themselves as often; and never so many that the others are no majority.

    Every eighth round may have all; if it ends well the quarrels are over.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._quarrels: dict[Pair, _Quarrel] = {}
        """In the order of their latest reports."""

    def record(self, one: str, other: str, sequence: int, *, lasting: bool) -> None:
        pair = _pair(one, other)
        before = self._quarrels.pop(pair, _Quarrel(-1, 0))
        rounds = before.rounds + (before.last != sequence)
        self._quarrels[pair] = _Quarrel(sequence, max(_LASTING, rounds) if lasting else rounds)
        if len(self._quarrels) > _MAX_QUARRELS:
            del self._quarrels[next(iter(self._quarrels))]

    def settle(self, names: Collection[str]) -> None:
        """These workers have been in a round together that ended well."""
        self._quarrels = {pair: quarrel for pair, quarrel in self._quarrels.items() if not set(pair) <= set(names)}

    def left_out(self, names: Sequence[str], sequence: int, is_majority: Callable[[Collection[str]], bool]) -> set[str]:
        """Return the workers among `names` that rest in this round. `is_majority`: whether some workers are enough for
        a plan."""
        quarrelling = [
            pair for pair, quarrel in self._quarrels.items() if set(pair) <= set(names) and quarrel.holds(sequence)
        ]
        out: set[str] = set()
        for knot in _knots(quarrelling):
            if sequence % _TOGETHER == 0 and all(self._quarrels[pair].last != sequence for pair in knot):
                continue
            # This node knows of itself that it does not lie.
            own = {name for pair in knot if self._me in pair for name in pair} - {self._me}
            rest = [pair for pair in knot if own.isdisjoint(pair)]
            out |= own
            sides = _sides(rest, sequence)
            kept = [[name for name in names if name not in out | side] for side in sides]
            out |= next((side for side, others in zip(sides, kept, strict=True) if is_majority(others)), sides[0])
        return out


def _knots(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Find the connected components of the quarrels: no worker is in two knots."""
    rest = sorted(pairs)
    knots = list[list[Pair]]()
    while rest:
        names = set(rest[0])
        size = 0
        while len(names) > size:
            size = len(names)
            names.update(name for pair in rest if not names.isdisjoint(pair) for name in pair)
        knots.append([pair for pair in rest if set(pair) <= names])
        rest = [pair for pair in rest if not set(pair) <= names]
    return knots


def _sides(knot: Sequence[Pair], sequence: int) -> list[set[str]]:
    """Find the sides of a knot, the one first whose turn to rest it is: each pair has a worker on either side. Only the
    fewest workers where two of these quarrel."""
    fewest = _fewest(knot)
    others = {name for pair in knot for name in pair} - fewest
    if any(set(pair) <= fewest for pair in knot) or not others:
        return [fewest]
    turn = sequence % (len(fewest) + len(others))
    return [fewest, others] if turn < len(others) else [others, fewest]


def _fewest(pairs: Sequence[Pair]) -> set[str]:
    """Find the fewest workers of which each pair has one (a vertex cover): the one in most pairs, or all its
    partners."""
    if not pairs:
        return set()
    counts = Counter(name for pair in pairs for name in pair)
    worst = min(counts, key=lambda name: (-counts[name], name))
    partners = {name for pair in pairs if worst in pair for name in pair} - {worst}
    without = {worst} | _fewest([pair for pair in pairs if worst not in pair])
    if len(counts) > _MOST_TRIED or counts[worst] == 1:
        return without
    instead = partners | _fewest([pair for pair in pairs if partners.isdisjoint(pair)])
    return instead if len(instead) < len(without) else without


def _pair(one: str, other: str) -> Pair:
    return min(one, other), max(one, other)


def _are_most(plan: Plan, senders: Collection[str]) -> bool:
    return 2 * len(senders) > len(plan.entries)


def choose(
    fit: list[Entry],
    sequence: int,
    quarrels: Quarrels,
    attendance: Attendance,
    is_majority: Callable[[Collection[str]], bool],
) -> list[Entry]:
    """Choose the workers of a plan from the fit ones: without one of any two that quarrel, and without those that were
    left out of the last rounds, if the others are enough."""
    resting = quarrels.left_out([entry.peer for entry in fit], sequence, is_majority)
    candidates = [entry for entry in fit if entry.peer not in resting]
    chosen = [entry for entry in candidates if attendance.takes(entry.peer)]
    if len(chosen) == len(candidates) or not chosen or not is_majority([entry.peer for entry in chosen]):
        return candidates
    for entry in candidates:
        if entry not in chosen:
            attendance.record_passed_over(entry.peer)
    return chosen
