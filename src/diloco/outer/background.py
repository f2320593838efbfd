"""Encoding and outer steps beside training, for a worker on a CPU whose rounds overlap with training.

The trainer's thread only copies: θ_i into a spare block when it posts, the next anchor into θ_i when it merges. Two
threads of the worker do the arithmetic meanwhile, with the same operations in the same order, so that no bit changes:

    trainer    post: copy θ_i                                          merge: θ_i ← next anchor
    posting          encode Δ_i, start the round                                              anchor ← next anchor
    waiting                                      the mean → next anchor, in a spare block

Until the merge nothing but the spare block has changed: a round that is late, refused or saved is as without threads.
The anchor follows a merge in the posting thread, before the next post; `lock` waits for it.
A step may post one fragment and merge another: the posting thread lets the trainer merge first, with a core of its own.
On a GPU this is not needed: its kernels run beside the trainer's thread anyway.
"""

import math
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.fragments import Fragment
from diloco.engines.base import PendingRound
from diloco.engines.behind_training import stay_behind_training
from diloco.engines.rounds import CONFIRMATION, Contribution, GlobalState, Report, RoundKey, RoundResult
from diloco.outer.replica import OneRankReplica
from diloco.outer.rounds import PendingWorkerRound
from diloco.outer.sending import FragmentSending

_LONGEST_SECONDS = 600.0  # for some copies and arithmetic in memory
_TRY_SECONDS = 1.0
_MERGE_SECONDS = 0.02  # that a post leaves the cores to a merge which is likely to come in the same step
_END_SECONDS = 5.0  # for a job at the end; one that waits for a lost peer is left behind


@dataclass(frozen=True)
class _Prepared:
    """The next anchor of a fragment, and what it was computed from."""

    mean: EncodedVector
    old_digest: str
    old_rounds: int
    block: Tensor
    digest: str
    norm: float
    """The norm of the mean."""


class BackgroundReplica(OneRankReplica):
    """The replica of a worker of one rank, with the arithmetic of rounds in threads of its own."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        plain = threading.Lock()
        self.merge_lock = plain
        self._anchors = plain
        self._idle = _IdleLock(plain)
        self.lock = self._idle
        self._posting = _Jobs("diloco-posting")
        self._waiting = _Jobs("diloco-waiting")
        self._merged = threading.Event()
        """Cleared while a mean is there that the trainer has not merged since the latest post."""
        self._merged.set()
        self._copied: dict[int, Tensor] = {}  # parameters of fragments that are being posted
        self._prepared: dict[int, _Prepared] = {}
        self._spare: list[Tensor] = []
        self._block_elements = max((f.numel for f in self.lane.fragments if f is not None), default=0)

    # The trainer's thread

    def encode(self, index: int, turn: int, report: Report, *, dropped: bool = False) -> tuple[float, Report]:
        """Copy the parameters; the norm is not known yet."""
        del turn
        fragment = self.lane.fragments[index]
        if fragment is not None and not dropped:
            fragment.check_memory()
            block = self._take_block()
            self._copied[index] = block
            fragment.copy_to(block)
        return 0.0 if dropped else math.nan, report

    def start_round(self, key: RoundKey, contributions: Sequence[Contribution], seconds: float) -> PendingWorkerRound:
        round_ = _BackgroundRound()
        block = self._copied.pop(key.fragment, None)
        self._forget(key.fragment)  # a mean that was not merged
        if self._prepared:
            self._merged.clear()
        if block is not None:
            self._idle.begin()
        self._posting.do(lambda: self._post(key, contributions[0], seconds, block, round_))
        return round_

    def merge(
        self, index: int, means: Sequence[EncodedVector], mixing: float, turn: int, *, plain: bool = False
    ) -> float:
        prepared = self._prepared_for(index, means[0])
        fragment = self.lane.fragments[index]
        if plain:  # a plain step is not the one that was prepared
            self._forget(index)
            prepared = None
        if prepared is None or fragment is None:
            self._merged.set()
            return super().merge(index, means, mixing, turn, plain=plain)
        if mixing < 1.0:
            fragment.follow_flat(prepared.block, mixing)
        self.lane.digests[index] = prepared.digest
        self._forget(index)
        self._idle.begin()
        self._posting.do(lambda: self._step_anchor(index, means[0], turn))
        self.changed(index)
        self._merged.set()
        return prepared.norm

    def are_finite(self, index: int, means: Sequence[EncodedVector]) -> bool:
        prepared = self._prepared_for(index, means[0])
        return super().are_finite(index, means) if prepared is None else math.isfinite(prepared.norm)

    def _prepared_for(self, index: int, mean: EncodedVector) -> _Prepared | None:
        """Return the anchor that was prepared with this mean; None if there is none, or if the anchor has changed
        since."""
        prepared = self._prepared.get(index)
        fragment = self.lane.fragments[index]
        if prepared is None or fragment is None or prepared.mean is not mean:
            return None
        same = (prepared.old_digest, prepared.old_rounds) == (self.lane.digests[index], fragment.rounds)
        return prepared if same else None

    def finish_posts(self) -> None:
        self._posting.finish()

    def fetch_states(self) -> list[GlobalState] | None:
        """Fetch the others' state after the rounds posted so far: the order of what an engine does is the same on all
        workers."""
        self.finish_posts()
        return super().fetch_states()

    def _forget(self, index: int) -> None:
        prepared = self._prepared.pop(index, None)
        if prepared is not None:
            self._spare.append(prepared.block)

    def _take_block(self) -> Tensor:
        try:
            return self._spare.pop()
        except IndexError:
            return torch.zeros(self._block_elements)

    # The posting thread

    def _post(
        self,
        key: RoundKey,
        contribution: Contribution,
        seconds: float,
        block: Tensor | None,
        round_: "_BackgroundRound",
    ) -> None:
        self._merged.wait(_MERGE_SECONDS)
        try:
            if block is not None:
                try:
                    contribution = replace(contribution, norm=self.lane.encode(key.fragment, self._turn(key), block))
                finally:
                    self._spare.append(block)
                    self._idle.end()
            round_.norm = contribution.norm
            pending = self.lane.engine.start_round(key, contribution, seconds)
        except BaseException as error:  # noqa: BLE001  the trainer hears of it when it waits
            round_.future.set_exception(error)
        else:
            self._waiting.do(lambda: self._await(key, pending, round_))

    def _turn(self, key: RoundKey) -> int:
        return key.sequence // len(self.lane.fragments)

    def _step_anchor(self, index: int, mean: EncodedVector, turn: int) -> None:
        try:
            with self._anchors:
                self.lane.merge(index, mean, 1.0, turn)
        finally:
            self._idle.end()

    # The waiting thread

    def _await(self, key: RoundKey, pending: PendingRound, round_: "_BackgroundRound") -> None:
        try:
            mean = pending.arrived_mean()
            if mean is not None and key.fragment != CONFIRMATION and mean.num_bytes:
                self._prepare(key.fragment, mean, self._turn(key))
        except BaseException as error:  # noqa: BLE001  the trainer hears of it when it waits
            round_.future.set_exception(error)
        else:
            round_.future.set_result(pending)

    def _prepare(self, index: int, mean: EncodedVector, turn: int) -> None:
        """Compute the next anchor, to save the trainer time: where nothing is prepared it takes the outer step
        itself."""
        fragment = self.lane.fragments[index]
        if fragment is None or not self._anchors.acquire(timeout=_TRY_SECONDS):
            return
        try:
            if not fragment.swapped:
                self._prepared[index] = self._next(index, fragment, mean, turn)
        finally:
            self._anchors.release()

    def _next(self, index: int, fragment: Fragment, mean: EncodedVector, turn: int) -> _Prepared:
        sending = self.lane.sending[index]
        assert isinstance(sending, FragmentSending)
        block = self._take_block()
        old_digest = self.lane.digests[index]
        old_rounds = fragment.rounds
        digest, norm = sending.next_anchor(mean, turn, block[: fragment.numel])
        return _Prepared(mean, old_digest, old_rounds, block, digest, norm)


class _BackgroundRound:
    """A round that the posting thread begins. `wait` is bounded by the engine's own wait."""

    def __init__(self) -> None:
        self.norm = math.nan
        self.future: Future[PendingRound] = Future()
        """The round at its engine, once its mean is there, or is known not to come."""

    def wait(self) -> RoundResult:
        return self.future.result().wait()


