"""An invitation survives a chat, and no other text is accepted as one."""

import io
from pathlib import Path

import base58
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.swarm.trust.credential import (
    MAX_EXPIRES,
)
from diloco.swarm.trust.invitation import (
    MAX_ADDRESSES,
    DamagedText,
    Invitation,
    decode_text,
    encode_text,
    invite,
    is_word,
    read_invitations,
)
from diloco.swarm.trust.run_key import RunKey
from diloco.swarm.trust.signatures import key_id

NOW = 1_800_000_000.0
ALICE = "12D3KooWL51Y1SzTFXeRnP1sxNC1PmDRHPAmWe4jf9WHZvP6BbAN"
BOB = "12D3KooWEVzzbXEuipGCBomRsHiLcoXP8rQAV44azxHrqxM9Ch26"
ADDRESSES = (f"/ip4/203.0.113.7/tcp/40331/p2p/{ALICE}", f"/ip6/2001:db8:85a3::7348/tcp/40331/p2p/{BOB}")
RUN = RunKey(bytes(range(32)))
INVITATION = invite(RUN, ADDRESSES, 3600, NOW)
TEXT = INVITATION.text()
LETTERS = base58.BITCOIN_ALPHABET.decode()


def parsed(text: str) -> Invitation:
    return Invitation.parse(text, NOW)


# The word


@given(st.binary(max_size=300))
@example(b"\0\0")
@example(b"\xff" * 18)
def test_any_bytes_become_a_word_and_come_back(data: bytes) -> None:
    word = encode_text(data)
    assert decode_text(word) == data
    assert word.isalnum() and word.isascii()


@given(st.text(alphabet=LETTERS, max_size=60))
def test_any_other_word_is_damaged(word: str) -> None:
    with pytest.raises(DamagedText):
        decode_text(word)


def test_more_bytes_than_a_word_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="too many for one word"):
        encode_text(bytes(3000) + b"1" * 3000)


def test_an_invitation_with_two_addresses_is_one_short_word() -> None:
    assert TEXT.isalnum() and TEXT.isascii() and TEXT.startswith("diloco2")
    assert len(TEXT) < 400
    assert len(invite(RUN, [], 60, NOW).text()) <= 215


addresses = st.lists(
    st.builds(
        "/{}/tcp/{}/p2p/{}".format,
        st.one_of(
            st.ip_addresses(v=4).map("/ip4/{}".format),
            st.ip_addresses(v=6).map("/ip6/{}".format),
            st.text(alphabet=LETTERS + ".-", min_size=1, max_size=30).map("/dns/{}".format),
        ).map(lambda host: host[1:]),
        st.integers(1, 65535),
        st.sampled_from([ALICE, BOB, f"{ALICE}/p2p-circuit/p2p/{BOB}"]),
    ),
    max_size=MAX_ADDRESSES,
    unique=True,
)


@given(st.binary(min_size=32, max_size=32), addresses, st.integers(1, MAX_EXPIRES - int(NOW)))
def test_an_invitation_is_read_as_it_was_written(seed: bytes, places: list[str], seconds: int) -> None:
    invitation = invite(RunKey(seed), places, seconds, NOW)
    found = Invitation.parse(invitation.text(), NOW)
    assert found == invitation
    assert found.run_id == RunKey(seed).run_id == key_id(RunKey(seed).public)
    assert found.id == invitation.id and found.expires == int(NOW + seconds)


def test_two_invitations_of_a_run_are_different_and_of_the_same_run() -> None:
    other = invite(RUN, ADDRESSES, 3600, NOW)
    assert other.id != INVITATION.id and other.run_id == INVITATION.run_id
    assert len(INVITATION.run_id) == len(INVITATION.id) == 16


