"""Ctrl-C ends a run of many arms after the step that is being taken, with the arms in progress saved.

SIGTERM and SIGHUP do the same, unless they are ignored (nohup). A second signal ends the run at once.
"""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

from diloco.training.processes.local_process import STOP_SIGNALS


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Says whether a signal has come. In another thread than the main one no signal can: it always says no."""
    came = False

    def stop(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    here = threading.current_thread() is threading.main_thread()
    heard = [one for one in STOP_SIGNALS if here and signal.getsignal(one) is not signal.SIG_IGN]
    before = {one: signal.signal(one, stop) for one in heard}
    try:
        yield lambda: came
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes that are started here hear no signal before they call `stop_with_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_with_parent(stopping: Event) -> Callable[[], bool]:
    """For a process of the run: the terminal's Ctrl-C is the parent's to hear, which says so with `stopping`."""
    for one in (signal.SIGINT, signal.SIGHUP):
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    return lambda: stopping.is_set() or not parent.is_alive()
