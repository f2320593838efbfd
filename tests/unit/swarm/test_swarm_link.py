"""The link between a trainer and its sidecar: messages arrive whole, memory is the same memory, waits are bounded."""

import asyncio
import math
import os
import pickle
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch

from diloco.engines.rounds import Comparison, GlobalState, RoundKey, RoundPhases
from diloco.errors import EngineError
from diloco.swarm.protocol.status import MemberStatus, RunStatus
from diloco.swarm.settings import Settings
from diloco.swarm.shared_memory import KeptMappings, SharedMemory
from diloco.swarm.sidecar import link as linking
from diloco.swarm.sidecar import messages, snapshots
from diloco.swarm.sidecar.link import AsyncLink, BlockingLink, LinkClosed, LinkError, LinkFull, pair
from diloco.swarm.sidecar.supervisor import SidecarProcess
from diloco.swarm.trainer import (
    FetchedState,
    PostedRound,
    PresentWorker,
    RoundMean,
    RoundOutcome,
    Snapshot,
)

Ends = tuple[BlockingLink[Any], BlockingLink[Any]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, other = (BlockingLink[Any](end, messages.Message) for end in pair())
    yield one, other
    one.close()
    other.close()


def filled(data: bytes) -> SharedMemory:
    return SharedMemory.copy_of(data)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208  a path would hold one more


def snapshot(note: bytes = b"note") -> Snapshot:
    return Snapshot(filled(b"state"), {"sequence": 2}, "digest", note)


def one_of_each() -> list[messages.Message]:
    key = RoundKey(5, 0)
    present = (PresentWorker(0, b"h", b"n"),)
    outcome = RoundOutcome(
        key,
        present=present,
        resync=True,
        contributors=(0, 2),
        refused={1: "nan"},
        total_weight=2.5,
        roster=(0, 1, 2),
        bytes_sent=1,
        bytes_received=2,
        seconds=0.1,
        comparison=Comparison((1.0, 0.5, 1.0), (0, 1), 3),
        phases=RoundPhases(0.25, None, 0.5),
    )
    return [
        messages.StartNode(1, Settings("é", "worker-0", announce=("a",)), 7),
        messages.PostRound(
            2, PostedRound(key, b"\0\xff", b"", "int8", 1024, 3, filled(b"part"), filled(b""), None, 600.0)
        ),
        messages.FetchState(3),
        messages.FetchRunFile(4, "tokenizer.json", "/tmp/x"),
        messages.Leave(5),
        messages.ServeFiles({"a": "b"}),
        messages.ReportProgress(10, 20, math.inf, 0.1),
        messages.SnapshotMade(6, snapshot()),
        messages.Started(7, 3),
        messages.Failed(8, "ConfigError", "no"),
        messages.RequestDone(9),
        messages.RoundEnded(10, outcome),
        messages.StateFetched(11, FetchedState(snapshot(), (RoundMean(key, filled(b"mean")),), 4, 50)),
        messages.PostAtOnce(12),
        messages.MakeSnapshot(13),
        messages.NodeEvent("joined", {"worker": 3}),
        messages.StatusReport(RunStatus("run", (MemberStatus(number=0),), None, {"3": "gathering"}, {})),
    ]


def plain(message: messages.Message | None) -> object:
    """To compare: memory as its bytes."""

    def data(memory: Any) -> bytes:
        return bytes(memory.view)

    assert message is not None
    return type(message), msgspec.to_builtins(message, enc_hook=data, builtin_types=(bytes,))


def test_every_message_arrives_as_it_was_sent(ends: Ends) -> None:
    assert {type(message) for message in one_of_each()} == set(get_args(messages.Message))
    for message in one_of_each():
        ends[0].send(message, 1.0)
        assert plain(ends[1].receive(1.0)) == plain(message)


def test_memory_that_was_sent_is_the_same_memory_on_both_sides(ends: Ends) -> None:
    mine = snapshot()
    ends[0].send(messages.SnapshotMade(1, mine), 1.0)
    theirs = ends[1].receive(1.0).snapshot
    theirs.data.view[:] = b"after"
    assert mine.data.view.tobytes() == b"after"


def test_a_message_longer_than_a_packet_arrives_with_its_memory(ends: Ends) -> None:
    note = os.urandom(3 * linking.MAX_PACKET_BYTES)
    ends[0].send(messages.SnapshotMade(1, snapshot(note)), 1.0)
    arrived = ends[1].receive(1.0).snapshot
    assert (arrived.note, arrived.data.view.tobytes()) == (note, b"state")


def test_many_means_travel_with_one_message(ends: Ends) -> None:
    means = tuple(RoundMean(RoundKey(n, 0), filled(bytes([n]))) for n in range(100))
    ends[0].send(messages.StateFetched(1, FetchedState(None, means, 100, 0)), 1.0)
    arrived = ends[1].receive(1.0).state.means
    assert [(mean.key.sequence, mean.data.view.tobytes()) for mean in arrived] == [(n, bytes([n])) for n in range(100)]


def test_a_message_beyond_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch, ends: Ends) -> None:
    monkeypatch.setattr(linking, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(LinkError, match="is too long: at most 100"):
        ends[0].send(messages.NodeEvent("x", {"text": "y" * 100}), 1.0)


def test_memory_and_descriptors_are_gone_when_nobody_holds_them(ends: Ends) -> None:
    before = open_files()
    for _ in range(50):
        ends[0].send(messages.SnapshotMade(1, snapshot(os.urandom(1 << 17))), 1.0)
        assert ends[1].receive(1.0) is not None
    assert open_files() == before


def test_memory_that_arrives_again_has_the_mapping_of_before_and_few_are_kept() -> None:
    mine = [SharedMemory.copy_of(b"a") for _ in range(3)]
    kept = KeptMappings(most=2)
    opened = open_files()

    def arrives(number: int) -> SharedMemory:
        return kept.mapping_of(SharedMemory(os.dup(mine[number].fd), 1))

    first = arrives(0)
    files_each = open_files() - opened
    second = arrives(1)
    assert arrives(0) is first and arrives(1) is second and first is not second
    mine[0].view[:] = b"b"
    assert (first.view.tobytes(), second.view.tobytes()) == (b"b", b"a")
    arrives(2)
    assert arrives(1) is second and arrives(0) is not first
    del first, second
    assert open_files() == opened + 2 * files_each


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


def state(memory: list[int]) -> dict[str, object]:
    return {"data": memory, "numbers": {}, "layout_digest": "", "note": b""}


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(("PostNow", {"sequence": 1})),
        b"[]",
        packed(message="PostNow", sequences=1),
        packed(message="PostNow", sequence="1"),
        packed(message="os.system"),
        packed(message="Started", number=True, worker=1),
        packed(message="SnapshotMade", number=1, snapshot=state([0, 5])),
        packed(message="SnapshotMade", number=1, snapshot=state([1, 3])),
        packed(message="_LongMessage", memory=[0, 100]),
        packed(message="_LongMessage", memory=[0, 3]),
        packed(message="_LongMessage", memory=[0]),
    ],
)
def test_what_is_no_message_is_refused_and_leaves_no_descriptor(data: bytes) -> None:
    raw, end = pair()
    link = BlockingLink[Any](end, messages.Message)
    before = open_files()
    memory = SharedMemory.create(3)
    socket.send_fds(raw, [data], [memory.fd])
    del memory
    with pytest.raises(LinkError, match="not a message of this version"):
        link.receive(1.0)
    assert open_files() == before
    raw.close()
    link.close()


