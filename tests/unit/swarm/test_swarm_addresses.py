"""Addresses as text and bytes, and what a user may write."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.errors import ConfigError
from diloco.swarm.network import identity, listening, multiaddr

PEER = identity.peer_id(bytes(range(32)))


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.7/tcp/4000",
        f"/ip4/203.0.113.7/tcp/4000/p2p/{PEER}",
        "/ip6/2001:db8::1/tcp/65535",
        f"/ip4/10.0.0.1/tcp/1/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
        "/dns/example.org/tcp/443",
        "/dns4/example.org/udp/443/quic-v1",
        "/unix/tmp/a/b.sock",
    ],
)
def test_an_address_survives_being_packed(address: str) -> None:
    assert multiaddr.to_text(multiaddr.to_bytes(address)) == address


@given(st.binary(max_size=60))
def test_a_peer_id_survives_being_packed(data: bytes) -> None:
    assert multiaddr.peer_id_to_bytes(multiaddr.peer_id_to_text(data)) == data


@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        text = multiaddr.to_text(data)
    except ConfigError:
        return
    assert isinstance(text, str)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "example.org",
        "/ip4/1.2.3",
        "/ip4/1.2.3.4/tcp/70000",
        "/ip4/1.2.3.4/tcp",
        "/http/x",
        "/p2p/0OIl",
        "/ip6/1.2.3.4",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError):
        multiaddr.to_bytes(address)


def test_a_peers_name_begins_as_libp2ps_do() -> None:
    assert identity.peer_id(os.urandom(32)).startswith("12D3KooW")


@pytest.mark.parametrize(
    ("text", "port", "expected"),
    [
        ("203.0.113.7", 4000, "/ip4/203.0.113.7/tcp/4000"),
        ("203.0.113.7:5000", 4000, "/ip4/203.0.113.7/tcp/5000"),
        ("2001:db8::1", 4000, "/ip6/2001:db8::1/tcp/4000"),
        ("[2001:db8::1]:5000", None, "/ip6/2001:db8::1/tcp/5000"),
        ("home.example.org:5000", None, "/dns/home.example.org/tcp/5000"),
        ("/ip4/203.0.113.7/tcp/5000", None, "/ip4/203.0.113.7/tcp/5000"),
        (f"/ip4/203.0.113.7/tcp/5000/p2p/{PEER}", None, "/ip4/203.0.113.7/tcp/5000"),
    ],
)
def test_what_is_announced_may_be_written_in_three_ways(text: str, port: int | None, expected: str) -> None:
    assert listening.parse_announced(text, port) == expected


@pytest.mark.parametrize(
    ("text", "port", "said"),
    [
        ("203.0.113.7", None, "has no port"),
        ("203.0.113.7:0", None, "between 1 and 65535"),
        ("203.0.113.7:many", None, "between 1 and 65535"),
        ("a b:5000", None, "not ADDRESS"),
        ("", 5000, "not ADDRESS"),
        ("", None, "not ADDRESS"),
        ("300.1.2.3:5000", None, "not ADDRESS"),
        ("/ip4/203.0.113.7/tcp/0", None, "not 0"),
        ("/ip4/203.0.113.7", 5000, "does not say where to call"),
        ("/tcp/5000", None, "does not say where to call"),
    ],
)
def test_what_cannot_be_announced_is_refused_with_the_reason(text: str, port: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        listening.parse_announced(text, port)


def test_a_host_of_another_kind_is_refused() -> None:
    assert listening.listen_addresses("::1", 4000) == ["/ip6/::1/tcp/4000"]
    assert listening.listen_addresses(None, None) == ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]
    with pytest.raises(ConfigError, match="not an address or name"):
        listening.listen_addresses("no such host", 4000)
    with pytest.raises(ConfigError, match="between 1 and 65535"):
        listening.listen_addresses(None, 0)


def test_a_peer_is_named_at_the_end_of_an_address() -> None:
    assert multiaddr.split_peer(f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}") == ("/ip4/1.2.3.4/tcp/1", PEER)
    through = f"/ip4/1.2.3.4/tcp/1/p2p/{PEER}/p2p-circuit"
    assert multiaddr.split_peer(f"{through}/p2p/{PEER}") == (through, PEER)
    with pytest.raises(ConfigError, match="does not end in"):
        multiaddr.split_peer(through)
