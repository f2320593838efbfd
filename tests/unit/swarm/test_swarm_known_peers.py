"""peers.json: merged, bounded, and written beside the event loop, so that a stalled disk makes no worker late."""

import asyncio
import threading
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from diloco.swarm.network import known_peers
from diloco.swarm.network.known_peers import KnownPeer, PeersFile, read_peers, write_peers
from diloco.swarm.simulator.workers import MemorySwarm


class StalledDisk:
    """Writes wait for `released`, at most a minute; `writes` counts those that have begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.released = threading.Event()
        self.writes = 0
        self.gave_up = False
        self._write = known_peers.write_private
        monkeypatch.setattr(known_peers, "write_private", self.write)

    def write(self, path: Path, text: str) -> None:
        self.writes += 1
        if not self.released.wait(60.0):
            self.gave_up = True
        self._write(path, text)


def test_rounds_go_on_while_the_disk_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = StalledDisk(monkeypatch)
    swarm = MemorySwarm(lost_seconds=2.0)

    async def story() -> tuple[int, ...]:
        workers = [await swarm.start(), await swarm.start()]
        await workers[1].catch_up()
        await asyncio.sleep(1.5)  # the file is looked after every second
        ended = await asyncio.gather(*(worker.post(torch.ones(3000)) for worker in workers))
        await asyncio.gather(*(worker.node.leave() for worker in workers))
        assert disk.writes and not disk.released.is_set()
        return ended[0][0].contributors

    try:
        assert asyncio.run(story()) == (0, 1)
    finally:
        disk.released.set()
        for worker in swarm.workers:
            worker.node._peers_file._thread.shutdown()  # no write of this test's may reach the next one's disk
    assert not disk.gave_up


def test_a_change_is_saved_soon_and_the_time_alone_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peers.json"
    disk = StalledDisk(monkeypatch)
    disk.released.set()
    me = KnownPeer("me", 0, ("/ip4/10.0.0.1/tcp/1/p2p/me",), "inv", 10.0, "worker-0")

    async def story() -> None:
        file = PeersFile(path)
        loop = asyncio.get_running_loop()
        now = 1000.0
        monkeypatch.setattr(loop, "time", lambda: now)

        async def given(peer: KnownPeer, at: float) -> int:
            nonlocal now
            now = at
            file.save_if_due([peer])
            assert file._saving is not None
            await file._saving
            return disk.writes

        assert await given(me, 1000.0) == 1
        later = replace(me, seen=20.0)
        assert [await given(later, 1000.0 + i) for i in (1, 3, 19)] == [1, 1, 1]
        assert await given(later, 1020.0) == 2
        moved = replace(later, addresses=("/ip4/10.0.0.9/tcp/1/p2p/me",))
        assert [await given(moved, at) for at in (1021.0, 1022.0, 1030.0)] == [2, 3, 3]
        assert read_peers(path) == [moved]

    asyncio.run(story())


def test_a_save_waits_for_the_disk_no_longer_than_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "peers.json"
    disk = StalledDisk(monkeypatch)

    async def story() -> None:
        file = PeersFile(path)
        await file.save([KnownPeer("me", 0, ())], 0.05)
        assert not path.exists()
        disk.released.set()
        await file.save([KnownPeer("me", 1, ())], 20.0)
        assert [peer.worker for peer in read_peers(path)] == [1]

    asyncio.run(story())


def test_known_peers_are_merged_and_the_last_seen_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "swarm" / "peers.json"
    assert read_peers(path) == []
    own = KnownPeer("me", 0, ("/ip4/10.0.0.1/tcp/1/p2p/me",), "inv", 10.0, "worker-0")
    bob = KnownPeer("bob", 1, ("/ip4/10.0.0.2/tcp/1/p2p/bob",), "inv", 20.0)
    write_peers(path, [own, bob])
    assert read_peers(path) == [bob, own]
    moved = KnownPeer("me", 0, ("/ip4/10.0.0.9/tcp/1/p2p/me",), None, 30.0)  # as another worker tells it
    write_peers(path, [moved])
    assert read_peers(path) == [KnownPeer("me", 0, moved.addresses, "inv", 30.0, "worker-0"), bob]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"peers": [{"peer": "a"}]}', '{"peers": [{"addresses": []}]}'])
def test_a_damaged_list_of_peers_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "peers.json").write_text(content)
    assert read_peers(tmp_path / "peers.json") == []


def test_no_more_peers_are_remembered_than_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "peers.json"
    write_peers(path, [KnownPeer(f"p{i}", None, (), None, float(i)) for i in range(600)])
    assert [peer.peer for peer in read_peers(path)] == [f"p{i}" for i in range(599, 87, -1)]
