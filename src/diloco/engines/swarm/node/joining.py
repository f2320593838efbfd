"""Into the swarm: find somebody of it, say hello to everybody, get a number.

Whom to look for: the addresses of the invitation, and all that this machine's workers have met before (peers.json). The
founder founds the swarm if nobody of it answers; everyone else must find somebody.
"""

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any

from diloco.engines.swarm.network.known_peers import read_peers
from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.engines.swarm.node import clock
from diloco.engines.swarm.node.membership import Membership
from diloco.engines.swarm.node.wire import Malformed, Message, pack
from diloco.engines.swarm.run_files import INVITATION_FILE, PEERS_FILE, write_private
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.trust.credential import PeerRefused
from diloco.engines.swarm.trust.invitation import Invitation
from diloco.errors import Excluded, RendezvousError

logger = logging.getLogger(__name__)

_SEARCH_SECONDS = 60.0
_FOUNDER_SEARCH_SECONDS = 6.0
_PAUSE_SECONDS = 0.5


async def join(membership: Membership, settings: Settings) -> None:
    """Afterwards this node has a number. Raises RendezvousError."""
    wished = _former_number(settings)
    for peer, reason in _remembered(settings).get("banned", {}).items():
        membership.permissions.ban(str(peer), str(reason))
    if await _find_somebody(membership, settings):
        number = await _ask_for_number(membership, wished)
        membership.status.number = number
    elif settings.founder:
        membership.status.number = max(wished, 0)
        membership.status.holds = True
    else:
        tried = [address for addresses in _where(membership, settings).values() for address in addresses]
        raise RendezvousError(
            f"nobody of this run answered at {', '.join(tried) or 'any address (none is known)'} within "
            f"{_SEARCH_SECONDS:g} s: is a worker of it running there, and its port open? Ask for a fresh invitation "
            "(diloco invite RUN), and see diloco doctor INVITATION"
        )
    remember(membership, settings)
    membership.numbers[membership.me] = membership.status.number
    for peer in membership.live():
        membership.beat_soon(peer.name)


def remember(membership: Membership, settings: Settings) -> None:
    """For this worker's next start: its number, and whom it has banned."""
    values = {"number": membership.status.number, "banned": membership.permissions.bans()}
    write_private(settings.path(f"{settings.name}.json"), json.dumps(values) + "\n")


def _former_number(settings: Settings) -> int:
    return int(_remembered(settings).get("number", -1))


def _remembered(settings: Settings) -> dict[str, Any]:
    try:
        values = json.loads(settings.path(f"{settings.name}.json").read_text())
        return {"number": int(values["number"]), "banned": dict(values["banned"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _where(membership: Membership, settings: Settings) -> dict[str, list[str]]:
    """Addresses by peer."""
    where: dict[str, list[str]] = {}
    found: Iterable[str] = Invitation.parse(settings.path(INVITATION_FILE).read_text(), None).addresses
    for address in [*found, *(a for known in read_peers(settings.path(PEERS_FILE)) for a in known.addresses)]:
        peer = address.rsplit("/p2p/", 1)[-1]
        if peer != membership.me and address not in where.setdefault(peer, []):
            where[peer].append(address)
    where.pop(membership.me, None)
    return where


async def _find_somebody(membership: Membership, settings: Settings) -> bool:
    """Everyone that is known is tried at once, again and again for a while."""
    end = clock.now() + (_FOUNDER_SEARCH_SECONDS if settings.founder else _SEARCH_SECONDS)
    refusal: Exception | None = None
    while True:
        where = _where(membership, settings)
        membership.permissions.vouch_for(where)
        results = await asyncio.gather(*(_try(membership, peer, at) for peer, at in where.items()))
        if any(result is None for result in results):
            await _greet_all(membership)
            return True
        refused = [r for r in results if isinstance(r, CallRefused | PeerRefused) and not str(r).startswith("busy")]
        refusal = refused[0] if refused else None
        if refusal is not None:
            raise Excluded(f"the swarm does not take this worker in: {refusal}")
        if clock.now() > end or (settings.founder and not where):
            return False
        await asyncio.sleep(_PAUSE_SECONDS)


async def _try(membership: Membership, peer: str, addresses: list[str]) -> Exception | None:
    try:
        await membership.transport.connect(peer, addresses, membership.settings.lost_seconds)
        await membership.greet(peer)
    except (Unreachable, CallRefused, Malformed, PeerRefused) as problem:
        logger.info("%s: %s", peer, problem)
        return problem
    return None


async def _greet_all(membership: Membership) -> None:
    """Those that the first ones told of."""
    others = [peer for peer in membership.peers.values() if not peer.live]
    await asyncio.gather(*(_try(membership, peer.name, peer.addresses) for peer in others))


async def _ask_for_number(membership: Membership, wished: int) -> int:
    """Of the leader; views of who that is settle within some beats."""
    end, problem = clock.now() + _SEARCH_SECONDS, "nobody leads it: none of those known has the state of the run"
    while clock.now() < end:
        leader = membership.leader()
        if leader is not None and leader != membership.me:
            try:
                data = await membership.transport.call(
                    leader, pack("number", wished=wished), membership.settings.lost_seconds
                )
                return Message.unpack(data).number("number")
            except (CallRefused, Malformed) as refused:
                problem = f"{_name(membership, leader)}, which leads it, says: {refused}"
            except Unreachable as unreachable:
                problem = f"{_name(membership, leader)}, which leads it, cannot be reached from here"
                logger.info("no number from %s: %s", leader, unreachable)
            logger.info("no number yet: %s", problem)
        await asyncio.sleep(_PAUSE_SECONDS)
        await asyncio.gather(*(_try(membership, p.name, p.addresses) for p in list(membership.peers.values())))
    raise RendezvousError(
        f"the swarm has given this worker no number within {_SEARCH_SECONDS:g} s: {problem} "
        f"({len(membership.peers)} workers are known); see diloco doctor INVITATION, and try again"
    )


def _name(membership: Membership, peer: str) -> str:
    return f"worker {membership.number_of(peer)} ({peer[-6:]})"
