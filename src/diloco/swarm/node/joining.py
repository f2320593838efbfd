"""Joining the swarm: find a member, say hello to all, get a worker number.

A node looks at the addresses of its invitation and of all peers that this machine's workers have met (peers.json). What
follows from their answers is decided in protocol/joining.py.
"""

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco.swarm import timing
from diloco.swarm.network.known_peers import read_peers
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.calls import addressed
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.members import Members
from diloco.swarm.protocol.joining import (
    JoinPhase,
    JoinState,
    giver_of_another_number,
    next_look_seconds,
    number_giver,
)
from diloco.swarm.protocol.messages import AskNumber, Number, expect
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.run_files import PEERS_FILE, invitation_file, write_private
from diloco.swarm.settings import Settings
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.invitation import Invitation

logger = logging.getLogger(__name__)


async def join(heartbeats: Heartbeats) -> None:
    """Afterwards this node has a number. Raises RendezvousError, and Excluded for a worker that is not let in."""
    members = heartbeats.members
    saved = _read_saved(members.settings)
    for peer, credential in saved.seats.items():
        members.permissions.take_seat_for(peer, bytes.fromhex(credential))
    for peer, reason in saved.banned.items():
        members.permissions.ban(peer, reason)
    members.status.start_after(saved.process)
    joining = JoinState(members.settings, saved.number, clock.now())
    await _search(heartbeats, joining)
    await _ask_for_number(heartbeats, joining)
    if joining.final_error is not None:
        raise joining.final_error
    assert joining.number is not None
    if joining.phase is JoinPhase.FOUNDED:
        members.status.found_run(joining.number)
    else:
        members.status.take_number(joining.number)
        if 0 <= saved.number != joining.number:  # another worker has taken it since this one was last here
            _tell_renumbered(members, saved.number, joining.number)
    _use_number(heartbeats)


def _use_number(heartbeats: Heartbeats) -> None:
    """This worker has a number, or another one: save it, and tell all."""
    members = heartbeats.members
    members.numbers[members.me] = members.status.number
    save(members)
    for peer in members.live():
        heartbeats.beat_soon(peer.name)


@dataclass(frozen=True)
class _SavedWorker:
    """What this worker's last start has saved."""

    number: int = -1
    banned: dict[str, str] = field(default_factory=dict)
    """Peer -> why."""
    seats: dict[str, str] = field(default_factory=dict)
    """Banned peer -> its credential, in hex."""
    process: str = ""


def save(members: Members) -> None:
    """Save what this worker's next start needs: its number, the peers that it has banned with the seats that they have
    used up, and the name of this process."""
    status = members.status
    permissions = members.permissions
    credentials = {peer: permissions.credential_of(peer) for peer in permissions.bans()}
    seats = {peer: credential.hex() for peer, credential in credentials.items() if credential is not None}
    values = {"number": status.number, "banned": permissions.bans(), "seats": seats, "process": status.process}
    write_private(members.settings.path(f"{members.settings.name}.json"), json.dumps(values) + "\n")


def _read_saved(settings: Settings) -> _SavedWorker:
    try:
        values = json.loads(settings.path(f"{settings.name}.json").read_text())
        process = str(values.get("process", ""))
        int(process[:20] or "0")  # a ValueError if it is not one of name_process
        seats = {str(peer): str(credential) for peer, credential in dict(values.get("seats", {})).items()}
        banned = {str(peer): str(reason) for peer, reason in dict(values["banned"]).items()}
        return _SavedWorker(int(values["number"]), banned, seats, process)
    except (OSError, ValueError, KeyError, TypeError):
        return _SavedWorker()


def _known_addresses(members: Members) -> dict[str, list[str]]:
    """Return a map: peer -> the addresses of it in the invitation and in peers.json."""
    known: dict[str, list[str]] = {}
    invitation = _own_invitation(members.settings)
    met = [address for peer in read_peers(members.settings.path(PEERS_FILE)) for address in peer.addresses]
    for address in [*invitation.addresses, *met]:
        peer = address.rsplit("/p2p/", 1)[-1]
        if peer != members.me and address not in known.setdefault(peer, []):
            known[peer].append(address)
    known.pop(members.me, None)
    return known


def _own_invitation(settings: Settings) -> Invitation:
    return Invitation.parse(settings.path(invitation_file(settings.name)).read_text(), None)


def _vouch_for_own(members: Members) -> None:
    """Vouch for the peers of this worker's own invitation, and for those of peers.json that have said hello here. What
    other members have told (`diloco join` saves their addresses too) is not this machine's own word."""
    met = [peer.peer for peer in read_peers(members.settings.path(PEERS_FILE)) if peer.invitation is not None]
    members.permissions.vouch_for([*_own_invitation(members.settings).peers, *met])