class _IdleLock:
    """A lock that is given only while the posting thread reads and writes no anchor."""

    def __init__(self, plain: threading.Lock) -> None:
        self._plain = plain
        self._changed = threading.Condition()
        self._open = 0

    def begin(self) -> None:
        with self._changed:
            self._open += 1

    def end(self) -> None:
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def __enter__(self) -> None:
        while True:
            self._plain.acquire()
            if not self._open:
                return
            self._plain.release()
            with self._changed:
                if not self._changed.wait_for(lambda: not self._open, _LONGEST_SECONDS):
                    raise RuntimeError(f"a round was not encoded within {_LONGEST_SECONDS:g} s")

    def __exit__(self, *error: object) -> None:
        self._plain.release()


class _Jobs:
    """One thread that does jobs in order. It ends when this object is gone, and before the interpreter does.

    A thread that comes out of torch's C++ code while the interpreter ends would abort the process.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: list[BaseException] = []

    def do(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            arguments = (self._queue, self._error)
            self._thread = threading.Thread(target=_work, args=arguments, name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, _end, self._thread, self._queue)
        self._queue.put(job)

    def finish(self) -> None:
        """Wait until all jobs given so far are done; raises the first error of one."""
        if self._thread is not None:
            done = threading.Event()
            self._queue.put(done.set)
            if not done.wait(_LONGEST_SECONDS):
                raise RuntimeError(f"{self._name} did not end its jobs within {_LONGEST_SECONDS:g} s")
        if self._error:
            raise self._error[0]


def _end(thread: threading.Thread, jobs: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    jobs.put(None)
    if thread is not threading.current_thread():  # a job may have held the last reference
        thread.join(_END_SECONDS)


def _work(jobs: "queue.SimpleQueue[Callable[[], None] | None]", errors: list[BaseException]) -> None:
    stay_behind_training()
    while (job := jobs.get()) is not None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  raised in the trainer's thread
            errors.append(error)
        del job
