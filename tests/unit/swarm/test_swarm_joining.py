"""Joining a swarm in memory, and leaving it: numbers, states, files, goodbyes."""

import asyncio
import contextlib
import hashlib
from pathlib import Path
from typing import Any

import pytest

from diloco.errors import EngineError, Excluded, RendezvousError
from diloco.swarm.network.known_peers import read_peers
from diloco.swarm.network.transport import CallRefused, Stream, Unreachable
from diloco.swarm.node import clock, recent_rounds, state_transfer
from diloco.swarm.node.file_transfer import fetch_file
from diloco.swarm.node.frames import write_frame
from diloco.swarm.node.guest import Guest
from diloco.swarm.node.places import Places, ReaderPlace
from diloco.swarm.protocol.certificate import Certificate
from diloco.swarm.protocol.joining import give_number
from diloco.swarm.protocol.messages import OpenState, RosterEntry
from diloco.swarm.protocol.status import MAX_NUMBER
from diloco.swarm.protocol.wire import encode
from diloco.swarm.run_files import PEERS_FILE, invitation_file
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.simulator import virtual_clock
from diloco.swarm.simulator.stories import founded, rounds, stop, told, train
from diloco.swarm.simulator.workers import NAMES, NUMEL, MemorySwarm, MemoryWorker, plan, values


def test_a_joiner_has_the_next_number_the_state_and_is_in_the_next_round() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, list[list[bytes]], tuple[int, ...]]:
        workers = await founded(swarm, 2)
        await rounds(workers, 3)
        joiner = await swarm.start()
        await joiner.catch_up()
        await asyncio.sleep(0.2)
        posts = (worker.post(values(worker.node.number, 3)) for worker in workers)
        ended = [one for one, _ in await asyncio.gather(*posts)]
        return joiner.node.number, [worker.trainer.means for worker in workers], ended[0].contributors

    number, means, contributors = told(story)
    assert number == 2 and contributors == (0, 1, 2)
    assert len(means[2]) == 4 and means[0] == means[1] == means[2]


def test_rounds_that_end_while_the_state_is_on_its_way_are_made_up_for_with_their_means() -> None:
    async def story(swarm: MemorySwarm) -> list[list[bytes]]:
        workers = await founded(swarm, 2)
        await rounds(workers, 2)
        joiner = await swarm.start()
        old = await workers[0].trainer.snapshot(), await workers[1].trainer.snapshot()
        await rounds(workers[:2], 2)
        for worker, snapshot in zip(workers, old, strict=False):

            async def outdated(snapshot: Any = snapshot) -> Any:
                return snapshot

            worker.trainer.snapshot = outdated  # type: ignore[method-assign]
        await joiner.catch_up()
        return [worker.trainer.means for worker in workers]

    means = told(story)
    assert len(means[2]) == 4 and means[0] == means[2]


def test_a_joiner_tells_how_much_of_the_state_has_arrived() -> None:
    async def story(swarm: MemorySwarm) -> list[dict[str, Any]]:
        workers = await founded(swarm, 1)
        workers[0].trainer.means.append(bytes(6 << 20))
        joiner = await swarm.start()
        for transport in swarm.network.peers.values():
            opened = transport.open_stream

            async def slow(*given: Any, opened: Any = opened) -> Any:
                stream = await opened(*given)
                read = stream.read_into

                async def later(*parts: Any) -> None:
                    await asyncio.sleep(0.6)
                    await read(*parts)

                stream.read_into = later
                return stream

            transport.open_stream = slow  # type: ignore[method-assign]
        await joiner.catch_up()
        return [fields for type_, fields in joiner.trainer.events if type_ == "state_arriving"]

    arriving = told(story)
    received = [fields["received_bytes"] for fields in arriving]
    assert len(received) >= 2 and received == sorted(received)
    assert all(0 < fields["received_bytes"] <= fields["all_bytes"] for fields in arriving)


