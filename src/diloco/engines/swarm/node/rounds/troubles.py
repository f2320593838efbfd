"""What the workers of a plan report to its leader, and which of them are left out of the next attempt.

A worker that several others cannot exchange parts with is left out, after a second attempt. A worker that two others
accuse of a lie has lied: it is left out and that counts as an offence, with both accusers' signatures. One accuser is
not believed more than the accused: both are left out of this round; or one of them, each in every second round, where
a majority would be missing without both. So a worker that accuses others falsely puts itself out too.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from diloco.engines.swarm.node.membership.members import Members
from diloco.engines.swarm.node.messages import Trouble
from diloco.engines.swarm.node.plan import Offence, Plan
from diloco.engines.swarm.node.proofs.liars import ACCUSERS

_MAX_TROUBLES = 2


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

    def __bool__(self) -> bool:
        return bool(self._reported)

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

    def judge_lies(self, plan: Plan, is_majority: Callable[[Collection[str]], bool]) -> Dropped:
        """`is_majority`: whether these workers are enough for a plan."""
        accused = self.accusers(plan)
        for peer, accusers in accused.items():
            if len(accusers) >= ACCUSERS:
                return Dropped({peer: "several workers accuse it of a lie"}, [_offence(plan, peer, accusers)])
        left_out: set[str] = set()
        for peer, accuser in [(peer, one) for peer, accusers in accused.items() for one in accusers]:
            one, other = sorted((peer, accuser), reverse=bool(plan.key.sequence % 2))
            choices = [{one, other} - {self._members.me}, {one}, {other}]
            rests = [[e.peer for e in plan.entries if e.peer not in left_out | choice] for choice in choices]
            left_out |= next((choices[i] for i, rest in enumerate(rests) if is_majority(rest)), choices[0])
        return Dropped(dict.fromkeys(left_out, "one accuses the other of a lie"))

    def pairs(self, plan: Plan) -> list[tuple[str, str]]:
        """Workers that cannot exchange parts with each other, as one of them says."""
        return [(sender, one.peer) for sender, one in self._reported if plan.entry(one.peer) is not None]

    def judge(self, plan: Plan) -> Dropped | None:
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


def _offence(plan: Plan, peer: str, accusers: dict[str, Trouble]) -> Offence:
    entry = plan.entry(peer)
    assert entry is not None
    signatures = {name: one.signature for name, one in accusers.items() if one.signature is not None}
    reason = next(iter(accusers.values())).reason[:200]
    return Offence(peer, entry.number, reason, plan.digest, signatures)
