"""What the owner of a run folder can do: invite machines, and revoke a peer. Torch-free.

Reads and writes RUN/swarm only. A worker that runs there finds the revocation in the file and passes it on.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from diloco.engines.swarm.network import identity
from diloco.engines.swarm.network.known_peers import KnownPeer, read_peers
from diloco.engines.swarm.network.multiaddr import ip_of, is_public
from diloco.engines.swarm.run_files import (
    INVITATION_FILE,
    PEERS_FILE,
    REVOCATIONS_FILE,
    RUN_KEY_FILE,
    SWARM_FOLDER,
    append_line,
    write_private,
)
from diloco.engines.swarm.trust.credential import PeerRefused
from diloco.engines.swarm.trust.invitation import Invitation, invite
from diloco.engines.swarm.trust.revocation import Revocation
from diloco.engines.swarm.trust.run_key import RunKey
from diloco.errors import ConfigError

DAYS = 30.0
"""How long a new invitation is valid if the user does not say."""
MAX_DAYS = 3650.0
_MAX_ADDRESSES = 4
_LIVE_SECONDS = 60.0
"""A peer that was silent for so long before the latest news of any peer is left out of invitations."""
_DAY_SECONDS = 86_400.0
_PEER_ID_LENGTH = 52
_MAX_NAMES = 5
"""Peers named in a message."""


@dataclass(frozen=True)
class RevokeResult:
    peer: str
    record: Revocation
    is_new: bool
    """False: the peer had been revoked before."""
    renewed: Invitation | None
    """The new invitation of this machine, if its own was revoked together with the peer."""
    staying: int
    """How many other peers use the revoked invitation and stay, as far as is known here."""


def swarm_folder(run: Path) -> Path:
    """RUN/swarm; ConfigError if the run is not of a swarm."""
    if not run.is_dir():
        raise ConfigError(f"{run} is not a run folder: there is no such folder")
    folder = run / SWARM_FOLDER
    if not (folder / INVITATION_FILE).is_file():
        raise ConfigError(f"{run} is not a run of a swarm: it has no {SWARM_FOLDER}/{INVITATION_FILE}")
    return folder


def may_invite(folder: Path) -> bool:
    """Whether this is the machine where the run began: only it can make new invitations."""
    return (folder / RUN_KEY_FILE).exists()


def new_invitation(folder: Path, days: float, now: float, seats: int = 1) -> Invitation:
    """Signed with the run's key."""
    if not (math.isfinite(days) and 0 < days <= MAX_DAYS):
        raise ConfigError(f"--days {days:g} must be above 0 and at most {MAX_DAYS:g}")
    key = _run_key(folder, "makes new invitations")
    return invite(key, _addresses(folder), max(1.0, days * _DAY_SECONDS), now, seats)


def own_invitation(folder: Path, now: float) -> Invitation:
    """The invitation that this machine came with, with the addresses that are known now."""
    own = Invitation.parse((folder / INVITATION_FILE).read_text(), now)
    if any(record.invitation == own.id for record in revocations(folder, own.run_public)):
        raise ConfigError(
            "the invitation that this machine came with was revoked: ask the owner of the run for a new one"
        )
    return own.with_addresses(_addresses(folder))


def refresh_invitation(folder: Path) -> bool:
    """Write the addresses that are known now into invitation.txt, before older ones: the machine that they were of may
    be gone. Returns whether anything has changed."""
    path = folder / INVITATION_FILE
    own = Invitation.parse(path.read_text(), None)
    fresh = own.with_addresses(list(dict.fromkeys([*_addresses(folder), *own.addresses]))[:_MAX_ADDRESSES])
    if fresh == own:
        return False
    write_private(path, fresh.text() + "\n")
    return True


def revoke(folder: Path, which: str, now: float) -> RevokeResult:
    """Exclude a peer and its invitation. `which`: its worker number, its id, or a unique beginning or end of the id.

    The record names the peers that stay: the others that came with the same invitation, and this machine's workers,
    which may have come with it.
    """
    key = _run_key(folder, "can revoke")
    peers = read_peers(folder / PEERS_FILE)
    peer = _find(peers, which)
    own = _own_peers(folder)
    if peer.local_name is not None or peer.peer in own:
        name = peer.local_name or own[peer.peer]
        raise ConfigError(f"{peer.peer} is this machine's own {name}: stop it instead")
    records = revocations(folder, key.public)
    before = [one for one in records if peer.peer in one.peers and peer.invitation in (None, one.invitation)]
    out = {peer.peer}.union(*(one.peers for one in records))
    if before:
        record = before[-1]
        return RevokeResult(peer.peer, record, False, None, len(_came_with(record.invitation, peers) - out))
    companions = _came_with(peer.invitation, peers) - out
    record = key.revoke([peer.peer], peer.invitation, companions | own.keys() if peer.invitation else set(), now)
    append_line(folder / REVOCATIONS_FILE, record.data.decode())
    renewed = _renew(folder, key, record, now)
    if renewed is not None:  # this machine's workers came with it too
        companions |= own.keys()
    return RevokeResult(peer.peer, record, True, renewed, len(companions))


