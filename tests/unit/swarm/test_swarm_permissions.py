"""Permissions: credentials, revocations and offences decide, within limits that no outsider can widen."""

import threading
from pathlib import Path

import pytest

from diloco.swarm.run_files import REVOCATIONS_FILE, append_line
from diloco.swarm.trust import permissions as module
from diloco.swarm.trust.credential import Credential, PeerRefused
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.permissions import Permissions
from diloco.swarm.trust.run_key import RunKey

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
def permissions(clock: Clock) -> Permissions:
    return Permissions(RUN.public, "me", FIRST.credential("me"), clock=clock)


INVITATIONS = dict[str, Invitation]()


def invited(peer: str) -> Invitation:
    """Each peer has an invitation of its own, valid for as long as FIRST."""
    return INVITATIONS.setdefault(peer, invite(RUN, [], 3600, START))


def shown(peer: str) -> bytes:
    return invited(peer).credential(peer).data()


def refusal(permissions: Permissions, peer: str, credential: bytes | None = None) -> str:
    """The kind of refusal: of a hello, or without a credential of anything else."""
    with pytest.raises(PeerRefused) as caught:
        permissions.check(peer) if credential is None else permissions.admit(peer, credential)
    return caught.value.kind


# Hellos


def test_a_peer_that_has_shown_its_credential_is_in_good_standing(permissions: Permissions) -> None:
    permissions.admit("bob", shown("bob"))
    permissions.check("bob")
    assert permissions.invitation_of("bob") == invited("bob").id


def test_this_node_is_in_good_standing_with_itself_and_shows_a_credential_that_others_take(clock: Clock) -> None:
    me = Permissions(RUN.public, "me", FIRST.credential("me"), clock=clock)
    you = Permissions(me.run_public, "you", SECOND.credential("you"), clock=clock)
    me.check("me")
    you.admit("me", me.credential)
    me.admit("you", you.credential)
    assert me.run_id == you.run_id == RUN.run_id
    assert me.invitation_of("me") == FIRST.id


def test_a_node_does_not_start_with_a_credential_of_another(clock: Clock) -> None:
    with pytest.raises(PeerRefused, match="forged"):
        Permissions(RUN.public, "me", SECOND.credential("you"), clock=clock)


def test_a_peer_that_has_not_said_hello_is_unknown(permissions: Permissions) -> None:
    assert refusal(permissions, "bob") == "unknown"
    permissions.vouch_for(["bob"])
    assert refusal(permissions, "bob") == "unknown"
    assert permissions.invitation_of("bob") is None


def test_strangers_with_no_credential_or_a_stolen_or_a_forged_one_stay_strangers(permissions: Permissions) -> None:
    foreign = invite(RunKey.create(), [], 3600, START).credential("mallory").data()
    for credential in (b"", b"x" * 173, b"x" * 100_000, shown("bob"), foreign):
        assert refusal(permissions, "mallory", credential) == "forged"
    assert refusal(permissions, "mallory") == "unknown"
    assert permissions.refusals == {"forged": 5, "unknown": 1}


def test_an_expired_invitation_is_refused_from_unknown_peers_only(permissions: Permissions, clock: Clock) -> None:
    permissions.admit("member", shown("member"))
    clock.now = FIRST.expires
    permissions.check("member")
    permissions.admit("member", shown("member"))
    assert refusal(permissions, "stranger", shown("stranger")) == "expired"
    permissions.vouch_for(["stranger"])  # by this machine's own files
    permissions.admit("stranger", shown("stranger"))
    permissions.check("stranger")
    permissions.admit("newcomer", SECOND.credential("newcomer").data())
    assert refusal(permissions, "member", THIRD.credential("member").data()) == "expired"
    guest = invited("member").credential("status", "guest").data()
    permissions.admit("status", guest, worker=False)  # of the machine of a member
    with pytest.raises(PeerRefused, match="expired"):
        permissions.admit("doctor", THIRD.credential("doctor", "guest").data(), worker=False)


def test_a_peer_that_most_members_know_may_come_with_an_expired_invitation(
    permissions: Permissions, clock: Clock
) -> None:
    clock.now = FIRST.expires
    known: dict[str, bool | None] = {"bob": True, "eve": False, "nobody tells": None}
    permissions.is_known_to_most = lambda peer: known[peer]
    permissions.admit("bob", shown("bob"))
    for peer in ("eve", "nobody tells"):
        assert refusal(permissions, peer, shown(peer)) == "expired"
    known["bob"] = None  # cut off from all others
    assert permissions.drop_unknown() == []
    known["bob"] = False
    assert permissions.drop_unknown() == ["bob"] and refusal(permissions, "bob") == "unknown"


def test_being_vouched_for_replaces_no_signature(permissions: Permissions) -> None:
    permissions.vouch_for(["mallory", "", "x" * 10_000])
    assert refusal(permissions, "mallory", shown("bob")) == "forged"
    assert len(permissions._vouched) == 1


