"""Attacks on the course of rounds: a member that lets others wait, takes the lead, or loses messages."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from msgspec import structs

from attacks import has_begun, instead_of, node
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node.calls import Calls
from diloco.swarm.node.heartbeats import Heartbeats
from diloco.swarm.node.leader import Leader
from diloco.swarm.node.node import Node
from diloco.swarm.node.own_checks import OwnChecks
from diloco.swarm.node.participant import Participant
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.plan import Authority, Plan
from diloco.swarm.protocol.wire import Malformed
from diloco.swarm.trainer import PostedRound

_HIGHEST = 1 << 53


def never_posts() -> None:
    """It is live, says that it has the state and that it is as far as the others, and never posts."""

    @instead_of(Participant, "post")
    async def post(honest: Callable[..., Any], self: Participant, posted: PostedRound) -> Any:
        if has_begun(posted.key.sequence):
            await asyncio.sleep(600.0)
        return await honest(self, posted)

    @instead_of(OwnChecks, "run")
    def run(honest: Callable[..., None], self: OwnChecks) -> None:
        if not has_begun():
            honest(self)

    @instead_of(Heartbeats, "_beat_for")
    def beat(honest: Callable[..., messages.Beat], self: Heartbeats, *arguments: Any) -> messages.Beat:
        honest_beat = honest(self, *arguments)
        furthest = max((peer.status.ended_round for peer in self.members.live()), default=-1)
        ended = max(honest_beat.status.ended_round, furthest)
        status = structs.replace(honest_beat.status, ended_round=ended, next_round=ended + 1, has_state=True)
        return structs.replace(honest_beat, status=status) if has_begun() else honest_beat


def never_completes() -> None:
    """It takes part in the transfer and never says how that went."""

    @instead_of(Calls, "ask")
    async def ask(honest: Callable[..., Any], self: Calls, peer: str, request: Any) -> Any:
        if isinstance(request, messages.Complete | messages.Trouble) and has_begun():
            return messages.Done()
        return await honest(self, peer, request)


def never_plans() -> None:
    """It leads, lets all wait, and makes no plan."""

    @instead_of(Leader, "answer_ready")
    def answer(honest: Callable[..., Any], self: Leader, *arguments: Any) -> Any:
        return messages.Waiting() if has_begun() else honest(self, *arguments)


def loses_messages() -> None:
    """No lie: every third plan, vote and commit to or from this member is lost."""
    count = 0

    def lost(request: Any) -> bool:
        nonlocal count
        count += isinstance(request, Plan | messages.Complete | messages.Commit)
        return isinstance(request, Plan | messages.Complete | messages.Commit) and count % 3 == 0

    @instead_of(Calls, "ask")
    async def ask(honest: Callable[..., Any], self: Calls, peer: str, request: Any) -> Any:
        if peer != self.transport.peer and has_begun() and lost(request):
            raise Unreachable("lost on its way")
        return await honest(self, peer, request)

    @instead_of(Node, "_answer")
    async def answer(honest: Callable[..., Any], self: Node, peer: str, request: Any) -> Any:
        if peer != self.transport.peer and has_begun() and lost(request):
            await asyncio.sleep(600.0)
        return await honest(self, peer, request)


def highest_term() -> None:
    """It wants to lead every round: with the highest term there is, and with one more than the last."""

    async def take() -> None:
        own_node = node()
        calls = own_node.participant.calls
        turn = 0
        terms: dict[str, int] = {}
        while True:
            await asyncio.sleep(0.5)
            if not has_begun():
                continue
            turn += 1
            sequence = max([own_node.own.next_round, *(peer.status.next_round for peer in own_node.members.live())])
            for peer in own_node.members.live():
                term = _HIGHEST if turn % 2 else terms.get(peer.name, 0) + 1
                with contextlib.suppress(CallRefused, Unreachable, Malformed):
                    inquire = messages.Inquire(sequence, Authority(term, -own_node.number))
                    answer = await calls.ask(peer.name, inquire)
                    if isinstance(answer, messages.Superseded | messages.Posted):
                        terms[peer.name] = answer.seen.term

    beside(take)


def flood() -> None:
    """Calls and streams to every member, as many as it can."""

    async def call() -> None:
        own_node = node()
        while True:
            await asyncio.sleep(0.0 if has_begun() else 0.5)
            for peer in own_node.members.live() if has_begun() else []:
                asks = [own_node.participant.calls.ask(peer.name, messages.AskOutcome(0)) for _ in range(20)]
                await asyncio.gather(*asks, return_exceptions=True)

    async def stream() -> None:
        own_node = node()
        while True:
            await asyncio.sleep(0.05)
            for peer in own_node.members.live() if has_begun() else []:
                with contextlib.suppress(Unreachable, OSError):
                    stream_opened = await own_node.transport.open_stream(peer.name, 5.0)
                    await stream_opened.write(b"\0" * 4096, 5.0)

    beside(call)
    beside(stream)


def beside(work: Callable[[], Any]) -> None:
    """Run this beside the node, from its start on."""

    @instead_of(Node, "start")
    async def start(honest: Callable[..., Any], self: Node) -> None:
        await honest(self)
        self._start_task(work())
