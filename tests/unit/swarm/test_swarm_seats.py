"""Seats: an invitation lets in one worker, for ever, as every member sees for itself."""

import asyncio
import json
from pathlib import Path

import pytest

from diloco.errors import Excluded
from diloco.swarm.network.known_peers import KnownPeer, read_peers
from diloco.swarm.node.members import NEW_AT_ONCE
from diloco.swarm.protocol.messages import RosterEntry
from diloco.swarm.run_files import PEERS_FILE
from diloco.swarm.simulator.lies import brings_a_second_key
from diloco.swarm.simulator.stories import founded, rounds, stop, told
from diloco.swarm.simulator.workers import NAMES, MemorySwarm, MemoryWorker, date, values
from diloco.swarm.trust.credential import Credential, InvitationCertificate, PeerRefused
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.permissions import Permissions
from diloco.swarm.trust.run_key import RunKey

KEY = RunKey.create()
OWN = invite(KEY, (), 3600.0, 1000.0)


def permissions() -> Permissions:
    return Permissions(KEY.public, "me", OWN.credential("me"), clock=lambda: 1000.0)


def invitation() -> Invitation:
    return invite(KEY, (), 3600.0, 1000.0)


def test_the_seat_is_taken_by_the_first_worker_and_kept_by_it() -> None:
    node, one = permissions(), invitation()
    node.admit("ann", one.credential("ann").data())
    with pytest.raises(PeerRefused, match=r"seats: the seat of the invitation \w+ is taken by another worker"):
        node.admit("bob", one.credential("bob").data())
    node.admit("ann", one.credential("ann").data())
    assert node._known.get("ann") is not None


def test_a_guest_takes_no_seat_and_cannot_become_a_worker() -> None:
    node, one = permissions(), invitation()
    for guest in ("status", "doctor", "join"):
        node.admit(guest, one.credential(guest, "guest").data(), worker=False)
        node.check_seat(guest)
        with pytest.raises(PeerRefused, match="is a guest's, and it would be a worker"):
            node.admit(guest, one.credential(guest, "guest").data())
    data = one.credential("status", "guest")
    with pytest.raises(PeerRefused, match="forged"):
        node.admit("status", Credential(data.certificate, data.signature, "worker").data())
    node.admit("ann", one.credential("ann").data())
    with pytest.raises(PeerRefused, match="is taken by the worker ann"):
        node.check_seat("join")


def test_a_ban_uses_the_seat_up_for_workers_and_guests_also_after_a_restart() -> None:
    node, one = permissions(), invitation()
    node.admit("ann", one.credential("ann").data())
    for _ in range(3):
        node.record_offence("ann", "norm")
    again = permissions()
    for peer, credential in node.seats_taken(()):
        again.take_seat_for(peer, credential)
    again.ban("ann", "norm")
    for here in (node, again):
        for worker in (True, False):
            role = "worker" if worker else "guest"
            with pytest.raises(PeerRefused, match=r"banned: .* its seat is used up"):
                here.admit("ann again", one.credential("ann again", role).data(), worker=worker)  # type: ignore[arg-type]


def test_a_certificate_is_signed() -> None:
    one = invitation().certificate
    longer = InvitationCertificate(one.public, one.expires + 1, one.signature)
    assert one.is_signed_by(KEY.public) and not longer.is_signed_by(KEY.public)


def test_a_member_that_restarts_remembers_the_seats_from_its_list_of_peers() -> None:
    node, one = permissions(), invitation()
    node.reserve_seats([KnownPeer("ann", 1, (), one.id), KnownPeer("a guest", None, (), one.id)])
    with pytest.raises(PeerRefused, match="is taken"):
        node.admit("bob", one.credential("bob").data())
    node.admit("ann", one.credential("ann").data())


def test_a_newcomer_is_told_whose_seats_are_taken_and_believes_no_guests_credential() -> None:
    node, newcomer, one, other = permissions(), permissions(), invitation(), invitation()
    node.admit("ann", one.credential("ann").data())
    node.admit("guest", other.credential("guest", "guest").data(), worker=False)
    node.ban("ann", "NaN")
    assert [peer for peer, _ in node.seats_taken(())] == ["ann"] and not node.seats_taken({"ann"})
    newcomer.take_seat_for("ann", one.credential("ann").data())
    newcomer.take_seat_for("guest", other.credential("guest", "guest").data())
    newcomer.take_seat_for("mallory", b"noise")
    with pytest.raises(PeerRefused, match="is taken"):
        newcomer.admit("ann again", one.credential("ann again").data())
    newcomer.admit("bob", other.credential("bob").data())


# In a swarm


