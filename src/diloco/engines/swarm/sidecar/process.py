"""The sidecar of one worker: a process of its own, in which the swarm's node lives beside the training.

    python -m diloco.engines.swarm.sidecar.process FD

It is started by the trainer (kept_sidecar.py), hears it over the link at FD, and ends with it: at the end of the link,
and, should it hang, by the kernel's death signal. It passes messages on to the node and the node's wishes back; it
decides nothing about the swarm. What it prints and logs is in the log file that the trainer gave it.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from diloco.engines.rounds import RoundKey
from diloco.engines.swarm.node.trainer import Arrived, Ended, Posting, Snapshot, Trainer
from diloco.engines.swarm.settings import Settings
from diloco.engines.swarm.shared_memory import SharedMemory, shared
from diloco.engines.swarm.sidecar import messages as say
from diloco.engines.swarm.sidecar.link import AsyncLink
from diloco.errors import DiLoCoError, EngineError

logger = logging.getLogger(__name__)

STATUS_SECONDS = 1.0
_SNAPSHOT_SECONDS = 60.0
_LEAVE_SECONDS = 2.5
_CLOSE_SECONDS = 1.5
_PR_SET_PDEATHSIG = 1


class Node(Protocol):
    """What a sidecar needs of the swarm's node (node.py)."""

    @property
    def number(self) -> int: ...
    async def start(self) -> None: ...
    async def post(self, posting: Posting) -> Ended: ...
    async def fetch_state(self) -> Arrived | None: ...
    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float) -> None: ...
    def serve_files(self, files: Mapping[str, Path]) -> None: ...
    async def fetch_file(self, name: str, path: Path) -> None: ...
    async def leave(self) -> None: ...
    def status(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Place:
    """A node and what it stands on."""

    node: Node
    lost: "asyncio.Future[str]"
    """Done, with a reason, when the network under the node has died: only a new process can help."""
    close: Callable[[], Awaitable[None]]


Build = Callable[[Settings, Trainer, int | None], Awaitable[Place]]


class Sidecar:
    """Between the link and the node; to the node it is the Trainer."""

    def __init__(self, end: socket.socket, build: Build) -> None:
        self._link = AsyncLink(end, self._hear)
        self._build = build
        self._place: Place | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._snapshots: dict[int, asyncio.Future[Snapshot | None]] = {}
        self._asked = 0

    async def run(self) -> None:
        """Until the trainer is gone; raises what went wrong here."""
        try:
            while not self._link.ended.done():
                ends: list[asyncio.Future[Any]]
                ends = [self._link.ended] if self._place is None else [self._link.ended, self._place.lost]
                await asyncio.wait(ends, timeout=STATUS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self._place is not None and self._place.lost.done():
                    raise EngineError(self._place.lost.result())
                self._tell_status()
            self._link.ended.result()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._place is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._place.close(), _CLOSE_SECONDS)

    # What the trainer says

    def _hear(self, message: say.Message) -> None:
        match message:
            case say.Start():
                self._answer(message.number, self._start(message))
            case say.Post():
                self._answer(message.number, self._post(message))
            case say.FetchState():
                self._answer(message.number, self._fetch_state(message.number))
            case say.FetchFile():
                self._answer(message.number, self._fetch_file(message))
            case say.Leave():
                self._answer(message.number, self._leave(message.number))
            case say.ServeFiles():
                self._started.serve_files({name: Path(path) for name, path in message.files.items()})
            case say.Progress():
                self._started.progress(
                    inner_steps=message.inner_steps,
                    tokens=message.tokens,
                    loss=message.loss,
                    step_seconds=message.step_seconds,
                )
            case say.SnapshotMade():
                self._take_snapshot(message)
            case _:
                raise TypeError(f"a trainer does not say {type(message).__name__}")

    @property
    def _started(self) -> Node:
        assert self._place is not None, "the trainer must send Start, and wait for Started, first"
        return self._place.node

    def _answer(self, number: int, work: Coroutine[Any, Any, say.Message]) -> None:
        """Do it beside everything else; the trainer hears the answer, or why there is none."""

        async def answered() -> None:
            try:
                answer = await work
            except DiLoCoError as error:
                answer = say.Failed(number, type(error).__name__, str(error))
            except Exception as error:
                logger.exception("a request of the trainer failed")
                answer = say.Failed(number, "", f"the sidecar could not do it: {error!r}; its log says more")
            self._link.send(answer)

        task = asyncio.get_running_loop().create_task(answered())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, message: say.Start) -> say.Started:
        place = await self._build(Settings.from_json(message.settings), self, message.held)
        try:
            await place.node.start()
        except BaseException:
            await place.close()
            raise
        self._place = place
        self._tell_status()
        return say.Started(message.number, place.node.number)

    async def _post(self, message: say.Post) -> say.RoundEnded:
        posting = Posting(
            key=RoundKey(message.sequence, message.fragment),
            header=message.header,
            note=message.note,
            codec=message.codec,
            part_elements=message.part_elements,
            num_parts=message.num_parts,
            part_bytes=message.part_bytes,
            contribution=message.contribution.view,
            mean=message.mean.view,
            max_norm_ratio=message.max_norm_ratio,
            deadline_seconds=message.deadline_seconds,
        )
        ended = await self._started.post(posting)
        self._tell_status()
        return say.RoundEnded(
            number=message.number,
            failure=ended.failure,
            resync=ended.resync,
            fatal=ended.fatal,
            contributors=list(ended.contributors),
            refused=list(ended.refused.items()),
            total_weight=ended.total_weight,
            present=[(one.worker, one.header, one.note) for one in ended.present],
            roster=list(ended.roster),
            bytes_sent=ended.bytes_sent,
            bytes_received=ended.bytes_received,
            seconds=ended.seconds,
        )

    async def _fetch_state(self, number: int) -> say.StateFetched:
        arrived = await self._started.fetch_state()
        if arrived is None:
            return say.StateFetched(number, holds=True)
        snapshot = arrived.snapshot
        answer = say.StateFetched(
            number,
            means=[(key.sequence, key.fragment, len(data)) for key, data in arrived.means],
            means_memory=_joined([data for _, data in arrived.means]),
            sequence=arrived.sequence,
            position=arrived.position,
        )
        if snapshot is None:
            return answer
        return replace(
            answer,
            memory=shared(snapshot.data),
            numbers=dict(snapshot.numbers),
            layout_digest=snapshot.layout_digest,
            note=bytes(snapshot.note),
        )

    async def _fetch_file(self, message: say.FetchFile) -> say.Done:
        await self._started.fetch_file(message.name, Path(message.path))
        return say.Done(message.number)

    async def _leave(self, number: int) -> say.Done:
        if self._place is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._place.node.leave(), _LEAVE_SECONDS)
        return say.Done(number)

    def _take_snapshot(self, message: say.SnapshotMade) -> None:
        waiting = self._snapshots.pop(message.number, None)
        if waiting is None or waiting.done():
            return
        if message.memory is None:
            waiting.set_result(None)
            return
        waiting.set_result(
            Snapshot(message.memory.view, message.numbers or {}, message.layout_digest, message.note),
        )

    # What the node says (worker.Trainer)

    def called(self, sequence: int) -> None:
        self._link.send(say.Called(sequence))

    async def snapshot(self) -> Snapshot | None:
        self._asked += 1
        number = self._asked
        waiting: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()
        self._snapshots[number] = waiting
        self._link.send(say.SnapshotWanted(number))
        try:
            return await asyncio.wait_for(waiting, _SNAPSHOT_SECONDS)
        except TimeoutError:
            logger.warning("the trainer made no snapshot within %g s", _SNAPSHOT_SECONDS)
            return None
        finally:
            self._snapshots.pop(number, None)

    def happened(self, type_: str, fields: Mapping[str, Any]) -> None:
        self._link.send(say.Happened(type_, dict(fields)))
        self._tell_status()

    def _tell_status(self) -> None:
        self._link.send(say.Status({} if self._place is None else self._place.node.status()))


def _joined(blocks: list[bytes]) -> SharedMemory | None:
    if not blocks:
        return None
    memory = SharedMemory.create(sum(map(len, blocks)))
    position = 0
    for block in blocks:
        memory.view[position : position + len(block)] = block
        position += len(block)
    return memory


def run(fd: int, build: Build) -> None:
    """The whole life of a sidecar process."""
    _die_with_the_trainer()
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)  # what this process starts must not keep the link open
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")

    async def live() -> None:
        await Sidecar(end, build).run()

    try:
        asyncio.run(live())
    except BaseException:
        logger.exception("the sidecar ends")
        os._exit(1)  # threads of other libraries must not hold up the end
    os._exit(0)


def _die_with_the_trainer() -> None:
    """Signals that end a whole job are the trainer's to handle: it says when its sidecar must go."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Had the trainer died before this line, the link would have ended: `Sidecar.run` sees that.


if __name__ == "__main__":
    from diloco.engines.swarm.sidecar.assembly import build

    run(int(sys.argv[1]), build)
