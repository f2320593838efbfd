"""The link between a trainer and its sidecar: messages arrive whole, memory is the same memory, waits are bounded."""

import asyncio
import dataclasses
import math
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
import torch

from diloco.engines.rounds import GlobalState
from diloco.engines.swarm.shared_memory import SharedMemory, shared
from diloco.engines.swarm.sidecar import link as linking
from diloco.engines.swarm.sidecar import messages as say
from diloco.engines.swarm.sidecar import snapshots
from diloco.engines.swarm.sidecar.link import AsyncLink, Link, LinkClosed, LinkError, LinkFull, pair
from diloco.errors import EngineError


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, other = (Link(end) for end in pair())
    yield one, other
    one.close()
    other.close()


def filled(data: bytes) -> SharedMemory:
    memory = SharedMemory.create(len(data))
    memory.view[:] = data
    return memory


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a path would hold one more


def messages() -> list[say.Message]:
    """One of each."""
    return [
        say.Start(1, {"folder": "é", "port": None, "patience": 0.5}),
        say.Post(2, 5, 0, b"\0\xff", b"", "int8", 1024, 3, 1028, filled(b"part"), filled(b""), None, 600.0),
        say.FetchState(3),
        say.FetchFile(4, "tokenizer.json", "/tmp/x"),
        say.Leave(5),
        say.ServeFiles({"a": "b"}),
        say.Progress(10, 20, math.inf, 0.1),
        say.SnapshotMade(6, filled(b"state"), {"sequence": 2}, "digest", b"note"),
        say.Started(7, 3),
        say.Failed(8, "ConfigError", "no"),
        say.Done(9),
        say.RoundEnded(10, None, True, False, [0, 2], [[1, "nan"]], 2.5, [[0, b"h", b"n"]], [0, 1, 2], 1, 2, 0.1),
        say.StateFetched(11, filled(b"state"), {"a": 1}, "d", b"n", [[1, 2, 3]], filled(b"mean"), 4, 50),
        say.Called(12),
        say.SnapshotWanted(13),
        say.Happened("joined", {"worker": 3}),
        say.Status({"members": [{"worker": 0}]}),
    ]


def plain(message: say.Message | None) -> object:
    """To compare: memory as its bytes."""
    assert message is not None
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    return type(message), {n: v.view.tobytes() if isinstance(v, SharedMemory) else v for n, v in fields.items()}


def test_every_message_arrives_as_it_was_sent(ends: tuple[Link, Link]) -> None:
    assert {type(message) for message in messages()} == set(get_args(say.Message))
    for message in messages():
        ends[0].send(message, 1.0)
        assert plain(ends[1].receive(1.0)) == plain(message)


def test_memory_that_was_sent_is_the_same_memory_on_both_sides(ends: tuple[Link, Link]) -> None:
    mine = filled(b"before")
    ends[0].send(say.SnapshotMade(1, mine), 1.0)
    theirs = ends[1].receive(1.0)
    assert isinstance(theirs, say.SnapshotMade) and theirs.memory is not None
    theirs.memory.view[:] = b"after!"
    assert mine.view.tobytes() == b"after!"


def test_a_message_longer_than_a_packet_arrives_with_its_memory(ends: tuple[Link, Link]) -> None:
    note = os.urandom(3 * linking.MAX_PACKET_BYTES)
    ends[0].send(say.SnapshotMade(1, filled(b"state"), {"sequence": 2}, "digest", note), 1.0)
    arrived = ends[1].receive(1.0)
    assert isinstance(arrived, say.SnapshotMade) and arrived.memory is not None
    assert (arrived.note, arrived.memory.view.tobytes()) == (note, b"state")


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch, ends: tuple[Link, Link]) -> None:
    monkeypatch.setattr(linking, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(LinkError, match="is too long: at most 100"):
        ends[0].send(say.Happened("x", {"text": "y" * 100}), 1.0)


def test_memory_and_descriptors_are_gone_when_nobody_holds_them(ends: tuple[Link, Link]) -> None:
    before = open_files()
    for _ in range(50):
        ends[0].send(say.SnapshotMade(1, filled(b"state"), None, "", os.urandom(1 << 17)), 1.0)
        assert ends[1].receive(1.0) is not None
    assert open_files() == before


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(("Called", {"sequence": 1})),
        b"[]",
        b'["Called", {"sequences": 1}]',
        b'["os.system", {}]',
        b'["Started", {"number": {"b64": "!"}, "worker": 1}]',
        b'["SnapshotMade", {"number": 1, "memory": {"memory": [0, 5]}}]',
        b'["SnapshotMade", {"number": 1, "memory": {"memory": [1, 5]}}]',
        b'["long", 100]',
    ],
)
def test_what_is_no_message_is_refused_and_leaves_no_descriptor(data: bytes) -> None:
    raw, end = pair()
    link = Link(end)
    before = open_files()
    memory = SharedMemory.create(3)
    socket.send_fds(raw, [data], [memory.fd])
    del memory
    with pytest.raises(LinkError, match=r"a message that is none|was announced as"):
        link.receive(1.0)
    assert open_files() == before
    raw.close()
    link.close()


