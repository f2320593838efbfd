"""The sidecar of one worker: a process of its own that runs the swarm's node beside the training.

The trainer starts it (supervisor.py) as `python -m diloco.swarm.sidecar FD` and talks to it over the link at
file descriptor FD. It ends with the trainer: when the link closes, or, if it hangs, by the kernel's death signal. It
passes messages between the trainer and the node, and decides nothing about the swarm. Its output goes to the log file
that the trainer gave it.
"""

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, assert_never

from msgspec.structs import replace

from diloco.errors import DiLoCoError, EngineError, with_remedy
from diloco.swarm import timing
from diloco.swarm.network.limits import TokenBucket
from diloco.swarm.protocol.status import RunStatus
from diloco.swarm.settings import Settings
from diloco.swarm.shared_memory import KeptMappings
from diloco.swarm.sidecar import messages
from diloco.swarm.sidecar.link import AsyncLink
from diloco.swarm.sidecar.messages import FromTrainer
from diloco.swarm.trainer import FetchedState, PostedRound, RoundOutcome, Snapshot, Trainer

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
# Parameters of glibc's mallopt
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_M_ARENA_MAX = -8


class HostedNode(Protocol):
    """The part of the swarm's node that a sidecar uses (node/node.py)."""

    @property
    def number(self) -> int: ...
    async def start(self) -> None: ...
    async def post(self, posted: PostedRound) -> RoundOutcome: ...
    async def fetch_state(self, most_bytes: int | None = None) -> FetchedState | None: ...
    def progress(self, *, inner_steps: int, tokens: int, loss: float, step_seconds: float, run_tokens: int) -> None: ...
    def serve_files(self, files: Mapping[str, Path]) -> None: ...
    async def fetch_file(self, name: str, path: Path) -> None: ...
    async def leave(self) -> None: ...
    def status(self) -> RunStatus: ...


@dataclass(frozen=True)
class NodeWithNetwork:
    """A node and the network under it."""

    node: HostedNode
    network_lost: "asyncio.Future[str]"
    """Done, with a reason, when the network under the node has died: only a new process can help."""
    close_network: Callable[[], Awaitable[None]]


Build = Callable[[Settings, Trainer, int | None], Awaitable[NodeWithNetwork]]
"""(settings, trainer, the first round that the trainer has not merged) -> a node that has not started yet."""


