"""Peers over real p2pd processes on this machine."""

import asyncio
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from diloco.errors import ConfigError, RendezvousError
from diloco.swarm.network.listening import ListenConfig
from diloco.swarm.network.p2pd import transport as p2pd_transport
from diloco.swarm.network.p2pd.transport import COMMON_FLAGS, P2pdTransport
from diloco.swarm.network.transport import MAX_CALL_BYTES, CallRefused, Stream, Unreachable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="the swarm runs on Linux only"),
]
WAIT = 100.0
"""Seconds: costs nothing while things work, and is enough on a busy machine."""
PROTOCOL = "/diloco-test/1"
LOOPBACK = ListenConfig(host="127.0.0.1")
WITHOUT_CALL_LIMIT = [flag for flag in COMMON_FLAGS if not flag.startswith("-persistentConnMaxMsgSize")]


class Waiting:
    """Counts the calls that `answer` keeps waiting."""

    count = 0


async def answer(peer: str, request: bytes) -> bytes:
    match request.partition(b" ")[0]:
        case b"fail":
            raise ValueError("there is no such thing")
        case b"nap":
            await asyncio.sleep(0.05)
        case b"wait":
            Waiting.count += 1
            await asyncio.sleep(1000)
        case b"long":
            return bytes(MAX_CALL_BYTES + 1)
    return peer.encode() + b" said " + request[:20]


async def echo(stream: Stream) -> None:
    size = int.from_bytes(await stream.read(8, WAIT))
    data = await stream.read(size, WAIT)
    await stream.write(data, WAIT)


async def greet(stream: Stream) -> None:
    """Ends only if the other end does not read."""
    await stream.write(b"\0", WAIT)
    await stream.read(1, WAIT)


@asynccontextmanager
async def peers(folder: Path, *networks: ListenConfig) -> AsyncIterator[list[P2pdTransport]]:
    made: list[P2pdTransport] = []
    try:
        for i, network in enumerate(networks):
            made.append(await P2pdTransport.create(folder / f"{i}.key", PROTOCOL, network))
            await made[-1].serve(answer, echo)
        for peer in made[1:]:
            await peer.connect(made[0].peer, await made[0].addresses(), WAIT)
        yield made
    finally:
        for peer in made:
            await peer.close()


def pid_of(peer: P2pdTransport) -> int:
    assert peer._daemon is not None
    return peer._daemon.process.pid


async def until_gone(caller: P2pdTransport, peer: str) -> None:
    """No call succeeds, and one of them says that the peer is gone, not only silent."""
    async with asyncio.timeout(WAIT):
        while True:
            with pytest.raises(Unreachable) as problem:
                await caller.call(peer, b"hello", WAIT)
            if problem.value.gone:
                return


def test_two_peers_call_each_other_and_exchange_streams(tmp_path: Path) -> None:
    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            assert a._daemon is not None and b._daemon is not None
            sockets = [a._daemon.folder, b._daemon.folder]
            assert stat.S_IMODE((tmp_path / "0.key").stat().st_mode) == 0o600
            assert await b.call(a.peer, b"hello", WAIT) == b.peer.encode() + b" said hello"
            assert await a.call(b.peer, b"hello", WAIT) == a.peer.encode() + b" said hello"
            with pytest.raises(CallRefused, match=r"^there is no such thing$"):
                await b.call(a.peer, b"fail", WAIT)
            with pytest.raises(CallRefused, match="the answer would have"):
                await b.call(a.peer, b"long", WAIT)
            data = os.urandom(3_000_000)
            stream = await b.open_stream(a.peer, WAIT)
            await stream.write(len(data).to_bytes(8), WAIT)
            await stream.write(memoryview(data), WAIT)
            back = bytearray(len(data))
            await stream.read_into(memoryview(back), WAIT)
            assert back == data
            assert (stream.bytes_sent, stream.bytes_received, stream.peer) == (len(data) + 8, len(data), a.peer)
            with pytest.raises(Unreachable, match="ended"):
                await stream.read(1, WAIT)
            stream.close()
            with pytest.raises(Unreachable, match="closed"):
                await stream.read(1, WAIT)
        assert not any(folder.exists() for folder in sockets)

    asyncio.run(run())


