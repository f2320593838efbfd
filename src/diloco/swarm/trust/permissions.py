"""Which peers may talk to a node: the one place that decides it. Every call and every stream asks `check` first.

A peer begins with a hello that carries its credential (`admit`). The rules are in docs/adr/0014 and 0041:

- An invitation is for one worker: its seat belongs to the first key that shows a worker's credential of it, for ever.
  No other key gets it, and with a ban it is used up. Only the holder of the invitation can sign such a credential, so
  that a member which passes one on can give away no seat but its own.
- An expired invitation is good for the worker that has its seat here, and for one that most live members know.
- A revocation holds for ever and is passed on. A ban is made of offences that this node has counted itself, or follows
  from a proof that it has checked (audit/liars.py).

This module only decides: it opens no connection, waits for nothing, and reads and writes no file except the
revocations', when told to.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from diloco.swarm.network.known_peers import KnownPeer
from diloco.swarm.network.limits import LruCache, PeerRateLimit, TokenBucket
from diloco.swarm.run_files import append_line
from diloco.swarm.trust.credential import Credential, PeerRefused, RefusalKind
from diloco.swarm.trust.run_key import Revocation
from diloco.swarm.trust.signatures import key_id

MAX_PEERS = 4096
"""Entries of each table: peers with a credential, vouched for, banned, saying hello; seats."""
MAX_SEATS_TOLD = 64
"""Seats of workers that are away or banned, of which a newcomer is told."""
MAX_REVOCATIONS = 1024
HELLOS_AT_ONCE = 5.0
HELLOS_PER_SECOND = 0.2
"""How many hellos one peer may say."""
STRANGERS_AT_ONCE = 64.0
STRANGERS_PER_SECOND = 16.0
"""How many hellos all unknown peers may say together. One costs two signatures to check, well under a millisecond."""
POINTS_PER_OFFENCE = 10
"""An accepted contribution takes back one point."""


class Permissions:
    """Invitations, seats, revocations and bans as one node of one run knows them: they say which peers it answers."""

    def __init__(
        self,
        run_public: bytes,
        peer: str,
        credential: Credential,
        refusals_to_ban: int = 3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`peer` and `credential` are this node's own."""
        credential.verify(run_public, peer, None)
        self.run_public = run_public
        self.run_id = key_id(run_public)
        self.peer = peer
        self.credential = credential.data()
        """This node's own credential, for its hellos."""
        self.refusals: Counter[RefusalKind] = Counter()
        """How often a peer was refused, by kind."""
        self._own = credential
        self._refusals_to_ban = refusals_to_ban
        self._clock = clock
        self._known: LruCache[Credential] = LruCache(MAX_PEERS)
        self._passed_on: LruCache[bytes] = LruCache(MAX_PEERS)
        """Credentials of peers that have not said hello here; good for their signatures only."""
        self._vouched: LruCache[None] = LruCache(MAX_PEERS)
        self._bans: LruCache[str] = LruCache(MAX_PEERS)
        self._offence_points: LruCache[int] = LruCache(MAX_PEERS)
        self._hellos = PeerRateLimit(HELLOS_AT_ONCE, HELLOS_PER_SECOND, MAX_PEERS)
        self._strangers = TokenBucket.full(STRANGERS_AT_ONCE, STRANGERS_PER_SECOND, clock())
        self._seats: LruCache[str] = LruCache(MAX_PEERS)
        """Invitation -> the worker that has its seat."""
        self._seats.put(credential.certificate.id, peer)
        self._on_word: dict[str, None] = {}
        """Workers whose invitation had expired when this node first heard of them, admitted as most members know them.
        """
        self.is_known_to_most: Callable[[str], bool | None] = lambda _: None
        """Whether most live members know this peer; None if none tells."""
        self._revocations: dict[bytes, Revocation] = {}
        self._file_stamp: tuple[int, int] | None = None

    # Hellos

    def admit(self, peer: str, credential: bytes, *, worker: bool = True, named: bool = False) -> None:
        """Let a peer that says hello, or that a member names, talk to this node from now on; or raise PeerRefused.

        A worker takes the seat of its invitation. What members name is limited elsewhere (members.py) and is no hello.
        """
        try:
            self._admit(peer, credential, worker, named)
        except PeerRefused as error:
            self.refusals[error.kind] += 1
            raise

    def _admit(self, peer: str, data: bytes, worker: bool, named: bool) -> None:
        known = self._known.get(peer)
        if known is not None and known.data() == data:
            self._check_not_excluded(peer, known)
            self._check_role(peer, known, worker)
            return
        if not named:
            self._count_hello(peer, known is not None or peer in self._vouched)
        credential = self._verified(peer, data)
        if self._clock() >= credential.certificate.expires:
            self._check_known_before(peer, credential)
        self._check_role(peer, credential, worker)
        if credential.role == "worker":
            self._seats.put(credential.certificate.id, peer)
        self._known.put(peer, credential)

    def _verified(self, peer: str, data: bytes) -> Credential:
        """Return the credential, if it is valid or expired, the peer is not excluded, and its seat is free or its
        own."""
        credential = Credential.read(data)
        credential.verify(self.run_public, peer, None)
        self._check_not_excluded(peer, credential)
        invitation = credential.certificate.id
        if credential.role == "worker" and self._seats.get(invitation) not in (None, peer):
            raise PeerRefused(
                "seats",
                f"the seat of the invitation {invitation} is taken by another worker: come back with the run folder "
                "that has joined with it (diloco train --resume RUN), or ask the owner of the run for another one "
                "(diloco invite RUN)",
            )
        return credential

    def _check_known_before(self, peer: str, credential: Credential) -> None:
        """Raise PeerRefused unless the worker of this expired invitation has come before.

        This node or most members must know it. A worker's machine may still send guests (`diloco status`).
        """
        if peer in self._vouched:
            return
        holder = self._seats.get(credential.certificate.id)
        if credential.role == "guest":
            has_come_before = holder is not None
        else:
            has_come_before = holder == peer
        if has_come_before:
            return
        if credential.role == "worker" and self.is_known_to_most(peer):
            self._on_word[peer] = None
            return
        credential.verify(self.run_public, peer, self._clock())

    def _check_role(self, peer: str, credential: Credential, worker: bool) -> None:
        if worker and credential.role != "worker":
            raise PeerRefused("forged", f"the credential that {peer} shows is a guest's, and it would be a worker")

    def check_seat(self, guest: str) -> None:
        """Raise PeerRefused if another worker has the seat of this guest, which is about to join."""
        invitation = self.invitation_of(guest)
        holder = None if invitation is None else self._seats.get(invitation)
        if holder is not None:
            raise PeerRefused(
                "seats",
                f"the seat of the invitation {invitation} is taken by the worker {holder[-8:]}: come back with its run "
                "folder (diloco train --resume RUN), or ask the owner of the run for another invitation",
            )

    def drop_unknown(self) -> list[str]:
        """Forget the workers that were admitted on the word of others, and that most members do not know any more.

        The first member that a newcomer meets may be the only one that knows a worker with an expired invitation.
        """
        dropped = [peer for peer in self._on_word if self.is_known_to_most(peer) is False]
        for peer in dropped:
            del self._on_word[peer]
            credential = self._known.get(peer)
            if credential is not None:
                self._seats.drop(credential.certificate.id)
            self._known.drop(peer)
        return dropped

    def _count_hello(self, peer: str, remembered: bool) -> None:
        now = self._clock()
        if not self._hellos.take(peer, now) or not (remembered or self._strangers.take(now)):
            raise PeerRefused("busy", "too many hellos; try again in some seconds")

    def vouch_for(self, peers: Iterable[str]) -> None:
        """Remember peers that this machine's own files name: its invitation's addresses, workers that it has met.

        An expired invitation is accepted from them; every other rule holds for them as for any peer.
        """
        for peer in peers:
            if 0 < len(peer) <= 128:
                self._vouched.put(peer, None)

    # Seats

    def reserve_seats(self, peers: Iterable[KnownPeer]) -> None:
        """Count the seats of these workers, which peers.json names, as taken."""
        for worker in peers:
            if worker.invitation is not None and worker.worker is not None:
                self._seats.put(worker.invitation, worker.peer)

    def seats_taken(self, without: Collection[str]) -> list[tuple[str, bytes]]:
        """Return the workers that are away or banned, and the credentials that prove their seats, to tell a newcomer.

        `without`: the members that it is told of anyway. The last ones that were heard of come first.
        """
        workers = []
        for peer in dict.fromkeys(reversed([*self._bans, *self._known])):
            if peer in without or peer == self.peer:
                continue
            data = self.credential_of(peer)
            if data is not None and Credential.read(data).role == "worker":
                workers.append((peer, data))
        return workers[:MAX_SEATS_TOLD]

    def take_seat_for(self, peer: str, data: bytes) -> None:
        """Reserve the seat of a worker that is not here, and whose credential another member has shown.

        No other key gets it. A credential that is not valid changes nothing, nor does one for a seat that is taken.
        """
        try:
            credential = Credential.read(data)
            if credential.role != "worker" or self._seats.get(credential.certificate.id) is not None:
                return
            credential.verify(self.run_public, peer, None)
        except PeerRefused:
            return
        self._passed_on.put(peer, data)
        self._seats.put(credential.certificate.id, peer)

    # Calls and streams

    def check(self, peer: str) -> None:
        """Raise PeerRefused unless the peer has shown its credential and is neither revoked nor banned."""
        credential = self._credential(peer)
        try:
            if credential is None:
                raise PeerRefused("unknown", f"{peer} has not said hello to this peer, or long ago; say hello first")
            self._check_not_excluded(peer, credential)
        except PeerRefused as error:
            self.refusals[error.kind] += 1
            raise

    def remember(self, peer: str, data: bytes) -> None:
        """Keep a valid credential that another member passes on: what `peer` has signed counts from now on."""
        if self.credential_of(peer) is None:
            try:
                credential = self._verified(peer, data)
            except PeerRefused:
                return
            if credential.role == "worker":
                self._passed_on.put(peer, data)

    def credential_of(self, peer: str) -> bytes | None:
        """Return the credential that a peer has shown, or another has passed on; None: it is not known to be
        invited."""
        credential = self._credential(peer)
        return self._passed_on.get(peer) if credential is None else credential.data()

    def has_seat(self, peer: str) -> bool:
        """Return whether the peer is a worker whose invitation is known here, and whose seat is its own.

        A second key of an invitation has none, nor has a guest.
        """
        data = self.credential_of(peer)
        if data is None:
            return False
        credential = Credential.read(data)
        invitation = credential.certificate.id
        holder = self.peer if invitation == self._own.certificate.id else self._seats.get(invitation)
        return credential.role == "worker" and holder in (None, peer)

    def invitation_of(self, peer: str) -> str | None:
        """Return the id of the invitation that the peer came with, to keep beside its addresses; None: not known."""
        credential = self._credential(peer)
        return None if credential is None else credential.certificate.id

    def _credential(self, peer: str) -> Credential | None:
        return self._own if peer == self.peer else self._known.get(peer)

    def _check_not_excluded(self, peer: str, credential: Credential) -> None:
        reason = self._bans.get(peer)
        if reason is not None:
            raise PeerRefused("banned", f"{peer} is banned from the run {self.run_id}: {reason}")
        invitation = credential.certificate.id
        holder = self._seats.get(invitation)
        if holder is not None and holder in self._bans:
            raise PeerRefused(
                "banned", f"the worker that came with the invitation {invitation} is banned: its seat is used up"
            )
        for record in self._revocations.values():
            if record.excludes(peer, invitation):
                what = peer if peer in record.peers else f"the invitation that {peer} came with"
                remedy = "" if peer in record.peers else "; ask for a new one"
                raise PeerRefused("revoked", f"{what} was revoked by the owner of the run{remedy}")

    # Revocations

    def add_revocation(self, data: bytes) -> bool:
        """Add a record, or raise PeerRefused if the run has not signed it.

        True if it is new here: pass it on, save it.
        """
        if data in self._revocations:
            return False
        record = Revocation.read(data, self.run_public)
        if len(self._revocations) >= MAX_REVOCATIONS:
            raise PeerRefused("busy", f"no more than {MAX_REVOCATIONS} revocations are kept")
        self._revocations[data] = record
        return True

    def revocations(self) -> list[bytes]:
        """Return all signed records, in the same order at every node."""
        return sorted(self._revocations)

    def revocations_digest(self) -> str:
        """16 hex digits, sent with every beat: a peer with another digest asks for the records."""
        digest = hashlib.sha256()
        for data in self.revocations():
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()[:16]

    def load_revocations(self, path: Path) -> bool:
        """Read RUN/swarm/revocations.txt; True if it had a new record. Costs one `stat` while the file is unchanged.

        A line that the run's key has not signed, or half a line, is skipped.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._file_stamp:
            return False
        self._file_stamp = stamp
        any_new = False
        for line in path.read_bytes().splitlines():
            try:
                any_new = (bool(line) and self.add_revocation(line)) or any_new
            except PeerRefused:
                continue
        return any_new

    def save_revocations(self, path: Path) -> None:
        """Append the records that the file lacks. If several processes do so at once, a record is there twice."""
        saved = set(path.read_bytes().splitlines()) if path.exists() else set()
        for data in self.revocations():
            if data not in saved:
                append_line(path, data.decode())

    # Offences and bans

    def record_offence(self, peer: str, reason: str) -> bool:
        """Count something that an honest peer does not do; True if the peer is now banned.

        Offences: a contribution that is not finite, out of norm, of another shape, model or codec, or not what its
        header claims; a message that cannot be read or breaks a limit. No offences, since honest peers do this too: an
        anchor whose digest differs, lateness, a message of an old round, silence, a broken connection.
        """
        if self._credential(peer) is None or peer in self._bans:  # a peer without a credential is refused anyway
            return peer in self._bans
        points = (self._offence_points.get(peer) or 0) + POINTS_PER_OFFENCE
        self._offence_points.put(peer, points)
        if points > (self._refusals_to_ban - 1) * POINTS_PER_OFFENCE:
            self.ban(peer, f"refused too often, the last time because: {reason}")
        return peer in self._bans

    def record_accepted(self, peer: str) -> None:
        """Count a good contribution of this peer."""
        points = self._offence_points.get(peer)
        if points is not None:
            self._offence_points.put(peer, max(0, points - 1))

    def ban(self, peer: str, reason: str) -> None:
        """Ban the peer for the rest of the run; its invitation's seat is used up.

        A node that starts again restores its bans.
        """
        data = self.credential_of(peer)
        if data is not None:
            self._seats.put(Credential.read(data).certificate.id, peer)
        self._bans.put(peer, reason)
        self._offence_points.drop(peer)

    def bans(self) -> dict[str, str]:
        """Return the banned peers, each with the reason."""
        return {peer: self._bans.get(peer) or "" for peer in list(self._bans)}
