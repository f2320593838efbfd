"""A peer in a process of its own, told what to do in lines of JSON: for machines that are network namespaces."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PROTOCOL = "/diloco-test/1"
_SECONDS = 60.0


class LaunchedPeer:
    """`command` wraps a command line, so that it runs on some machine. Several peers start at the same time: `ready`.

    `punch_seconds`: how long an attempt at hole punching may take.
    """

    def __init__(
        self,
        key: Path,
        seeds: Sequence[str] = (),
        command: Callable[[Sequence[str]], list[str]] = list,
        port: int | None = None,
        announce: Sequence[str] = (),
        punch_seconds: float = 20.0,
    ) -> None:
        given = json.dumps(
            {"key": str(key), "seeds": seeds, "port": port, "announce": announce, "punch_seconds": punch_seconds}
        )
        line = command([sys.executable, __file__, given])
        self.process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = ""

    def ready(self) -> None:
        self.name = self._hear()["peer"]

    def _hear(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the peer has ended with {self.process.wait()}"
        return json.loads(line)

    def do(self, what: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([what, *arguments]) + "\n")
        self.process.stdin.flush()
        told = self._hear()
        if "error" in told:
            raise RuntimeError(told["error"])
        return told["value"]

    def wait_for_address(self, part: str) -> list[str]:
        found: list[str] = self._wait_for("addresses", lambda addresses: any(part in a for a in addresses))
        return found

    def wait_for_kind(self, kind: str) -> None:
        """Until the peer knows that it is public or private."""
        self._wait_for("kind", lambda found: found == kind)

    def _wait_for(self, what: str, wanted: Callable[[Any], bool]) -> Any:
        end = time.monotonic() + 2 * _SECONDS
        while not wanted(found := self.do(what)):
            assert time.monotonic() < end, f"the {what} of this peer are still {found}"
            time.sleep(0.05)
        return found

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(_SECONDS)
        finally:
            self.process.kill()
            self.process.wait()
            self.process.stdout.close()


async def _main() -> None:
    from diloco.swarm import timing
    from diloco.swarm.network.listening import ListenConfig
    from diloco.swarm.network.p2pd.transport import P2pdTransport
    from diloco.swarm.network.transport import Stream

    async def answer(peer: str, request: bytes) -> bytes:
        return f"{peer} said ".encode() + request

    async def echo(stream: Stream) -> None:
        size = int.from_bytes(await stream.read(8, _SECONDS))
        await stream.write(await stream.read(size, _SECONDS), _SECONDS)

    async def do(what: str, *arguments: Any) -> Any:
        match what:
            case "addresses":
                return await transport.addresses()
            case "kind":
                return transport.reachability.kind
            case "connect":
                return await transport.connect(*arguments, _SECONDS)
            case "call":
                return (await transport.call(arguments[0], arguments[1].encode(), _SECONDS)).decode()
            case "stream":
                data = os.urandom(arguments[1])
                stream = await transport.open_stream(arguments[0], _SECONDS)
                await stream.write(len(data).to_bytes(8) + data, _SECONDS)
                same = await stream.read(len(data), _SECONDS) == data
                stream.close()
                return same
            case "ways":
                return (await transport.connections()).get(arguments[0], [])
        raise ValueError(what)

    given = json.loads(sys.argv[1])
    timing.PUNCH_SECONDS = given["punch_seconds"]
    timing.DIAL_BACK_SECONDS = 4.0  # a busy machine may need more than the usual 1.5
    config = ListenConfig(port=given["port"], announce=tuple(given["announce"]))
    transport = await P2pdTransport.create(Path(given["key"]), PROTOCOL, config, given["seeds"])
    await transport.serve(answer, echo)
    print(json.dumps({"peer": transport.peer}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            told = {"value": await do(*json.loads(line))}
        except Exception as error:  # noqa: BLE001 - the test gets to see it
            told = {"error": repr(error)}
        print(json.dumps(told), flush=True)
    await transport.close()


if __name__ == "__main__":
    asyncio.run(_main())
