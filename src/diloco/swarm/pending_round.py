"""A round of the swarm that the trainer has posted: its memory, the wait for its outcome, and its result.

The encoded outer gradient is copied into shared memory when the round is posted, and the mean back when it has ended:
the trainer may use its own memory meanwhile.
"""

import logging
import struct
import threading
import time
import weakref
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.engines.base import PendingRound
from diloco.engines.header import find_report_fault, unpack
from diloco.engines.rounds import Contribution, Member, Report, RoundResult
from diloco.errors import DiLoCoError, EngineError, Excluded, RoundFailed
from diloco.swarm import timing
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.sidecar.messages import PostRound, RoundEnded
from diloco.swarm.sidecar.supervisor import SidecarLost
from diloco.swarm.trainer import PostedRound, PresentWorker, RoundOutcome

logger = logging.getLogger(__name__)


def as_tensor(memory: SharedMemory) -> torch.Tensor:
    """Return all of it as uint8, without a copy."""
    if not memory.num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(memory, dtype=torch.uint8, count=memory.num_bytes)


def pin(memory: SharedMemory) -> None:
    """Lock it in RAM, which makes copies from and to a GPU several times as fast.

    Where the system refuses (a limit on locked memory), copies are slow and all else is the same.
    """
    if not memory.num_bytes:
        return
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = as_tensor(memory).data_ptr()
    code = int(cuda.cudaHostRegister(address, memory.num_bytes, 0))
    if code == 0:
        weakref.finalize(memory, cuda.cudaHostUnregister, address)
    else:
        logger.warning("memory for rounds could not be locked (CUDA error %d): copies from the GPU are slower", code)


@dataclass(frozen=True)
class RoundMemory:
    """Shared memory for a contribution and for the mean."""

    contribution: SharedMemory
    mean: SharedMemory


class RoundMemoryPool:
    """Rounds of the same fragment reuse each other's memory, one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[tuple[int, int, int], list[RoundMemory]] = {}

    def take(self, fragment: int, contribution_bytes: int, mean_bytes: int, *, pinned: bool = False) -> RoundMemory:
        """`pinned`: for copies from and to a GPU; the same for all rounds of a fragment."""
        with self._lock:
            free = self._free.get((fragment, contribution_bytes, mean_bytes))
            if free:
                return free.pop()
        memory = RoundMemory(SharedMemory.create(contribution_bytes), SharedMemory.create(mean_bytes))
        if pinned:
            pin(memory.contribution)
            pin(memory.mean)
        return memory

    def give_back(self, posted: PostedRound) -> None:
        """Only after the sidecar has reported the end of the round: until then it may write into the memory."""
        key = (posted.key.fragment, posted.contribution.num_bytes, posted.mean.num_bytes)
        with self._lock:
            self._free.setdefault(key, []).append(RoundMemory(posted.contribution, posted.mean))

    def clear(self) -> None:
        with self._lock:
            self._free.clear()


class RoundOwner(Protocol):
    """What a pending round needs of its engine."""

    leave_deadline: float
    """On time.monotonic()'s clock: a round that has not ended by then fails."""

    def on_round_ended(self, posted: PostedRound, outcome: RoundOutcome, members: tuple[Member, ...]) -> None: ...

    def restart_sidecar(self, number: int, reason: str) -> None:
        """The sidecar does not answer request `number`."""


class FailedRound(PendingRound):
    def __init__(self, failure: RoundFailed) -> None:
        self._failure = failure

    def wait(self) -> RoundResult:
        raise self._failure


