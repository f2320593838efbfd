"""Peers behind routers, in network namespaces: reached through a public peer, or directly by hole punching."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest

from support.swarm import networks
from support.swarm.networks import Internet, internet
from support.swarm.peer import LaunchedPeer

_MISSING = networks.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_MISSING) and networks.REQUIRED not in os.environ, reason=_MISSING or ""),
]


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    assert not _MISSING, f"{_MISSING}, and {networks.REQUIRED} is set"
    with internet() as made:
        made.public("public")
        made.home("home")
        made.home("other")
        made.home("strict", symmetric=True)
        made.home("forwarded", open_ports=[4000])
        yield made


@contextmanager
def on(
    net: Internet, places: dict[str, int | None], folder: Path, seeds: Sequence[str] = ()
) -> Iterator[list[LaunchedPeer]]:
    """A peer on each machine, with its port. They start at the same time."""
    with ExitStack() as stack:
        peers = []
        for where, port in places.items():
            punch_seconds = 2.0 if where == "strict" else 20.0  # an attempt from there cannot succeed
            peers.append(LaunchedPeer(folder / where, seeds, partial(net.inside, where), port, (), punch_seconds))
            stack.callback(peers[-1].close)
        for peer in peers:
            peer.ready()
        yield peers


@pytest.fixture(scope="module")
def public(net: Internet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedPeer]:
    with on(net, {"public": 4000}, tmp_path_factory.mktemp("public")) as (peer,):
        yield peer


def exchange(one: LaunchedPeer, two: LaunchedPeer) -> list[str]:
    """Calls and streams both ways; returns how they went."""
    assert one.do("call", two.name, "hello") == f"{one.name} said hello"
    assert two.do("call", one.name, "hello") == f"{two.name} said hello"
    assert one.do("stream", two.name, 2_000_000)  # libp2p's usual relay ends after 128 KiB
    assert two.do("stream", one.name, 2_000_000)
    ways: list[str] = one.do("ways", two.name)
    return ways


def test_peers_behind_routers_meet_directly_or_through_a_public_one(
    net: Internet, public: LaunchedPeer, tmp_path: Path
) -> None:
    public.wait_for_kind("public")
    seeds = public.do("addresses")
    with on(net, {"home": None, "other": None, "strict": None}, tmp_path, seeds) as (home, other, strict):
        at = {peer: peer.wait_for_address("/p2p-circuit/") for peer in (home, other, strict)}
        for peer in at:
            peer.wait_for_kind("private")
            peer.do("connect", public.name, seeds)
        with ThreadPoolExecutor() as both:  # both ask at the same time
            list(both.map(lambda a, b: a.do("connect", b.name, at[b]), (home, other), (other, home)))
        assert all("/p2p-circuit" not in way for way in exchange(home, other))
        strict.do("connect", home.name, at[home])
        assert all("/p2p-circuit" in way for way in exchange(strict, home))
        assert public.do("call", home.name, "hello") == f"{public.name} said hello"


def test_a_peer_whose_router_forwards_its_port_is_public_and_relays(
    net: Internet, public: LaunchedPeer, tmp_path: Path
) -> None:
    with on(net, {"forwarded": 4000}, tmp_path, public.do("addresses")) as (forwarded,):
        forwarded.wait_for_kind("public")
        own = forwarded.do("addresses")
        assert own[0].startswith("/ip4/5.5.5.") and any(address.startswith("/ip4/192.168.") for address in own)
        with on(net, {"home": None}, tmp_path, own) as (home,):
            home.wait_for_kind("private")
            public.do("connect", home.name, home.wait_for_address("/p2p-circuit/"))
            assert public.do("stream", home.name, 200_000)
