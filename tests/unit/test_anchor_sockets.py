"""The connections of asynchronous workers to the anchor: what they carry, and what they do when an end is gone."""

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import Fragment, build_fragments
from diloco.engines.anchor_sockets import SocketLink
from diloco.engines.asynchronous import AnchorServer, Kind, Request
from diloco.engines.header import pack
from diloco.engines.rounds import Contribution, RoundKey
from diloco.errors import EngineError
from diloco.methods.asynchronous import DelayedNesterov


class Ends:
    """Worker 0's link and those of the others, in this process."""

    def __init__(self, workers: int) -> None:
        self.fragment = fragment()
        self.vector = EncodedVector(codec("fp32"), self.fragment.layout)
        self.server = AnchorServer(workers, self.fragment, self.vector, None)
        self.said = b""
        self.links = [SocketLink(worker, self.gather(worker), 60.0) for worker in range(workers)]
        for worker, link in enumerate(self.links):
            link.open(self.server if worker == 0 else None)

    def gather(self, worker: int) -> Callable[[bytes], list[bytes]]:
        def gather(mine: bytes) -> list[bytes]:
            self.said = self.said if worker else mine
            return [self.said]

        return gather

    def request(self, worker: int, kind: Kind = "arrive", value: float = 1.0) -> Request:
        self.vector.encode(0, torch.full((self.fragment.numel,), value))
        weight = 1.0 if kind == "arrive" else 0.0
        header = pack(RoundKey(0, 0), Contribution(self.vector, weight, 1.0, "anchor", "layout"))
        payload = self.vector.data.view(-1).clone() if kind == "arrive" else torch.empty(0, dtype=torch.uint8)
        return Request(kind, worker, header, payload, 60.0)


def fragment() -> Fragment:
    [built] = build_fragments({"w": torch.zeros(7)}, [["w"]], DelayedNesterov(1.0, 0.0, 1))
    return built


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends(3)
    yield ends
    for link in ends.links:
        link.close()


def test_every_arrival_moves_the_anchor_and_its_sender_gets_it(ends: Ends) -> None:
    for number, worker in enumerate((1, 2, 0, 1), 1):
        reply = ends.links[worker].ask(ends.request(worker), 60.0)
        assert torch.equal(reply.anchor, torch.full((7,), -float(number)))
        assert reply.arrivals == number
    assert set(reply.headers) == {0, 1, 2}


def test_a_worker_that_is_done_waits_for_the_others_until_their_connection_ends(ends: Ends) -> None:
    ends.links[2].ask(ends.request(2), 60.0)
    ended = threading.Event()

    def finish() -> None:
        ends.links[1].ask(ends.request(1, "done"), 60.0)
        ended.set()

    threading.Thread(target=finish, daemon=True).start()
    assert not ended.wait(0.2)
    ends.links[2].close()
    assert 2 not in ends.links[0].ask(ends.request(0, "done"), 60.0).headers, "worker 2 is lost"
    assert ended.wait(60.0)


def test_without_worker_0_a_worker_says_so() -> None:
    ends = Ends(2)
    connection = ends.links[1]
    connection.ask(ends.request(1), 60.0)
    ends.links[0].close()
    with pytest.raises(EngineError, match="has lost worker 0, which holds the anchor"):
        connection.ask(ends.request(1), 60.0)
    connection.close()


@pytest.mark.parametrize("what", ["a wrong token", "too many bytes"])
def test_a_connection_that_does_not_belong_here_is_ended_and_moves_nothing(ends: Ends, what: str) -> None:
    host, port, token = ends.said.rstrip(b"\0").decode().split(" ")
    with socket.create_connection((host, int(port)), 60.0) as stranger:
        greeting = "0" * len(token) if what == "a wrong token" else token
        stranger.sendall(greeting.encode() + struct.pack("<Q", 1))
        stranger.sendall(struct.pack("<BQdQ", 0, 1, 5.0, 2**40))
        stranger.settimeout(60.0)
        answer = b""
        with suppress(ConnectionError):
            answer = stranger.recv(1)
        assert answer == b""
    assert ends.server.arrivals == 0


def test_another_model_is_refused_with_the_reason(ends: Ends) -> None:
    ends.links[1].ask(ends.request(1), 60.0)
    header = pack(RoundKey(0, 0), Contribution(ends.vector, 1.0, 1.0, "anchor", "another"))
    request = ends.request(2)
    with pytest.raises(EngineError, match="worker 2 trains something else"):
        ends.links[2].ask(Request("arrive", 2, header, request.payload, 60.0), 60.0)
