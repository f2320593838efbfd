"""Seats: an invitation lets in as many workers as it was made for, counted by every member, and no more."""

import asyncio
from pathlib import Path

import pytest

from diloco.engines.swarm.network.known_peers import KnownPeer, read_peers
from diloco.engines.swarm.node.membership.members import NEW_AT_ONCE
from diloco.engines.swarm.node.messages import RosterEntry
from diloco.engines.swarm.run_files import PEERS_FILE
from diloco.engines.swarm.trust.credential import Certificate, PeerRefused
from diloco.engines.swarm.trust.invitation import Invitation, invite
from diloco.engines.swarm.trust.permissions import Permissions
from diloco.engines.swarm.trust.run_key import RunKey
from diloco.errors import ConfigError
from support.swarm.memory import NAMES, MemorySwarm
from support.swarm.stories import founded, rounds, told

KEY = RunKey.create()
OWN = invite(KEY, (), 3600.0, 1000.0)


def permissions() -> Permissions:
    return Permissions(KEY.public, "me", OWN.credential("me"), clock=lambda: 1000.0)


def invitation(seats: int) -> Invitation:
    return invite(KEY, (), 3600.0, 1000.0, seats)


def test_one_seat_is_taken_by_the_first_worker_and_kept_by_it() -> None:
    node, one = permissions(), invitation(1)
    node.admit("ann", one.credential("ann").data())
    with pytest.raises(PeerRefused, match=r"seats: the one seat of the invitation \w+ is taken: ask the owner"):
        node.admit("bob", one.credential("bob").data())
    node.admit("ann", one.credential("ann").data())
    assert node._known.get("ann") is not None


def test_a_guest_takes_no_seat_and_a_banned_worker_leaves_none() -> None:
    node, two = permissions(), invitation(2)
    for guest in ("status", "doctor", "join"):
        node.admit(guest, two.credential(guest).data(), worker=False)
    node.admit("ann", two.credential("ann").data())
    for _ in range(3):
        node.record_offence("ann", "norm")
    assert "ann" in node.bans()
    node.admit("bob", two.credential("bob").data())
    with pytest.raises(PeerRefused, match="2 seats"):
        node.admit("cat", two.credential("cat").data())


def test_the_number_of_seats_is_signed() -> None:
    one = invitation(1).certificate
    more = Certificate(one.public, one.expires, one.signature, 100)
    assert one.is_signed_by(KEY.public) and not more.is_signed_by(KEY.public)
    with pytest.raises(ConfigError, match="from 1 to 1023 seats, not 0"):
        invitation(0)
    assert Invitation.parse(invitation(7).text(), 1000.0).seats == 7


def test_a_member_that_restarts_remembers_the_seats_from_its_list_of_peers() -> None:
    node, one = permissions(), invitation(1)
    node.reserve_seats([KnownPeer("ann", 1, (), one.id), KnownPeer("a guest", None, (), one.id)])
    with pytest.raises(PeerRefused, match="is taken"):
        node.admit("bob", one.credential("bob").data())
    node.admit("ann", one.credential("ann").data())


def test_invented_members_of_one_invitation_are_never_called() -> None:
    async def story(swarm: MemorySwarm) -> list[str]:
        workers = await founded(swarm, 2)
        members = workers[0].node.members
        one = invite(swarm.run_key, [], 1e9, 0.0, seats=1)
        names = [f"{NAMES[5][:-4]}{index:04d}" for index in range(60)]
        members.add_roster("teller", (RosterEntry(name, one.credential(name).data(), (), 9) for name in names))
        return [name for name in names if name in members.peers]

    assert len(told(story)) == 1


def test_of_10_000_invented_members_only_a_rosters_worth_is_looked_at_and_another_member_is_still_heard() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, bool]:
        workers = await founded(swarm, 2)
        members, looked = workers[0].node.members, list[str]()
        admit = members.permissions.admit

        def count(peer: str, credential: bytes, *, worker: bool = True, teller: str | None = None) -> None:
            looked.append(peer)
            admit(peer, credential, worker=worker, teller=teller)

        members.permissions.admit = count  # type: ignore[method-assign]
        names = [f"{NAMES[5][:-5]}{index:05d}" for index in range(10_000)]
        members.add_roster("liar", (RosterEntry(name, b"invented", (), 9) for name in names))
        credential = invite(swarm.run_key, [], 1e9, 0.0, seats=1).credential(NAMES[6]).data()
        members.add_roster("another", [RosterEntry(NAMES[6], credential, (), 9)])
        return len(looked), NAMES[6] in members.peers

    assert told(story) == (NEW_AT_ONCE + 1, True)


def test_workers_that_a_member_invents_take_no_seat_from_those_that_come() -> None:
    node, three = permissions(), invitation(3)

    def named(peer: str, teller: str) -> bool:
        try:
            node.admit(peer, three.credential(peer).data(), teller=teller)
        except PeerRefused:
            return False
        return True

    node.admit("ann", three.credential("ann").data())
    assert sum(named(f"invented {index}", "liar") for index in range(50)) == 2, "as many as seats are free"
    assert named("ann", "liar") and named("bob", "honest"), "another member still names its own"
    for worker in ("bob", "cat"):
        node.admit(worker, three.credential(worker).data())
    with pytest.raises(PeerRefused, match="3 seats"):
        node.admit("invented 0", three.credential("invented 0").data())
    assert not named("dan", "honest")


def test_a_joiner_gets_its_seat_though_a_member_has_invented_others_and_these_are_not_passed_on() -> None:
    async def story(swarm: MemorySwarm) -> tuple[tuple[int, ...], list[str], set[str]]:
        shared = invite(swarm.run_key, [], 4e9, 0.0, seats=3)
        swarm.invitation = lambda: shared.with_addresses([f"/ip4/127.0.0.1/tcp/1/p2p/{NAMES[0]}"])  # type: ignore[method-assign]
        workers = await founded(swarm, 2)
        invented = [f"{NAMES[5][:-4]}{index:04d}" for index in range(60)]
        roster = [RosterEntry(name, shared.credential(name).data(), (), 9) for name in invented]
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