class Sidecar:
    """Passes messages between the link and the node; to the node it is the Trainer."""

    def __init__(self, end: socket.socket, build: Build) -> None:
        self._link = AsyncLink[FromTrainer](end, FromTrainer, self._on_message)
        self._build = build
        self._mappings = KeptMappings()
        self._running: NodeWithNetwork | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._snapshots: dict[int, asyncio.Future[Snapshot | None]] = {}
        self._snapshots_asked = 0

    async def run(self) -> None:
        """Run until the trainer closes the link; raise EngineError if the network dies."""
        try:
            while not self._link.ended.done():
                ends: list[asyncio.Future[Any]] = [self._link.ended]
                if self._running is not None:
                    ends.append(self._running.network_lost)
                await asyncio.wait(ends, timeout=timing.STATUS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                if self._running is not None and self._running.network_lost.done():
                    raise EngineError(self._running.network_lost.result())
                self._send_status()
            self._link.ended.result()
        finally:
            for task in self._tasks:
                task.cancel()
            if self._running is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timing.SIDECAR_CLOSE_SECONDS):
                        await self._running.close_network()

    # Messages of the trainer

    def _on_message(self, message: FromTrainer) -> None:
        match message:
            case messages.StartNode():
                self._answer(message.number, self._start(message))
            case messages.PostRound():
                self._answer(message.number, self._post(message))
            case messages.FetchState():
                self._answer(message.number, self._fetch_state(message))
            case messages.FetchRunFile():
                self._answer(message.number, self._fetch_file(message))
            case messages.Leave():
                self._answer(message.number, self._leave(message.number))
            case messages.ServeFiles():
                self._node.serve_files({name: Path(path) for name, path in message.files.items()})
            case messages.ReportProgress():
                self._node.progress(
                    inner_steps=message.inner_steps,
                    tokens=message.tokens,
                    loss=message.loss,
                    step_seconds=message.step_seconds,
                    run_tokens=message.run_tokens,
                )
            case messages.SnapshotMade():
                waiting = self._snapshots.pop(message.number, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(message.snapshot)
            case _:
                assert_never(message)

    @property
    def _node(self) -> HostedNode:
        assert self._running is not None, "the trainer must send Start, and wait for Started, first"
        return self._running.node

    def _answer(self, number: int, work: Coroutine[Any, Any, messages.Answer]) -> None:
        """Run `work` as a task; send its result, or Failed, to the trainer."""

        async def answer() -> None:
            try:
                self._link.send(await work)
            except DiLoCoError as error:
                self._link.send(messages.Failed(number, type(error).__name__, str(error)))
            except Exception as error:
                logger.exception("a request of the trainer failed")
                reason = f"the sidecar failed at it ({with_remedy(error)}); its log has the traceback"
                self._link.send(messages.Failed(number, "", reason))

        task = asyncio.get_running_loop().create_task(answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _start(self, message: messages.StartNode) -> messages.Started:
        running = await self._build(message.settings, self, message.next_round)
        try:
            await running.node.start()
        except BaseException:
            await running.close_network()
            raise
        self._running = running
        self._send_status()
        return messages.Started(message.number, running.node.number)

    async def _post(self, message: messages.PostRound) -> messages.RoundEnded:
        posted = replace(
            message.round,
            contribution=self._mappings.mapping_of(message.round.contribution),
            mean=self._mappings.mapping_of(message.round.mean),
        )
        outcome = await self._node.post(posted)
        self._send_status()
        return messages.RoundEnded(message.number, outcome)

    async def _fetch_state(self, message: messages.FetchState) -> messages.StateFetched:
        return messages.StateFetched(message.number, await self._node.fetch_state(message.most_bytes))

    async def _fetch_file(self, message: messages.FetchRunFile) -> messages.RequestDone:
        await self._node.fetch_file(message.name, Path(message.path))
        return messages.RequestDone(message.number)

    async def _leave(self, number: int) -> messages.RequestDone:
        if self._running is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timing.SIDECAR_LEAVE_SECONDS):
                    await self._running.node.leave()
        return messages.RequestDone(number)

    # What the node asks of its trainer (trainer.py)

    def post_now(self, sequence: int) -> None:
        self._link.send(messages.PostAtOnce(sequence))

    async def snapshot(self) -> Snapshot | None:
        self._snapshots_asked += 1
        number = self._snapshots_asked
        waiting: asyncio.Future[Snapshot | None] = asyncio.get_running_loop().create_future()
        self._snapshots[number] = waiting
        self._link.send(messages.MakeSnapshot(number))
        try:
            async with asyncio.timeout(timing.SNAPSHOT_SECONDS):
                return await waiting
        except TimeoutError:
            logger.warning("the trainer made no snapshot within %g s", timing.SNAPSHOT_SECONDS)
            return None
        finally:
            self._snapshots.pop(number, None)

    def emit(self, type_: str, fields: Mapping[str, Any]) -> None:
        self._link.send(messages.NodeEvent(type_, dict(fields)))
        self._send_status()

    def _send_status(self) -> None:
        self._link.send(messages.StatusReport(None if self._running is None else self._running.node.status()))


class LogLimit(logging.Filter):
    """Lets at most so many lines pass at once, then so many a second; the next line says how many were left out.

    Other peers cause most lines of this log, and one that never stops must not fill the disk.
    """

    def __init__(self, at_once: float = 5000.0, per_second: float = 1.0) -> None:
        super().__init__()
        self._bucket = TokenBucket.full(at_once, per_second, time.monotonic())
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if not self._bucket.take(time.monotonic()):
            self._left_out += 1
            return False
        if self._left_out:
            record.msg = f"({self._left_out} lines before this one were left out) {record.getMessage()}"
            record.args = ()
            self._left_out = 0
        return True


def run(fd: int, build: Build) -> None:
    """Live the whole life of a sidecar process."""
    _die_with_the_trainer()
    _keep_freed_memory()
    end = socket.socket(fileno=fd)
    end.set_inheritable(False)  # child processes must not keep the link open
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())

    async def live() -> None:
        await Sidecar(end, build).run()

    try:
        asyncio.run(live())
    except BaseException:
        logger.exception("the sidecar ends")
        os._exit(1)  # threads of other libraries must not delay the end
    os._exit(0)


def _die_with_the_trainer() -> None:
    """Have the kernel kill this process when the trainer dies, and ignore the signals that end a whole job: the trainer
    handles them, and says when its sidecar must end."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the trainer died before this line, the link is closed already, and `Sidecar.run` ends.


def _keep_freed_memory() -> None:
    """Have malloc keep freed memory: a round needs the memory of the last one again.

    As malloc is by default, most of it goes back to the system and is brought in anew, page by page, which costs as
    much as reducing the round.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # of glibc
    if mallopt is not None:
        for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 1 << 30), (_M_ARENA_MAX, 1)):
            mallopt(parameter, value)
