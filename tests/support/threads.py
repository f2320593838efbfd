"""k workers as threads of this process, over the local engine."""

import threading
from collections.abc import Callable, Collection
from typing import TypeVar

import torch

from diloco.engines.base import Engine
from diloco.engines.local import LocalSwarm

T = TypeVar("T")


def in_threads(
    workers: int,
    work: Callable[[Engine], T],
    *,
    fail_at: Collection[tuple[int, int]] = (),
    seconds: float = 300.0,
) -> list[T]:
    """`work(engine)` for every worker; its results in worker order. Raises the first worker's error, or for a hang."""
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(engine: Engine) -> None:
        torch.set_num_threads(1)
        try:
            results[engine.worker] = work(engine)
        except BaseException as error:  # noqa: BLE001  it is raised again below, in the thread of the test
            errors[engine.worker] = error

    threads = [
        threading.Thread(target=run, args=(engine,), daemon=True)
        for engine in LocalSwarm(workers, fail_at=fail_at).engines()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    if errors:
        raise errors[min(errors)]
    hung = [worker for worker, thread in enumerate(threads) if thread.is_alive()]
    assert not hung, f"workers {hung} hang"
    return [results[worker] for worker in range(workers)]
