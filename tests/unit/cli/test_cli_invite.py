"""`diloco invite` and `diloco revoke` on run folders as a swarm leaves them; no swarm runs."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from diloco.cli.main import run
from diloco.errors import ConfigError
from diloco.swarm.network import identity
from diloco.swarm.network.known_peers import KnownPeer, write_peers
from diloco.swarm.run_files import REVOCATIONS_FILE, write_private
from diloco.swarm.trust.credential import PeerRefused
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.permissions import Permissions
from diloco.swarm.trust.run_key import RunKey
from diloco.swarm.trust.run_owner import choose_addresses, own_invitation, refresh_invitation

OWN = "12D3KooWL51Y1SzTFXeRnP1sxNC1PmDRHPAmWe4jf9WHZvP6BbAN"
BOB = "12D3KooWEVzzbXEuipGCBomRsHiLcoXP8rQAV44azxHrqxM9Ch26"
EVE = "12D3KooWEqnTdgqHnkkwarSrJjeMP2ZJiADWLYADaNvUb6SQNyPF"
HOUR = 3600.0


def at(ip: str, peer: str) -> str:
    return f"/{'ip6' if ':' in ip else 'ip4'}/{ip}/tcp/4000/p2p/{peer}"


@dataclass
class Founded:
    path: Path
    key: RunKey
    first: Invitation
    bobs: Invitation

    @property
    def swarm(self) -> Path:
        return self.path / "swarm"

    def met(self, *peers: KnownPeer) -> None:
        write_peers(self.swarm / "peers.json", peers)

    def without_key(self) -> None:
        (self.swarm / "run.key").unlink()

    def seen_by(self, peer: str) -> Permissions:
        """The node of a peer, after it has read the file."""
        own = invite(self.key, [], HOUR, time.time())
        node = Permissions(self.key.public, peer, own.credential(peer))
        node.load_revocations(self.swarm / REVOCATIONS_FILE)
        return node


@pytest.fixture
def founded(tmp_path: Path) -> Founded:
    key = RunKey.create()
    first = invite(key, [at("198.51.100.1", OWN)], HOUR, time.time())
    made = Founded(tmp_path / "run", key, first, invite(key, [], HOUR, time.time()))
    key.save(made.swarm / "run.key")
    write_private(made.swarm / "worker-0.invitation", first.text() + "\n")
    made.met(
        KnownPeer(
            OWN, 0, (at("127.0.0.1", OWN), at("192.168.1.5", OWN), at("8.8.8.8", OWN)), first.id, 3.0, "worker-0"
        ),
        KnownPeer(BOB, 1, (at("9.9.9.9", BOB),), made.bobs.id, 2.0),
        KnownPeer(EVE, 2, (at("10.1.1.1", EVE),), None, 1.0),
    )
    return made


def succeeds(capsys: pytest.CaptureFixture[str], *tokens: str) -> tuple[str, str]:
    assert run(list(tokens)) == 0, capsys.readouterr().err
    captured = capsys.readouterr()
    return captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *tokens: str) -> str:
    assert run(list(tokens)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


# invite


def test_where_the_run_began_every_invitation_is_new(capsys: pytest.CaptureFixture[str], founded: Founded) -> None:
    out, err = succeeds(capsys, "invite", str(founded.path), "--days", "7")
    assert out.count("\n") == 1 and len(out) < 500  # the invitation and nothing else, for $(...)
    made = Invitation.parse(out, time.time())
    assert made.run_id == founded.key.run_id and made.id != founded.first.id
    assert abs(made.expires - time.time() - 7 * 24 * HOUR) < 60
    assert made.addresses == (at("8.8.8.8", OWN), at("192.168.1.5", OWN), at("9.9.9.9", BOB), at("10.1.1.1", EVE))
    assert (
        made.until in err and "an invitation for one worker" in err and "no worker of this run is running here" in err
    )
    again, _ = succeeds(capsys, "invite", str(founded.path))
    assert Invitation.parse(again, time.time()).id not in (made.id, founded.first.id)


def test_several_seats_are_as_many_invitations_one_a_line(capsys: pytest.CaptureFixture[str], founded: Founded) -> None:
    out, err = succeeds(capsys, "invite", str(founded.path), "--seats", "3")
    ids = {Invitation.parse(line, time.time()).id for line in out.splitlines()}
    assert len(ids) == out.count("\n") == 3 and "3 invitations, each for one worker" in err
    assert "must be from 1 to 1023" in refused(capsys, "invite", str(founded.path), "--seats", "0")


def test_it_says_how_to_join_a_run_of_diloco_train_and_one_of_an_own_loop(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    assert "join_swarm(FOLDER" in succeeds(capsys, "invite", str(founded.path))[1]
    (founded.swarm / "run.json").write_text("{}")
    assert "join -, and paste it" in succeeds(capsys, "invite", str(founded.path))[1]


def test_elsewhere_no_invitation_is_made_and_one_that_was_given_away_gets_fresh_addresses(
    capsys: pytest.CaptureFixture[str], founded: Founded, tmp_path: Path
) -> None:
    founded.without_key()
    for option in ([], ["--days=3"], ["--seats=2"]):
        told = refused(capsys, "invite", str(founded.path), *option)
        assert "only the machine where the run began makes invitations" in told and "--renew" in told
    given_away = invite(founded.key, [at("198.51.100.9", OWN)], HOUR, time.time())
    (tmp_path / "word").write_text(given_away.text())
    out, err = succeeds(capsys, "invite", str(founded.path), "--renew", f"@{tmp_path / 'word'}")
    made = Invitation.parse(out, time.time())
    assert made.id == given_away.id and made.expires == given_away.expires
    assert made.addresses[0] == at("8.8.8.8", OWN) and "the addresses known now" in err
    of_another = invite(RunKey.create(), [], HOUR, time.time()).text()
    assert "is to the run" in refused(capsys, "invite", str(founded.path), "--renew", of_another)
    assert "leave --seats" in refused(capsys, "invite", str(founded.path), "--renew", of_another, "--seats=2")


def test_the_own_invitation_of_a_revoked_machine_is_of_no_use(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    succeeds(capsys, "revoke", str(founded.path), "1")
    write_private(founded.swarm / "worker-0.invitation", founded.bobs.text())  # as the other machine has it
    founded.without_key()
    with pytest.raises(ConfigError, match="was revoked"):
        own_invitation(founded.swarm, time.time())


def test_without_known_peers_the_addresses_are_those_of_its_own_invitation(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    (founded.swarm / "peers.json").unlink()
    out, _ = succeeds(capsys, "invite", str(founded.path))
    assert Invitation.parse(out, time.time()).addresses == founded.first.addresses
    write_private(founded.swarm / "worker-0.invitation", founded.first.with_addresses([]).text())
    assert "start a worker first" in refused(capsys, "invite", str(founded.path))


@pytest.mark.parametrize("days", ["0", "-1", "nan", "inf", "4000"])
def test_an_impossible_number_of_days_is_refused(
    capsys: pytest.CaptureFixture[str], founded: Founded, days: str
) -> None:
    assert "must be above 0 and at most 3650" in refused(capsys, "invite", str(founded.path), f"--days={days}")


def test_what_is_no_run_of_a_swarm_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for verb in (["invite"], ["revoke"]):
        more = ["1"] if verb == ["revoke"] else []
        assert "not a run of a swarm" in refused(capsys, *verb, str(tmp_path), *more)
        assert "no such folder" in refused(capsys, *verb, str(tmp_path / "nowhere"), *more)
    assert "RUN" in refused(capsys, "invite")
    assert "PEER" in refused(capsys, "revoke", str(tmp_path))


def test_without_the_swarms_packages_the_remedy_is_named(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['cryptography'] = None; from diloco.cli.main import run; "
        f"sys.exit(run(['invite', {str(tmp_path)!r}]))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and "needs cryptography" in ended.stderr and ".[swarm]" in ended.stderr


# Which addresses


def test_public_addresses_come_first_and_the_machines_own_loopback_only_alone() -> None:
    own = KnownPeer(OWN, 0, (at("127.0.0.1", OWN), at("10.0.0.1", OWN), at("2001:4860::8", OWN)), local_name="worker-0")
    assert choose_addresses([own]) == [at("2001:4860::8", OWN), at("10.0.0.1", OWN)]
    near = KnownPeer(OWN, 0, (at("127.0.0.1", OWN), at("fe80::1", OWN), at("10.0.0.1", OWN)), local_name="worker-0")
    assert choose_addresses([near]) == [at("10.0.0.1", OWN)]
    alone = KnownPeer(OWN, 0, (at("127.0.0.1", OWN),), local_name="worker-0")
    assert choose_addresses([alone]) == [at("127.0.0.1", OWN)]
    assert choose_addresses([]) == choose_addresses([KnownPeer(BOB, 1, ())]) == []


def test_addresses_lead_to_different_machines() -> None:
    second = KnownPeer(EVE, 1, (at("8.8.8.8", EVE),), local_name="worker-1")
    own = KnownPeer(OWN, 0, (at("8.8.8.8", OWN), at("10.0.0.1", OWN), at("10.0.0.2", OWN)), local_name="worker-0")
    home = KnownPeer(BOB, 2, (at("192.168.7.7", BOB),))
    relayed = KnownPeer("carol", 3, (f"/ip4/10.3.3.3/tcp/1/p2p/{BOB}/p2p-circuit/p2p/carol", at("10.3.3.3", "carol")))
    assert choose_addresses([own, second, home, relayed]) == [
        at("8.8.8.8", OWN), at("10.0.0.1", OWN), relayed.addresses[0], at("192.168.7.7", BOB)
    ]  # fmt: skip
    assert choose_addresses([own, second]) == [at("8.8.8.8", OWN), at("10.0.0.1", OWN), at("8.8.8.8", EVE)]


def test_dead_peers_and_peers_that_never_became_members_are_in_no_invitation() -> None:
    own = KnownPeer(OWN, 0, (at("10.0.0.1", OWN),), seen=1000.0, local_name="worker-0")
    before = KnownPeer("earlier", 7, (at("10.0.0.1", "earlier"),), seen=100.0, local_name="worker-1")
    dead = KnownPeer(EVE, 1, (at("8.8.8.8", EVE),), seen=900.0)
    knocking = KnownPeer("mallory", None, (at("9.9.9.9", "mallory"),), seen=1000.0)
    live = KnownPeer(BOB, 3, (at("10.1.1.1", BOB),), seen=950.0)
    assert choose_addresses([own, before, dead, knocking, live]) == [at("10.0.0.1", OWN), at("10.1.1.1", BOB)]


def test_the_oldest_members_come_first() -> None:
    many = [KnownPeer(f"p{i}", i, (at("8.8.8.8", f"p{i}"),), seen=float(i)) for i in range(9)]
    assert choose_addresses(many) == [at("8.8.8.8", f"p{i}") for i in range(4)]


def test_a_revoked_peer_is_in_no_invitation(capsys: pytest.CaptureFixture[str], founded: Founded) -> None:
    assert any(BOB in address for address in own_invitation(founded.swarm, time.time()).addresses)
    succeeds(capsys, "revoke", str(founded.path), "1")
    assert not any(BOB in address for address in own_invitation(founded.swarm, time.time()).addresses)


def test_the_invitation_in_the_run_folder_follows_the_members_and_forgets_no_address_that_it_has_room_for(
    founded: Founded,
) -> None:
    """So that a copy of it, and the next start, find the run when the machine where it began is gone."""

    def saved() -> Invitation:
        return Invitation.parse((founded.swarm / "worker-0.invitation").read_text(), time.time())

    now, before = time.time(), saved()
    others = {BOB: "198.51.100.2", EVE: "198.51.100.3"}
    founded.met(*(KnownPeer(peer, 1, (at(ip, peer),), None, now) for peer, ip in others.items()))
    assert refresh_invitation(founded.swarm) and not refresh_invitation(founded.swarm)
    assert saved().id == before.id and {BOB, EVE, OWN} <= set(saved().peers)
    assert saved().credential(BOB) == before.credential(BOB)


# revoke


def test_this_machines_own_worker_is_not_revoked_though_the_list_of_peers_has_lost_it(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    own = identity.load_or_create(founded.swarm / "worker-1.key")
    assert "own worker-1: stop it" in refused(capsys, "revoke", str(founded.path), own)


def test_a_revoked_peer_is_out_for_all_and_so_is_its_invitation(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    _, err = succeeds(capsys, "revoke", str(founded.path), "1")
    assert f"{BOB} is revoked" in err and f"so is its invitation {founded.bobs.id}" in err
    assert (founded.swarm / REVOCATIONS_FILE).stat().st_mode & 0o777 == 0o600
    node = founded.seen_by(EVE)
    node.check(EVE)
    node.admit(OWN, founded.first.credential(OWN).data())
    for peer in (BOB, "bob under a new name"):
        with pytest.raises(PeerRefused, match="revoked"):
            node.admit(peer, founded.bobs.credential(peer).data())


def test_an_invitation_that_was_given_away_is_revoked_before_a_worker_comes_with_it(
    capsys: pytest.CaptureFixture[str], founded: Founded, tmp_path: Path
) -> None:
    leaked = invite(founded.key, [], HOUR, time.time())
    (tmp_path / "word").write_text(leaked.text())
    _, err = succeeds(capsys, "revoke", str(founded.path), f"@{tmp_path / 'word'}")
    assert f"the invitation {leaked.id} is revoked" in err
    assert "was revoked already" in succeeds(capsys, "revoke", str(founded.path), leaked.text())[1]
    with pytest.raises(PeerRefused, match="revoked"):
        founded.seen_by(EVE).admit("mallory", leaked.credential("mallory").data())
    _, err = succeeds(capsys, "revoke", str(founded.path), founded.bobs.text())
    assert f"{BOB} is revoked" in err


def test_a_peer_is_named_by_number_by_id_or_by_its_beginning_or_end(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    assert "fits 2 peers" in refused(capsys, "revoke", str(founded.path), "12D3KooWE")
    succeeds(capsys, "revoke", str(founded.path), "12D3KooWEV")
    succeeds(capsys, "revoke", str(founded.path), EVE)
    assert "was revoked already" in succeeds(capsys, "revoke", str(founded.path), EVE[-6:])[1]  # as status shows it
    with pytest.raises(PeerRefused, match="revoked"):
        founded.seen_by(EVE).check(EVE)


def test_a_second_time_changes_nothing(capsys: pytest.CaptureFixture[str], founded: Founded) -> None:
    succeeds(capsys, "revoke", str(founded.path), "1")
    before = (founded.swarm / REVOCATIONS_FILE).read_bytes()
    assert "was revoked already" in succeeds(capsys, "revoke", str(founded.path), BOB)[1]
    assert (founded.swarm / REVOCATIONS_FILE).read_bytes() == before


def test_a_peer_never_met_can_be_revoked_by_its_whole_id_with_a_warning(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    stranger = BOB[:-1] + "7"
    _, err = succeeds(capsys, "revoke", str(founded.path), stranger)
    assert "come back under a new id" in err
    founded.met(KnownPeer(stranger, 5, (), "0123456789abcdef"))  # met later
    assert "0123456789abcdef" in succeeds(capsys, "revoke", str(founded.path), stranger)[1]


@pytest.mark.parametrize("peer", ["9", "12D3KooWx", "nobody", "", "²"])
def test_an_unknown_peer_is_not_revoked(capsys: pytest.CaptureFixture[str], founded: Founded, peer: str) -> None:
    assert f"{BOB} (worker 1)" in refused(capsys, "revoke", str(founded.path), peer)
    assert not (founded.swarm / REVOCATIONS_FILE).exists()


def test_one_does_not_revoke_ones_own_worker_nor_without_the_key(
    capsys: pytest.CaptureFixture[str], founded: Founded
) -> None:
    assert "stop it instead" in refused(capsys, "revoke", str(founded.path), "0")
    founded.without_key()
    assert "only the machine where the run began" in refused(capsys, "revoke", str(founded.path), "1")
    assert not (founded.swarm / REVOCATIONS_FILE).exists()