def with_invitation(swarm: MemorySwarm, shared: Invitation) -> None:
    """The workers that are started next come with this invitation."""
    swarm.invitation = lambda: shared.with_addresses(  # type: ignore[method-assign]
        [f"/ip4/127.0.0.1/tcp/1/p2p/{worker.name}" for worker in swarm.workers]
    )


def test_a_banned_person_does_not_come_back_with_a_new_key_and_the_same_invitation() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[str], tuple[int, ...], dict[str, str]]:
        workers = await founded(swarm, 3)
        usual = swarm.invitation
        bad = invite(swarm.run_key, [], 4e9, 0.0)
        with_invitation(swarm, bad)
        liar = await swarm.start()
        await liar.catch_up()
        for worker in workers[:3]:
            worker.auditor.liars.ban(liar.name, "NaN")
        stop(swarm, liar)
        swarm.invitation = usual  # type: ignore[method-assign]
        newcomer = await swarm.start()
        await newcomer.catch_up()
        with_invitation(swarm, bad)
        refused = []
        for name in NAMES[10:13]:
            with pytest.raises(Excluded) as caught:
                await swarm.start(name=name)
            refused.append(str(caught.value))
        saved = json.loads((Path(workers[0].node.settings.folder) / "worker-0.json").read_text())
        await rounds([*workers[:3], newcomer], 1)
        return refused, newcomer.node.members.roster(), saved["seats"]

    refused, roster, seats = told(story)
    assert len(refused) == 3 and all("seat" in reason for reason in refused)
    assert len(roster) == 4 and list(seats) == [NAMES[3]]


async def _friend_and_stranger(swarm: MemorySwarm) -> tuple[list[MemoryWorker], RosterEntry]:
    """Three members with expired invitations; the second one names a stranger that has an expired one, too."""
    workers = await founded(swarm, 3)
    expired = invite(swarm.run_key, [], 60.0, date())
    await asyncio.sleep(4000.0)  # all invitations so far are for an hour
    entry = RosterEntry(NAMES[9], expired.credential(NAMES[9]).data(), ("/ip4/127.0.0.1/tcp/1",), 7)
    return workers, entry


def test_an_expired_invitation_that_a_friend_introduces_is_refused_by_every_member() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[bool], str]:
        workers, entry = await _friend_and_stranger(swarm)
        for worker in workers:
            worker.node.members.add_roster(workers[1].name, [entry])
        named = [NAMES[9] in worker.node.members.peers for worker in workers]
        hello = workers[0].node.permissions
        with pytest.raises(PeerRefused) as caught:
            hello.admit(NAMES[9], entry.credential)
        return named, caught.value.kind

    assert told(story) == ([False] * 3, "expired")


def test_a_newcomer_takes_in_members_whose_invitations_have_expired_and_not_a_friend_of_one() -> None:
    async def story(swarm: MemorySwarm) -> tuple[bool, bool, bool, tuple[int, ...]]:
        workers, entry = await _friend_and_stranger(swarm)
        newcomer = await swarm.start()
        await newcomer.catch_up()
        members = newcomer.node.members
        for peer in members.peers.values():  # at its start it may have heard of one member only, the friend
            peer.knows = frozenset([NAMES[9][-8:]]) if peer.name == workers[1].name else None
        members.add_roster(workers[1].name, [entry])
        at_first = NAMES[9] in members.peers
        await asyncio.sleep(5.0)
        expelled = [event for event in newcomer.trainer.events if event[0] == "member_expelled"]
        await rounds([*workers[:3], newcomer], 1)
        return at_first, NAMES[9] in members.peers, "expired" in expelled[0][1]["reason"], members.roster()

    assert told(story) == (True, False, True, (0, 1, 2, 3))


def test_a_member_whose_invitation_has_expired_returns_with_its_key() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, ...]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)
        await asyncio.sleep(4000.0)
        stop(swarm, workers[2])
        await asyncio.sleep(5.0)
        swarm.network.dead.discard(workers[2].name)
        again = await swarm.start(name=workers[2].name, folder=workers[2].node.settings.folder)
        await again.catch_up()
        await rounds([workers[0], workers[1], again], 1)
        return again.node.members.roster()

    assert told(story) == (0, 1, 2)


def test_invented_members_of_one_invitation_are_never_called() -> None:
    async def story(swarm: MemorySwarm) -> list[str]:
        workers = await founded(swarm, 2)
        members = workers[0].node.members
        one = invite(swarm.run_key, [], 4e9, 0.0)
        names = [f"{NAMES[5][:-4]}{index:04d}" for index in range(60)]
        members.add_roster("teller", (RosterEntry(name, one.credential(name).data(), (), 9) for name in names))
        return [name for name in names if name in members.peers]

    assert len(told(story)) == 1


