"""Who may be here: told by credentials, revocations and conduct, within limits that no outsider can widen."""

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.engines.swarm.network.known_peers import KnownPeer, read_peers, write_peers
from diloco.engines.swarm.network.limits import Allowance, Recent
from diloco.engines.swarm.run_files import REVOCATIONS_FILE, append_line
from diloco.engines.swarm.trust import permissions as module
from diloco.engines.swarm.trust.invitation import Credential, NotWelcome, RunKey, invite
from diloco.engines.swarm.trust.permissions import Trust

START = 1_800_000_000.0
RUN = RunKey(bytes(range(32)))
FIRST = invite(RUN, [], 3600, START)
SECOND = invite(RUN, [], 7200, START)
THIRD = invite(RUN, [], 60, START)


class Clock:
    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def trust(clock: Clock) -> Trust:
    return Trust(RUN.public, "me", FIRST.credential("me"), clock=clock)


def shown(peer: str) -> bytes:
    return FIRST.credential(peer).data()


def turned_away(trust: Trust, peer: str, credential: bytes | None = None) -> str:
    """The kind of refusal: of a hello, or without a credential of anything else."""
    with pytest.raises(NotWelcome) as caught:
        trust.check(peer) if credential is None else trust.welcome(peer, credential)
    return caught.value.kind


# Coming


def test_a_peer_that_has_shown_its_credential_is_in_good_standing(trust: Trust) -> None:
    trust.welcome("bob", shown("bob"))
    trust.check("bob")
    assert trust.invitation_of("bob") == FIRST.id


def test_this_node_is_in_good_standing_with_itself_and_shows_a_credential_that_others_take(clock: Clock) -> None:
    me = Trust(RUN.public, "me", FIRST.credential("me"), clock=clock)
    you = Trust(me.run_public, "you", SECOND.credential("you"), clock=clock)
    me.check("me")
    you.welcome("me", me.credential)
    me.welcome("you", you.credential)
    assert me.run_id == you.run_id == RUN.run_id
    assert me.invitation_of("me") == FIRST.id


def test_a_node_does_not_start_with_a_credential_of_another(clock: Clock) -> None:
    with pytest.raises(NotWelcome, match="forged"):
        Trust(RUN.public, "me", FIRST.credential("you"), clock=clock)


def test_who_has_not_said_hello_is_unknown(trust: Trust) -> None:
    assert turned_away(trust, "bob") == "unknown"
    trust.vouch(["bob"])
    assert turned_away(trust, "bob") == "unknown"
    assert trust.invitation_of("bob") is None


def test_strangers_with_no_credential_or_a_stolen_or_a_forged_one_stay_strangers(trust: Trust) -> None:
    foreign = invite(RunKey.create(), [], 3600, START).credential("mallory").data()
    for credential in (b"", b"x" * 165, b"x" * 100_000, shown("bob"), foreign):
        assert turned_away(trust, "mallory", credential) == "forged"
    assert turned_away(trust, "mallory") == "unknown"
    assert trust.turned_away == {"forged": 5, "unknown": 1}


def test_an_expired_invitation_turns_strangers_away_and_nobody_else(trust: Trust, clock: Clock) -> None:
    trust.welcome("member", shown("member"))
    clock.now = FIRST.expires
    trust.check("member")
    trust.welcome("member", shown("member"))
    assert turned_away(trust, "stranger", shown("stranger")) == "expired"
    trust.vouch(["stranger"])
    trust.welcome("stranger", shown("stranger"))
    trust.check("stranger")
    trust.welcome("newcomer", SECOND.credential("newcomer").data())
    trust.welcome("member", THIRD.credential("member").data())  # known already: another expired one will do


def test_being_vouched_for_replaces_no_signature(trust: Trust) -> None:
    trust.vouch(["mallory", "", "x" * 10_000])
    assert turned_away(trust, "mallory", shown("bob")) == "forged"
    assert len(trust._vouched) == 1