class SwarmRound(PendingRound):
    """`wait` is bounded by the round's deadline, and by `leave_deadline` once this worker leaves."""

    def __init__(
        self, owner: RoundOwner, contribution: Contribution, message: PostRound, answer: "Future[Any]"
    ) -> None:
        self._owner = owner
        self._contribution = contribution
        self._answer = answer
        self._number = message.number
        self._sequence = message.round.key.sequence
        self._posted: PostedRound | None = message.round
        self._deadline = time.monotonic() + message.round.deadline_seconds + timing.DEADLINE_GRACE_SECONDS
        self._outcome: RoundResult | DiLoCoError | None = None
        self._has_mean = False  # it is copied already

    def arrived_mean(self) -> EncodedVector | None:
        while not self._answer.done():
            left = min(self._deadline, self._owner.leave_deadline) - time.monotonic()
            if left <= 0:
                return None
            wait([self._answer], min(timing.OUTCOME_POLL_SECONDS, left))
        if self._answer.exception() is not None:
            return None
        outcome = self._answer.result().outcome
        posted = self._posted
        if posted is None or outcome.failure is not None or not outcome.total_weight:
            return None
        self._copy_mean(posted)
        return self._contribution.vector.mean

    def _copy_mean(self, posted: PostedRound) -> None:
        self._contribution.vector.mean.data.view(-1).copy_(as_tensor(posted.mean))
        self._has_mean = True

    def wait(self) -> RoundResult:
        if self._outcome is None:
            try:
                self._outcome = self._result(self._wait_for_outcome())
            except DiLoCoError as error:
                self._outcome = error
            self._posted = None  # a kept exception must not keep the memory
        if isinstance(self._outcome, DiLoCoError):
            raise self._outcome
        return self._outcome

    def _wait_for_outcome(self) -> RoundOutcome:
        """Raises RoundFailed without an outcome; the memory is then not reused: the sidecar may still write into it."""
        while True:
            left = min(self._deadline, self._owner.leave_deadline) - time.monotonic()
            try:  # wake up now and then: `leave_deadline` may be set meanwhile
                ended = self._answer.result(max(0.0, min(timing.OUTCOME_POLL_SECONDS, left)))
            except SidecarLost as lost:
                raise self._failed(str(lost), resync=True) from lost
            except RoundFailed as failure:
                raise self._failed(failure.reason, resync=True) from failure
            except TimeoutError:
                self._check_deadlines()
            else:
                assert isinstance(ended, RoundEnded)
                return ended.outcome

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        if now >= self._owner.leave_deadline:
            raise self._failed("it had not ended when this worker left", resync=False)
        if now >= self._deadline:
            reason = "the swarm's process did not end it in time"
            self._owner.restart_sidecar(self._number, f"round {self._sequence}: {reason}")
            raise self._failed(reason, resync=True)

    def _failed(self, reason: str, *, resync: bool) -> RoundFailed:
        prefix = f"round {self._sequence}: "
        return RoundFailed(reason if reason.startswith(prefix) else prefix + reason, resync=resync)

    def _result(self, outcome: RoundOutcome) -> RoundResult:
        vector = self._contribution.vector
        posted = self._posted
        assert posted is not None
        if outcome.failure is None and outcome.total_weight > 0 and not self._has_mean:
            self._copy_mean(posted)
        members = tuple(_member(present) for present in outcome.present)
        self._owner.on_round_ended(posted, outcome, members)
        if outcome.fatal:
            raise Excluded(outcome.failure or "the swarm has excluded this worker")
        if outcome.failure is not None:
            failure = self._failed(outcome.failure, resync=outcome.resync)
            failure.stopping = any(member.report.stopping for member in members)
            raise failure
        return RoundResult(mean=vector.mean, members=members, **outcome.summary_fields())


def _member(present: PresentWorker) -> Member:
    try:
        member = replace(unpack(present.worker, present.header).member, note=present.note)
        if find_report_fault(member.report) is None:
            return member
        return replace(member, report=Report(stopping=member.report.stopping, done=member.report.done))
    except struct.error as error:
        raise EngineError(
            f"worker {present.worker} sent a header of {len(present.header)} bytes, which this version cannot read: "
            "run the same version of diloco everywhere"
        ) from error
