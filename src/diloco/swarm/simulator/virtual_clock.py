"""An asyncio event loop with a virtual clock, for tests that wait for timers and for nothing outside the process.

`loop.time()` stands still while anything is ready to run. When nothing is, it jumps to the next timer instead of
sleeping until then. So a test of time-outs takes milliseconds, and a busy machine cannot make one of them expire early.

- The code under test must read time from its loop (`loop.time()`, `asyncio.sleep`, `asyncio.timeout`) only.
- `run_in_executor` and `asyncio.to_thread` call the function at once, in the loop's own thread: no threads, no races.
- If nothing is ready and no timer is set, no event can ever come: `Stuck` is raised instead of a hang.
- Tasks and futures are hashed by their order of creation, not by their address: a set of them has the same order in
  every run.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")

START = 1000.0


class Stuck(RuntimeError):
    """Every task waits, and no timer is set."""


class _Selector(selectors.DefaultSelector):
    """Advances the clock by the time-out that the loop would sleep for."""

    now = START

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout is None:
            raise Stuck("every task waits for something that neither another task nor a timer will bring")
        if not events and timeout is not None:
            self.now += max(0.0, timeout)
        return events


class _Task(asyncio.Task[T]):
    def __init__(self, work: Coroutine[Any, Any, T], serial: int, **options: Any) -> None:
        self._serial = serial  # the next line puts this task into a set
        super().__init__(work, **options)

    def __hash__(self) -> int:
        return self._serial


class _Future(asyncio.Future[T]):
    def __init__(self, serial: int, loop: asyncio.AbstractEventLoop) -> None:
        self._serial = serial
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self._serial


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        self._serials = count(1)
        super().__init__(self._virtual)
        self.set_task_factory(self._make_task)  # type: ignore[arg-type]  # its protocol names the loop

    def _make_task(self, _: object, work: Coroutine[Any, Any, T], **options: Any) -> "asyncio.Task[T]":
        return _Task(work, next(self._serials), loop=self, **options)

    def create_future(self) -> "asyncio.Future[Any]":
        return _Future(next(self._serials), self)

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: Any) -> "asyncio.Future[T]":  # type: ignore[override]
        del executor
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - what the function raises is the future's exception
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as asyncio.run does, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(work)
