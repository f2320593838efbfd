"""The run's key, and what it signs: credentials and revocations."""

import stat
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.swarm.trust.credential import (
    MAX_CREDENTIAL_BYTES,
    Credential,
    InvitationCertificate,
    PeerRefused,
    certified_bytes,
)
from diloco.swarm.trust.invitation import Invitation, invite
from diloco.swarm.trust.run_key import MAX_REVOCATION_BYTES, Revocation, RunKey
from diloco.swarm.trust.signatures import sign

NOW = 1_800_000_000.0
ALICE = "12D3KooWL51Y1SzTFXeRnP1sxNC1PmDRHPAmWe4jf9WHZvP6BbAN"
BOB = "12D3KooWEVzzbXEuipGCBomRsHiLcoXP8rQAV44azxHrqxM9Ch26"
ADDRESSES = (f"/ip4/203.0.113.7/tcp/40331/p2p/{ALICE}", f"/ip6/2001:db8:85a3::7348/tcp/40331/p2p/{BOB}")
RUN = RunKey(bytes(range(32)))
INVITATION = invite(RUN, ADDRESSES, 3600, NOW)
TEXT = INVITATION.text()
LETTERS = base58.BITCOIN_ALPHABET.decode()


# The run's key


def test_the_runs_key_is_kept_for_its_owner_alone_and_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "swarm" / "run.key"
    key = RunKey.create()
    key.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert RunKey.load(path) == key
    with pytest.raises(ConfigError, match="not overwritten"):
        RunKey.create().save(path)
    assert RunKey.load(path) == key
    assert [file.name for file in path.parent.iterdir()] == ["run.key"]


@pytest.mark.parametrize("content", ["", "xyz", "00" * 31, "00" * 33])
def test_a_damaged_key_of_the_run_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.key").write_text(content)
    with pytest.raises(ConfigError, match="restore it"):
        RunKey.load(tmp_path / "run.key")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunKey.load(tmp_path / "missing")


# Credentials


def test_a_credential_is_small_and_proves_itself_with_the_runs_public_key_alone() -> None:
    data = INVITATION.credential(BOB).data()
    assert len(data) <= MAX_CREDENTIAL_BYTES
    assert INVITATION.seed not in data
    credential = Credential.read(data)
    credential.verify(RUN.public, BOB, NOW)
    assert credential.certificate.id == INVITATION.id


def refusal(credential: Credential, run_public: bytes, peer: str, now: float | None) -> PeerRefused:
    with pytest.raises(PeerRefused) as caught:
        credential.verify(run_public, peer, now)
    assert str(caught.value).startswith(f"{caught.value.kind}: ")
    return caught.value


def test_a_credential_stolen_by_another_peer_is_refused() -> None:
    error = refusal(INVITATION.credential(BOB), RUN.public, ALICE, NOW)
    assert error.kind == "forged" and "another peer" in str(error)


def test_a_credential_for_another_run_is_refused() -> None:
    error = refusal(INVITATION.credential(BOB), RunKey.create().public, BOB, NOW)
    assert error.kind == "forged" and "not of the run" in str(error)


def test_a_credential_is_for_one_run_though_two_had_signed_the_same_invitation() -> None:
    other = RunKey.create()
    certified = certified_bytes(INVITATION.certificate.public, INVITATION.expires)
    certificate = InvitationCertificate(
        INVITATION.certificate.public, INVITATION.expires, sign(other.seed, "invitation", certified)
    )
    twice = Credential(certificate, INVITATION.credential(BOB).signature)
    assert twice.certificate.is_signed_by(other.public)
    assert refusal(twice, other.public, BOB, NOW).kind == "forged"


def test_a_credential_of_an_expired_invitation_is_refused_where_the_time_counts() -> None:
    credential = INVITATION.credential(BOB)
    assert refusal(credential, RUN.public, BOB, INVITATION.expires).kind == "expired"
    credential.verify(RUN.public, BOB, None)


def test_a_credential_with_any_byte_changed_is_refused() -> None:
    data = INVITATION.credential(BOB).data()
    for place in range(len(data)):
        changed = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        with pytest.raises(PeerRefused, match="forged"):
            Credential.read(changed).verify(RUN.public, BOB, NOW)


@given(st.binary(max_size=300))
def test_any_other_bytes_are_no_credential(data: bytes) -> None:
    with pytest.raises(PeerRefused, match="forged"):
        Credential.read(data).verify(RUN.public, BOB, NOW)


def test_a_signature_made_for_one_purpose_does_not_serve_for_another() -> None:
    """A run's key signs invitations and revocations: the one can never be read as the other."""
    record = RUN.revoke([BOB], None, NOW)
    signature = bytes.fromhex(record.data.partition(b" ")[0].decode())
    forged = Invitation(RUN.public, INVITATION.seed, INVITATION.expires, signature)
    with pytest.raises(ConfigError, match="forged"):
        Invitation.parse(forged.text(), NOW)
    told = record.data.partition(b" ")[2]
    aimless = Ed25519PrivateKey.from_private_bytes(RUN.seed).sign(told).hex().encode() + b" " + told
    with pytest.raises(PeerRefused, match="forged"):
        Revocation.read(aimless, RUN.public)


# Revocations


def test_a_revocation_excludes_its_peers_and_those_of_its_invitation() -> None:
    record = Revocation.read(RUN.revoke([ALICE], INVITATION.id, NOW).data, RUN.public)
    assert record.excludes(ALICE, None) and record.excludes(ALICE, "another")
    assert record.excludes("newcomer", INVITATION.id)
    assert not record.excludes("newcomer", "another") and not record.excludes("newcomer", None)
    assert record.at == int(NOW)
    only_a_peer = RUN.revoke([ALICE], None, NOW)
    assert not only_a_peer.excludes("newcomer", None)


def test_only_the_runs_key_can_revoke() -> None:
    data = RUN.revoke([ALICE], INVITATION.id, NOW).data
    for forged in (RunKey.create().revoke([ALICE], None, NOW).data, data.replace(b"12D3", b"12D4"), data[1:],
                   data[128:], b"", b" ", b"00" * 64 + b" {}", b"zz" * 64 + b" {}", b"\xff" * 200):  # fmt: skip
        with pytest.raises(PeerRefused, match="forged"):
            Revocation.read(forged, RUN.public)


def test_a_revocation_is_one_line_and_has_a_limit() -> None:
    record = RUN.revoke([ALICE, "odd\nname", *(f"{BOB}{i}" for i in range(500))], INVITATION.id, NOW)
    assert b"\n" not in record.data and len(record.data) <= MAX_REVOCATION_BYTES
    with pytest.raises(ConfigError, match="of 2000 peers"):
        RUN.revoke([f"{BOB}{i}" for i in range(2000)], INVITATION.id, NOW)