def test_a_known_peer_may_come_with_a_newer_invitation(permissions: Permissions) -> None:
    permissions.admit("bob", shown("bob"))
    permissions.admit("bob", SECOND.credential("bob").data())
    assert permissions.invitation_of("bob") == SECOND.id
    assert refusal(permissions, "bob", b"nonsense") == "forged"
    permissions.check("bob")


# Revoked


def test_a_revoked_peer_is_out_whatever_it_shows(permissions: Permissions) -> None:
    permissions.admit("bob", shown("bob"))
    assert permissions.add_revocation(RUN.revoke(["bob"], None, START).data)
    assert refusal(permissions, "bob") == "revoked"
    assert refusal(permissions, "bob", shown("bob")) == "revoked"
    permissions.vouch_for(["bob"])
    assert refusal(permissions, "bob", SECOND.credential("bob").data()) == "revoked"


def test_with_an_invitation_every_peer_that_comes_with_it_is_revoked(permissions: Permissions) -> None:
    permissions.admit("bad", shown("bad"))
    permissions.admit("elsewhere", SECOND.credential("elsewhere").data())
    permissions.add_revocation(RUN.revoke(["bad"], invited("bad").id, START).data)
    for peer in ("elsewhere", "me"):
        permissions.check(peer)
    assert refusal(permissions, "bad") == "revoked"
    new_name = "bad under a new name"
    assert refusal(permissions, new_name, invited("bad").credential(new_name).data()) == "revoked"


def test_a_node_learns_that_it_is_revoked_itself(permissions: Permissions) -> None:
    permissions.add_revocation(RUN.revoke([], FIRST.id, START).data)
    assert refusal(permissions, "me") == "revoked"


def test_a_revocation_is_news_once_and_is_passed_on_as_it_came(permissions: Permissions, clock: Clock) -> None:
    other = Permissions(RUN.public, "you", SECOND.credential("you"), clock=clock)
    assert permissions.revocations() == [] and permissions.revocations_digest() == other.revocations_digest()
    records = [RUN.revoke([name], None, START).data for name in ("a", "b", "c")]
    assert [permissions.add_revocation(record) for record in (*records, *records)] == [True] * 3 + [False] * 3
    assert permissions.revocations_digest() != other.revocations_digest()
    assert [other.add_revocation(record) for record in reversed(permissions.revocations())] == [True] * 3
    assert permissions.revocations_digest() == other.revocations_digest()
    assert refusal(other, "b", shown("b")) == "revoked"


def test_a_forged_revocation_changes_nothing(permissions: Permissions) -> None:
    permissions.admit("bob", shown("bob"))
    before = permissions.revocations_digest()
    for data in (RunKey.create().revoke(["bob"], None, START).data, b"", b"x" * 200_000):
        with pytest.raises(PeerRefused, match="forged"):
            permissions.add_revocation(data)
    permissions.check("bob")
    assert permissions.revocations_digest() == before


# Banned


def test_the_third_offence_bans(permissions: Permissions) -> None:
    permissions.admit("bob", shown("bob"))
    assert [permissions.record_offence("bob", reason) for reason in ("NaN", "NaN", "norm 1e30")] == [False, False, True]
    assert refusal(permissions, "bob") == "banned"
    assert refusal(permissions, "bob", shown("bob")) == "banned"
    assert refusal(permissions, "bob", SECOND.credential("bob").data()) == "banned"
    assert list(permissions.bans()) == ["bob"] and "norm 1e30" in permissions.bans()["bob"]
    assert permissions.record_offence("bob", "again")


@pytest.mark.parametrize("refusals", [1, 2, 5])
def test_so_many_refusals_ban_as_the_settings_say(clock: Clock, refusals: int) -> None:
    permissions = Permissions(RUN.public, "me", FIRST.credential("me"), refusals, clock)
    permissions.admit("bob", shown("bob"))
    assert [permissions.record_offence("bob", "NaN") for _ in range(refusals)] == [False] * (refusals - 1) + [True]