def test_every_member_may_replace_the_addresses() -> None:
    moved = parsed(TEXT).with_addresses([f"/dns/example.org/tcp/1/p2p/{BOB}"])
    again = parsed(moved.text())
    assert again.addresses == (f"/dns/example.org/tcp/1/p2p/{BOB}",) and again.peers == (BOB,)
    assert again.id == INVITATION.id and again.certificate == INVITATION.certificate
    assert INVITATION.peers == (ALICE, BOB)
    assert INVITATION.with_addresses(ADDRESSES * 5).addresses == ADDRESSES


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("", "does not end in /p2p/PEER"),
        ("203.0.113.7:4000", "does not end in /p2p/PEER"),
        ("/ip4/203.0.113.7/tcp/4000", "does not end in /p2p/PEER"),
        ("/ip4/1.2.3.4/tcp/1/p2p/", "does not end in /p2p/PEER"),
        (f"/ip4/ü/p2p/{BOB}", "is not a value for ip4"),
        (f"/ip4/1.2.3.4\n/p2p/{BOB}", "is not a value for ip4"),
        (f"/a b/p2p/{BOB}", "is not known here"),
        (f"/dns/a b/tcp/1/p2p/{BOB}", "has a space"),
        (f"/dns/ü.org/tcp/1/p2p/{BOB}", "has a space or a character"),
        ("/ip4/1.2.3.4/tcp/1/p2p/0OIl", "is not a peer id"),
        (f"/dns/{'a' * 200}/p2p/{BOB}", "at most 200 are allowed"),
    ],
)
def test_what_is_not_an_address_of_a_peer_is_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        INVITATION.with_addresses([address])


def test_more_addresses_than_an_invitation_holds_are_refused() -> None:
    with pytest.raises(ConfigError, match="at most 8 addresses, not 9"):
        INVITATION.with_addresses([f"/ip4/1.2.3.4/tcp/{i}/p2p/{BOB}" for i in range(1, 10)])


@pytest.mark.parametrize("seconds", [0, -1, 0.5, float("nan"), float("inf"), MAX_EXPIRES])
def test_an_invitation_for_an_impossible_time_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="valid for"):
        invite(RUN, [], seconds, NOW)


# Pasting


def test_a_paste_may_bring_spaces_line_ends_quotes_and_the_command_along() -> None:
    lines = "\n> ".join(TEXT[i : i + 70] for i in range(0, len(TEXT), 70))
    zero_width = "​".join(TEXT[i : i + 9] for i in range(0, len(TEXT), 9))
    for paste in (f"  {TEXT}\n", f'"{TEXT}"', f"`{TEXT}`", f"<{TEXT}>.", f"**{TEXT}**", f"> {lines}\r\n", zero_width,
                  f"diloco join {TEXT}", "\ufeff" + TEXT, "Diloco2" + TEXT[7:], " ".join(TEXT)):  # fmt: skip
        assert parsed(paste) == INVITATION


@given(st.lists(st.tuples(st.integers(0, len(TEXT)), st.text(alphabet=" \t\r\n​­'\"`*_-.,<>|", max_size=4))))
def test_what_is_neither_letter_nor_digit_is_passed_over_wherever_it_is(noise: list[tuple[int, str]]) -> None:
    text = TEXT
    for place, letters in noise:
        text = text[:place] + letters + text[place:]
    assert parsed(text) == INVITATION


def test_every_single_letter_matters() -> None:
    for place in range(len("diloco"), len(TEXT)):
        for letter in (LETTERS[(LETTERS.index(TEXT[place]) + 1) % 58], "0"):
            with pytest.raises(ConfigError):
                parsed(TEXT[:place] + letter + TEXT[place + 1 :])
        with pytest.raises(ConfigError):
            parsed(TEXT[:place] + TEXT[place + 1 :])


@given(st.integers(0, len(TEXT) - 1), st.sampled_from(LETTERS), st.booleans())
def test_a_letter_changed_or_put_in_is_noticed(place: int, letter: str, put_in: bool) -> None:
    text = TEXT[:place] + letter + TEXT[place + (not put_in) :]
    if text.lower()[:6] == TEXT[:6] and text[6:] == TEXT[6:]:
        return  # unchanged, or Diloco1
    with pytest.raises(ConfigError):
        parsed(text)


def test_two_letters_changed_places_are_noticed() -> None:
    for place in range(len(TEXT) - 1):
        swapped = TEXT[:place] + TEXT[place + 1] + TEXT[place] + TEXT[place + 2 :]
        if swapped != TEXT:
            with pytest.raises(ConfigError):
                parsed(swapped)


def test_a_cut_paste_is_called_cut() -> None:
    for length in range(len("diloco2"), len(TEXT)):
        with pytest.raises(ConfigError, match=r"cut short.*copy it again"):
            parsed(TEXT[:length])
    with pytest.raises(ConfigError, match=f"120 of {len(TEXT) - 7} characters"):
        parsed(TEXT[:127])


