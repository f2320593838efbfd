"""Peers behind routers, in network namespaces: found out at once, reached through a peer that is open."""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.launched.peer import LaunchedPeer
from tests.worlds import networks
from tests.worlds.networks import Internet, internet

_MISSING = networks.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING) and networks.REQUIRED not in os.environ, reason=_MISSING or ""),
]


@pytest.fixture(scope="module")
def net() -> Iterator[Internet]:
    assert not _MISSING, f"{_MISSING}, and {networks.REQUIRED} is set"
    with internet() as made:
        made.public("public")
        made.home("home")
        made.home("other")
        made.home("forwarded", open_ports=[4000])
        yield made


@contextmanager
def on(
    net: Internet, places: dict[str, int | None], folder: Path, seeds: Sequence[str] = ()
) -> Iterator[list[LaunchedPeer]]:
    """A peer on each machine, with its port; they start at the same time."""
    with ExitStack() as stack:
        peers = []
        for where, port in places.items():
            peers.append(LaunchedPeer(folder / where, seeds, partial(net.inside, where), port))
            stack.callback(peers[-1].close)
        for peer in peers:
            peer.ready()
        yield peers


def test_two_peers_behind_routers_exchange_calls_and_streams_through_an_open_one(net: Internet, tmp_path: Path) -> None:
    with on(net, {"public": 4000}, tmp_path) as (public,):
        assert public.kind == "open"
        seeds = public.do("addresses")
        with on(net, {"home": None, "other": None}, tmp_path, seeds) as (home, other):
            assert (home.kind, other.kind) == ("closed", "closed")
            home.do("introduce", public.name, seeds)
            home.do("introduce", other.name, other.wait_for_address("/p2p-circuit/"))
            assert home.do("call", other.name, "hello") == f"{home.name} said hello"
            assert other.do("call", home.name, "hello") == f"{other.name} said hello"
            assert home.do("stream", other.name, 2_000_000)  # libp2p's usual relay ends after 128 KiB
            assert other.do("stream", home.name, 2_000_000)
            assert public.do("call", home.name, "hello") == f"{public.name} said hello"


def test_a_peer_whose_router_forwards_its_port_is_open_and_relays(net: Internet, tmp_path: Path) -> None:
    with on(net, {"public": 4000}, tmp_path) as (public,):
        seeds = public.do("addresses")
        with on(net, {"forwarded": 4000}, tmp_path, seeds) as (forwarded,):
            assert forwarded.kind == "open"
            own = forwarded.do("addresses")
            assert own[0].startswith("/ip4/5.5.5.") and any(address.startswith("/ip4/192.168.") for address in own)
            with on(net, {"home": None}, tmp_path, own) as (home,):
                assert home.kind == "closed"
                public.do("introduce", home.name, home.wait_for_address("/p2p-circuit/"))
                assert public.do("stream", home.name, 200_000)
