"""Attacks by what a member says of itself and of other members."""

import asyncio
import contextlib
import os
import secrets
from collections.abc import Callable
from typing import Any

from msgspec import structs

from attacks import has_begun, instead_of, node
from attacks.rounds import beside
from diloco.engines.swarm.network.identity import peer_id
from diloco.engines.swarm.network.transport import CallRefused, Unreachable
from diloco.engines.swarm.node import messages
from diloco.engines.swarm.node.membership.heartbeats import Heartbeats
from diloco.engines.swarm.node.membership.processes import addressed
from diloco.engines.swarm.run_files import invitation_file
from diloco.engines.swarm.trust.invitation import Invitation

_INVENTED = 10_000


def number_1_is_mine() -> None:
    """It says that it has number 1, an honest member's, from its first hello on."""

    @instead_of(Heartbeats, "hello")
    def hello(honest: Callable[..., messages.Hello], self: Heartbeats) -> messages.Hello:
        made = honest(self)
        return structs.replace(made, status=structs.replace(made.status, number=1))

    @instead_of(Heartbeats, "_beat_for")
    def beat(honest: Callable[..., messages.Beat], self: Heartbeats, *arguments: Any) -> messages.Beat:
        made = honest(self, *arguments)
        return structs.replace(made, status=structs.replace(made.status, number=1))


def invented_members() -> None:
    """It names 10,000 members, with its own invitation and the address of a third party (ATTACK_PORT)."""

    async def tell() -> None:
        own = node()
        invitation = Invitation.parse(own.settings.path(invitation_file()).read_text(), None)
        port, invented = os.environ["ATTACK_PORT"], list[messages.RosterEntry]()
        while not has_begun():
            await asyncio.sleep(0.2)
        for count in range(_INVENTED):
            peer = peer_id(secrets.token_bytes(32))
            where = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",)
            invented.append(messages.RosterEntry(peer, invitation.credential(peer).data(), where, 5 + count % 1000))
            if len(invented) == 256:
                await _tell_all(tuple(invented))
                invented.clear()
        await _tell_all(tuple(invented))

    async def _tell_all(invented: tuple[messages.RosterEntry, ...]) -> None:
        own = node()
        for peer in own.members.live():
            beat = structs.replace(own.heartbeats._beat_for(peer), roster=invented)
            with contextlib.suppress(CallRefused, Unreachable):
                await own.transport.call(peer.name, addressed(own.members, peer.name, beat), 5.0)

    beside(tell)
