"""The members of a swarm as one worker sees them: which are live, which of them leads, which numbers are taken.

There is no master. The live member with the lowest number that has the state leads rounds (leading.py) and gives
numbers to joiners (`give_number`); when it is lost, the next one does. The views of two workers may differ for a
moment: rounds are safe all the same, since every message of a leader carries an authority (plan.py).

Numbers are labels: a peer's key is its identity, and a worker that returns keeps its number. After a network split two
workers may have got the same one; of the two the one with the higher key asks for another, and is in no plan before it
has one. That is no offence.

The state of this file is data. node/members.py keeps it up to date from what arrives.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.attendance import Attendance
from diloco.swarm.protocol.messages import RosterEntry
from diloco.swarm.protocol.status import MAX_NUMBER, OwnStatus, Status
from diloco.swarm.settings import Settings

MAX_TOLD_ADDRESSES = 8
"""Addresses that one member may tell of another."""
_LATEST_ROUNDS = 3


@dataclass
class Peer:
    """A peer is live from its first answer until it is lost or leaves. Times are those of the node's clock."""

    name: str
    credential: bytes
    addresses: tuple[str, ...]
    """The addresses that the peer itself has told."""
    told: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Addresses that other members have told while it is not live here, by teller."""
    status: Status = field(default_factory=Status)
    heard_at: float = 0.0
    """0 for a peer that other members have named, and that has not proved its key here."""
    asked_at: float = 0.0
    live: bool = False
    left: bool = False
    """It has said goodbye."""
    lost_at: float = 0.0
    gone: bool = False
    """It is known to be dead or to have left; a lost peer that is not gone may only be cut off."""
    rejects: bool = False
    """It refuses this node: banned or revoked."""
    rival: tuple[str, float] = ("", 0.0)
    """A second process that has said hello with this peer's identity, and when it first did."""
    latency_seconds: float = 0.0
    knows: frozenset[str] | None = None
    """The live members as the peer last reported them, by the ends of their names."""

    def roster_entry(self) -> RosterEntry:
        return RosterEntry(self.name, self.credential, self.addresses[:MAX_TOLD_ADDRESSES], self.status.number)


class Membership:
    def __init__(self, me: str, settings: Settings, status: OwnStatus, now: Callable[[], float]) -> None:
        """`status`: this worker's own. `now`: the time, as the driver reads it."""
        self.me = me
        self.settings = settings
        self.status = status
        self.now = now
        self.peers: dict[str, Peer] = {}
        self.numbers: dict[str, int] = {}
        """Peer -> worker number, of all that this node has heard with one: a worker that returns keeps its number.
        What others say of a peer is not in it, so that no invented one counts in a quorum."""
        self.attendance = Attendance()

    def live(self) -> list[Peer]:
        """The other live members, in worker order."""
        live = [peer for peer in self.peers.values() if peer.live and peer.status.number >= 0]
        return sorted(live, key=lambda peer: peer.status.number)

    def with_state(self) -> list[Peer]:
        """The other live members that have the global state."""
        return [peer for peer in self.live() if peer.status.has_state]

    def is_live(self, name: str) -> bool:
        return name == self.me or (name in self.peers and self.peers[name].live)

    def number_of(self, name: str) -> int:
        """The number of a member; −1 if it has none."""
        if name == self.me:
            return self.status.number
        peer = self.peers.get(name)
        return -1 if peer is None else peer.status.number

    def roster(self) -> tuple[int, ...]:
        """The numbers of the live members that have the state."""
        own = [self.status.number] if self.status.has_state else []
        return tuple(sorted({*own, *(peer.status.number for peer in self.with_state())}))

    def leader(self) -> str | None:
        """The live member with the lowest number that has the state and leads well; None if no member has the state."""
        candidates = [(peer.status.number, peer.name) for peer in self.with_state()]
        if self.status.has_state:
            candidates.append((self.status.number, self.me))
        now = self.now()
        good = [candidate for candidate in candidates if self.attendance.may_lead(candidate[1], now)]
        return min(good or candidates)[1] if candidates else None

    def most_ended(self, sequence: int) -> bool:
        """Whether at least half of the members with the state say that this round has ended.

        Only members whose contributions are in the latest rounds are counted, where there are any: many joiners or
        returning workers at once cannot outvote them. What is known of the others may be some beats old, and they count
        all the same: else a single one that claims to be ahead would outvote them.
        """
        statuses = [self.status, *(peer.status for peer in self.live())]
        holders = [status for status in statuses if status.has_state]
        latest = self.status.ended_round
        first_recent = max(0, latest - _LATEST_ROUNDS)
        contributors = [status for status in holders if latest >= 0 and status.contributed_round >= first_recent]
        voters = contributors or holders
        return 0 < len(voters) <= 2 * sum(status.ended_round >= sequence for status in voters)

    def first_ahead(self, sequence: int) -> str | None:
        """The first live member that has ended this round; None if there is none."""
        return next((peer.name for peer in self.live() if peer.status.ended_round >= sequence), None)

    def may_go_on(self) -> bool:
        """False for a while after most members have fallen silent: this machine's own network may be cut.

        Peers that are known to be dead do not count. If half of the members are silent the others wait briefly, if
        most are, about a minute; then a swarm that has really lost them goes on.
        """
        now = self.now()
        silent = [peer for peer in self.peers.values() if peer.lost_at and not peer.gone and peer.status.has_state]
        present = 1 + len(self.with_state())
        for share, wait in ((1, timing.HALF_SILENT_SHARE), (0, timing.MOST_SILENT_SHARE)):
            recent = sum(now - peer.lost_at < wait * self.settings.lost_seconds for peer in silent)
            if recent > present - share:
                return False
        return True

    def is_taken(self, number: int, name: str) -> bool:
        """Whether another worker that was heard here, or this one, has the number."""
        heard = [other for other in self.peers.values() if other.heard_at]
        numbers = {other.name: other.status.number for other in heard} | {self.me: self.status.number}
        return any(taken == number for other, taken in numbers.items() if other != name)


# Numbers


def give_number(members: Membership, name: str, wished: int) -> int:
    """The number of this peer, a new one if another peer with a lower key has it too. Raises CallRefused."""
    leader = members.leader()
    if leader != members.me:
        raise CallRefused(f"{leader} leads, not this worker", "leader")
    numbers = {**members.numbers, members.me: members.status.number}
    taken = set(numbers.values())
    number = numbers.get(name)
    told = {peer.status.number for peer in members.peers.values() if peer.status.number >= 0}  # as others say
    if number is None:
        number = wished if wished >= 0 and wished not in taken else _next(taken | told)
    elif any(other < name for other, others_number in numbers.items() if others_number == number):
        number = _next(taken | told)
    members.numbers[name] = number
    return number


def _next(taken: set[int]) -> int:
    """The number above all that are taken; the lowest free one if a member claims the highest that there is."""
    return max(taken) + 1 if max(taken) < MAX_NUMBER else min(set(range(len(taken) + 1)) - taken)


def clashes(members: Membership, name: str) -> bool:
    """Whether another live member has the number of this one, and a lower key."""
    number = members.number_of(name)
    numbers = {peer.name: peer.status.number for peer in members.live()} | {members.me: members.status.number}
    return number >= 0 and any(other < name for other, others_number in numbers.items() if others_number == number)
