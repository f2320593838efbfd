"""Real sidecar processes around a fake node, to test the link and the supervisor; and a search for leftover processes.

Run as a program it is such a sidecar. The node is alone in its swarm: the mean of a round is its own contribution. The
note of a round, and files in the swarm's folder at the start, tell it to misbehave.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diloco.atomic_files import write_file
from diloco.engines.rounds import RoundKey
from diloco.errors import ConfigError, RendezvousError
from diloco.swarm.protocol.status import MemberStatus, RunStatus
from diloco.swarm.settings import Settings
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar import process as sidecar
from diloco.swarm.trainer import (
    FetchedState,
    PostedRound,
    PresentWorker,
    RoundMean,
    RoundOutcome,
    Snapshot,
    Trainer,
)

COMMAND = (sys.executable, __file__)
_TOLD_FILE = "told.json"


class LonelyNode:
    """Writes what it is told to a file; `told` reads it."""

    number = 7

    def __init__(self, settings: Settings, trainer: Trainer) -> None:
        self.settings, self.trainer = settings, trainer
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._told: dict[str, Any] = {"pid": os.getpid()}

    def tell(self, **fields: Any) -> None:
        self._told |= fields
        write_file(self.settings.path(_TOLD_FILE), json.dumps(self._told))

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
        self.trainer.emit("member_joined", {"worker": 7})

    async def post(self, posting: PostedRound) -> RoundOutcome:
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
                return RoundOutcome(posting.key, failure="nobody else came", resync=True)
            case b"ban":
                return RoundOutcome(posting.key, failure="worker 7 is banned", fatal=True)
            case b"call":
                self.trainer.post_now(posting.key.sequence + 1)
        posting.mean.view[:] = posting.contribution.view
        notes = posting.note * 100_000 if posting.note == b"long" else posting.note
        return RoundOutcome(
            posting.key,
            contributors=(7,),
            refused={3: "not finite"},
            total_weight=2.0,
            present=(PresentWorker(7, posting.header, notes),),
            roster=(3, 7),
            bytes_sent=11,
            bytes_received=12,
            seconds=0.5,
        )

    async def fetch_state(self, most_bytes: int | None = None) -> FetchedState | None:
        del most_bytes
        """The trainer's own state, as if another had served it, and two means."""
        means = (
            RoundMean(RoundKey(4, 0), SharedMemory.copy_of(b"abcd")),
            RoundMean(RoundKey(5, 1), SharedMemory.copy_of(b"ef")),
        )
        if self.settings.path("only means").exists():
            return FetchedState(None, means, 6, 60)
        snapshot = await self.trainer.snapshot()
        again = await self.trainer.snapshot()
        if snapshot is None or again is None:
            return None
        same = os.fstat(snapshot.data.fd).st_ino == os.fstat(again.data.fd).st_ino
        copy = Snapshot(snapshot.data, {**snapshot.numbers, "same": int(same)}, snapshot.layout_digest, snapshot.note)
        return FetchedState(copy, means, 6, 60)

    def progress(self, **fields: Any) -> None:
        self.tell(**fields)

    def serve_files(self, files: Mapping[str, Path]) -> None:
        self.tell(files={name: str(path) for name, path in files.items()})

    async def fetch_file(self, name: str, path: Path) -> None:
        if name == "missing":
            raise RendezvousError("nobody has the file missing")
        path.write_text(name)

    async def leave(self) -> None:
        self.settings.path("left").touch()

    def status(self) -> RunStatus:
        members = MemberStatus(number=3), MemberStatus(number=7), MemberStatus(number=8, live=False)
        return RunStatus("run", members, None, {}, {})


def told(settings: Settings) -> dict[str, Any]:
    """What the node of the worker with these settings was told: next_round, files, progress; and its "pid"."""
    return dict(json.loads(settings.path(_TOLD_FILE).read_text()))


async def build(settings: Settings, trainer: Trainer, next_round: int | None) -> sidecar.NodeWithNetwork:
    node = LonelyNode(settings, trainer)
    node.tell(next_round=next_round)

    async def close() -> None:
        settings.path("closed").touch()

    return sidecar.NodeWithNetwork(node, node.lost, close)


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