def test_a_source_that_dies_while_it_gives_the_state_is_replaced_by_another() -> None:
    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], int]:
        workers = await founded(swarm, 3)
        for worker in workers:
            worker.trainer.means.append(bytes(3 << 20))  # a state of some size
        joiner = await swarm.start()
        asked: list[MemoryWorker] = []
        for worker in workers[:3]:
            original = worker.trainer.snapshot

            async def noticed(worker: MemoryWorker = worker, original: Any = original) -> Any:
                asked.append(worker)
                if len(asked) == 1:
                    swarm.network.after(20, lambda: stop(swarm, worker))
                return await original()

            worker.trainer.snapshot = noticed  # type: ignore[method-assign]
        await joiner.catch_up()
        return [asked[-1].trainer.means, joiner.trainer.means], len(asked)

    (source, mine), asked = told(story)
    assert mine == source and asked >= 2


@pytest.mark.parametrize("what", ["no head", "slowly"])
def test_a_joiner_turns_to_another_source_when_one_is_slow(what: str) -> None:
    """The slow one goes on sending, so that its stream never breaks, and would take minutes."""

    async def story(swarm: MemorySwarm) -> tuple[list[list[bytes]], float]:
        workers = await founded(swarm, 3)
        for worker in workers:
            worker.trainer.means.append(bytes(3 << 20))
        slow = workers[1]
        serve = slow.node.states.serve

        async def slowly(stream: Stream) -> None:
            if what == "no head":
                await asyncio.sleep(600.0)
            write = stream.write

            async def later(data: bytes | memoryview, seconds: float) -> None:
                for first in range(0, len(data), 1 << 12):
                    await asyncio.sleep(0.1)
                    await write(data[first : first + (1 << 12)], seconds)

            stream.write = later  # type: ignore[method-assign]
            await serve(stream)

        slow.node.states.serve = slowly  # type: ignore[method-assign]
        joiner = await swarm.start()
        states = joiner.node.states
        sources = states.search.sources
        states.search.sources = lambda first: sorted(sources(first), key=lambda peer: peer.name != slow.name)  # type: ignore[method-assign]
        started = clock.now()
        await joiner.catch_up()
        return [workers[0].trainer.means, joiner.trainer.means], clock.now() - started

    (source, mine), seconds = told(story)
    assert mine == source and seconds < 4.0  # `stall_seconds` are 2, the whole state of the slow one takes over 70


