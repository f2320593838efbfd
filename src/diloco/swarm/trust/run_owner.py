"""What the owner of a run folder can do: invite machines, and revoke a peer. Torch-free.

Only RUN/swarm is read and written. A worker that runs there finds the revocation in the file and passes it on.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.errors import ConfigError
from diloco.swarm import timing
from diloco.swarm.network import identity
from diloco.swarm.network.known_peers import KnownPeer, read_peers
from diloco.swarm.network.multiaddr import ip_of, is_public
from diloco.swarm.run_files import (
    INVITATION_FILES,
    PEERS_FILE,
    REVOCATIONS_FILE,
    RUN_KEY_FILE,
    SWARM_FOLDER,
    append_line,
    invitation_file,
    write_private,
)
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.invitation import MARK, Invitation, invite
from diloco.swarm.trust.run_key import Revocation, RunKey

DAYS = 30.0
"""How long a new invitation is valid if the user does not say."""
MAX_DAYS = 3650.0
MAX_SEATS = 1023
"""Invitations that are made at once."""
_MAX_ADDRESSES = 4
_DAY_SECONDS = 86_400.0
_PEER_ID_LENGTH = 52
_MAX_NAMES = 5
"""Peers named in a message."""
_ANYWHERE = 0
_SAME_NETWORK = 1
_SAME_MACHINE = 2


@dataclass(frozen=True)
class RevokeResult:
    peer: str | None
    """The peer's id; None: none is known to have come with the invitation that was revoked."""
    record: Revocation
    is_new: bool
    """False: the peer had been revoked before."""


def swarm_folder(run: Path) -> Path:
    """Return the folder RUN/swarm; ConfigError if the run is not of a swarm."""
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder: there is no such folder")
    folder = run / SWARM_FOLDER
    if not _has_invitation(folder):
        raise ConfigError(f"{run} is not a run of a swarm: it has no {SWARM_FOLDER}/{INVITATION_FILES}")
    return folder


# Invitations


def may_invite(folder: Path) -> bool:
    """Return whether this is the machine where the run began: only it can make new invitations."""
    return (folder / RUN_KEY_FILE).exists()


def new_invitations(folder: Path, days: float, now: float, seats: int = 1) -> list[Invitation]:
    """Make invitations signed with the run's key, one for each of `seats` workers."""
    check_days(days)
    if not 1 <= seats <= MAX_SEATS:
        raise ConfigError(f"--seats {seats} must be from 1 to {MAX_SEATS}: each seat is an invitation of its own")
    key = _run_key(folder, "makes new invitations")
    addresses = _addresses(folder)
    return [invite(key, addresses, max(1.0, days * _DAY_SECONDS), now) for _ in range(seats)]


def check_days(days: float) -> None:
    if not (math.isfinite(days) and 0 < days <= MAX_DAYS):
        raise ConfigError(f"--days {days:g} must be above 0 and at most {MAX_DAYS:g}")


def renewed(folder: Path, invitation: Invitation) -> Invitation:
    """Return the invitation with the addresses that this machine knows now: those that it had may be gone."""
    _check_same_run(folder, invitation, _stored_invitation(folder).run_id)
    return invitation.with_addresses(_addresses(folder))


def _check_same_run(folder: Path, invitation: Invitation, run_id: str) -> None:
    if invitation.run_id != run_id:
        raise ConfigError(f"the invitation is to the run {invitation.run_id}, and {folder.parent} is of {run_id}")


def own_invitation(folder: Path, now: float | None) -> Invitation:
    """Return the invitation of this machine's first worker, with the addresses that are known now."""
    own = Invitation.parse(_own_invitation_file(folder).read_text(), now)
    if any(record.invitation == own.id for record in revocations(folder, own.run_public)):
        raise ConfigError(
            "the invitation that this machine came with was revoked: ask the owner of the run for a new one"
        )
    return own.with_addresses(_addresses(folder))


