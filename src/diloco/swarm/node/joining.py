"""Joining the swarm: find a member, say hello to all, get a worker number.

A node looks at the addresses of its invitation and of all peers that this machine's workers have met (peers.json). The
founder begins a new swarm if no peer answers; every other node must find one.
"""

import asyncio
import json
import logging
from typing import Any

from diloco.errors import Excluded, RendezvousError
from diloco.own_command import command
from diloco.swarm.network.known_peers import read_peers
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node import clock
from diloco.swarm.node.calls import addressed
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.members import Members
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.membership import clashes
from diloco.swarm.protocol.messages import AskNumber, Number, expect
from diloco.swarm.protocol.refusals import NOT_ADMITTED
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
    for peer, credential in saved.get("seats", {}).items():
        members.permissions.take_seat_for(str(peer), bytes.fromhex(credential))
    for peer, reason in saved.get("banned", {}).items():
        members.permissions.ban(str(peer), str(reason))
    wished = int(saved.get("number", -1))
    if saved.get("process", "") >= members.status.process:  # the clock of this machine was set back
        members.status.process = f"{int(saved['process'][:20]) + 1:020d}{members.status.process[20:]}"
    if await _find_member(heartbeats):
        members.status.take_number(await _ask_for_number(heartbeats, wished))
        if 0 <= wished != members.status.number:  # another worker has taken it since this one was last here
            _tell_renumbered(members, wished, members.status.number)
    elif members.settings.founder:
        members.status.found_run(max(wished, 0))
    else:
        tried = [address for addresses in _known_addresses(members).values() for address in addresses]
        raise RendezvousError(
            f"no worker of this run answered at {', '.join(tried) or 'any address (none is known)'} within "
            f"{timing.SEARCH_SECONDS:g} s: is one running there, and its port open? Ask for a fresh invitation "
            f"({command('invite', 'RUN')}), and see {command('doctor', '-')}"
        )
    save(members)
    members.numbers[members.me] = members.status.number
    for peer in members.live():
        heartbeats.beat_soon(peer.name)


def save(members: Members) -> None:
    """Save what this worker's next start needs: its number, the peers that it has banned with the seats that they have
    used up, and the name of this process."""
    status = members.status
    permissions = members.permissions
    credentials = {peer: permissions.credential_of(peer) for peer in permissions.bans()}
    seats = {peer: credential.hex() for peer, credential in credentials.items() if credential is not None}
    values = {"number": status.number, "banned": permissions.bans(), "seats": seats, "process": status.process}
    write_private(members.settings.path(f"{members.settings.name}.json"), json.dumps(values) + "\n")


def _read_saved(settings: Settings) -> dict[str, Any]:
    try:
        values = json.loads(settings.path(f"{settings.name}.json").read_text())
        process = str(values.get("process", ""))
        int(process[:20] or "0")  # a ValueError if it is not one of name_process
        seats = dict(values.get("seats", {}))
        return {"number": int(values["number"]), "banned": dict(values["banned"]), "seats": seats, "process": process}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _known_addresses(members: Members) -> dict[str, list[str]]:
    """Peer -> the addresses of it in the invitation and in peers.json."""
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


async def _find_member(heartbeats: Heartbeats) -> bool:
    """Try all known peers at once, again and again for a while."""
    members = heartbeats.members
    founder = heartbeats.settings.founder
    end = clock.now() + (timing.FOUNDER_SEARCH_SECONDS if founder else timing.SEARCH_SECONDS)
    admission_seconds = max(timing.SEARCH_SECONDS, timing.ADMISSION_SHARE * heartbeats.settings.lost_seconds)
    last = clock.now() + admission_seconds  # while a member answers
    while True:
        known = _known_addresses(members)
        called = [peer for peer in members.peers.values() if peer.heard_at]
        known |= {peer.name: list(peer.addresses) for peer in called}
        _vouch_for_own(members)
        problems = await asyncio.gather(*(_try(heartbeats, peer, addresses) for peer, addresses in known.items()))
        _check_admitted(problems)
        if any(problem is None for problem in problems):
            others = [peer for peer in members.peers.values() if not peer.live]  # those that the first ones named
            await asyncio.gather(*(_try(heartbeats, peer.name) for peer in others))
            return True
        refusals = [problem for problem in problems if isinstance(problem, CallRefused)]
        if refusals and clock.now() > last:
            raise RendezvousError(f"the swarm does not admit this worker now: {refusals[0]}; try again later")
        if not refusals and (clock.now() > end or (founder and not known)):
            return False
        await asyncio.sleep(timing.SEARCH_PAUSE_SECONDS)


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