def test_a_reader_waits_no_longer_than_it_is_told_and_hears_of_the_end(ends: tuple[Link, Link]) -> None:
    assert ends[1].receive(0.01) is None
    ends[0].send(say.Called(3), 1.0)
    ends[0].close()
    assert ends[1].receive(1.0) == say.Called(3)
    with pytest.raises(LinkClosed):
        ends[1].receive(1.0)
    with pytest.raises(LinkClosed):
        ends[1].send(say.Called(3), 1.0)


def test_a_writer_whose_other_end_is_frozen_waits_no_longer_than_it_is_told(ends: tuple[Link, Link]) -> None:
    def fill() -> None:
        for _ in range(100_000):
            ends[0].send(say.Happened("x", {"text": "y" * 1000}), 0.0)

    with pytest.raises(LinkFull, match="no message within 0"):
        fill()


def test_the_asyncio_end_keeps_what_cannot_be_sent_yet_and_ends_with_the_other() -> None:
    async def talk() -> tuple[list[say.Message], int]:
        mine, theirs = pair()
        heard: list[say.Message] = []
        end = AsyncLink(mine, heard.append)
        other = Link(theirs)
        for sequence in range(2000):
            end.send(say.Happened("x", {"n": sequence, "text": "y" * 1000}))
        got = 0
        while got < 2000:
            message = other.receive(0.0)
            if message is None:
                await asyncio.sleep(0.001)
                continue
            assert isinstance(message, say.Happened) and message.fields["n"] == got
            got += 1
        await end.flush(1.0)
        other.send(say.Called(5), 1.0)
        other.close()
        await asyncio.wait_for(end.ended, 5.0)
        end.send(say.Called(1))  # nobody is there: nothing happens
        return heard, got

    assert asyncio.run(talk()) == ([say.Called(5)], 2000)


def test_the_asyncio_end_gives_up_an_end_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "_MAX_UNSENT", 3)

    async def talk() -> None:
        mine, theirs = pair()
        end = AsyncLink(mine, lambda _: None)
        while not end.ended.done():
            end.send(say.Happened("x", {"text": "y" * 10_000}))
        theirs.close()
        await end.ended

    with pytest.raises(LinkFull, match="3 messages untaken"):
        asyncio.run(talk())


def test_what_a_handler_raises_is_raised_by_whoever_waits_for_the_end() -> None:
    def refuse(message: say.Message) -> None:
        raise TypeError("not to me")

    async def talk() -> None:
        mine, theirs = pair()
        end = AsyncLink(mine, refuse)
        other = Link(theirs)
        other.send(say.Called(1), 1.0)
        try:
            await asyncio.wait_for(end.ended, 5.0)
        finally:
            other.close()

    with pytest.raises(TypeError, match="not to me"):
        asyncio.run(talk())


# States in shared memory

TENSORS = {
    "odd bytes": torch.arange(7, dtype=torch.uint8),
    "anchor": torch.randn(5, 3),
    "count": torch.tensor(2**40),
    "half": torch.randn(3).bfloat16(),
    "nothing": torch.empty(0, 4),
    "turned": torch.randn(4, 6).t(),
    "flags": torch.tensor([True, False]),
}


def test_a_state_comes_out_of_shared_memory_as_it_went_in() -> None:
    got = snapshots.read(snapshots.write(TENSORS))
    assert got.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert got[name].dtype == tensor.dtype
        assert torch.equal(got[name], tensor)


def test_a_state_that_was_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    memory = snapshots.write(TENSORS)
    memory.view[:8] = (1 << 40).to_bytes(8, "little")
    with pytest.raises(EngineError, match="the state that arrived is damaged"):
        snapshots.read(memory)


def test_a_view_of_shared_memory_is_not_copied_and_any_other_is() -> None:
    memory = filled(b"state")
    assert shared(memory.view) is memory
    assert shared(memory.view[1:]).view.tobytes() == b"tate"
    assert shared(memoryview(b"bytes")).view.tobytes() == b"bytes"


def test_requests_for_the_same_state_share_a_snapshot_and_a_changed_state_has_its_own() -> None:
    asked, sent = [], []

    def provider() -> GlobalState:
        asked.append(1)
        return GlobalState({"a": torch.zeros(2)}, {"sequence": len(asked)}, "layout", note=b"n")

    maker = snapshots.SnapshotMaker(sent.append)
    assert maker._snapshot(1).memory is None  # nobody serves yet
    maker.serve(provider)
    first, second = maker._snapshot(2), maker._snapshot(3)
    assert (first.number, second.number, len(asked)) == (2, 3, 1)
    assert first.memory is second.memory
    maker.changed()
    third = maker._snapshot(4)
    assert third.numbers == {"sequence": 2} and third.memory is not first.memory