def refresh_invitation(folder: Path, name: str = "worker-0") -> bool:
    """Write the addresses that are known now into a worker's invitation; return whether anything has changed.

    They stand before older ones, whose machine may be gone.
    """
    path = folder / invitation_file(name)
    own = Invitation.parse(path.read_text(), None)
    fresh = own.with_addresses(list(dict.fromkeys([*_addresses(folder), *own.addresses]))[:_MAX_ADDRESSES])
    if fresh == own:
        return False
    write_private(path, fresh.text() + "\n")
    return True


def give_seats(folder: Path, names: Iterable[str], days: float, now: float) -> None:
    """Write an invitation for each of this machine's own workers that has none; only where the run began."""
    for name in names:
        path = folder / invitation_file(name)
        if not path.exists():
            key = _run_key(folder, f"gives its workers invitations, and {name} has none")
            addresses = _stored_invitation(folder).addresses if _has_invitation(folder) else ()
            write_private(path, invite(key, addresses, max(1.0, days * _DAY_SECONDS), now).text() + "\n")


def check_seats(folder: Path, names: Iterable[str]) -> None:
    """Raise ConfigError if a worker of this machine has no invitation and none can be made here."""
    missing = [name for name in names if not (folder / invitation_file(name)).exists()]
    if missing and not may_invite(folder):
        raise ConfigError(
            f"{', '.join(missing)} of {folder.parent} {'has' if len(missing) == 1 else 'have'} no invitation, and each "
            "worker needs its own: start as many workers as have joined (--workers), and the others with `diloco join` "
            "and new invitations"
        )


def _has_invitation(folder: Path) -> bool:
    return any(folder.glob(INVITATION_FILES))


def _own_invitation_file(folder: Path) -> Path:
    """Return the invitation of this machine's first worker."""
    return min(folder.glob(INVITATION_FILES))


def _stored_invitation(folder: Path) -> Invitation:
    """Read that invitation, with the addresses that it was given, also if it has expired."""
    return Invitation.parse(_own_invitation_file(folder).read_text(), None)


# Revocations


def revoke(folder: Path, which: str, now: float) -> RevokeResult:
    """Exclude a peer and its invitation.

    `which` is its worker number, its id, a unique beginning or end of the id, or an invitation that was given away,
    whether a worker has come with it or not.
    """
    key = _run_key(folder, "can revoke")
    peers = read_peers(folder / PEERS_FILE)
    if which.lower().startswith(MARK):
        invitation = Invitation.parse(which, None)
        _check_same_run(folder, invitation, key.run_id)
        peer = _peer_with(peers, invitation)
    else:
        peer = _find(peers, which)
    own = _own_peers(folder)
    if peer.local_name is not None or peer.peer in own:
        name = peer.local_name or own[peer.peer]
        raise ConfigError(f"{peer.peer} is this machine's own {name}: stop it instead")
    excluded = [peer.peer] if peer.peer else []
    for record in reversed(revocations(folder, key.public)):
        if record.peers.issuperset(excluded) and peer.invitation in (None, record.invitation):
            return RevokeResult(peer.peer or None, record, is_new=False)
    record = key.revoke(excluded, peer.invitation, now)
    append_line(folder / REVOCATIONS_FILE, record.data.decode())
    return RevokeResult(peer.peer or None, record, is_new=True)


def _peer_with(peers: list[KnownPeer], invitation: Invitation) -> KnownPeer:
    """Return the peer that came with an invitation; one without an id if none has."""
    unknown = KnownPeer("", None, (), invitation.id)
    return next((known for known in peers if known.invitation == invitation.id), unknown)


def revocations(folder: Path, run_public: bytes) -> list[Revocation]:
    """Return the records in the file that the run's key has signed."""
    path = folder / REVOCATIONS_FILE
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(Revocation.read(line, run_public))
        except PeerRefused:  # half a line, say
            continue
    return records