async def _search(heartbeats: Heartbeats, joining: JoinState) -> None:
    """Call all known peers at once, again and again; and those that the first ones named, once one lets this worker
    in."""
    members = heartbeats.members
    while joining.phase is JoinPhase.SEARCHING:
        known = _known_addresses(members)
        called = [peer for peer in members.peers.values() if peer.heard_at]
        known |= {peer.name: list(peer.addresses) for peer in called}
        _vouch_for_own(members)
        joining.judge_search(known, await _say_hello_to(heartbeats, known), clock.now())
        if joining.phase is JoinPhase.SEARCHING:
            await asyncio.sleep(timing.SEARCH_PAUSE_SECONDS)
    if joining.phase is JoinPhase.ASKING:
        named = [peer.name for peer in members.peers.values() if not peer.live]
        await _say_hello_to(heartbeats, dict.fromkeys(named))


async def _say_hello_to(heartbeats: Heartbeats, peers: Mapping[str, list[str] | None]) -> list[Exception | None]:
    """Say hello to all of these peers at once, each at these addresses; the answers as of `_try`."""
    return await asyncio.gather(*(_try(heartbeats, peer, addresses) for peer, addresses in peers.items()))


async def _try(heartbeats: Heartbeats, peer: str, addresses: list[str] | None = None) -> Exception | None:
    """Say hello to a peer at these addresses; None: to one that is known, where it or other members say that it is."""
    try:
        if addresses is None:
            await heartbeats.dial(heartbeats.members.peers[peer])
        else:
            await heartbeats.transport.connect(peer, addresses, heartbeats.settings.lost_seconds)
            await heartbeats.say_hello(peer)
    except (Unreachable, CallRefused, Malformed, PeerRefused) as problem:
        logger.info("%s: %s", peer, problem)
        return problem
    except OSError as problem:  # of this machine, which has run out of open files, say
        heartbeats.members.faults.record("calling a member", problem)
        return problem
    return None


async def look_for_others(heartbeats: Heartbeats) -> None:
    """Call the peers of the invitation and of peers.json that are no known members: for ever, less and less often.

    A worker that began alone, or a side of a split that has forgotten the other, finds the rest so.
    """
    members = heartbeats.members
    pause = timing.LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        known = {peer: where for peer, where in _known_addresses(members).items() if peer not in members.peers}
        _vouch_for_own(members)
        problems = await _say_hello_to(heartbeats, known)
        pause = next_look_seconds(pause, found=any(problem is None for problem in problems))


async def settle_number(heartbeats: Heartbeats) -> bool:
    """Ask for another number if another live worker has this one's too; return whether there is a new one."""
    members = heartbeats.members
    giver = giver_of_another_number(members)
    if giver is None:
        return False
    try:
        number = await _ask_number_of(heartbeats, giver, -1)
    except (CallRefused, Malformed, Unreachable) as problem:
        logger.info("no other number yet: %s", problem)
        return False
    if number == members.status.number:
        return False
    _tell_renumbered(members, members.status.number, number)
    members.status.take_number(number)
    _use_number(heartbeats)
    return True


def _tell_renumbered(members: Members, before: int, number: int) -> None:
    members.on_event("renumbered", {"peer": members.me, "before": before, "number": number})


async def _ask_for_number(heartbeats: Heartbeats, joining: JoinState) -> None:
    """Ask the leader; the members agree on which one leads within some beats."""
    members = heartbeats.members
    while joining.may_ask(members, clock.now()):
        giver = number_giver(members)
        if giver is not None:
            try:
                joining.take_number(await _ask_number_of(heartbeats, giver, joining.wished_number))
                return
            except (CallRefused, Malformed, Unreachable) as problem:
                why = joining.record_no_number(members, giver, problem)
                logger.info("no number yet: %s: %s", why, problem)
        await asyncio.sleep(timing.SEARCH_PAUSE_SECONDS)
        joining.judge_hellos(await _say_hello_to(heartbeats, dict.fromkeys(members.peers)))


async def _ask_number_of(heartbeats: Heartbeats, giver: str, wished: int) -> int:
    """Raises CallRefused, Malformed or Unreachable."""
    request = addressed(heartbeats.members, giver, AskNumber(wished))
    answer = await heartbeats.transport.call(giver, request, heartbeats.settings.lost_seconds)
    return expect(answer, Number).number