def test_a_known_peer_may_come_with_a_newer_invitation(trust: Trust) -> None:
    trust.welcome("bob", shown("bob"))
    trust.welcome("bob", SECOND.credential("bob").data())
    assert trust.invitation_of("bob") == SECOND.id
    assert turned_away(trust, "bob", b"nonsense") == "forged"
    trust.check("bob")


# Revoked


def test_a_revoked_peer_is_out_whatever_it_shows(trust: Trust) -> None:
    trust.welcome("bob", shown("bob"))
    assert trust.revoke(RUN.revoke(["bob"], None, [], START).data)
    assert turned_away(trust, "bob") == "revoked"
    assert turned_away(trust, "bob", shown("bob")) == "revoked"
    trust.vouch(["bob"])
    assert turned_away(trust, "bob", SECOND.credential("bob").data()) == "revoked"


def test_with_an_invitation_go_all_who_came_with_it_but_the_kept(trust: Trust) -> None:
    for peer in ("bad", "kept", "other"):
        trust.welcome(peer, shown(peer))
    trust.welcome("elsewhere", SECOND.credential("elsewhere").data())
    trust.revoke(RUN.revoke(["bad"], FIRST.id, ["kept", "me"], START).data)
    for peer in ("kept", "elsewhere", "me"):
        trust.check(peer)
    assert turned_away(trust, "bad") == turned_away(trust, "other") == "revoked"
    assert turned_away(trust, "bad under a new name", shown("bad under a new name")) == "revoked"
    trust.welcome("other", SECOND.credential("other").data())  # invited again
    trust.check("other")


def test_a_node_learns_that_it_is_revoked_itself(trust: Trust) -> None:
    trust.revoke(RUN.revoke(["bad"], FIRST.id, [], START).data)
    assert turned_away(trust, "me") == "revoked"


def test_a_revocation_is_news_once_and_is_passed_on_as_it_came(trust: Trust, clock: Clock) -> None:
    other = Trust(RUN.public, "you", FIRST.credential("you"), clock=clock)
    assert trust.revocations() == [] and trust.revocations_digest() == other.revocations_digest()
    records = [RUN.revoke([name], None, [], START).data for name in ("a", "b", "c")]
    assert [trust.revoke(record) for record in (*records, *records)] == [True] * 3 + [False] * 3
    assert trust.revocations_digest() != other.revocations_digest()
    assert [other.revoke(record) for record in reversed(trust.revocations())] == [True] * 3
    assert trust.revocations_digest() == other.revocations_digest()
    assert turned_away(other, "b", shown("b")) == "revoked"


def test_a_forged_revocation_changes_nothing(trust: Trust) -> None:
    trust.welcome("bob", shown("bob"))
    before = trust.revocations_digest()
    for data in (RunKey.create().revoke(["bob"], None, [], START).data, b"", b"x" * 200_000):
        with pytest.raises(NotWelcome, match="forged"):
            trust.revoke(data)
    trust.check("bob")
    assert trust.revocations_digest() == before


# Banned


def test_the_third_offence_bans(trust: Trust) -> None:
    trust.welcome("bob", shown("bob"))
    assert [trust.refused("bob", reason) for reason in ("NaN", "NaN", "norm 1e30")] == [False, False, True]
    assert turned_away(trust, "bob") == "banned"
    assert turned_away(trust, "bob", shown("bob")) == "banned"
    assert turned_away(trust, "bob", SECOND.credential("bob").data()) == "banned"
    assert list(trust.banned()) == ["bob"] and "norm 1e30" in trust.banned()["bob"]
    assert trust.refused("bob", "again")


@pytest.mark.parametrize("refusals", [1, 2, 5])
def test_so_many_refusals_ban_as_the_settings_say(clock: Clock, refusals: int) -> None:
    trust = Trust(RUN.public, "me", FIRST.credential("me"), refusals, clock)
    trust.welcome("bob", shown("bob"))
    assert [trust.refused("bob", "NaN") for _ in range(refusals)] == [False] * (refusals - 1) + [True]