def test_many_callers_at_a_time_get_each_their_own_answer(tmp_path: Path) -> None:
    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK, LOOPBACK) as (a, *others):
            calls = [(peer, b"nap %d" % i) for i in range(5) for peer in others]
            answers = await asyncio.gather(*(peer.call(a.peer, text, WAIT) for peer, text in calls))
            assert answers == [peer.peer.encode() + b" said " + text for peer, text in calls]

    asyncio.run(run())


def test_an_identity_keeps_its_name_over_ipv6_and_a_restart(tmp_path: Path) -> None:
    async def run() -> None:
        async with peers(tmp_path, ListenConfig(host="::1"), ListenConfig(host="::1")) as (a, b):
            names = [a.peer, b.peer]
            assert (await a.addresses())[0].startswith("/ip6/::1/tcp/")
            assert await b.call(a.peer, b"hello", WAIT) == b.peer.encode() + b" said hello"
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            assert [a.peer, b.peer] == names

    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    asyncio.run(run())


def test_what_is_announced_is_told_instead_of_what_is_listened_at(tmp_path: Path) -> None:
    async def run() -> None:
        async with peers(tmp_path, ListenConfig(host="127.0.0.1", announce=("swarm.example.org:4000",))) as (a,):
            assert await a.addresses() == [f"/dns/swarm.example.org/tcp/4000/p2p/{a.peer}"]

    asyncio.run(run())


def test_a_taken_port_and_a_foreign_host_are_refused_by_name(tmp_path: Path) -> None:
    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            for host in (None, "127.0.0.1"):
                with pytest.raises(RendezvousError, match=rf"port {port} is taken .* --port"):
                    await P2pdTransport.create(tmp_path / "a.key", PROTOCOL, ListenConfig(host=host, port=port))
        async with peers(tmp_path, LOOPBACK) as (first,):
            port, _ = await first.port_and_addresses()
            with pytest.raises(RendezvousError, match=f"port {port} is taken"):  # p2pd alone would silently share it
                await P2pdTransport.create(tmp_path / "b.key", PROTOCOL, ListenConfig(port=port))
        with pytest.raises(ConfigError, match=r"192\.0\.2\.77 is no address of this machine"):
            await P2pdTransport.create(tmp_path / "a.key", PROTOCOL, ListenConfig(host="192.0.2.77"))

    asyncio.run(run())


def test_a_stranger_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(p2pd_transport, "CALLS_PER_PEER", 2)
    monkeypatch.setattr(p2pd_transport, "STREAMS_PER_PEER", 2)
    monkeypatch.setattr(p2pd_transport, "COMMON_FLAGS", WITHOUT_CALL_LIMIT)

    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            with pytest.raises(ValueError, match="at most"):
                await b.call(a.peer, bytes(MAX_CALL_BYTES + 1), WAIT)
            with pytest.raises(Exception, match="at most"):  # a peer that sends it all the same
                await b._control.call(a.peer, f"{PROTOCOL}/call", bytes(MAX_CALL_BYTES + 1))
            Waiting.count = 0
            waiting = [asyncio.create_task(b.call(a.peer, b"wait", 2 * WAIT)) for _ in range(2)]
            async with asyncio.timeout(WAIT):
                while Waiting.count < 2:
                    await asyncio.sleep(0.01)
            with pytest.raises(CallRefused, match="too many calls"):
                await b.call(a.peer, b"hello", WAIT)
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            streams = [await b.open_stream(a.peer, WAIT) for _ in range(3)]
            ended, waiting_on = await asyncio.wait(
                [asyncio.create_task(greet(stream)) for stream in streams], return_when=asyncio.FIRST_COMPLETED
            )
            assert [type(task.exception()) for task in ended] == [Unreachable]  # one of the three is refused
            for task in waiting_on:
                task.cancel()
            await asyncio.wait(waiting_on)
            for stream in streams:
                stream.close()
            async with asyncio.timeout(WAIT):  # the cancelled calls no longer count
                while True:
                    try:
                        assert await b.call(a.peer, b"hello", WAIT)
                        break
                    except CallRefused:
                        await asyncio.sleep(0.05)

    asyncio.run(run())


