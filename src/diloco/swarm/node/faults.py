"""Errors of this worker's own program: each is told by an event, so that none is taken for a bad network.

What the network and other peers do wrong is expected, and has exceptions of its own (Unreachable, CallRefused,
Malformed). Any other exception is a fault of the program, or of a machine that has run out of open files or of disk;
the worker goes on as well as it can.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from diloco.errors import with_remedy
from diloco.swarm import timing
from diloco.swarm.network.transport import CallRefused, OnCall, OnStream, Stream, Unreachable
from diloco.swarm.node import clock

logger = logging.getLogger(__name__)


class Faults:
    def __init__(self, on_event: Callable[[str, dict[str, object]], None]) -> None:
        self._on_event = on_event
        self._told_at: dict[str, float] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def record(self, what: str, problem: BaseException) -> None:
        """`what`: what the worker was about, in a few words that are the same each time."""
        now = clock.now()
        told = f"{what} {type(problem).__name__}"
        is_new = now - self._told_at.get(told, -timing.FAULT_TOLD_EVERY) >= timing.FAULT_TOLD_EVERY
        logger.error("a fault of this worker's program, in %s: %r", what, problem, exc_info=problem if is_new else None)
        if is_new:
            self._told_at[told] = now
            self._on_event("internal_error", {"what": what, "reason": with_remedy(problem)})

    def start(self, work: Coroutine[Any, Any, None], what: str) -> "asyncio.Task[None]":
        """Start a task, which is held until it ends; what it fails with is recorded."""

        def end(task: "asyncio.Task[None]") -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (problem := task.exception()) is not None:
                self.record(what, problem)

        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(end)
        return task

    def answering(self, answer: OnCall) -> OnCall:
        async def call(peer: str, request: bytes) -> bytes:
            try:
                return await answer(peer, request)
            except (CallRefused, Unreachable):
                raise
            except Exception as problem:  # noqa: BLE001 - recorded
                self.record("answering a call", problem)
                raise CallRefused(f"the asked worker failed at it: {problem!r}"[:300]) from None

        return call

    def serving(self, serve: OnStream) -> OnStream:
        async def stream(opened: Stream) -> None:
            try:
                await serve(opened)
            except Exception as problem:  # noqa: BLE001 - recorded
                self.record("serving a stream", problem)

        return stream
