"""Attacks by what a member says of itself and of other members."""

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable
from typing import Any

from msgspec import structs

from attacks import has_begun, instead_of, node
from attacks.rounds import beside
from diloco.swarm.network.identity import peer_id
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node.calls import addressed
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.node import Node
from diloco.swarm.node.transfer import Transfer
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.run_files import RUN_KEY_FILE, invitation_file
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.run_key import RunKey

_INVENTED = 10_000


def number_1_is_mine() -> None:
    """It says that it has number 1, an honest member's, from its first hello on."""

    @instead_of(Heartbeats, "hello")
    def hello(honest: Callable[..., messages.Hello], self: Heartbeats) -> messages.Hello:
        honest_hello = honest(self)
        return structs.replace(honest_hello, status=structs.replace(honest_hello.status, number=1))

    @instead_of(Heartbeats, "_beat_for")
    def beat(honest: Callable[..., messages.Beat], self: Heartbeats, *arguments: Any) -> messages.Beat:
        honest_beat = honest(self, *arguments)
        return structs.replace(honest_beat, status=structs.replace(honest_beat.status, number=1))


def invented_members() -> None:
    """It names 10,000 members, with its own invitation and the address of a third party (ATTACK_PORT)."""

    async def tell() -> None:
        own_node = node()
        invitation = Invitation.parse(own_node.settings.path(invitation_file()).read_text(), None)
        port = os.environ["ATTACK_PORT"]
        invented = list[messages.RosterEntry]()
        while not has_begun():
            await asyncio.sleep(0.2)
        for count in range(_INVENTED):
            peer = peer_id(secrets.token_bytes(32))
            addresses = (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",)
            invented.append(messages.RosterEntry(peer, invitation.credential(peer).data(), addresses, 5 + count % 1000))
            if len(invented) == 256:
                await _tell_all(tuple(invented))
                invented.clear()
        await _tell_all(tuple(invented))

    beside(tell)


async def _tell_all(invented: tuple[messages.RosterEntry, ...]) -> None:
    own_node = node()
    for peer in own_node.members.live():
        beat = structs.replace(own_node.heartbeats._beat_for(peer), roster=invented)
        with contextlib.suppress(CallRefused, Unreachable):
            await own_node.transport.call(peer.name, addressed(own_node.members, peer.name, beat), 5.0)


def invented_with_a_live_number() -> None:
    """The owner of the run names 60 members, each with an invitation of its own, the number 1 of an honest member and
    the address of a third party."""

    async def tell() -> None:
        own_node = node()
        while not has_begun():
            await asyncio.sleep(0.2)
        key = RunKey.load(own_node.settings.path(RUN_KEY_FILE))
        port = os.environ["ATTACK_PORT"]
        peers = [peer_id(secrets.token_bytes(32)) for _ in range(60)]
        credentials = [(peer, invite(key, [], 86400.0, time.time()).credential(peer).data()) for peer in peers]
        while True:
            roster = tuple(
                messages.RosterEntry(peer, credential, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",), 1)
                for peer, credential in credentials
            )
            await _tell_all(roster)
            await asyncio.sleep(1.0)

    beside(tell)


def withholds_and_returns() -> None:
    """It sends no part and no mean, and says goodbye and hello after every round."""

    @instead_of(Transfer, "run")
    async def run(honest: Callable[..., Any], self: Transfer) -> None:
        if has_begun(self.plan.key.sequence):
            await asyncio.sleep(3600.0)
        await honest(self)

    async def come_and_go() -> None:
        last_handled = -1
        while True:
            own_node = node()
            ended = max((peer.status.ended_round for peer in own_node.members.live()), default=-1)
            if has_begun() and ended > last_handled:
                last_handled = ended
                await _leave_and_return(own_node)
            await asyncio.sleep(0.2)

    beside(come_and_go)


def goodbye_flood() -> None:
    """It says goodbye and hello without end."""

    async def flood() -> None:
        while True:
            if has_begun():
                await _leave_and_return(node())
            await asyncio.sleep(0.03)

    beside(flood)


async def _leave_and_return(own_node: Node) -> None:
    peers = [peer.name for peer in own_node.members.live()]
    await own_node.heartbeats.say_goodbye(2.0)
    for name in peers:
        with contextlib.suppress(CallRefused, Unreachable, Malformed, PeerRefused):
            await own_node.heartbeats.say_hello(name)