def _came_with(invitation: str | None, peers: Iterable[KnownPeer]) -> set[str]:
    return {peer.peer for peer in peers if invitation is not None and peer.invitation == invitation}


def revocations(folder: Path, run_public: bytes) -> list[Revocation]:
    """The records in the file that the run's key has signed."""
    path, found = folder / REVOCATIONS_FILE, []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(Revocation.read(line, run_public))
        except PeerRefused:  # half a line, say
            continue
    return found


def _run_key(folder: Path, action: str) -> RunKey:
    if not may_invite(folder):
        raise ConfigError(f"{folder} has no {RUN_KEY_FILE}: only the machine where the run began {action}")
    return RunKey.load(folder / RUN_KEY_FILE)


def _own_peers(folder: Path) -> dict[str, str]:
    """This machine's own workers: peer id -> name. Read from their keys: peers.json is a cache and may lack them."""
    keys = [path for path in folder.glob("*.key") if path.name != RUN_KEY_FILE]
    return {identity.load_or_create(path): path.stem for path in keys}


def _renew(folder: Path, key: RunKey, record: Revocation, now: float) -> Invitation | None:
    """Replace invitation.txt if it was revoked: the workers that this machine starts later come with it."""
    path = folder / INVITATION_FILE
    own = Invitation.parse(path.read_text(), None)
    if own.id != record.invitation:
        return None
    left = own.expires - now
    fresh = invite(key, own.addresses, left if left > 0 else DAYS * _DAY_SECONDS, now, own.seats)
    write_private(path, fresh.text() + "\n")
    return fresh


def _find(peers: list[KnownPeer], which: str) -> KnownPeer:
    if which.isdecimal() and len(which) < 9:
        found = [peer for peer in peers if peer.worker == int(which)]
    else:
        found = [peer for peer in peers if which and (peer.peer.startswith(which) or peer.peer.endswith(which))]
        if not found and len(which) == _PEER_ID_LENGTH and which.isalnum():
            return KnownPeer(which, None, ())
    if len(found) == 1:
        return found[0]
    names = ", ".join(_name(peer) for peer in (found or peers)[:_MAX_NAMES]) or "none"
    if found:
        raise ConfigError(f"{which!r} fits {len(found)} peers: {names}; write more of the id")
    raise ConfigError(
        f"{which!r} is no peer that this machine has met; the last seen: {names}; or give a whole peer id"
    )


def _name(peer: KnownPeer) -> str:
    return peer.peer if peer.worker is None else f"{peer.peer} (worker {peer.worker})"


# Addresses


def _addresses(folder: Path) -> list[str]:
    """The addresses for an invitation: of peers met lately, else those of this machine's own invitation."""
    own = Invitation.parse((folder / INVITATION_FILE).read_text(), None)
    revoked = {peer for record in revocations(folder, own.run_public) for peer in record.peers}
    found = choose_addresses(peer for peer in read_peers(folder / PEERS_FILE) if peer.peer not in revoked)
    found = found or list(own.addresses)
    if not found:
        raise ConfigError(f"no address of this run is known yet ({folder / PEERS_FILE}): start a worker first")
    return found


def choose_addresses(peers: Iterable[KnownPeer]) -> list[str]:
    """At most four, which lead to different machines: this one's two best, then the best of each other member.

    Peers that were silent in the last minute of which anything is known are left out, and so are peers of other
    machines without a worker number. Public addresses come first, then the members with the lowest numbers.
    """
    known = list(peers)
    latest = max((peer.seen for peer in known), default=0.0)
    known = [peer for peer in known if peer.addresses and latest - peer.seen <= _LIVE_SECONDS]
    own = [peer for peer in known if peer.local_name is not None]
    others = [(peer.worker, peer) for peer in known if peer.local_name is None and peer.worker is not None]
    ranked = [peer for _, peer in sorted(others, key=lambda one: (_distance(_best(one[1])[0]), one[0]))]
    chosen = _best(own[0])[:2] if own else []
    chosen += [_best(peer)[0] for peer in [*ranked, *own[1:]]]
    return chosen[:_MAX_ADDRESSES]


def _best(peer: KnownPeer) -> list[str]:
    """Addresses that most machines can call come first; loopback and link-local ones only if there are no others."""
    ranked = sorted(peer.addresses, key=_distance)
    return [address for address in ranked if _distance(address) < 2] or ranked


def _distance(address: str) -> int:
    """0: callable from anywhere (names and relays too), 1: from the same network, 2: from the same machine."""
    if is_public(address):
        return 0
    ip = ip_of(address)
    return 2 if ip is None or ip.is_loopback or ip.is_link_local or ip.is_unspecified else 1