def test_of_10_000_invented_members_only_a_rosters_worth_is_looked_at_and_another_member_is_still_heard() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, bool]:
        workers = await founded(swarm, 2)
        members, looked = workers[0].node.members, list[str]()
        admit = members.permissions.admit

        def count(peer: str, credential: bytes, *, worker: bool = True, named: bool = False) -> None:
            looked.append(peer)
            admit(peer, credential, worker=worker, named=named)

        members.permissions.admit = count  # type: ignore[method-assign]
        names = [f"{NAMES[5][:-5]}{index:05d}" for index in range(10_000)]
        members.add_roster("liar", (RosterEntry(name, b"invented", (), 9) for name in names))
        credential = invite(swarm.run_key, [], 4e9, 0.0).credential(NAMES[6]).data()
        members.add_roster("another", [RosterEntry(NAMES[6], credential, (), 9)])
        return len(looked), NAMES[6] in members.peers

    assert told(story) == (NEW_AT_ONCE + 1, True)


def test_workers_that_a_member_invents_take_no_seat_but_its_own_and_are_not_passed_on() -> None:
    async def story(swarm: MemorySwarm) -> tuple[tuple[int, ...], list[str], set[str]]:
        workers = await founded(swarm, 2)
        own = invite(swarm.run_key, [], 4e9, 0.0)  # of the member that lies
        invented = [f"{NAMES[5][:-4]}{index:04d}" for index in range(60)]
        roster = [RosterEntry(name, own.credential(name).data(), (), 9) for name in invented]
        for worker in workers:
            worker.node.members.add_roster(NAMES[1], roster)
        await asyncio.sleep(3.0)  # they are called, and do not answer
        joiner = await swarm.start()
        await joiner.catch_up()
        await rounds(workers, 1)
        await asyncio.sleep(3.0)
        saved = read_peers(Path(workers[0].node.settings.folder) / PEERS_FILE)
        told_of = [name for name in joiner.node.members.peers if name in invented]
        return joiner.node.members.roster(), told_of, {peer.peer for peer in saved} & set(invented)

    roster, told_of, saved = told(story)
    assert len(roster) == 3 and not told_of and not saved


def test_a_second_key_of_an_invitation_has_no_seat_nor_has_a_guest() -> None:
    node, one, other = permissions(), invitation(), invitation()
    node.admit("ann", one.credential("ann").data())
    node.admit("guest", other.credential("guest", "guest").data(), worker=False)
    node.remember("ann again", one.credential("ann again").data())
    node.remember("my second", OWN.credential("my second").data())
    assert [peer for peer in ("me", "ann", "ann again", "my second", "guest", "bob") if node.has_seat(peer)] == [
        "me",
        "ann",
    ]


def test_no_honest_worker_follows_a_plan_with_a_second_key_of_an_invitation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each plan of a leader that lies has it. The round ends under the next leader."""

    async def story(swarm: MemorySwarm) -> tuple[list[set[str]], list[str | None], list[dict[str, str]]]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        brings_a_second_key(workers[0], monkeypatch, NAMES[9])
        posts = (worker.post(values(worker.node.number, 1), seconds=300.0) for worker in workers)
        ended = await asyncio.gather(*posts)
        honest = workers[1:]
        last = [worker.node.outcomes.quorum.last_plan for worker in honest]
        plans = [{entry.peer for entry in plan.entries} for plan in last if plan is not None]
        return plans, [one.failure for one, _ in ended[1:]], [worker.node.permissions.bans() for worker in honest]

    plans, failures, bans = told(story)
    assert failures == [None] * 3 and not any(bans)
    assert len(plans) == 3 and all(set(NAMES[1:4]) <= peers <= set(NAMES[:4]) for peers in plans)


def test_a_worker_follows_a_plan_with_a_newcomer_once_the_leader_has_named_it() -> None:
    """Worker 2 has not heard of the newcomer when the plan comes; the leader names it, and no round is lost."""

    async def story(swarm: MemorySwarm) -> tuple[bool, list[str | None], set[str]]:
        workers = await founded(swarm, 4)
        late, newcomer = workers[2].node, workers[3].name
        del late.members.peers[newcomer]
        late.permissions._known.drop(newcomer)
        known = late.permissions.has_seat(newcomer)
        ended = await asyncio.gather(*(worker.post(values(worker.node.number, 0)) for worker in workers))
        last = late.outcomes.quorum.last_plan
        assert last is not None
        return known, [outcome.failure for outcome, _ in ended], {entry.peer for entry in last.entries}

    known, failures, peers = told(story)
    assert not known and failures == [None] * 4 and peers == set(NAMES[:4])