@given(st.text(max_size=400))
@example("diloco2" + "z" * 30)
@example("diloco2" + "1" * 200)
@example("İdiloco2")
def test_no_text_is_an_invitation_by_chance(text: str) -> None:
    with pytest.raises(ConfigError):
        parsed(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        (" \n", "is empty"),
        ("hello", "not an invitation.*begins with diloco2"),
        ("diloco" + "1" + TEXT[7:], "of version 1, and this diloco reads version 2"),
        ("diloco", "of version none"),
        (TEXT + "1", "characters instead of"),
        (TEXT[:50] + "0" + TEXT[51:], "the letter '0', which no invitation contains"),
        (TEXT[:50] + "ж" + TEXT[51:], "the letter 'ж'"),
    ],
)
def test_what_is_wrong_with_it_is_said(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parsed(text)


def test_no_message_shows_the_secret() -> None:
    assert INVITATION.seed.hex() not in repr(INVITATION) and repr(INVITATION.seed) not in repr(INVITATION)
    assert repr(RUN.seed) not in repr(RUN)
    for text in (TEXT[:-1], TEXT + "2", "diloco1" + TEXT[7:]):
        with pytest.raises(ConfigError) as caught:
            parsed(text)
        assert TEXT[20:40] not in str(caught.value)


# Time and forgery


def test_an_expired_invitation_says_when_what_the_clock_says_and_what_to_do() -> None:
    Invitation.parse(TEXT, INVITATION.expires - 1)
    with pytest.raises(ConfigError) as caught:
        Invitation.parse(TEXT, INVITATION.expires + 86_400)
    message = str(caught.value)
    assert "expired at 2027-01-15 09:00:00 UTC" in message and "clock says 2027-01-16 09:00:00 UTC" in message
    assert "diloco invite RUN" in message and "set the clock" in message
    assert Invitation.parse(TEXT, None) == INVITATION


def test_an_invitation_that_another_key_signed_or_that_was_made_to_last_longer_is_forged() -> None:
    other = RunKey.create()
    longer = Invitation(RUN.public, INVITATION.seed, INVITATION.expires + 1, INVITATION.signature)
    swapped = Invitation(other.public, INVITATION.seed, INVITATION.expires, INVITATION.signature)
    own_seed = Invitation(RUN.public, bytes(32), INVITATION.expires, INVITATION.signature)
    for forged in (longer, swapped, own_seed):
        with pytest.raises(ConfigError, match="forged"):
            parsed(forged.text())


def test_a_word_with_other_contents_is_refused() -> None:
    good = [RUN.public, INVITATION.seed, INVITATION.expires, INVITATION.signature, []]
    assert parsed("diloco2" + encode_text(msgspec.msgpack.encode(good))).addresses == ()
    no_peer = b"\x04\x01\x02\x03\x04\x06\x0f\xa0"  # /ip4/1.2.3.4/tcp/4000
    for contents in (
        [], good[:-3], [*good, 1], [b"short", *good[1:]], [*good[:2], -1, *good[3:]], [*good[:4], [bytes(300)]],
        [*good[:4], [b"\x04"] * 9], [*good[:4], [b"\xff\xff"]], [*good[:4], [no_peer]], {"run_public": RUN.public},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="damaged"):
            parsed("diloco2" + encode_text(msgspec.msgpack.encode(contents)))


# Where it is given


def test_it_is_read_from_standard_input_a_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = invite(RUN, ADDRESSES, 3600, NOW)
    path = tmp_path / "invitations.txt"
    path.write_text(f"diloco join {TEXT[:80]}\n{TEXT[80:]}\n\n  '{other.text()}'\n")
    assert read_invitations([f"@{path}"], NOW) == [INVITATION, other]
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text()))
    assert read_invitations(["-"], NOW) == [INVITATION, other]
    monkeypatch.setenv("DILOCO_INVITATION", TEXT)
    assert read_invitations([], NOW) == [INVITATION]
    assert read_invitations([TEXT, other.text()], NOW) == [INVITATION, other]
    assert [is_word(one) for one in ("-", "@file", TEXT)] == [False, False, True]


def test_what_is_not_given_right_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_INVITATION", raising=False)
    with pytest.raises(ConfigError, match=r"no invitation is given: paste it after .*join -.*@FILE.*DILOCO_INVITATION"):
        read_invitations([], NOW)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_invitations([f"@{tmp_path / 'nowhere'}"], NOW)
    with pytest.raises(ConfigError, match="is there twice: each is for one worker"):
        read_invitations([TEXT, TEXT], NOW)
    with pytest.raises(ConfigError, match="different runs"):
        read_invitations([TEXT, invite(RunKey.create(), [], 3600, NOW).text()], NOW)
