"""The members of the swarm, kept up to date: what peers and other members say of them, with events and wake-ups.

What follows from that (which are live, which one leads, where a peer is called) is in protocol/membership.py;
heartbeats.py calls and answers them. No peer is a member without a credential.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from diloco.swarm.network.limits import PeerRateLimit
from diloco.swarm.network.transport import Transport
from diloco.swarm.node import clock
from diloco.swarm.node.faults import Faults
from diloco.swarm.protocol.membership import MAX_ADDRESSES, Membership, Peer
from diloco.swarm.protocol.messages import RosterEntry
from diloco.swarm.protocol.status import OwnStatus, Status
from diloco.swarm.run_files import REVOCATIONS_FILE
from diloco.swarm.settings import Settings
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.permissions import MAX_PEERS, Permissions

logger = logging.getLogger(__name__)

NEW_AT_ONCE, NEW_PER_SECOND = 1024.0, 16.0
"""New members that one member may name."""


class Members(Membership):
    def __init__(self, transport: Transport, permissions: Permissions, settings: Settings, status: OwnStatus) -> None:
        """`status`: this worker's own."""
        super().__init__(transport.peer, settings, status, clock.now)
        self.transport = transport
        self.permissions = permissions
        permissions.is_known_to_most = self.is_known_to_most
        self.addresses: tuple[str, ...] = ()
        """This node's own."""
        self.excluded: str | None = None
        """Why this node is no longer a member: revoked, banned or replaced."""
        self.counted_tokens = 0
        """This worker's tokens when a mean last had its contribution in it."""
        self.on_event: Callable[[str, dict[str, object]], None] = lambda *_: None
        self.faults = Faults(lambda *event: self.on_event(*event))
        self._waiters: dict[asyncio.Event, None] = {}
        """A dictionary for its order: what a node does next must not depend on addresses in memory."""
        self._new_from = PeerRateLimit(NEW_AT_ONCE, NEW_PER_SECOND, MAX_PEERS)

    # Changes

    def changed(self) -> None:
        """A member has come, gone or said something new: wake all that wait for it."""
        for waiter in self._waiters:
            waiter.set()

    async def wait_for_change(self, seconds: float) -> None:
        """Return at the next change, or after `seconds`."""
        waiter = asyncio.Event()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout(seconds):
                await waiter.wait()
        except TimeoutError:
            pass
        finally:
            del self._waiters[waiter]

    def drop_unknown(self) -> None:
        """Workers with an expired invitation that most members turn out not to know are no members."""
        for name in self.permissions.drop_unknown():
            peer = self.peers.pop(name, None)
            if peer is not None:
                reason = "expired: its invitation has expired, and most members do not know it"
                self.on_event("member_expelled", {"peer": name, "number": peer.status.number, "reason": reason})
                self.changed()

    def add(self, name: str, credential: bytes, addresses: tuple[str, ...], *, named: bool = False) -> Peer:
        """Raises PeerRefused. `named`: by another member; it has not said hello itself."""
        self.permissions.admit(name, credential, named=named)
        self.permissions.check(name)
        peer = self.peers.setdefault(name, Peer(name, credential, ()))
        peer.take_credential(credential)
        if not named:
            peer.take_addresses(addresses[:MAX_ADDRESSES])
        return peer

    def add_roster(self, teller: str, entries: Iterable[RosterEntry]) -> None:
        """Peers that another member knows. Each is live here from its first answer to this node.

        New ones cost signatures to check: of one teller at most a whole roster at once, and a few in a second.
        """
        for entry in entries:
            if entry.peer == self.me:
                continue
            if entry.peer in self.peers:
                self.hear_addresses(self.peers[entry.peer], teller, entry.addresses)
                continue
            if not self._new_from.take(teller, self.now()):
                return
            try:
                peer = self.add(entry.peer, entry.credential, (), named=True)
            except PeerRefused as reason:
                logger.debug("%s, a peer of another member, is refused: %s", entry.peer, reason)
            else:
                peer.take_named_number(entry.number)
                self.hear_addresses(peer, teller, entry.addresses)

    def take_seats(self, teller: str, seats: Iterable[tuple[str, bytes]]) -> None:
        """Take the seats of workers that are away or banned, as another member shows by their credentials."""
        for name, credential in seats:
            if name not in self.peers and name != self.me and self._new_from.take(teller, self.now()):
                self.permissions.take_seat_for(name, credential)

    def add_revocations(self, records: Iterable[bytes]) -> None:
        if [record for record in records if self.permissions.add_revocation(record)]:
            self.permissions.save_revocations(self.settings.path(REVOCATIONS_FILE))
            self.expel()

    def expel(self) -> None:
        """Remove the peers that have been revoked or banned."""
        self.check_self()
        for name in list(self.peers):
            try:
                self.permissions.check(name)
            except PeerRefused as reason:
                peer = self.peers.pop(name)
                self.on_event("member_expelled", {"peer": name, "number": peer.status.number, "reason": str(reason)})
        self.changed()

    def check_self(self) -> None:
        try:
            self.permissions.check(self.me)
        except PeerRefused as reason:
            self.exclude_self(str(reason))

    def exclude_self(self, reason: str) -> None:
        """This node is revoked, banned or replaced, and takes no part in rounds any more."""
        if self.excluded is None:
            lost = max(0, self.status.tokens - self.counted_tokens)
            self.excluded = f"{reason}. Its work on {lost:,} tokens since its last round is not in the run"
            reason = self.excluded
            self.on_event("excluded", {"number": self.status.number, "reason": reason})
        self.status.lose_state()

    # One peer

    def record_heard(self, peer: Peer, status: Status, *, hello: bool = False) -> None:
        """The peer has said something: it is live."""
        if self.hear(peer, status, hello=hello):
            self.emit_about("member_joined", peer.name)
        self.changed()

    def record_lost(self, peer: Peer, reason: str, *, gone: bool = False) -> None:
        if not peer.live:
            return
        peer.lose(self.now(), gone=gone)
        self.emit_about("member_lost", peer.name, reason=reason)
        self.changed()

    def record_left(self, name: str) -> None:
        """A peer has said goodbye."""
        peer = self.peers.get(name)
        if peer is not None and not peer.left:
            peer.leave(self.now())
            self.emit_about("member_left", peer.name)
            self.changed()

    def record_rejected(self, peer: Peer, reason: str, code: str) -> None:
        """The peer has banned this node, knows that it was revoked, or holds another process of its identity."""
        if self.reject(peer, code):
            self.exclude_self(reason)
        self.changed()

    def emit_about(self, type_: str, name: str, **more: object) -> None:
        """An event about a member, or about this worker itself."""
        label = self.peers[name].status.label if name in self.peers else ""
        self.on_event(type_, {"peer": name, "number": self.number_of(name), "label": label, **more})
