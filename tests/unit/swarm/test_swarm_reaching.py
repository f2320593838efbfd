"""p2pd's arguments, the meaning of its errors, and which requests make this machine connect. No p2pd runs here."""

import asyncio
import json

import pytest

from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd import hole_punching, reachability
from diloco.swarm.network.p2pd.control import DaemonError, to_unreachable
from diloco.swarm.network.p2pd.daemon import p2pd_arguments
from diloco.swarm.network.p2pd.reachability import (
    DialBackResult,
    Reachability,
    decode_dial_back,
    encode_dial_back,
    public_addresses,
)
from diloco.swarm.network.transport import Unreachable
from diloco.swarm.simulator.stories import founded, told
from diloco.swarm.simulator.workers import MemorySwarm

RELAYED = "/ip4/5.5.5.1/tcp/4000/p2p/R/p2p-circuit"
FAILED = "failed to dial: failed to dial P: all dials failed"
REFUSED = "dial tcp4 192.168.2.2:4000: connect: connection refused"


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("stream reset", False),
        ("failed to dial: failed to dial P: no addresses", True),
        (f"{FAILED}\n  * [/ip4/192.168.2.2/tcp/4000] {REFUSED}", True),
        (f"{FAILED}\n  * [/ip4/192.168.2.2/tcp/4000] dial tcp4: i/o timeout", False),
        (
            f"{FAILED}\n  * [/ip4/192.168.2.2/tcp/4000] {REFUSED}\n  * [/ip4/5.5.5.2/tcp/1] dial tcp4: i/o timeout",
            False,
        ),
        (f"{FAILED}\n  * [{RELAYED}] error opening relay circuit: NO_RESERVATION (204)", True),
        (f"{FAILED}\n  * [{RELAYED}] error opening hop stream to relay: {FAILED}\n  * [/ip4/5.5.5.1] {REFUSED}", False),
        ("failed to negotiate protocol: protocols not supported: [/diloco/x/call]", False),
        ("connect: network is unreachable", False),
    ],
)
def test_a_peer_is_gone_only_if_every_way_to_it_says_so(text: str, gone: bool) -> None:
    assert to_unreachable("P", DaemonError(text), gone_before=False).gone is gone


@pytest.mark.parametrize("before", [True, False])
def test_a_dial_that_was_not_even_tried_tells_what_the_last_one_told(before: bool) -> None:
    text = f"{FAILED}\n  * [/ip4/192.168.2.2/tcp/4000] dial backoff"
    assert to_unreachable("P", DaemonError(text), gone_before=before).gone is before


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (ListenConfig(host="127.0.0.1"), "unknown"),
        (ListenConfig(host="5.5.5.5"), "public"),
        (ListenConfig(port=4000, announce=("5.5.5.5",)), "public"),
        (ListenConfig(port=4000, announce=("192.168.1.7",)), "unknown"),
        (ListenConfig(announce=("home.example.org:4000",)), "public"),
    ],
)
def test_a_peer_with_a_public_address_of_its_own_or_announced_is_taken_for_public(
    config: ListenConfig, kind: str
) -> None:
    assert reachability.guess_reachability(config).kind == kind


def test_a_public_peer_relays_and_a_private_one_asks_its_relays() -> None:
    config = ListenConfig(host="127.0.0.1")
    opened = p2pd_arguments(Reachability("public", seen_at=("/ip4/5.5.5.5/tcp/4000",)), config)
    assert "-announceAddrs=/ip4/5.5.5.5/tcp/4000" in opened and "-forceReachabilityPublic" in opened
    closed = p2pd_arguments(Reachability("private", relays=("/ip4/5.5.5.1/tcp/4000/p2p/R",)), config)
    assert "-trustedRelays=/ip4/5.5.5.1/tcp/4000/p2p/R" in closed and "-autoRelay" in closed
    assert not {"-autoRelay", "-forceReachabilityPublic"} & set(p2pd_arguments(Reachability(), config))