def _check_admitted(problems: list[Exception | None]) -> None:
    """Raises Excluded if more members turn this worker away for good than let it in: a new member knows no old bans."""
    away = [
        problem
        for problem in problems
        if (problem.code if isinstance(problem, CallRefused) else getattr(problem, "kind", "")) in NOT_ADMITTED
    ]
    if len(away) > problems.count(None):
        raise Excluded(f"the swarm does not admit this worker: {away[0]}")


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
        problems = await asyncio.gather(*(_try(heartbeats, peer, addresses) for peer, addresses in known.items()))
        has_found = any(problem is None for problem in problems)
        longer = min(timing.LONGEST_LOOK_SECONDS, timing.LOOK_GROWTH * pause)
        pause = timing.LOOK_SECONDS if has_found else longer


async def settle_number(heartbeats: Heartbeats) -> bool:
    """Ask for another number if another live worker has this one's too; return whether there is a new one."""
    members = heartbeats.members
    leader = members.leader()
    if not clashes(members, members.me) or leader in (None, members.me):
        return False
    try:
        answer = await heartbeats.transport.call(
            leader, addressed(members, leader, AskNumber(-1)), heartbeats.settings.lost_seconds
        )
        number = expect(answer, Number).number
    except (CallRefused, Malformed, Unreachable) as problem:
        logger.info("no other number yet: %s", problem)
        return False
    if number == members.status.number:
        return False
    _tell_renumbered(members, members.status.number, number)
    members.status.take_number(number)
    members.numbers[members.me] = number
    save(members)
    for peer in members.live():
        heartbeats.beat_soon(peer.name)
    return True


def _tell_renumbered(members: Members, before: int, number: int) -> None:
    members.on_event("renumbered", {"peer": members.me, "before": before, "number": number})


async def _ask_for_number(heartbeats: Heartbeats, wished: int) -> int:
    """Ask the leader; the members agree on which one leads within some beats."""
    members = heartbeats.members
    end = clock.now() + timing.SEARCH_SECONDS
    problem = "no worker leads it: none that is known has the state of the run"
    while clock.now() < end:
        leader = members.leader()
        if leader is not None and leader != members.me:
            name = f"worker {members.number_of(leader)} ({leader[-6:]})"
            try:
                request = addressed(members, leader, AskNumber(wished))
                answer = await heartbeats.transport.call(leader, request, heartbeats.settings.lost_seconds)
                return expect(answer, Number).number
            except (CallRefused, Malformed) as refused:
                problem = f"{name}, which leads it, says: {refused}"
            except Unreachable as unreachable:
                problem = f"{name}, which leads it, cannot be reached from here"
                logger.info("no number from %s: %s", leader, unreachable)
            logger.info("no number yet: %s", problem)
        await asyncio.sleep(timing.SEARCH_PAUSE_SECONDS)
        peers = list(members.peers.values())
        _check_admitted(await asyncio.gather(*(_try(heartbeats, peer.name) for peer in peers)))
    raise RendezvousError(
        f"the swarm has given this worker no number within {timing.SEARCH_SECONDS:g} s: {problem} "
        f"({len(members.peers)} workers are known); see {command('doctor', '-')}, and try again"
    )