def test_a_rare_fault_is_forgiven_and_a_frequent_one_is_not(trust: Trust) -> None:
    trust.welcome("flaky", shown("flaky"))
    for _ in range(20):
        assert not trust.refused("flaky", "NaN")
        for _ in range(module.FORGIVING):
            trust.accepted("flaky")
    trust.welcome("sly", shown("sly"))
    for _ in range(4):
        trust.refused("sly", "NaN")
        for _ in range(module.FORGIVING // 2):
            trust.accepted("sly")
    assert "sly" in trust.banned() and "flaky" not in trust.banned()


def test_good_contributions_give_no_credit_for_later(trust: Trust) -> None:
    trust.welcome("bob", shown("bob"))
    for _ in range(100):
        trust.accepted("bob")
    assert not trust.refused("bob", "NaN")
    for _ in range(100):
        trust.accepted("bob")
    assert [trust.refused("bob", "NaN") for _ in range(3)][-1]


def test_outsiders_are_not_counted(trust: Trust) -> None:
    assert [trust.refused("mallory", "noise") for _ in range(10)] == [False] * 10
    trust.accepted("mallory")
    assert trust.banned() == {} and len(trust._offences) == 0


def test_bans_can_be_brought_back(trust: Trust, clock: Clock) -> None:
    trust.welcome("bob", shown("bob"))
    trust.ban("bob", "NaN")
    again = Trust(RUN.public, "me", FIRST.credential("me"), clock=clock)
    for peer, reason in trust.banned().items():
        again.ban(peer, reason)
    assert turned_away(again, "bob", shown("bob")) == "banned"


# Limits


def test_one_peer_cannot_make_this_one_check_signatures_all_day(trust: Trust, clock: Clock) -> None:
    kinds = [turned_away(trust, "mallory", b"noise") for _ in range(20)]
    assert kinds == ["forged"] * 5 + ["busy"] * 15
    trust.welcome("bob", shown("bob"))
    clock.now += 5
    assert [turned_away(trust, "mallory", b"noise") for _ in range(2)] == ["forged", "busy"]


def test_many_names_cannot_either_and_members_still_get_in(trust: Trust, clock: Clock) -> None:
    trust.vouch(["member"])
    trust.welcome("known", shown("known"))
    kinds = [turned_away(trust, f"mallory {i}", b"noise") for i in range(200)]
    assert kinds.count("forged") <= 64
    assert turned_away(trust, "bob", shown("bob")) == "busy"
    trust.welcome("member", shown("member"))
    for _ in range(50):  # costs no signature
        trust.welcome("known", shown("known"))
    clock.now += 1
    trust.welcome("bob", shown("bob"))


def test_memory_does_not_grow_with_those_who_come(trust: Trust, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Credential, "verify", lambda *_: None)
    for table in (trust._known, trust._vouched, trust._bans, trust._offences, trust._hellos):
        table._most = 50  # type: ignore[attr-defined]
    data = shown("anyone")
    for i in range(300):
        clock.now += 1
        trust.welcome(f"peer {i}", data)
        trust.check("peer 0")
        trust.vouch([f"other {i}"])
        trust.refused(f"peer {i}", "NaN")
        trust.ban(f"banned {i}", "NaN")
    sizes = [len(t) for t in (trust._known, trust._vouched, trust._bans, trust._offences, trust._hellos)]
    assert sizes == [50] * 5
    assert turned_away(trust, "peer 1") == "unknown"  # says hello again if it is still there
    assert len(trust.turned_away) <= 6


def test_no_more_revocations_are_kept_than_the_limit(trust: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REVOCATIONS", 2)
    for name in ("a", "b"):
        trust.revoke(RUN.revoke([name], None, [], START).data)
    with pytest.raises(NotWelcome, match="no more than 2"):
        trust.revoke(RUN.revoke(["c"], None, [], START).data)


def test_what_is_not_used_of_an_allowance_does_not_add_up() -> None:
    allowance = Allowance.full(3, 0.5, 0.0)
    assert [allowance.take(1e6) for _ in range(5)] == [True] * 3 + [False] * 2
    assert not allowance.take(0.0) and not allowance.take(1.0) and allowance.take(2.0)  # the clock was set back


@given(st.lists(st.floats(-3, 2), max_size=60))
def test_an_allowance_is_never_exceeded_however_the_clock_goes(steps: list[float]) -> None:
    allowance, now, taken, gone = Allowance.full(3, 0.5, 0.0), 0.0, 0, 0.0
    for step in steps:
        now, gone = now + step, gone + max(0.0, step)
        taken += allowance.take(now)
        assert taken <= 3 + 0.5 * gone + 1e-6


def test_the_least_recently_used_makes_room() -> None:
    recent: Recent[int] = Recent(2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert list(recent) == ["a", "c"] and "b" not in recent and recent.get("b") is None
    recent.drop("a")
    recent.drop("nobody")
    assert len(recent) == 1


# Files


def test_revocations_are_on_the_disk_and_a_running_node_sees_a_change(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "swarm" / REVOCATIONS_FILE
    writer, reader = (Trust(RUN.public, name, FIRST.credential(name), clock=clock) for name in ("me", "you"))
    assert not reader.load(path)
    writer.revoke(RUN.revoke(["a"], None, [], START).data)
    writer.save(path)
    writer.save(path)
    assert reader.load(path) and not reader.load(path)
    append_line(path, RUN.revoke(["b"], None, [], START).data.decode())
    assert reader.load(path)
    assert turned_away(reader, "b", shown("b")) == "revoked"
    reader.save(path)
    assert len([line for line in path.read_text().splitlines() if line]) == 2


def test_a_cut_or_foreign_line_of_the_file_hides_no_other(tmp_path: Path, trust: Trust) -> None:
    path = tmp_path / REVOCATIONS_FILE
    first, second = (RUN.revoke([name], None, [], START).data.decode() for name in ("a", "b"))
    append_line(path, RunKey.create().revoke(["me"], None, [], START).data.decode())
    append_line(path, first)
    with path.open("a") as file:
        file.write(second[:100])  # the power went
    append_line(path, second)
    assert trust.load(path)
    assert len(trust.revocations()) == 2
    trust.check("me")


def test_processes_that_write_at_once_lose_no_revocation(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / REVOCATIONS_FILE

    def write(name: str) -> None:
        node = Trust(RUN.public, "me", FIRST.credential("me"), clock=clock)
        for i in range(5):
            node.revoke(RUN.revoke([f"{name} {i}"], None, [], START).data)
            node.save(path)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    reader = Trust(RUN.public, "me", FIRST.credential("me"), clock=clock)
    reader.load(path)
    assert len(reader.revocations()) == 20


def test_known_peers_are_merged_and_the_last_seen_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "swarm" / "peers.json"
    assert read_peers(path) == []
    own = KnownPeer("me", 0, ("/ip4/10.0.0.1/tcp/1/p2p/me",), "inv", 10.0, "worker-0")
    bob = KnownPeer("bob", 1, ("/ip4/10.0.0.2/tcp/1/p2p/bob",), "inv", 20.0)
    write_peers(path, [own, bob])
    assert read_peers(path) == [bob, own]
    moved = KnownPeer("me", 0, ("/ip4/10.0.0.9/tcp/1/p2p/me",), None, 30.0)  # as another worker tells it
    write_peers(path, [moved])
    assert read_peers(path) == [KnownPeer("me", 0, moved.addresses, "inv", 30.0, "worker-0"), bob]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"peers": [{"peer": "a"}]}', '{"peers": [{"addresses": []}]}'])
def test_a_damaged_list_of_peers_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "peers.json").write_text(content)
    assert read_peers(tmp_path / "peers.json") == []


def test_no_more_peers_are_remembered_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    write_peers(path, [KnownPeer(f"p{i}", None, (), None, float(i)) for i in range(600)])
    assert [peer.peer for peer in read_peers(path)] == [f"p{i}" for i in range(599, 87, -1)]
