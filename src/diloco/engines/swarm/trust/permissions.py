"""Who may do what in a node: the one place that decides it. Every call and every stream asks `check` first.

A stranger has one thing to say, a hello with its credential (`admit`). What counts is in docs/adr/0014: an expired
invitation turns strangers away and nobody else; a revocation is for ever and passed on; a ban is made of offences that
this node has counted itself, and not passed on. Decides, and does nothing else: no connection, no waiting, and no
file but the revocations', when told to.
"""

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from diloco.engines.swarm.network.limits import LruCache, TokenBucket
from diloco.engines.swarm.run_files import append_line
from diloco.engines.swarm.trust.invitation import Credential, Kind, PeerRefused, Revocation
from diloco.engines.swarm.trust.invitation import run_id as id_of

MAX_PEERS = 4096
"""So many are remembered of each sort: with a credential, vouched for, banned, knocking."""
MAX_REVOCATIONS = 1024
HELLOS_AT_ONCE, HELLOS_PER_SECOND = 5.0, 0.2
"""Of one peer. Its first try, and a few more at once."""
STRANGERS_AT_ONCE, STRANGERS_PER_SECOND = 64.0, 16.0
"""Of all peers together that nobody vouches for: a hello costs two signatures to check, well under a millisecond."""
FORGIVING = 10
"""So many accepted contributions take back one offence."""