def test_only_public_addresses_that_lead_straight_there_can_be_relays() -> None:
    straight = "/ip4/5.5.5.1/tcp/4000/p2p/R"
    assert public_addresses([straight, f"{RELAYED}/p2p/P", "/ip4/192.168.1.2/tcp/1/p2p/P", straight]) == [straight]
    assert hole_punching.relays_in(["/ip4/192.168.1.2/tcp/1", RELAYED]) == ["R"]


class Connected:
    """A control whose daemon is connected with some peers."""

    def __init__(self, peers: dict[str, list[str]]) -> None:
        self.peers = peers
        self.told = list[tuple[str, bytes]]()

    async def list_peers(self) -> dict[str, list[str]]:
        return self.peers

    async def call(self, peer: str, protocol: str, data: bytes) -> bytes:
        assert protocol == "/p/punched"
        self.told.append((peer, data))
        return b"true"


def test_a_peer_is_called_back_only_where_it_comes_from_and_not_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, int]] = []

    async def speaks_libp2p(host: str, port: int, seconds: float) -> bool:
        called.append((host, port))
        return True

    monkeypatch.setattr(reachability, "speaks_libp2p", speaks_libp2p)
    control = Connected({"P": ["/ip4/5.5.5.2/tcp/55555"], "Q": [f"{RELAYED}"]})

    async def story() -> list[DialBackResult | None]:
        asked = reachability.DialBack()
        requests = [
            ("P", encode_dial_back(4000)),
            ("P", encode_dial_back(4000)),
            ("Q", encode_dial_back(4000)),
            ("stranger", encode_dial_back(4000)),
            ("X", bytes(100)),
        ]
        return [decode_dial_back(await asked.answer(control, peer, request)) for peer, request in requests]  # type: ignore[arg-type]

    assert asyncio.run(story()) == [DialBackResult("5.5.5.2", True), None, None, None, None]
    assert called == [("5.5.5.2", 4000)]


def test_a_relay_tells_two_of_each_other_only_if_both_are_connected_with_it() -> None:
    async def story() -> None:
        control = Connected({"P": ["/ip4/5.5.5.2/tcp/1"], "Q": ["/ip4/5.5.5.3/tcp/2"], "R": [RELAYED]})
        puncher = hole_punching.HolePuncher("me", "/p")
        wanted = json.dumps({"peer": "Q"}).encode()
        assert json.loads(await puncher.answer_as_relay(control, "P", wanted)) == "/ip4/5.5.5.3/tcp/2"  # type: ignore[arg-type]
        assert control.told == [("Q", b'{"peer":"P","address":"/ip4/5.5.5.2/tcp/1"}')]
        for asker, request in [("R", wanted), ("stranger", wanted), ("P", b'{"peer": "nobody"}'), ("P", bytes(300))]:
            assert await puncher.answer_as_relay(control, asker, request) == b"null"  # type: ignore[arg-type]
        assert len(control.told) == 1

    asyncio.run(story())


@pytest.mark.parametrize(("second", "gone"), [(Unreachable("stream reset", broken=True), False),
                                              (Unreachable("connection refused", gone=True), True)])  # fmt: skip
def test_a_broken_connection_is_no_death_until_the_next_call_finds_no_peer(second: Unreachable, gone: bool) -> None:
    """The others drop the connections of a frozen worker: thawed, it must not take them for dead and go on alone."""

    async def story(swarm: MemorySwarm) -> tuple[bool, bool]:
        worker, other, _ = await founded(swarm, 3)
        heartbeats = worker.node.heartbeats
        answers = iter([Unreachable("stream reset", broken=True), second])

        async def call(*_: object) -> bytes:
            raise next(answers)

        heartbeats._call = call  # type: ignore[method-assign]
        peer = worker.node.members.peers[other.name]
        await heartbeats._beat(peer)
        return peer.live, peer.gone

    assert told(story) == (not gone, gone)
