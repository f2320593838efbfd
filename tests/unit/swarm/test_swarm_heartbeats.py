"""When a member is called, when it counts as lost, and what a heartbeat tells it: decided from its state alone."""

import pytest

from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, Unreachable
from diloco.swarm.protocol import heartbeats
from diloco.swarm.protocol.heartbeats import Look, NoAnswer, beat_for, judge_no_answer, look_at, too_many_silent
from diloco.swarm.protocol.membership import DIALS_AT_ONCE, MAX_TELLERS, Membership, Peer, PeerPhase
from diloco.swarm.protocol.status import OwnStatus, Status
from diloco.swarm.settings import Settings

SETTINGS = Settings(folder="", name="worker-0", lost_seconds=5.0)
LOST = SETTINGS.lost_seconds
BEAT = SETTINGS.beat_seconds


def heard(name: str = "b", at: float = 100.0, number: int = 1) -> Peer:
    peer = Peer(name, b"", ("/ip4/127.0.0.1/tcp/1",))
    peer.hear(Status(number, has_state=True), at, hello=True)
    return peer


def look(peer: Peer, now: float, *, me: str = "a", byte_at: float = 0.0) -> Look:
    return look_at(peer, me, SETTINGS, byte_at, now)


def test_the_peer_with_the_lower_name_begins_a_heartbeat_and_the_other_one_if_it_hears_nothing() -> None:
    late = 100.0 + timing.SECOND_CALLER_SHARE * BEAT + 0.01
    assert look(heard(), 100.0 + BEAT + 0.01) == Look(call=True)
    assert look(heard(), 100.0 + BEAT + 0.01, me="c") == Look()
    assert look(heard(), late, me="c") == Look(call=True)


def test_a_peer_is_lost_after_lost_seconds_without_a_beat_or_a_byte() -> None:
    now = 100.0 + LOST + 0.1
    assert look(heard(), now) == Look(lost=True, call=True)
    assert look(heard(), now, byte_at=now - 0.5) == Look(call=True)
    thawed = heard()
    thawed.excuse(60.0)
    assert not look(thawed, 160.0 + LOST - 0.1).lost


def test_a_silent_peer_is_called_for_ever_and_less_and_less_often() -> None:
    peer = heard()
    peer.lose(106.0, gone=False)
    pauses = []
    now = 106.0
    for _ in range(60):
        peer.ask(now)
        asked = now
        while not look(peer, now).call:
            now += 1.0
        pauses.append(now - asked)
    assert pauses == sorted(pauses)
    assert pauses[0] == LOST and pauses[-1] == timing.LONGEST_REDIAL_SECONDS


def test_a_peer_that_has_left_or_was_only_named_is_forgotten_and_not_one_that_is_silent() -> None:
    later = 100.0 + timing.FORGET_SECONDS + 1.0
    left = heard()
    left.leave(100.0)
    named = Peer("b", b"", ())
    assert look(named, 100.0) == Look(call=True)
    named.stay_away(100.0, gone=False)
    silent = heard()
    silent.lose(100.0, gone=False)
    assert look(left, later) == look(named, later) == Look(forget=True)
    assert look(left, 101.0) == Look()
    assert look(silent, later) == Look(call=True)


def test_of_too_many_silent_peers_those_that_were_lost_first_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "_MAX_SILENT", 2)
    peers = [heard(name) for name in "bcdef"]
    for peer, lost_at in zip(peers, (3.0, 1.0, 2.0, 4.0), strict=False):
        peer.lose(lost_at, gone=False)
    assert [peer.name for peer in too_many_silent(peers)] == ["c", "d"]


def test_what_follows_from_no_answer() -> None:
    live = heard()
    away = heard()
    away.lose(101.0, gone=False)
    assert judge_no_answer(live, CallRefused("no", "banned")) is NoAnswer.REJECTED
    assert judge_no_answer(away, Unreachable("no", gone=True)) is NoAnswer.STAYS_AWAY
    assert judge_no_answer(live, Unreachable("no", broken=True)) is NoAnswer.ASK_AGAIN
    assert judge_no_answer(live, Unreachable("silent")) is NoAnswer.WAIT
    assert judge_no_answer(live, CallRefused("no", "busy")) is NoAnswer.WAIT


def members_of(*peers: Peer) -> Membership:
    members = Membership("a", SETTINGS, OwnStatus(0), lambda: 100.0)
    members.peers = {peer.name: peer for peer in peers}
    return members


def test_a_beat_names_the_live_members_that_its_receiver_does_not_know() -> None:
    silent = heard("d")
    silent.lose(100.0, gone=False)
    receiver = heard("b")
    members = members_of(receiver, heard("c"), silent, Peer("e", b"", ()))
    assert beat_for(receiver, members, (), "", b"").roster == ()  # it has told nothing yet
    receiver.take_known(["a"])
    beat = beat_for(receiver, members, (), "", b"")
    assert [entry.peer for entry in beat.roster] == ["c"]
    assert beat.known == ("a", "b", "c")


def test_a_worker_that_more_members_reject_than_are_live_is_out_and_the_later_of_two_processes_by_a_tie() -> None:
    members = members_of(heard("b"), heard("c"), heard("d"))
    assert not members.reject(members.peers["b"], "banned")
    assert members.reject(members.peers["c"], "banned")
    members = members_of(heard("b"), heard("c"))
    assert members.reject(members.peers["b"], "twice")
    assert not members_of(heard("b"), heard("c")).reject(heard("b"), "banned")


def test_the_addresses_that_others_tell_of_a_peer_are_bounded_and_kept_apart_from_its_own() -> None:
    lost = heard()
    members = members_of(lost)
    members.hear_addresses(lost, "c", ("/ip4/192.0.2.1/tcp/1",))
    assert not lost.told  # it is live here
    lost.lose(100.0, gone=False)
    for teller in range(2 * MAX_TELLERS):
        members.hear_addresses(lost, str(teller), (f"/ip4/192.0.2.1/tcp/{teller}",))
    addresses, tellers = members.dialled_addresses(lost)
    assert addresses[0] == lost.addresses[0] and len(tellers) == MAX_TELLERS == len(addresses) - 1
    for _ in range(int(DIALS_AT_ONCE)):
        addresses, tellers = members.dialled_addresses(lost)
    assert (addresses, tellers) == ([*lost.addresses], [])


def test_only_a_hello_ends_a_goodbye() -> None:
    peer = heard()
    peer.leave(101.0)
    assert not peer.hear(Status(1), 102.0, hello=False) and peer.phase is PeerPhase.LEFT
    assert peer.hear(Status(1), 103.0, hello=True) and peer.phase is PeerPhase.LIVE