def test_a_call_that_is_too_large_for_the_other_peers_daemon_harms_no_other_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            monkeypatch.setattr(p2pd_transport, "COMMON_FLAGS", WITHOUT_CALL_LIMIT)
            stranger = await P2pdTransport.create(tmp_path / "stranger.key", PROTOCOL, LOOPBACK)
            await stranger.connect(a.peer, await a.addresses(), WAIT)
            sending = asyncio.create_task(stranger._control.call(a.peer, f"{PROTOCOL}/call", bytes(3 << 20)))
            await asyncio.sleep(0.3)
            assert await b.call(a.peer, b"hello", WAIT)
            assert not sending.done() or sending.exception() is not None
            sending.cancel()
            await asyncio.wait([sending])
            await stranger.close()

    asyncio.run(run())


def freeze(pid: int) -> None:
    """Returns when all threads of the process have stopped: the signal itself does not wait for that."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    while any(task.read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.glob("*/stat")):
        time.sleep(0.001)


def test_a_frozen_peer_is_silent_and_a_killed_one_is_gone(tmp_path: Path) -> None:
    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            stream = await b.open_stream(a.peer, WAIT)
            freeze(pid_of(a))
            with pytest.raises(Unreachable, match="did not answer") as silent:
                await b.call(a.peer, b"hello", 0.3)
            assert not silent.value.gone
            with pytest.raises(Unreachable, match="no progress"):
                await stream.write(bytes(64 << 20), 0.3)
            os.kill(pid_of(a), signal.SIGCONT)
            stream.close()
            assert await b.call(a.peer, b"hello", WAIT)
            stream = await b.open_stream(a.peer, WAIT)
            reading = asyncio.create_task(stream.read(1, WAIT))
            await asyncio.sleep(0.05)
            os.kill(pid_of(a), signal.SIGKILL)
            with pytest.raises(Unreachable):
                await reading
            for _ in range(2):  # the second time p2pd does not even try
                await until_gone(b, a.peer)
            async with asyncio.timeout(WAIT):
                assert "ended with code -9" in await a.ended
            with pytest.raises(Unreachable, match="p2pd has ended"):
                await a.call(b.peer, b"hello", WAIT)

    asyncio.run(run())


def test_a_peer_that_was_forgotten_or_restarted_is_found_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            await b.disconnect(a.peer)
            assert await b.call(a.peer, b"hello", WAIT)
            await a.close()
            again = await P2pdTransport.create(tmp_path / "0.key", PROTOCOL, LOOPBACK)
            await again.serve(answer, echo)
            await b.connect(again.peer, await again.addresses(), WAIT)
            assert await b.call(again.peer, b"hello", WAIT)
            await again.close()

    asyncio.run(run())


def test_what_is_asked_while_p2pd_restarts_waits_for_the_new_one(tmp_path: Path) -> None:
    """A peer that learns that it is behind a router restarts p2pd, also in the middle of a run."""

    async def run() -> None:
        async with peers(tmp_path, LOOPBACK, LOOPBACK) as (a, b):
            at = await b.addresses()
            restarting = asyncio.create_task(a.restart(a.reachability, LOOPBACK))
            while a._daemon is not None:
                await asyncio.sleep(0)
            asked = a.open_stream(b.peer, WAIT), a.call(b.peer, b"hello", WAIT), a.connect(b.peer, at, WAIT)
            stream, said, _ = await asyncio.gather(*asked)
            stream.close()
            assert said == a.peer.encode() + b" said hello"
            await restarting

    asyncio.run(run())


_KILLED = """
import asyncio, sys
from pathlib import Path
from diloco.swarm.network.p2pd.transport import P2pdTransport
from diloco.swarm.network.listening import ListenConfig

async def main():
    transport = await P2pdTransport.create(Path(sys.argv[1]), "/diloco-test/1", ListenConfig(host="127.0.0.1"))
    print(transport._daemon.process.pid, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def test_no_daemon_is_left_when_its_process_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _KILLED, tmp_path / "a.key"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as said:
        pid = int(said.readline())
        watched = os.pidfd_open(pid)
        process.kill()
        process.wait()
    try:
        assert select.select([watched], [], [], WAIT)[0], "p2pd is still there"
    finally:
        os.close(watched)


def test_hivemind_itself_is_not_imported() -> None:
    used = "import sys, diloco.swarm.network.p2pd.transport as d; d.Control('/a', '/b')"
    code = f"{used}; print({{'torch', 'hivemind'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