def _run_key(folder: Path, action: str) -> RunKey:
    if not may_invite(folder):
        raise ConfigError(f"{folder} has no {RUN_KEY_FILE}: only the machine where the run began {action}")
    return RunKey.load(folder / RUN_KEY_FILE)


def _own_peers(folder: Path) -> dict[str, str]:
    """Return the names of this machine's own workers by peer id, from their keys: peers.json is a cache and may lack
    them."""
    keys = [path for path in folder.glob("*.key") if path.name != RUN_KEY_FILE]
    return {identity.load_or_create(path): path.stem for path in keys}


def _find(peers: list[KnownPeer], which: str) -> KnownPeer:
    """Return the one peer with this worker number, or beginning or end of its id. Raises ConfigError."""
    if which.isdecimal() and len(which) < 9:
        matches = [peer for peer in peers if peer.worker == int(which)]
    else:
        matches = [peer for peer in peers if which and (peer.peer.startswith(which) or peer.peer.endswith(which))]
        if not matches and len(which) == _PEER_ID_LENGTH and which.isalnum():
            return KnownPeer(which, None, ())
    if len(matches) == 1:
        return matches[0]
    names = ", ".join(_name(peer) for peer in (matches or peers)[:_MAX_NAMES]) or "none"
    if matches:
        raise ConfigError(f"{which!r} fits {len(matches)} peers: {names}; write more of the id")
    raise ConfigError(
        f"{which!r} is no peer that this machine has met; the last seen: {names}; or give a whole peer id"
    )


def _name(peer: KnownPeer) -> str:
    return peer.peer if peer.worker is None else f"{peer.peer} (worker {peer.worker})"


# Addresses


def _addresses(folder: Path) -> list[str]:
    """Return the addresses for an invitation: those of peers met lately, else those of this machine's own
    invitation."""
    own = _stored_invitation(folder)
    revoked = {peer for record in revocations(folder, own.run_public) for peer in record.peers}
    peers = [peer for peer in read_peers(folder / PEERS_FILE) if peer.peer not in revoked]
    addresses = choose_addresses(peers) or list(own.addresses)
    if not addresses:
        raise ConfigError(f"no address of this run is known yet ({folder / PEERS_FILE}): start a worker first")
    return addresses


def choose_addresses(peers: Iterable[KnownPeer]) -> list[str]:
    """Choose at most four that lead to different machines: this one's two best, then the best of each other member.

    Peers that were silent in the last minute of which anything is known are left out, and so are peers of other
    machines without a worker number. Public addresses come first, then the members with the lowest numbers.
    """
    known = list(peers)
    latest = max((peer.seen for peer in known), default=0.0)
    live = [peer for peer in known if peer.addresses and latest - peer.seen <= timing.INVITED_LIVE_SECONDS]
    own = [peer for peer in live if peer.local_name is not None]
    others = [
        (_distance(_best_addresses(peer)[0]), peer.worker, _best_addresses(peer)[0])
        for peer in live
        if peer.local_name is None and peer.worker is not None
    ]
    others.sort(key=lambda other: other[:2])  # by distance and number
    chosen = _best_addresses(own[0])[:2] if own else []
    chosen += [address for _, _, address in others]
    chosen += [_best_addresses(peer)[0] for peer in own[1:]]
    return chosen[:_MAX_ADDRESSES]


def _best_addresses(peer: KnownPeer) -> list[str]:
    """Return a peer's addresses, those that most machines can call first; loopback and link-local ones only without
    others."""
    ranked = sorted(peer.addresses, key=_distance)
    return [address for address in ranked if _distance(address) < _SAME_MACHINE] or ranked


def _distance(address: str) -> int:
    """Return how near a caller must be: _ANYWHERE (names, relays), _SAME_NETWORK or _SAME_MACHINE."""
    if is_public(address):
        return _ANYWHERE
    ip = ip_of(address)
    if ip is None or ip.is_loopback or ip.is_link_local or ip.is_unspecified:
        return _SAME_MACHINE
    return _SAME_NETWORK
