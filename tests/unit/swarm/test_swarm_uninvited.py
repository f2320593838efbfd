"""Peers without an invitation, guests, revoked peers and senders of nonsense: none of them takes part in a round."""

import asyncio
from typing import Any

import pytest

from diloco.errors import RendezvousError
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.node.frames import read_frame, write_frame
from diloco.swarm.protocol import messages
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.status import RunStatus, Status
from diloco.swarm.protocol.wire import PROTOCOL, PeerMessage, encode
from diloco.swarm.simulator.network import MemoryTransport
from diloco.swarm.simulator.stories import founded, rounds, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, date, values
from diloco.swarm.trust.run_key import RunKey

AUTHORITY = Authority(1, 0, 1)


class Unknown(PeerMessage, frozen=True):
    """A message of no type that a node knows."""


def test_an_invitation_of_another_run_opens_nothing() -> None:
    async def story(swarm: MemorySwarm) -> None:
        await founded(swarm, 2)
        await swarm.start(credential_of=RunKey.create())

    with pytest.raises(RendezvousError, match="does not admit this worker"):
        told(story)


def test_a_peer_of_another_protocol_is_refused_with_both_versions_and_is_no_offender() -> None:
    async def story(swarm: MemorySwarm) -> tuple[str, tuple[str, ...]]:
        workers = await founded(swarm, 2)
        older = messages.Hello(PROTOCOL - 1, "0.0.9", "guest", workers[1].node.permissions.credential, (), Status())
        with pytest.raises(CallRefused) as caught:
            await workers[1].node.transport.call(workers[0].name, encode(older), 1.0)
        return str(caught.value), tuple(workers[0].node.permissions.bans())

    refusal, bans = told(story)
    assert f"speaks protocol {PROTOCOL} " in refusal and f"you speak {PROTOCOL - 1} (diloco 0.0.9)" in refusal
    assert not bans


def test_a_stranger_can_neither_ask_nor_contribute_nor_lead_nor_download() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[str], list[str]]:
        workers = await founded(swarm, 2)
        await rounds(workers, 1)
        stranger = MemoryTransport(swarm.network, NAMES[20])
        await stranger.serve(_done, _no_stream)
        target, refusals, read = workers[0].name, [], []
        ended = workers[0].node.outcomes.recent.get(0)
        assert ended is not None
        for request in (
            messages.Beat(Status(), (), (), ""),
            messages.AskNumber(0),
            messages.Ready(ended.plan.entries[0].contribution, None),
            ended.plan,
            messages.Commit(1, AUTHORITY, ended.plan.digest, ended.certificate),
            messages.Inquire(1, AUTHORITY),
            messages.AskOutcome(0),
            messages.AskStatus(),
            messages.AskFiles(),
            messages.PostNow(1),
        ):
            with pytest.raises(CallRefused) as caught:
                await stranger.call(target, encode(request), 1.0)
            refusals.append(str(caught.value))
        for opening in (
            messages.OpenState(),
            messages.OpenMean(0),
            messages.OpenFile("config"),
            messages.OpenParts(0, AUTHORITY),
        ):
            stream = await stranger.open_stream(target, 1.0)
            try:
                await write_frame(stream, encode(opening), 1.0)
                read.append((await read_frame(stream, 1 << 20, 1.0)).decode())
            except Unreachable:
                pass
        return refusals, read

    refusals, read = told(story)
    assert read == []
    assert all("hello" in text for text in refusals), refusals


def test_a_guest_with_an_invitation_sees_the_status_and_is_in_no_round() -> None:
    async def story(swarm: MemorySwarm) -> tuple[RunStatus, tuple[int, ...]]:
        workers = await founded(swarm, 2)
        guest = MemoryTransport(swarm.network, NAMES[21])
        await guest.serve(_done, _no_stream)
        credential = swarm.invitation().credential(guest.peer).data()
        hello = messages.Hello(PROTOCOL, "1", "guest", credential, (), Status())
        await guest.call(workers[0].name, encode(hello), 1.0)
        answer = await guest.call(workers[0].name, encode(messages.AskStatus()), 1.0)
        with pytest.raises(CallRefused, match="say hello first"):
            await guest.call(workers[0].name, encode(messages.Inquire(0, AUTHORITY)), 1.0)
        return messages.expect(answer, messages.StatusAnswer).status, workers[0].node.members.roster()

    status, members = told(story)
    assert members == (0, 1) and [member.number for member in status.members] == [0, 1]


def test_a_revoked_worker_is_out_everywhere_and_told_why() -> None:
    async def story(swarm: MemorySwarm) -> tuple[str | None, bool, list[tuple[int, ...]]]:
        workers = await founded(swarm, 3)
        record = swarm.run_key.revoke([workers[2].name], None, date())
        for worker in workers[:1]:  # one hears of it, beats carry it on
            worker.node.permissions.add_revocation(record.data)
            worker.node.members.expel()
        await asyncio.sleep(0.6)
        ended, _ = await workers[2].post(values(2), seconds=10.0)
        return ended.failure, ended.fatal, [worker.node.members.roster() for worker in workers[:2]]

    failure, fatal, members = told(story)
    assert fatal and failure is not None and "revoked" in failure
    assert members == [(0, 1), (0, 1)]


def test_messages_that_make_no_sense_get_their_sender_banned() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[str], tuple[int, ...]]:
        workers = await founded(swarm, 3)
        refusals = []
        for data in (b"\xc1", encode(Unknown()), encode(messages.AskOutcome(-5)), b"\x93\x01\x02\x03"):
            with pytest.raises(CallRefused) as caught:
                await workers[2].node.transport.call(workers[0].name, data, 1.0)
            refusals.append(str(caught.value))
        return refusals, workers[0].node.members.roster()

    refusals, members = told(story)
    assert all("malformed" in text for text in refusals[:3]) and "banned" in refusals[3]
    assert members == (0, 1)


async def _done(peer: str, data: bytes) -> bytes:
    return encode(messages.Done())


async def _no_stream(stream: Any) -> None:
    stream.close()