def test_a_rare_fault_is_forgiven_and_a_frequent_one_is_not(permissions: Permissions) -> None:
    permissions.admit("flaky", shown("flaky"))
    for _ in range(20):
        assert not permissions.record_offence("flaky", "NaN")
        for _ in range(module.POINTS_PER_OFFENCE):
            permissions.record_accepted("flaky")
    permissions.admit("sly", shown("sly"))
    for _ in range(4):
        permissions.record_offence("sly", "NaN")
        for _ in range(module.POINTS_PER_OFFENCE // 2):
            permissions.record_accepted("sly")
    assert "sly" in permissions.bans() and "flaky" not in permissions.bans()


def test_good_contributions_give_no_credit_for_later(permissions: Permissions) -> None:
    permissions.admit("bob", shown("bob"))
    for _ in range(100):
        permissions.record_accepted("bob")
    assert not permissions.record_offence("bob", "NaN")
    for _ in range(100):
        permissions.record_accepted("bob")
    assert [permissions.record_offence("bob", "NaN") for _ in range(3)][-1]


def test_outsiders_are_not_counted(permissions: Permissions) -> None:
    assert [permissions.record_offence("mallory", "noise") for _ in range(10)] == [False] * 10
    permissions.record_accepted("mallory")
    assert permissions.bans() == {} and len(permissions._offence_points) == 0


def test_bans_can_be_brought_back(permissions: Permissions, clock: Clock) -> None:
    permissions.admit("bob", shown("bob"))
    permissions.ban("bob", "NaN")
    again = Permissions(RUN.public, "me", FIRST.credential("me"), clock=clock)
    for peer, reason in permissions.bans().items():
        again.ban(peer, reason)
    assert refusal(again, "bob", shown("bob")) == "banned"


# Limits


def test_one_peer_cannot_make_this_one_check_signatures_all_day(permissions: Permissions, clock: Clock) -> None:
    kinds = [refusal(permissions, "mallory", b"noise") for _ in range(20)]
    assert kinds == ["forged"] * 5 + ["busy"] * 15
    permissions.admit("bob", shown("bob"))
    clock.now += 5
    assert [refusal(permissions, "mallory", b"noise") for _ in range(2)] == ["forged", "busy"]


def test_many_names_cannot_either_and_members_still_get_in(permissions: Permissions, clock: Clock) -> None:
    permissions.vouch_for(["member"])
    permissions.admit("known", shown("known"))
    kinds = [refusal(permissions, f"mallory {i}", b"noise") for i in range(200)]
    assert kinds.count("forged") <= 64
    assert refusal(permissions, "bob", shown("bob")) == "busy"
    permissions.admit("member", shown("member"))
    for _ in range(50):  # costs no signature
        permissions.admit("known", shown("known"))
    clock.now += 1
    permissions.admit("bob", shown("bob"))


def test_memory_does_not_grow_with_the_number_of_peers(
    permissions: Permissions, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Credential, "verify", lambda *_: None)
    for table in (
        permissions._known,
        permissions._vouched,
        permissions._bans,
        permissions._offence_points,
        permissions._hellos._buckets,
    ):
        table._max_entries = 50  # type: ignore[attr-defined]
    for i in range(300):
        clock.now += 1
        permissions.admit(f"peer {i}", shown(f"peer {i}"))
        permissions.check("peer 0")
        permissions.vouch_for([f"other {i}"])
        permissions.record_offence(f"peer {i}", "NaN")
        permissions.ban(f"banned {i}", "NaN")
    sizes = [
        len(t)
        for t in (
            permissions._known,
            permissions._vouched,
            permissions._bans,
            permissions._offence_points,
            permissions._hellos._buckets,
        )
    ]
    assert sizes == [50] * 5
    assert refusal(permissions, "peer 1") == "unknown"  # says hello again if it is still there
    assert len(permissions.refusals) <= 6


def test_no_more_revocations_are_kept_than_the_limit(permissions: Permissions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REVOCATIONS", 2)
    for name in ("a", "b"):
        permissions.add_revocation(RUN.revoke([name], None, START).data)
    with pytest.raises(PeerRefused, match="no more than 2"):
        permissions.add_revocation(RUN.revoke(["c"], None, START).data)


# Files


def test_revocations_are_on_the_disk_and_a_running_node_sees_a_change(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "swarm" / REVOCATIONS_FILE
    writer, reader = (Permissions(RUN.public, me, invited(me).credential(me), clock=clock) for me in ("me", "you"))
    assert not reader.load_revocations(path)
    writer.add_revocation(RUN.revoke(["a"], None, START).data)
    writer.save_revocations(path)
    writer.save_revocations(path)
    assert reader.load_revocations(path) and not reader.load_revocations(path)
    append_line(path, RUN.revoke(["b"], None, START).data.decode())
    assert reader.load_revocations(path)
    assert refusal(reader, "b", shown("b")) == "revoked"
    reader.save_revocations(path)
    assert len([line for line in path.read_text().splitlines() if line]) == 2


def test_a_cut_or_foreign_line_of_the_file_hides_no_other(tmp_path: Path, permissions: Permissions) -> None:
    path = tmp_path / REVOCATIONS_FILE
    first, second = (RUN.revoke([name], None, START).data.decode() for name in ("a", "b"))
    append_line(path, RunKey.create().revoke(["me"], None, START).data.decode())
    append_line(path, first)
    with path.open("a") as file:
        file.write(second[:100])  # the power went
    append_line(path, second)
    assert permissions.load_revocations(path)
    assert len(permissions.revocations()) == 2
    permissions.check("me")


def test_processes_that_write_at_once_lose_no_revocation(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / REVOCATIONS_FILE

    def write(name: str) -> None:
        node = Permissions(RUN.public, "me", FIRST.credential("me"), clock=clock)
        for i in range(5):
            node.add_revocation(RUN.revoke([f"{name} {i}"], None, START).data)
            node.save_revocations(path)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    reader = Permissions(RUN.public, "me", FIRST.credential("me"), clock=clock)
    reader.load_revocations(path)
    assert len(reader.revocations()) == 20
