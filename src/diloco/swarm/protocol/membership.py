"""The members of a swarm as one worker sees them: which are live, which of them leads, which numbers are taken.

There is no master. The live member with the lowest number that has the state leads rounds (leading.py) and gives
numbers to joiners (joining.py); when it is lost, the next one does. The views of two workers may differ for a
moment: rounds are safe all the same, since every message of a leader carries an authority (plan.py).

Numbers are labels: a peer's key is its identity, and a worker that returns keeps its number. After a network split two
workers may have got the same one; of the two the one with the higher key asks for another, and is in no plan before it
has one. That is no offence.

The state of this file is data, and only the methods here write it. node/members.py calls them with what arrives, and
tells the user of what has changed.
"""

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from diloco.swarm import timing
from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.protocol.attendance import Attendance
from diloco.swarm.protocol.messages import RosterEntry
from diloco.swarm.protocol.status import OwnStatus, Status
from diloco.swarm.settings import Settings
from diloco.swarm.trust.permissions import MAX_PEERS

MAX_ADDRESSES = 16
"""Addresses that a peer tells of itself."""
MAX_TOLD_ADDRESSES = 8
"""Addresses that one member may tell of another."""
MAX_TELLERS = 8
"""Members whose word about the addresses of one is kept."""
DIALS_AT_ONCE, DIALS_PER_SECOND = 16.0, 0.1
"""Calls to addresses that one member has told, without an answer of the peer that it named."""
_LATEST_ROUNDS = 3


class PeerPhase(enum.Enum):
    NAMED = "named"
    LIVE = "live"
    SILENT = "silent"
    DEAD = "dead"
    REFUSING = "refusing"
    LEFT = "left"


PEER_MEANING: dict[PeerPhase, str] = {
    PeerPhase.NAMED: "another member has named it, and it has not answered here: it counts in no majority",
    PeerPhase.LIVE: "it has answered, and is waited for in rounds",
    PeerPhase.SILENT: "it may be cut off, and go on elsewhere: it counts in the majority that a round needs",
    PeerPhase.DEAD: "its machine refuses connections: it does not count",
    PeerPhase.REFUSING: "it lets this worker in no longer: banned, revoked, or replaced by another process",
    PeerPhase.LEFT: "it has said goodbye",
}