@pytest.mark.parametrize("number", [2, 3])
def test_slow_readers_of_the_state_hold_no_place_that_a_faster_joiner_waits_for(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """They read a piece every second, for minutes, and come again at once when they are displaced."""
    monkeypatch.setattr(state_transfer, "_MAX_READERS", 2)

    async def story(swarm: MemorySwarm) -> tuple[float, bool]:
        first, *slow = workers = await founded(swarm, 1 + number)
        first.trainer.means.append(bytes(40 << 20))
        for worker in workers:
            worker.node.own.has_state = worker is first

        async def read_slowly(reader: MemoryWorker) -> None:
            while True:
                with contextlib.suppress(Unreachable):
                    stream = await reader.node.transport.open_stream(first.name, 10.0)
                    await write_frame(stream, encode(OpenState()), 10.0)
                    while True:
                        await stream.read(1 << 17, 10.0)
                        await asyncio.sleep(1.0)
                await asyncio.sleep(0.01)

        reading = [asyncio.create_task(read_slowly(reader)) for reader in slow]
        await asyncio.sleep(5.0)
        joiner = await swarm.start()
        started = clock.now()
        await joiner.catch_up()
        for task in reading:
            task.cancel()
        return clock.now() - started, joiner.trainer.means == first.trainer.means

    seconds, whole = told(story)
    assert whole and seconds < 30.0  # 320 s otherwise


def test_a_second_request_of_a_member_takes_the_place_of_its_first_one() -> None:
    async def story(swarm: MemorySwarm) -> list[str]:
        del swarm
        places, ended = Places(2, 1.0), list[str]()

        async def read(peer: str, name: str, seconds: float) -> None:
            try:
                async with places.take(peer) as place:
                    await place.run(asyncio.sleep(seconds))
                    ended.append(name)
            except Unreachable:
                ended.append(f"{name} was displaced")

        readers = [("a", "first", 9.0), ("b", "other", 0.5), ("a", "second", 0.1)]
        async with asyncio.TaskGroup() as group:
            for reader in readers:
                group.create_task(read(*reader))
                await asyncio.sleep(0)
        return ended

    assert told(story) == ["first was displaced", "second", "other"]


def test_a_joiner_whose_line_is_slower_than_a_round_gets_in_with_one_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Members keep one mean in memory, as of a large model; the source keeps those since its snapshot on the disk."""
    monkeypatch.setattr(recent_rounds, "MAX_BYTES", 4 * NUMEL)
    monkeypatch.setattr(state_transfer, "MAX_BYTES", 4 * NUMEL)
    monkeypatch.setattr(state_transfer, "_CHUNK_BYTES", 1 << 9)
    files = list[int]()
    in_file = recent_rounds.on_disk
    monkeypatch.setattr(recent_rounds, "on_disk", lambda folder, size: (files.append(size), in_file(folder, size))[1])

    async def story(swarm: MemorySwarm) -> tuple[int, int, bool, list[dict[str, int]]]:
        workers = list(await founded(swarm, 3))
        await rounds(workers, 3)
        joiner = await swarm.start()
        asked = list[str]()
        for worker in workers:
            send = worker.node.states._send

            async def slowly(stream: Stream, place: ReaderPlace, send: Any = send) -> None:
                asked.append(stream.peer)
                write = stream.write

                async def later(data: bytes | memoryview, seconds: float) -> None:
                    await asyncio.sleep(0.1)
                    await write(data, seconds)

                stream.write = later  # type: ignore[method-assign]
                await send(stream, place)

            worker.node.states._send = slowly  # type: ignore[method-assign]
        training = [asyncio.create_task(train(worker, 1000, step_seconds=0.8)) for worker in workers]
        await joiner.catch_up()
        missed = joiner.trainer.sequence - 3
        same = joiner.trainer.means == workers[0].trainer.means[: joiner.trainer.sequence]
        await asyncio.sleep(10.0)  # it has the state: nothing is kept for it any more
        held = [worker.node.outcomes.recent.held() for worker in workers]
        for task in training:
            task.cancel()
        return len(asked), missed, same, held

    downloads, missed, same, held = told(story)
    assert downloads == 1 and missed >= 5 and same and files and not any(held)


def test_without_room_on_the_disk_no_means_are_held_and_memory_does_not_grow(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recent_rounds, "MAX_BYTES", 4)
    monkeypatch.setattr(recent_rounds, "_FREE_SHARE", 1.0)

    async def story(swarm: MemorySwarm) -> tuple[int, dict[str, int]]:
        del swarm
        recent = recent_rounds.RecentRounds(tmp_path)
        recent.hold("joiner", 0)
        for sequence in range(5):
            recent.add_copy(plan([0, 1], sequence), SharedMemory.copy_of(b"mean"), Certificate(1, (), {}))
        await recent.copied()
        return sum(sequence in recent for sequence in range(5)), recent.held()

    assert told(story) == (1, {})


@pytest.mark.parametrize(("answers", "hosts"), [({"a": 1.0, "b": 1.5, "c": 9.0}, ["a", "b"]), ({"c": 9.0}, ["c"])])
def test_a_guest_does_not_wait_for_silent_members_when_others_have_answered(
    answers: dict[str, float], hosts: list[str]
) -> None:
    async def story() -> tuple[list[str], int]:
        guest = Guest.__new__(Guest)
        guest._hosts = []

        async def greet(peer: str, _: list[str]) -> Exception | None:
            await asyncio.sleep(answers.get(peer, 10.0))
            if peer not in answers:
                return Unreachable("silent")
            guest._hosts.append(peer)
            return None

        guest._greet = greet  # type: ignore[method-assign]
        return guest._hosts, len(await guest._greet_all({peer: [] for peer in "abcd"}))

    assert virtual_clock.run(story()) == (hosts, 2 if len(hosts) == 2 else 4)


def test_a_member_that_says_that_it_is_ahead_is_not_asked_for_the_state_before_all_others() -> None:
    async def story(swarm: MemorySwarm) -> set[str]:
        workers = await founded(swarm, 4)
        await rounds(workers, 1)
        workers[2].node.own.ended_round += 3
        joiner = await swarm.start()
        await asyncio.sleep(0.5)
        return {joiner.node.states.search.sources(None)[0].name for _ in range(40)}

    assert len(told(story)) == 4


def test_a_joiner_that_finds_no_worker_with_the_state_says_so() -> None:
    async def story(swarm: MemorySwarm) -> None:
        workers = await founded(swarm, 1)
        joiner = await swarm.start()
        stop(swarm, workers[0])
        await joiner.catch_up()

    with pytest.raises(EngineError, match="no worker that has the state of this run answers"):
        told(story, lost_seconds=0.2)


def test_the_first_worker_may_die_and_others_join_through_any_known_peer() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, tuple[int, ...]]:
        workers = await founded(swarm, 3)
        stop(swarm, workers[0])
        joiner = await swarm.start()  # its invitation names all three
        await joiner.catch_up()
        await asyncio.sleep(0.2)
        ended = await asyncio.gather(*(worker.post(values(worker.node.number)) for worker in workers[1:]))
        return joiner.node.number, ended[0][0].contributors

    assert told(story) == (3, (1, 2, 3))


def test_a_worker_that_is_started_again_keeps_its_number_and_finds_the_swarm_by_its_own_notes() -> None:
    async def story(swarm: MemorySwarm) -> tuple[int, int, int]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)
        victim = workers[1]
        async with asyncio.timeout(20.0):
            while len(known := read_peers(Path(victim.node.settings.folder) / PEERS_FILE)) < 3:
                await asyncio.sleep(0.2)
        stop(swarm, victim)
        await asyncio.sleep(0.3)
        (Path(victim.node.settings.folder) / invitation_file()).write_text(swarm.invitation().with_addresses([]).text())
        again = await swarm.start(name=victim.name, folder=victim.node.settings.folder)
        await again.catch_up()
        return len(known), again.node.number, len(again.trainer.means)

    assert told(story) == (3, 1, 1)


def test_a_worker_that_is_started_again_and_gets_another_number_says_so() -> None:
    async def story(swarm: MemorySwarm) -> list[dict[str, Any]]:
        workers = await founded(swarm, 2)
        stop(swarm, workers[1])
        saved = Path(workers[1].node.settings.folder) / f"{workers[1].node.settings.name}.json"
        saved.write_text(saved.read_text().replace('"number": 1', '"number": 0'))  # what another one has by now
        again = await swarm.start(name=workers[1].name, folder=workers[1].node.settings.folder)
        return [fields for type_, fields in again.trainer.events if type_ == "renumbered"]

    assert told(story) == [{"peer": NAMES[1], "before": 0, "number": 1}]


def test_two_that_join_at_once_get_two_numbers() -> None:
    async def story(swarm: MemorySwarm) -> set[int]:
        await founded(swarm, 2)
        joined = await asyncio.gather(*(swarm.start(name=NAMES[10 + i]) for i in range(4)))
        return {worker.node.number for worker in joined}

    assert told(story) == {2, 3, 4, 5}


def test_a_member_that_claims_the_highest_number_leaves_one_for_the_next_joiner() -> None:
    async def story(swarm: MemorySwarm) -> int:
        _, liar = await founded(swarm, 2)
        liar.node.own.number = MAX_NUMBER
        await asyncio.sleep(1.0)
        return (await swarm.start()).node.number

    assert told(story) == 1


def test_a_joiner_that_the_leader_knows_by_another_member_first_gets_a_number() -> None:
    async def story(swarm: MemorySwarm) -> int:
        founder, _, joiner = await founded(swarm, 3)
        members, name = founder.node.members, joiner.name
        credential = members.peers.pop(name).credential
        del members.numbers[name]
        members.add_roster(NAMES[1], [RosterEntry(name, credential, (), -1)])
        return give_number(members, name, -1)

    assert told(story) == 2


def test_a_worker_that_says_goodbye_is_not_waited_for() -> None:
    async def story(swarm: MemorySwarm) -> tuple[tuple[int, ...], list[str]]:
        workers = await founded(swarm, 3)
        await workers[0].node.leave()
        await rounds(workers[1:], 1)
        ended = [type_ for type_, _ in workers[1].trainer.events]
        return workers[1].node.members.roster(), ended

    members, events = told(story)
    assert members == (1, 2) and "member_left" in events and "member_lost" not in events


def test_two_that_have_both_moved_find_each_other_through_a_third() -> None:
    """As when the relay of both dies: each has a new address, which only the third peer, still connected, hears."""

    async def story(swarm: MemorySwarm) -> bool:
        one, _, two = await founded(swarm, 3)
        apart = True

        def check_alive(here: str, there: str) -> None:
            if apart and {here, there} == {one.name, two.name}:
                raise Unreachable("the relay is gone")

        def moved(worker: MemoryWorker) -> str:
            return f"/ip4/127.0.0.1/tcp/2/p2p/{worker.name}"

        def move(worker: MemoryWorker, other: MemoryWorker) -> None:
            async def addresses() -> list[str]:
                return [moved(worker)]

            async def connect(peer: str, addresses: list[str], seconds: float) -> None:
                nonlocal apart
                if peer == other.name and moved(other) in addresses:
                    apart = False
                await worker.node.transport._reach(peer, seconds)

            worker.node.transport.addresses, worker.node.transport.connect = addresses, connect

        move(one, two)
        move(two, one)
        swarm.network.check_alive = check_alive  # type: ignore[method-assign]
        lost = [one.node.members.peers[two.name], two.node.members.peers[one.name]]
        async with asyncio.timeout(10):
            while any(peer.live for peer in lost):
                await asyncio.sleep(0.02)
            while not all(peer.live for peer in lost):
                await asyncio.sleep(0.02)
        return True

    assert told(story)


@pytest.mark.parametrize("lie", ["another file", "too long"])
def test_a_file_that_one_gives_wrongly_comes_from_another(tmp_path: Path, lie: str) -> None:
    for name, data in (("true", b"true" * 9), ("lie", b"lies" * (9 if lie == "another file" else 900))):
        (tmp_path / name).write_bytes(data)
    digest = hashlib.sha256(b"true" * 9).hexdigest() if lie == "another file" else None

    async def story(swarm: MemorySwarm) -> bytes:
        liar, honest, asking = await founded(swarm, 3)
        liar.node.serve_files({"shard": tmp_path / "lie"})
        honest.node.serve_files({"shard": tmp_path / "true"})
        peers = [liar.name, honest.name]
        await fetch_file(asking.node.transport, peers, "shard", tmp_path / "here", 1.0, 36, digest)
        with pytest.raises(EngineError, match="no worker of the swarm can give 'shard'"):
            await fetch_file(asking.node.transport, [liar.name], "shard", tmp_path / "no", 1.0, 36, digest)
        return (tmp_path / "here").read_bytes()

    assert told(story) == b"true" * 9
    assert not (tmp_path / "no").exists()


def test_a_worker_that_gets_no_number_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diloco.swarm.timing.SEARCH_SECONDS", 0.7)

    async def story(swarm: MemorySwarm) -> None:
        await founded(swarm, 1)

        def refuse(*_: Any) -> int:
            raise CallRefused("not today")

        monkeypatch.setattr("diloco.swarm.node.node.give_number", refuse)
        await swarm.start()

    with pytest.raises(
        RendezvousError, match=r"no number within 0\.7 s: worker 0 \(.*\), which leads it, says: not today"
    ):
        told(story)


@pytest.mark.parametrize("banning", [1, 2])
def test_a_worker_is_turned_away_once_more_members_ban_it_than_let_it_in(banning: int) -> None:
    async def story(swarm: MemorySwarm) -> int:
        workers = await founded(swarm, 3)
        for worker in workers[1 : 1 + banning]:
            worker.node.members.permissions.ban(NAMES[3], "NaN")
        return (await swarm.start(name=NAMES[3])).node.number

    if banning == 1:
        assert told(story) == 3
    else:
        with pytest.raises(Excluded, match=r"is banned from the run .*: NaN"):
            told(story)


def test_a_joiner_does_not_wait_for_a_witness_that_stays_behind_when_another_is_enough() -> None:
    """It cannot reach the others, has an old state, and never has the one that the joiner asks about."""

    async def story(swarm: MemorySwarm) -> tuple[int, list[bytes], list[bytes]]:
        workers = await founded(swarm, 3)
        await rounds(workers, 1)
        swarm.network.pairs = [{worker.name, workers[2].name} for worker in workers[:2]]
        await asyncio.gather(*(train(worker, 4) for worker in workers[:2]))
        joiner = await swarm.start()
        await asyncio.sleep(1.0)
        assert [peer.status.ended_round for peer in joiner.node.members.with_state()] == [3, 3, 0]
        async with asyncio.timeout(2.0):  # four stalls are 8 s
            await joiner.catch_up()
        return joiner.trainer.sequence, joiner.trainer.means, workers[0].trainer.means

    sequence, fetched, own = told(story, patience=0.5)
    assert sequence == 4 and fetched == own
