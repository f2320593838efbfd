"""Who is in the swarm, as one node sees it: everyone beats everyone, and whoever is silent is left out.

There is no master. The live member with the lowest number leads rounds (leading.py) and gives numbers to joiners; when
it is lost, the next one does. Views of two nodes may differ for a moment: rounds are safe all the same, since every
word in them carries an authority (plan.py).

A peer is lost when it is known to be dead (its machine refuses the connection) or has been silent for `lost_seconds`;
it is called again now and then, so that a cut network heals by itself. Nobody is a member without a credential.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from diloco.engines.swarm.network.transport import CallRefused, Transport, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.peer import MAX_ADDRESSES, Peer
from diloco.engines.swarm.node.status import Status
from diloco.engines.swarm.node.wire import PROTOCOL, Malformed, Message, pack, texts
from diloco.engines.swarm.run_files import REVOCATIONS_FILE
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.trust.credential import PeerRefused
from diloco.engines.swarm.trust.permissions import Permissions
from diloco.version import __version__

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.2
_FROZEN_SECONDS = 2.0
_FORGET_SECONDS = 600.0
_HALF_SILENT = 0.5  # so many times `lost_seconds` to wait where half of all have fallen silent
_MOST_SILENT = 12.0  # and where more than half have


class Membership:
    """The roster. `changed` is set whenever somebody comes or goes, or says something new."""

    def __init__(self, transport: Transport, permissions: Permissions, settings: Settings, status: Status) -> None:
        self.transport, self.permissions, self.settings, self.status = transport, permissions, settings, status
        self.peers: dict[str, Peer] = {}
        self.numbers: dict[str, int] = {}
        """Of everyone that ever had one, so that whoever comes back keeps it."""
        self.addresses: list[str] = []
        self.out: str | None = None
        """Why this node is a member no more: revoked or banned."""
        self.on_event: Callable[[str, dict[str, object]], None] = lambda *_: None
        self._waiters: set[asyncio.Event] = set()
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def me(self) -> str:
        return self.transport.peer

    # Views

    def live(self) -> list[Peer]:
        """The others that are here, in worker order."""
        here = [peer for peer in self.peers.values() if peer.live and peer.status.number >= 0]
        return sorted(here, key=lambda peer: peer.status.number)

    def is_live(self, name: str) -> bool:
        return name == self.me or (name in self.peers and self.peers[name].live)

    def number_of(self, name: str) -> int:
        if name == self.me:
            return self.status.number
        peer = self.peers.get(name)
        return -1 if peer is None else peer.status.number

    def roster(self) -> tuple[int, ...]:
        own = [self.status.number] if self.status.holds else []
        return tuple(sorted({*own, *(peer.status.number for peer in self.live() if peer.status.holds)}))

    def leader(self) -> str | None:
        """The live member with the lowest number that has the state; None if nobody has."""
        holders = [(peer.status.number, peer.name) for peer in self.live() if peer.status.holds]
        if self.status.holds:
            holders.append((self.status.number, self.me))
        return min(holders)[1] if holders else None

    def most_ended(self, sequence: int) -> bool:
        """Whether at least half of those who have the state say that this round has ended.

        Those whose work is in the latest rounds have a say: many that join or come back at once have not.
        """
        holders = [status for status in (self.status, *(peer.status for peer in self.live())) if status.holds]
        asked = [status for status in holders if status.contributed >= self.status.ended >= 0] or holders
        return 0 < len(asked) <= 2 * sum(status.ended >= sequence for status in asked)

    def may_go_on(self) -> bool:
        """Not at once after most have fallen silent: then it may be this machine's own network that is cut.

        Whoever is known to be dead does not count. With half of them silent the others wait a little, with most of
        them silent a minute or so; a swarm that has really lost them goes on then.
        """
        now = clock.now()
        silent = [peer for peer in self.peers.values() if peer.lost_at and not peer.gone and peer.status.holds]
        here = 1 + sum(peer.status.holds for peer in self.live())
        for share, wait in ((1, _HALF_SILENT), (0, _MOST_SILENT)):
            recent = sum(now - peer.lost_at < wait * self.settings.lost_seconds for peer in silent)
            if recent > here - share:
                return False
        return True

    # News

    def changed(self) -> None:
        for waiter in self._waiters:
            waiter.set()

    async def wait_for_change(self, seconds: float) -> None:
        """Returns at the next change, or after `seconds`."""
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        try:
            async with asyncio.timeout(seconds):
                await waiter.wait()
        except TimeoutError:
            pass
        finally:
            self._waiters.discard(waiter)

    # Getting to know each other

    def greeting(self, role: str = "worker") -> dict[str, object]:
        return {
            "protocol": PROTOCOL,
            "version": __version__,
            "role": role,
            "credential": self.permissions.credential,
            "addresses": self.addresses[:MAX_ADDRESSES],
            "status": self.status.to_wire(),
            "time": time.time(),
        }

    async def greet(self, name: str) -> Message:
        """Say hello; afterwards both know each other. Raises Unreachable or CallRefused."""
        answer = Message.unpack(await self._call(name, pack("hello", **self.greeting()), self.settings.lost_seconds))
        self._meet(name, answer)
        return answer

    def greeted(self, name: str, message: Message) -> dict[str, object]:
        """Somebody says hello; raises PeerRefused before anything else is looked at."""
        self.permissions.admit(name, message.data("credential", 4096))
        self._take_revocations(message)
        self.permissions.check(name)
        if message.text("role") == "worker":
            self._meet(name, message)
        known = [peer.entry() for peer in self._known()]
        return {**self.greeting(), "roster": known, "revocations": self.permissions.revocations()}

    def _known(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if not peer.left]

    def _meet(self, name: str, message: Message) -> None:
        self._take_revocations(message)
        peer = self._add(name, message.data("credential", 4096), texts(message.items("addresses")))
        peer.left = False
        self._heard(peer, Status.from_wire(message.map("status")))
        if message.has("roster"):
            self._take_roster(message.items("roster"))

    def _add(self, name: str, credential: bytes, addresses: list[str]) -> Peer:
        self.permissions.admit(name, credential)
        self.permissions.check(name)
        peer = self.peers.setdefault(name, Peer(name, credential, []))
        peer.credential = credential
        peer.addresses = addresses[:MAX_ADDRESSES] or peer.addresses
        return peer

    def _take_roster(self, entries: list[object]) -> None:
        """Others that somebody else knows. They are members of ours from their first answer on."""
        for entry in entries:
            match entry:
                case [str() as name, bytes() as credential, list() as addresses, int() as number]:
                    if name == self.me:
                        continue
                    if name in self.peers:
                        self._take_addresses(self.peers[name], texts(addresses))
                        continue
                    self.permissions.vouch_for([name])
                    try:
                        self._add(name, credential, texts(addresses)).status.number = number
                    except PeerRefused as reason:
                        logger.debug("%s, whom another member knows, is not welcome: %s", name, reason)
                    else:
                        self.numbers.setdefault(name, number)
                case _:
                    raise Malformed("not an entry of a roster")

    def _take_addresses(self, peer: Peer, addresses: list[str]) -> None:
        """Of somebody that is lost here and not elsewhere: it may have moved."""
        if not peer.live and not peer.left and addresses and peer.addresses != addresses[:MAX_ADDRESSES]:
            peer.addresses, peer.asked = addresses[:MAX_ADDRESSES], 0.0

    def _take_revocations(self, message: Message) -> None:
        records = message.items("revocations") if message.has("revocations") else []
        news = [record for record in records if isinstance(record, bytes) and self.permissions.add_revocation(record)]
        if news:
            self.permissions.save_revocations(self.settings.path(REVOCATIONS_FILE))
            self.expel()

    def expel(self) -> None:
        """Whoever has been revoked or banned is no member any more."""
        self.check_self()
        for name in list(self.peers):
            try:
                self.permissions.check(name)
            except PeerRefused as reason:
                peer = self.peers.pop(name)
                self.on_event("member_expelled", {"peer": name, "number": peer.status.number, "reason": str(reason)})
        self.changed()

    def check_self(self) -> None:
        """Whether this node itself is still welcome; if not, it takes no part in anything any more."""
        try:
            self.permissions.check(self.me)
        except PeerRefused as reason:
            self.out = self.out or str(reason)
            self.status.holds = False

    def number_for(self, name: str, wished: int) -> int:
        """For a joiner; only the leader gives them."""
        leader = self.leader()
        if leader != self.me:
            raise CallRefused(f"not the leader; {leader} is")
        taken = {self.status.number: self.me} | {number: other for other, number in self.numbers.items()}
        if name not in self.numbers:
            free = wished if wished >= 0 and wished not in taken else max(taken) + 1
            self.numbers[name] = free
        return self.numbers[name]

    # Beats

    async def keep_beating(self) -> None:
        """Until cancelled."""
        last = clock.now()
        while True:
            now = clock.now()
            if now - last > _FROZEN_SECONDS:  # this process was: the others were not silent, it was deaf
                for peer in self.peers.values():
                    peer.heard += now - last
            last = now
            for peer in list(self.peers.values()):
                self._look_after(peer, now)
            await asyncio.sleep(_TICK_SECONDS)

    def _look_after(self, peer: Peer, now: float) -> None:
        if peer.left or (not peer.live and peer.lost_at and now - peer.lost_at > _FORGET_SECONDS):
            if now - max(peer.heard, peer.lost_at) > _FORGET_SECONDS:
                self.peers.pop(peer.name, None)
            return
        # One of the two begins; the other only if it hears nothing.
        first = self.me < peer.name
        due = self.settings.beat_seconds * (1.0 if first else 1.6)
        if peer.live and now - peer.heard > self.settings.lost_seconds:
            self._lose(peer, f"silent for {self.settings.lost_seconds:g} s")
        if not peer.live:
            due = self.settings.lost_seconds if peer.lost_at else 0.0
        if now - max(peer.heard, peer.asked) >= due:
            self.beat_soon(peer.name)

    def beat_soon(self, name: str) -> None:
        """Ask now whether somebody is still there."""
        if name in self._busy or name not in self.peers:
            return
        self._busy.add(name)
        task = asyncio.create_task(self._beat(self.peers[name]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _beat(self, peer: Peer) -> None:
        peer.asked = clock.now()
        try:
            if not peer.live:
                await self.transport.connect(peer.name, peer.addresses, self.settings.lost_seconds)
                await self.greet(peer.name)
                return
            beat = pack("beat", **self._beat_fields(), **self._news_for(peer))
            data = await self._call(peer.name, beat, self.settings.lost_seconds)
            peer.latency_seconds = clock.now() - peer.asked
            news = self.beaten(peer.name, Message.unpack(data))
            if not {"roster", "revocations"}.isdisjoint(news):  # what the other one does not know
                await self._call(peer.name, pack("beat", **news), self.settings.lost_seconds)
        except (Unreachable, CallRefused, Malformed, PeerRefused) as problem:
            await self._no_answer(peer, problem)
        finally:
            self._busy.discard(peer.name)

    async def _no_answer(self, peer: Peer, problem: Exception) -> None:
        if isinstance(problem, CallRefused):
            self._turned_away(peer, str(problem))
        elif not peer.live:
            peer.lost_at = peer.lost_at or clock.now()
            peer.gone = peer.gone or (isinstance(problem, Unreachable) and problem.gone)  # silent first, and dead now
        elif isinstance(problem, Unreachable) and problem.gone:
            try:
                await self._call(peer.name, pack("beat", **self._beat_fields()), self.settings.beat_seconds)
            except (Unreachable, CallRefused) as again:
                if isinstance(again, Unreachable) and again.gone:
                    self._lose(peer, str(again), gone=True)
            else:
                peer.heard = clock.now()

    def _turned_away(self, peer: Peer, reason: str) -> None:
        """It is there, but does not know this node (it was started again: hello again), or will not have it.

        One alone cannot put a node out; when most say so, it is.
        """
        unwelcome = reason.startswith(("banned", "revoked"))
        peer.rejects = unwelcome
        peer.lost_at = clock.now() if unwelcome else peer.lost_at
        peer.live, peer.asked = False, peer.asked if unwelcome or not peer.live else 0.0
        rejecting = sum(other.rejects for other in self.peers.values())
        if unwelcome and rejecting > sum(other.live for other in self.peers.values()):
            self.out = self.out or reason
            self.status.holds = False
        self.changed()

    def _beat_fields(self) -> dict[str, object]:
        revoked = self.permissions.revocations_digest()
        here = {"status": self.status.to_wire(), "addresses": self.addresses[:MAX_ADDRESSES]}
        return {**here, "known": self._fingerprint(), "revoked": revoked}

    def _fingerprint(self) -> list[str]:
        """Who is here as this node sees it, by the ends of their names."""
        return sorted(name[-8:] for name in [self.me, *(peer.name for peer in self._known() if peer.live)])

    def _news_for(self, peer: Peer) -> dict[str, object]:
        """Those that are here, and not there as that peer has last told."""
        others = (other for other in self._known() if other.live and other is not peer and peer.knows is not None)
        unknown = [other.entry() for other in others if other.name[-8:] not in (peer.knows or ())]
        return {"roster": unknown} if unknown else {}

    def beaten(self, name: str, message: Message) -> dict[str, object]:
        """A beat, or the answer to one: what it tells, and what the sender does not know."""
        peer = self.peers[name]
        self._heard(peer, Status.from_wire(message.map("status")))
        if message.has("roster"):
            self._take_roster(message.items("roster"))
        self._take_revocations(message)
        peer.knows = set(texts(message.items("known")))
        if message.has("addresses"):  # a relay may have been lost, and another one found
            peer.addresses = texts(message.items("addresses"))[:MAX_ADDRESSES] or peer.addresses
        answer = self._beat_fields() | self._news_for(peer)
        if message.text("revoked") != self.permissions.revocations_digest():
            answer["revocations"] = self.permissions.revocations()
        return answer

    def _heard(self, peer: Peer, status: Status) -> None:
        peer.heard = clock.now()
        number = peer.status.number
        peer.status = status
        if status.number < 0:
            status.number = number
        if status.number >= 0:
            self.numbers[peer.name] = status.number
        if not peer.live and not peer.left:
            peer.live, peer.rejects, peer.lost_at, peer.gone = True, False, 0.0, False
            if status.number >= 0:
                self._tell("member_joined", peer)
        elif number < 0 <= status.number:
            self._tell("member_joined", peer)
        self.changed()

    def _tell(self, type_: str, peer: Peer, **more: object) -> None:
        self.on_event(type_, {"peer": peer.name, "number": peer.status.number, "label": peer.status.label, **more})

    def _lose(self, peer: Peer, reason: str, *, gone: bool = False) -> None:
        if not peer.live:
            return
        peer.live, peer.lost_at, peer.gone = False, clock.now(), gone
        self._tell("member_lost", peer, reason=reason)
        self.changed()

    def suspect(self, name: str, problem: Unreachable) -> None:
        """A call or stream to somebody broke: ask at once whether it is still there."""
        logger.info("%s: %s", name, problem)
        self.beat_soon(name)

    def farewell(self, name: str) -> None:
        """Somebody has said goodbye."""
        peer = self.peers.get(name)
        if peer is not None and not peer.left:
            peer.live, peer.left, peer.gone, peer.lost_at = False, True, True, clock.now()
            self._tell("member_left", peer)
            self.changed()

    async def say_goodbye(self, seconds: float) -> None:
        async def to(peer: Peer) -> None:
            try:
                await self._call(peer.name, pack("bye"), seconds)
            except (Unreachable, CallRefused) as problem:
                logger.debug("%s was not told goodbye: %s", peer.name, problem)

        await asyncio.gather(*(to(peer) for peer in self.peers.values() if peer.live))

    async def _call(self, name: str, data: bytes, seconds: float) -> bytes:
        return await self.transport.call(name, data, seconds)