PEER_TRANSITIONS: dict[PeerPhase, dict[PeerPhase, str]] = {
    PeerPhase.NAMED: {PeerPhase.LIVE: "it says or answers Hello"},
    PeerPhase.LIVE: {
        PeerPhase.SILENT: "no beat and no byte of it for `lost_seconds`",
        PeerPhase.DEAD: "a connection to it broke, and its machine refuses the next one",
        PeerPhase.REFUSING: "it refuses a beat for good",
        PeerPhase.LEFT: "Goodbye",
    },
    PeerPhase.SILENT: {
        PeerPhase.LIVE: "as above, or a Beat of it",
        PeerPhase.DEAD: "its machine refuses the connection",
        PeerPhase.REFUSING: "as above",
        PeerPhase.LEFT: "as above",
    },
    PeerPhase.DEAD: {PeerPhase.LIVE: "as above", PeerPhase.REFUSING: "as above", PeerPhase.LEFT: "as above"},
    PeerPhase.REFUSING: {PeerPhase.LIVE: "as above", PeerPhase.LEFT: "as above"},
    PeerPhase.LEFT: {PeerPhase.LIVE: "it says Hello again"},
}
"""Phase -> the phases that may follow, and what takes the peer there."""


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

    @property
    def phase(self) -> PeerPhase:
        if self.live:
            return PeerPhase.LIVE
        if self.left:
            return PeerPhase.LEFT
        if not self.heard_at:
            return PeerPhase.NAMED
        if self.rejects:
            return PeerPhase.REFUSING
        return PeerPhase.DEAD if self.gone else PeerPhase.SILENT

    def roster_entry(self) -> RosterEntry:
        return RosterEntry(self.name, self.credential, self.addresses[:MAX_TOLD_ADDRESSES], self.status.number)

    # What it says

    def take_credential(self, credential: bytes) -> None:
        self.credential = credential

    def take_addresses(self, addresses: tuple[str, ...]) -> None:
        """The peer tells its own addresses; without any the earlier ones stay."""
        self.addresses = addresses or self.addresses

    def take_named_number(self, number: int) -> None:
        """Another member says that the peer has this number."""
        self.status.number = number

    def take_known(self, names: Iterable[str]) -> None:
        """The peer tells which members are live there, by the ends of their names."""
        self.knows = frozenset(names)

    def hear(self, status: Status, now: float, *, hello: bool) -> bool:
        """The peer has said something; returns whether it is live again by that. `hello`: which ends its goodbye.

        What is known of its attendance stays: it belongs to the key, and not to the visit.
        """
        self.heard_at = now
        self.status = status
        self.left = self.left and not hello
        if self.live or self.left:
            return False
        self.live = True
        self.rejects = False
        self.lost_at = 0.0
        self.gone = False
        return True

    def touch(self, now: float) -> None:
        """The peer has answered a call."""
        self.heard_at = now

    def excuse(self, seconds: float) -> None:
        """This process was frozen for so long: the peer was not silent."""
        self.heard_at += seconds if self.heard_at else 0.0

    def meet_rival(self, process: str, now: float) -> None:
        """A second process says hello with this peer's identity."""
        if self.rival[0] != process:
            self.rival = (process, now)

    # Calls to it

    def ask(self, now: float) -> None:
        """The peer is called now."""
        self.asked_at = now

    def measure(self, now: float) -> None:
        """The peer answers the call."""
        self.latency_seconds = now - self.asked_at

    # How it goes away, and comes back

    def lose(self, now: float, *, gone: bool) -> None:
        self.live = False
        self.lost_at = now
        self.gone = gone

    def stay_away(self, now: float, *, gone: bool) -> None:
        """The peer does not answer, and was not live before."""
        self.lost_at = self.lost_at or now
        self.gone = self.gone or gone  # silent first, and dead now

    def leave(self, now: float) -> None:
        self.live = False
        self.left = True
        self.gone = True
        self.lost_at = now

    def reject(self, now: float) -> None:
        self.rejects = True
        self.live = False
        self.lost_at = now

    # Where it is, as others say

    def hear_addresses(self, teller: str, addresses: tuple[str, ...]) -> bool:
        """Remember where a teller says that this peer is, which is not live here; returns whether that is new. The
        addresses that the peer told are kept."""
        addresses = addresses[:MAX_TOLD_ADDRESSES]
        if self.live or self.left or not addresses or self.told.get(teller) == addresses:
            return False
        self.told[teller] = addresses
        if len(self.told) > MAX_TELLERS:
            del self.told[next(iter(self.told))]
        return self.heard_at > 0 and addresses != self.addresses[:MAX_TOLD_ADDRESSES]

    def call_soon(self) -> None:
        """The peer has moved: the next look at it calls it."""
        self.asked_at = 0.0


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
        self._dials = PeerRateLimit(DIALS_AT_ONCE, DIALS_PER_SECOND, MAX_PEERS)

    # What peers say

    def hear(self, peer: Peer, status: Status, *, hello: bool) -> bool:
        """The peer has said something; returns whether the user is told that a member has joined."""
        before = peer.status
        if status.has_state and not before.has_state:
            self.attendance.record_state(peer.name)
        if status.number < 0 or (0 <= before.number != status.number and self.is_taken(status.number, peer.name)):
            status.number = before.number  # a member that has a number cannot take another one's
        appeared = peer.hear(status, self.now(), hello=hello)
        if status.number >= 0:
            self.numbers[peer.name] = status.number
        return status.number >= 0 and (appeared or before.number < 0)

    def reject(self, peer: Peer, code: str) -> bool:
        """The peer lets this worker in no longer; returns whether this worker is out of the run.

        One peer alone cannot exclude a worker. If more reject it than are live, it is excluded; of two processes with
        one identity the later one also if as many do, so that the earlier one stays.
        """
        peer.reject(self.now())
        rejecting = sum(other.rejects for other in self.peers.values())
        return rejecting + (code == "twice") > sum(other.live for other in self.peers.values())

    def hear_addresses(self, peer: Peer, teller: str, addresses: tuple[str, ...]) -> None:
        if peer.hear_addresses(teller, addresses) and self._dials.take(teller, self.now()):
            peer.call_soon()

    def dialled_addresses(self, peer: Peer) -> tuple[list[str], list[str]]:
        """Return the addresses at which to call a peer now, its own and those that tellers gave, and these tellers. A
        teller may have this node call some peers that do not answer, and then one every ten seconds: a member that
        invents others, or gives the address of a third party for them, has that called no more often."""
        now = self.now()
        tellers = [teller for teller in peer.told if self._dials.take(teller, now)]
        told = [address for teller in tellers for address in peer.told[teller]]
        return list(dict.fromkeys([*peer.addresses, *told])), tellers

    def record_dialled(self, peer: Peer, tellers: Iterable[str]) -> None:
        """The peer has answered at an address that these members told: they were right."""
        peer.told.clear()
        for teller in tellers:
            self._dials.give_back(teller)

    def is_known_to_most(self, name: str) -> bool | None:
        """Whether most other live members know this one, of those that tell which they know; None if none tells."""
        told = [name[-8:] in peer.knows for peer in self.live() if peer.name != name and peer.knows is not None]
        return 2 * sum(told) > len(told) if told else None

    # What follows

    def live(self) -> list[Peer]:
        """Return the other live members, in worker order."""
        live = [peer for peer in self.peers.values() if peer.live and peer.status.number >= 0]
        return sorted(live, key=lambda peer: peer.status.number)

    def with_state(self) -> list[Peer]:
        """Return the other live members that have the global state."""
        return [peer for peer in self.live() if peer.status.has_state]

    def is_live(self, name: str) -> bool:
        return name == self.me or (name in self.peers and self.peers[name].live)

    def number_of(self, name: str) -> int:
        """Return the number of a member; −1 if it has none."""
        if name == self.me:
            return self.status.number
        peer = self.peers.get(name)
        return -1 if peer is None else peer.status.number

    def roster(self) -> tuple[int, ...]:
        """Return the numbers of the live members that have the state."""
        own = [self.status.number] if self.status.has_state else []
        return tuple(sorted({*own, *(peer.status.number for peer in self.with_state())}))

    def leader(self) -> str | None:
        """Return the live member with the lowest number that has the state and leads well; None if no member has the
        state."""
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
        """Return the first live member that has ended this round; None if there is none."""
        return next((peer.name for peer in self.live() if peer.status.ended_round >= sequence), None)

    def may_go_on(self) -> bool:
        """False for a while after most members have fallen silent: this machine's own network may be cut.

        Peers that are known to be dead do not count. If half of the members are silent the others wait briefly, if
        most are, about a minute; then a swarm that has really lost them goes on.
        """
        now = self.now()
        silent = [peer for peer in self.peers.values() if peer.lost_at and not peer.gone and peer.status.has_state]
        present = 1 + len(self.with_state())

        def silent_for_less_than(share: float) -> int:
            return sum(now - peer.lost_at < share * self.settings.lost_seconds for peer in silent)

        half_just_fell_silent = silent_for_less_than(timing.HALF_SILENT_SHARE) >= present
        most_just_fell_silent = silent_for_less_than(timing.MOST_SILENT_SHARE) > present
        return not (half_just_fell_silent or most_just_fell_silent)

    def is_taken(self, number: int, name: str) -> bool:
        """Whether another worker that was heard here, or this one, has the number."""
        heard = [other for other in self.peers.values() if other.heard_at]
        numbers = {other.name: other.status.number for other in heard} | {self.me: self.status.number}
        return any(taken == number for other, taken in numbers.items() if other != name)


def clashes(members: Membership, name: str) -> bool:
    """Whether another live member has the number of this one, and a lower key."""
    number = members.number_of(name)
    numbers = {peer.name: peer.status.number for peer in members.live()} | {members.me: members.status.number}
    return number >= 0 and any(other < name for other, others_number in numbers.items() if others_number == number)
