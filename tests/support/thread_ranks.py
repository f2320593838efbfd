"""The ranks of a worker as threads of one process, which meet at barriers: no torch.distributed."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from diloco.engines.worker_ranks import WorkerRanks

_SECONDS = 20.0


class Meeting:
    """What the ranks have put down at the same point."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks)
        self.places: list[Any] = [None] * ranks

    def rank(self, rank: int) -> "ThreadRanks":
        return ThreadRanks(self, rank)


class ThreadRanks(WorkerRanks):
    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__(range(meeting.ranks), rank)
        self._meeting = meeting

    def _all(self, own: Any) -> list[Any]:
        """What every rank puts down."""
        self._meeting.places[self.rank] = own
        self._meeting.barrier.wait(_SECONDS)
        places = list(self._meeting.places)
        self._meeting.barrier.wait(_SECONDS)
        return places

    def gather(self, data: bytes) -> list[bytes]:
        rows = self._all(data)
        assert len(set(map(len, rows))) == 1
        return rows

    def tell(self, data: bytes) -> bytes:
        said: bytes = self._all(data)[0]
        return said

    def exchange(self, parts: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        received = [theirs[self.rank] for theirs in self._all([part.clone() for part in parts])]
        assert [len(part) for part in received] == list(lengths)
        return received

    def share(self, flat: Tensor, bounds: Sequence[int]) -> None:
        copies = self._all(flat.clone())
        for rank in range(self.count):
            flat[bounds[rank] : bounds[rank + 1]] = copies[rank][bounds[rank] : bounds[rank + 1]]

    def average(self, tensor: Tensor) -> None:
        total = torch.stack([copy.float() for copy in self._all(tensor.clone())]).sum(0)
        tensor.copy_(total.div_(self.count))

    def close(self, broken: bool = False) -> None: ...


def on_ranks(ranks: int, work: Callable[[WorkerRanks], Any]) -> list[Any]:
    """`work` on every rank of one worker, in threads; the results in rank order."""
    return in_threads([lambda rank=meeting: work(rank) for meeting in map(Meeting(ranks).rank, range(ranks))])


def in_threads(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """All at the same time; the results in their order. Raises the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as error:  # noqa: BLE001  raised again below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 3 * _SECONDS
    while any(thread.is_alive() for thread in threads) and not errors and time.monotonic() < deadline:
        threads[0].join(0.05) if threads[0].is_alive() else time.sleep(0.01)
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results