def test_an_end_takes_only_the_messages_that_are_meant_for_it() -> None:
    mine, theirs = pair()
    sidecar = BlockingLink[Any](mine, messages.FromTrainer)
    trainer = BlockingLink[Any](theirs, messages.FromSidecar)
    trainer.send(messages.PostAtOnce(1), 1.0)
    with pytest.raises(LinkError, match="'PostAtOnce'"):
        sidecar.receive(1.0)
    sidecar.close()
    trainer.close()


def test_a_reader_waits_no_longer_than_it_is_told_and_hears_of_the_end(ends: Ends) -> None:
    assert ends[1].receive(0.01) is None
    ends[0].send(messages.PostAtOnce(3), 1.0)
    ends[0].close()
    assert ends[1].receive(1.0) == messages.PostAtOnce(3)
    with pytest.raises(LinkClosed):
        ends[1].receive(1.0)
    with pytest.raises(LinkClosed):
        ends[1].send(messages.PostAtOnce(3), 1.0)


def test_a_writer_whose_other_end_is_frozen_waits_no_longer_than_it_is_told(ends: Ends) -> None:
    def fill() -> None:
        for _ in range(100_000):
            ends[0].send(messages.NodeEvent("x", {"text": "y" * 1000}), 0.0)

    with pytest.raises(LinkFull, match="no message within 0"):
        fill()