class Permissions:
    """Of one node in one run."""

    def __init__(
        self,
        run_public: bytes,
        peer: str,
        credential: Credential,
        refusals_to_ban: int = 3,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`peer` and `credential`: this node's own."""
        credential.verify(run_public, peer, None)
        self.run_public, self.run_id, self.peer = run_public, id_of(run_public), peer
        self.credential = credential.data()
        """To show in a hello."""
        self.refusals: Counter[Kind] = Counter()
        """How often, by kind; for whoever looks at the swarm."""
        self._own = credential
        self._refusals_to_ban, self._clock = refusals_to_ban, clock
        self._known: LruCache[Credential] = LruCache(MAX_PEERS)
        self._vouched: LruCache[None] = LruCache(MAX_PEERS)
        self._bans: LruCache[str] = LruCache(MAX_PEERS)
        self._offences: LruCache[int] = LruCache(MAX_PEERS)  # in points, FORGIVING each
        self._hellos: LruCache[TokenBucket] = LruCache(MAX_PEERS)
        self._strangers = TokenBucket.full(STRANGERS_AT_ONCE, STRANGERS_PER_SECOND, clock())
        self._revocations: dict[bytes, Revocation] = {}
        self._file_stamp: tuple[int, int] | None = None

    # Who comes

    def admit(self, peer: str, credential: bytes) -> None:
        """A peer says hello. Returns if it may be here from now on, else raises PeerRefused."""
        try:
            self._admit(peer, credential)
        except PeerRefused as error:
            self.refusals[error.kind] += 1
            raise

    def _admit(self, peer: str, data: bytes) -> None:
        known = self._known.get(peer)
        if known is not None and known.data() == data:
            self._check_standing(peer, known)
            return
        remembered = known is not None or peer in self._vouched
        self._count_hello(peer, remembered)
        credential = Credential.read(data)
        credential.verify(self.run_public, peer, None if remembered else self._clock())
        self._check_standing(peer, credential)
        self._known.put(peer, credential)

    def _count_hello(self, peer: str, remembered: bool) -> None:
        now = self._clock()
        own = self._hellos.get(peer)
        if own is None:
            own = TokenBucket.full(HELLOS_AT_ONCE, HELLOS_PER_SECOND, now)
            self._hellos.put(peer, own)
        if not own.take(now) or not (remembered or self._strangers.take(now)):
            raise PeerRefused("busy", "too many hellos; try again in some seconds")

    def vouch_for(self, peers: Iterable[str]) -> None:
        """A member's list of members, an invitation's addresses or peers.json name them: they are no strangers.

        An expired invitation is not held against them. All else that is asked of a peer is asked of them too.
        """
        for peer in peers:
            if 0 < len(peer) <= 128:
                self._vouched.put(peer, None)

    # Who is here

    def check(self, peer: str) -> None:
        """Returns if the peer has shown its credential and is in good standing, else raises PeerRefused."""
        credential = self._credential(peer)
        try:
            if credential is None:
                raise PeerRefused("unknown", f"{peer} has not said hello to this peer, or long ago; say hello first")
            self._check_standing(peer, credential)
        except PeerRefused as error:
            self.refusals[error.kind] += 1
            raise

    def invitation_of(self, peer: str) -> str | None:
        """The id of the invitation that it came with, to keep beside its addresses; None: not known."""
        credential = self._credential(peer)
        return None if credential is None else credential.certificate.id

    def _credential(self, peer: str) -> Credential | None:
        return self._own if peer == self.peer else self._known.get(peer)

    def _check_standing(self, peer: str, credential: Credential) -> None:
        reason = self._bans.get(peer)
        if reason is not None:
            raise PeerRefused("banned", f"{peer} is banned from the run {self.run_id}: {reason}")
        invitation = credential.certificate.id
        for record in self._revocations.values():
            if record.concerns(peer, invitation):
                raise PeerRefused("revoked", _revoked(peer, record))

    # Who is out

    def add_revocation(self, data: bytes) -> bool:
        """True if the record is new here (pass it on, save it). Raises PeerRefused if the run has not signed it."""
        if data in self._revocations:
            return False
        record = Revocation.read(data, self.run_public)
        if len(self._revocations) >= MAX_REVOCATIONS:
            raise PeerRefused("busy", f"no more than {MAX_REVOCATIONS} revocations are kept")
        self._revocations[data] = record
        return True

    def revocations(self) -> list[bytes]:
        """All, for those who may not have them; the same order everywhere."""
        return sorted(self._revocations)

    def revocations_digest(self) -> str:
        """Small enough for every beat: who has another one asks for the records."""
        digest = hashlib.sha256()
        for data in self.revocations():
            digest.update(hashlib.sha256(data).digest())
        return digest.hexdigest()[:16]

    def record_offence(self, peer: str, reason: str) -> bool:
        """A peer has done something that an honest one does not do; True if it is now banned for it.

        That is: a contribution that is not finite, out of norm, of another shape, model or codec, or not what its
        header claims; a message that cannot be read or breaks a limit. It is NOT: an anchor whose digest differs,
        being late or of an old round, silence, a broken connection: that happens to the best.
        """
        if self._credential(peer) is None or peer in self._bans:  # outsiders are refused anyway, and not remembered
            return peer in self._bans
        points = (self._offences.get(peer) or 0) + FORGIVING
        self._offences.put(peer, points)
        if points > (self._refusals_to_ban - 1) * FORGIVING:
            self.ban(peer, f"refused too often, the last time because: {reason}")
        return peer in self._bans

    def record_accepted(self, peer: str) -> None:
        """A contribution of this peer was good."""
        points = self._offences.get(peer)
        if points is not None:
            self._offences.put(peer, max(0, points - 1))

    def ban(self, peer: str, reason: str) -> None:
        """For the run. A node that is started again brings its bans back with this."""
        self._bans.put(peer, reason)
        self._offences.drop(peer)

    def bans(self) -> dict[str, str]:
        """Peers and why."""
        return {peer: self._bans.get(peer) or "" for peer in list(self._bans)}

    # The one file

    def load_revocations(self, path: Path) -> bool:
        """Take in what RUN/swarm/revocations.txt has; True if there was news. Quick if the file has not changed.

        A line that the run's key has not signed, or half a line, is passed over: it can do nothing.
        """
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        stamp = (status.st_mtime_ns, status.st_size)
        if stamp == self._file_stamp:
            return False
        self._file_stamp, news = stamp, False
        for line in path.read_bytes().splitlines():
            try:
                news = (bool(line) and self.add_revocation(line)) or news
            except PeerRefused:
                continue
        return news

    def save_revocations(self, path: Path) -> None:
        """Add to the file what it lacks. Several processes may do so at once: then a record is there twice."""
        there = set(path.read_bytes().splitlines()) if path.exists() else set()
        for data in self.revocations():
            if data not in there:
                append_line(path, data.decode())


def _revoked(peer: str, record: Revocation) -> str:
    if peer in record.peers:
        return f"{peer} was revoked by the owner of the run"
    return f"the invitation that {peer} came with was revoked by the owner of the run; ask for a new one"
