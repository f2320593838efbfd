"""An asyncio event loop with a virtual clock, for tests that wait for timers and for nothing outside the process.

`loop.time()` stands still while anything is ready to run. When nothing is, it jumps to the next timer instead of
sleeping until then. So a test of time-outs takes milliseconds, and a busy machine cannot make one of them expire early.

- The code under test must read time from its loop (`loop.time()`, `asyncio.sleep`, `asyncio.timeout`) only.
- `run_in_executor` and `asyncio.to_thread` call the function at once, in the loop's own thread: no threads, no races.
- If nothing is ready and no timer is set, no event can ever come: `Stuck` is raised instead of a hang.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
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


class VirtualClockLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

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
    """As asyncio.run, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(work)