def test_the_asyncio_end_keeps_what_cannot_be_sent_yet_and_ends_with_the_other() -> None:
    async def talk() -> tuple[list[messages.Message], int]:
        mine, theirs = pair()
        heard: list[messages.Message] = []
        end = AsyncLink[Any](mine, messages.Message, heard.append)
        other = BlockingLink[Any](theirs, messages.Message)
        for sequence in range(2000):
            end.send(messages.NodeEvent("x", {"n": sequence, "text": "y" * 1000}))
        got = 0
        while got < 2000:
            message = other.receive(0.0)
            if message is None:
                await asyncio.sleep(0.001)
                continue
            assert isinstance(message, messages.NodeEvent) and message.fields["n"] == got
            got += 1
        other.send(messages.PostAtOnce(5), 60.0)
        other.close()
        async with asyncio.timeout(60.0):
            await end.ended
        end.send(messages.PostAtOnce(1))  # no sidecar is there: nothing happens
        return heard, got

    assert asyncio.run(talk()) == ([messages.PostAtOnce(5)], 2000)


def test_the_asyncio_end_gives_up_an_end_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linking, "_MAX_UNSENT", 3)

    async def talk() -> None:
        mine, theirs = pair()
        end = AsyncLink[Any](mine, messages.Message, lambda _: None)
        while not end.ended.done():
            end.send(messages.NodeEvent("x", {"text": "y" * 10_000}))
        theirs.close()
        await end.ended

    with pytest.raises(LinkFull, match="3 messages unread"):
        asyncio.run(talk())


def test_what_a_handler_raises_is_raised_by_whoever_waits_for_the_end() -> None:
    def refuse(message: messages.Message) -> None:
        raise TypeError("not to me")

    async def talk() -> None:
        mine, theirs = pair()
        end = AsyncLink[Any](mine, messages.Message, refuse)
        other = BlockingLink[Any](theirs, messages.Message)
        other.send(messages.PostAtOnce(1), 60.0)
        try:
            async with asyncio.timeout(60.0):
                await end.ended
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


def test_requests_for_the_same_state_share_a_snapshot_and_a_changed_state_has_its_own() -> None:
    asked = []
    sent = []

    def provider() -> GlobalState:
        asked.append(1)
        return GlobalState({"a": torch.zeros(2)}, {"sequence": len(asked)}, "layout", note=b"n")

    maker = snapshots.SnapshotMaker(sent.append)
    assert maker._snapshot() is None  # no state is served yet
    maker.serve(provider)
    first, second = maker._snapshot(), maker._snapshot()
    assert first is not None and first is second and len(asked) == 1
    maker.invalidate()
    third = maker._snapshot()
    assert third is not None and third.numbers == {"sequence": 2} and third.data is not first.data


def test_the_exit_of_a_sidecar_is_seen_in_a_trainer_with_many_open_files(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        sidecar = SidecarProcess(["true"], tmp_path / "log")
        assert sidecar.exits_within(60.0)
        sidecar.end()
        sidecar.link.close()
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
