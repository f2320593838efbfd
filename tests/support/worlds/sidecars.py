"""Real sidecar processes around a made-up node, for what is between a trainer and its sidecar; and who is left of them.

Run as a program it is such a sidecar. The node is alone in its swarm: the mean of a round is its own contribution. What
else it does is said by a round's note, and, before there are rounds, by files in the swarm's folder.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.engines.rounds import RoundKey
from diloco.engines.swarm.node.trainer import Arrived, Ended, Posting, Present, Snapshot, Trainer
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.shared_memory import SharedMemory
from diloco.engines.swarm.sidecar import process as sidecar
from diloco.errors import ConfigError, RendezvousError

COMMAND = (sys.executable, __file__)


class LonelyNode:
    number = 7

    def __init__(self, settings: Settings, trainer: Trainer) -> None:
        self.settings, self.trainer = settings, trainer
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.told: dict[str, Any] = {}

    async def start(self) -> None:
        starts = self.settings.path("starts")
        count = len(starts.read_text()) if starts.exists() else 0
        starts.write_text("x" * (count + 1))
        if self.settings.path("refuse").exists():
            raise ConfigError("the invitation has expired: ask for a new one")
        if count and self.settings.path("refuse later").exists():
            raise RendezvousError("nobody answers: is the network up?")
        if self.settings.path("crash").exists():
            raise ZeroDivisionError
        if self.settings.path("sleep").exists():
            await asyncio.sleep(3600)
        self.trainer.happened("member_joined", {"worker": 7})

    async def post(self, posting: Posting) -> Ended:
        match posting.note:
            case b"die":
                os.kill(os.getpid(), signal.SIGKILL)
            case b"freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case b"lose":
                self.lost.set_result("p2pd ended with code 1")
                await asyncio.sleep(3600)
            case b"sleep":
                await asyncio.sleep(3600)
            case b"bug":
                raise ZeroDivisionError
            case b"fail":
                return Ended(posting.key, failure="nobody else came", resync=True)
            case b"ban":
                return Ended(posting.key, failure="worker 7 is banned", fatal=True)
            case b"call":
                self.trainer.called(posting.key.sequence + 1)
        posting.mean[:] = posting.contribution
        notes = posting.note * 100_000 if posting.note == b"long" else posting.note
        return Ended(
            posting.key,
            contributors=(7,),
            refused={3: "not finite"},
            total_weight=2.0,
            present=(Present(7, posting.header, notes),),
            roster=(3, 7),
            bytes_sent=11,
            bytes_received=12,
            seconds=0.5,
        )

    async def fetch_state(self) -> Arrived | None:
        """The trainer's own state, as if another had served it, and two means."""
        means = ((RoundKey(4, 0), b"abcd"), (RoundKey(5, 1), b"ef"))
        if self.settings.path("only means").exists():
            return Arrived(None, means, 6, 60)
        snapshot = await self.trainer.snapshot()
        again = await self.trainer.snapshot()
        if snapshot is None or again is None:
            return None
        one, other = snapshot.data.obj, again.data.obj
        assert isinstance(one, SharedMemory) and isinstance(other, SharedMemory)
        same = os.fstat(one.fd).st_ino == os.fstat(other.fd).st_ino
        copy = Snapshot(snapshot.data, {**snapshot.numbers, "same": int(same)}, snapshot.layout_digest, snapshot.note)
        return Arrived(copy, means, 6, 60)

    def progress(self, **told: Any) -> None:
        self.told |= told

    def serve_files(self, files: Mapping[str, Path]) -> None:
        self.told["files"] = {name: str(path) for name, path in files.items()}

    async def fetch_file(self, name: str, path: Path) -> None:
        if name == "missing":
            raise RendezvousError("nobody has the file missing")
        path.write_text(name)

    async def leave(self) -> None:
        self.settings.path("left").touch()

    def status(self) -> dict[str, Any]:
        return {"members": [_member(3), _member(7), _member(8, live=False)], "pid": os.getpid(), **self.told}


def _member(number: int, *, live: bool = True) -> dict[str, Any]:
    return {"number": number, "live": live}


async def build(settings: Settings, trainer: Trainer, held: int | None) -> sidecar.Place:
    node = LonelyNode(settings, trainer)
    node.told["held"] = held

    async def close() -> None:
        settings.path("closed").touch()

    return sidecar.Place(node, node.lost, close)


def processes_with(text: str) -> list[int]:
    """All processes, zombies left out, that have this text in their command line or environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if text.encode() in told and state != "Z":
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sidecar.run(int(sys.argv[1]), build)
