"""The outer loop of one worker: post what is due, merge what has come back.

    post    Δ_i = anchor − θ_i of a fragment that is due, encoded and given to the engine        (core/outer_step.py)
    merge   the mean of a fragment whose time has come, through OuterOpt, back into θ_i          (core/outer_step.py)

`OuterLoop` is what all kinds of runs have in common. Its subclasses say what is due, what a round does to the anchor,
what a missed round means, and which workers stop together: `FixedLoop` (fixed.py) of workers that are there from the
first step to the last, `ElasticLoop` (elastic.py) of workers that come and go, `AsynchronousLoop`
(methods/asynchronous.py) of workers without rounds. What else goes beyond the plain algorithm enters through the hooks
of method.py.

A failed round changes nothing but a counter: the worker trains on from its own parameters, and its next outer gradient
carries that work, taken from the others' anchor if they went on. No wait is longer than `sync.timeout_seconds`.
"""

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import ClassVar

import torch
from torch.optim import Optimizer

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import PartLayout
from diloco.core.options import common_values
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.core.rates import LearningRateCurve
from diloco.core.schedule import RoundLengths
from diloco.engines.base import Connection
from diloco.engines.rounds import CONFIRMATION, Contribution, Member, Report, RoundKey, RoundResult
from diloco.errors import RoundFailed
from diloco.outer.background import BackgroundReplica
from diloco.outer.gathered_replica import GatheredReplica
from diloco.outer.method import Method, TrainingWorker
from diloco.outer.ranked_replica import RankedReplica
from diloco.outer.replica import OneRankReplica, Replica
from diloco.outer.rounds import RoundCounters, RoundEvent, RoundInFlight, has_another_anchor, settle
from diloco.outer.sending import make_groups
from diloco.outer.state import AnchorEvaluation, OuterState, means_taken, restored_rounds, saved_rounds
from diloco.outer.tensors import ModelTensors, Numbers, TensorPieces

logger = logging.getLogger(__name__)

_LEAST_WORK = 1e-18  # the rate of the last steps may be next to 0


class OuterLoop(ABC):
    """One worker's outer loop, which owns its fragments. `inner_steps` is counted by the caller that takes them; then
    `post`, then `merge`."""

    serves_copies: ClassVar[bool] = False
    """Other workers get this worker's state as copies, at any moment and in another thread."""

    # Set by the caller

    on_post: Callable[[RoundKey], None] | None = None
    on_round: Callable[[RoundEvent], None] | None = None
    on_cut: Callable[[], None] | None = None
    """Called before merging a round in which a worker stops: the last moment to save."""
    note: Callable[[], bytes] = bytes
    """Writes what elastic workers are told besides with every post, and joiners with the state, in another thread; by
    default nothing."""
    rates: LearningRateCurve | None = None
    """The learning rates of the inner steps, if they are known: steps at a low rate are less work."""
    ends_at: int | None = None
    """The position at which the run ends for all workers, if `end_at` has told it."""

    # What rounds have told

    confirmed: tuple[Member, ...] = ()
    """The workers that have confirmed the last parameters, this one included; none before the end."""
    others_done: bool = False
    """Another worker has taken all its steps, and this one has not called `finish` since."""
    compared: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
    """The contributors to the latest mean of several workers, and their inner products."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        sync: SyncConfig,
        outer: OuterOptimizer,
        *,
        inner: Optimizer,
        weight: float,
        common: tuple[object, ...] = (),
        growth: RoundLengths | None = None,
        methods: Sequence[Method] = (),
    ) -> None:
        """`join` comes next. `inner`: the inner optimizer, which must not get other parameters later.

        `common`: what else must be the same on all workers. `growth`: of the rounds, if their length is not constant.
        """
        self.engine = engine
        self.sync = sync
        self.weight = weight
        self.methods = tuple(methods)
        self.report = Report()
        self.counters = RoundCounters()
        self.in_flight: list[RoundInFlight] = []
        self._inner = inner
        self._travels_a_turn = any(method.travels_a_turn for method in self.methods)
        more = [group for method in self.methods for group in method.groups()]
        groups, self.schedule = make_groups(tensors, sync, outer, growth, more)
        common = (self.schedule, common_values(sync), *common)
        replica_class = choose_replica(sync, engine, tensors)
        self.replica: Replica = replica_class(tensors, engine, groups, sync, self.methods, common)
        self.state = OuterState(self.replica, self.methods)
        self.evaluation = AnchorEvaluation(self.state, self.replica, serves_copies=self.serves_copies)
        for method in self.methods:
            method.begin(TrainingWorker(engine, self.schedule, self.state, self._training_seconds))

    @property
    def inner_steps(self) -> int:
        return self.state.inner_steps

    @inner_steps.setter
    def inner_steps(self, steps: int) -> None:
        self.state.inner_steps = steps

    @property
    def sequence(self) -> int:
        """Rounds posted so far."""
        return self.state.sequence

    @property
    def rounds(self) -> int:
        """Merged rounds, of all fragments."""
        return self.state.rounds

    @property
    def outer_steps(self) -> int:
        """Merged rounds of the parameters' fragments, without those of buffers and second moments."""
        counts = zip(self.replica.groups, self.state.merged_rounds, strict=True)
        return sum(rounds for group, rounds in counts if not group.auxiliary)

    def is_auxiliary(self, key: RoundKey) -> bool:
        """Whether a round averages buffers or second moments."""
        return self.replica.groups[key.fragment].auxiliary

    @property
    def mixing(self) -> float:
        """The share of its own parameters that this worker keeps at a merge."""
        return 1.0 if self._travels_a_turn else self.sync.mixing

    def end_at(self, position: int) -> None:
        """Set the position at which the run ends for all workers: no jump leads past it."""
        self.ends_at = position
        self.state.jump_back_to(position)

    # What a kind of run decides

    @property
    @abstractmethod
    def stopping(self) -> bool:
        """Whether a worker has asked for the end (`report.stopping`): leave the training loop and call `finish`."""

    @property
    def patience_seconds(self) -> float:
        """How much longer than `sync.timeout_seconds` this worker, which has no steps left, waits for the others."""
        return 0.0

    @abstractmethod
    def join(self, *, restoring: bool) -> None:
        """Serve this worker's state, and take over the others'. Collective, before the first inner step.

        `restoring`: a saved state is loaded next, so only the layouts are compared, and no tensor is sent.
        """

    @abstractmethod
    def due(self) -> Iterator[int]:
        """Yield the fragments to post after the inner steps taken so far, in order, each once it may be posted."""

    @abstractmethod
    def got_result(self, posted: RoundInFlight, result: RoundResult) -> None:
        """Called when a round has a result, before its mean is merged."""

    @abstractmethod
    def failed(self, posted: RoundInFlight, failure: RoundFailed) -> None:
        """Called when a round has failed."""

    @abstractmethod
    def refused_for_its_anchor(self, posted: RoundInFlight) -> None:
        """Called when the others refused this worker's contribution because its anchor is not theirs."""

    def merge_mean(self, posted: RoundInFlight, result: RoundResult) -> float | None:
        """Apply a round's mean: take the outer step, or what another kind of run does with it. Its norm if the anchor
        moved."""
        return self.outer_step(posted, result)

    def after_round(self, posted: RoundInFlight) -> None:  # noqa: B027 - only where workers come and go
        """Called when a round is over, with or without a mean."""

    @abstractmethod
    def end_together(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """See DiLoCo.finish."""

    def before_saving(self) -> None:  # noqa: B027 - most kinds have nothing of their own to save
        """Called before the state is saved, once the rounds in flight have ended."""

    @abstractmethod
    def unsavable(self) -> str | None:
        """Say why a run cannot go on from the state of this moment; None if it can. Call `settle` first."""

    @abstractmethod
    def loaded(self) -> None:
        """Called when a saved state was loaded: nothing is missed any more."""

    # Posting and merging by the schedule

    def post(self) -> None:
        """Give the engine the outer gradients that are due after the inner steps taken so far."""
        self.refuse_while_evaluating()
        for index in self.due():
            self.post_fragment(index)

    def merge(self) -> None:
        """Take back the rounds whose time has come; waits for them if the network is behind."""
        self.refuse_while_evaluating()
        if self._travels_a_turn:
            return  # `due` merges a round before its fragment is posted again
        while self.in_flight and self.in_flight[0].at_step <= self.inner_steps - self.sync.overlap_steps:
            self.merge_next()

    def merge_pending(self) -> None:
        """Take back all rounds in flight now; every worker must do so at the same step."""
        self.refuse_while_evaluating()
        while self.in_flight:
            self.merge_next()

    def merge_next(self) -> None:
        posted = self.in_flight.pop(0)
        self.end_round(posted)
        self.after_round(posted)

    def finish(self, *, early: bool, before_confirming: Callable[[], None] | None) -> None:
        """See DiLoCo.finish."""
        self.end_together(early=early, before_confirming=before_confirming or (lambda: None))
        self.report = replace(self.report, stopping=False, done=False)
        self.others_done = False

    def reached_positions(self) -> range:
        """Return the positions of the schedule that the last inner step has reached: one, or more of a slow worker."""
        step = self.state.inner_steps
        reached = range(step, step + 1)
        for method in self.methods:
            reached = method.positions(reached, self.ends_at)
        return reached

    def is_in_flight(self, index: int) -> bool:
        """Whether a round of this fragment is posted and not yet merged."""
        return any(posted.key.fragment == index for posted in self.in_flight)

    # One round

    def post_fragment(self, index: int) -> None:
        """Take a fragment's outer gradient and give it to the engine."""
        report = self.report
        for method in self.methods:
            report = method.report(report)
        started = time.monotonic()
        with self.count_seconds():
            self.replica.check_unchanged([p for group in self._inner.param_groups for p in group["params"]])
            turn = self.schedule.turn_of(self.state.sequence)
            done = self.report.done
            header_only = self.replica.lanes[0].sending[index].is_header_only(turn, done)
            dropped = not done and not header_only and any(method.drops(self.state.sequence) for method in self.methods)
            norm, self.report = self.replica.encode(index, turn, report, dropped=dropped)
            steps = 0 if dropped or header_only else self.state.steps_taken - self.state.merged_at[index]
            vectors = [lane.sending[index].vector for lane in self.replica.lanes]
            encoded = time.monotonic()
            posted = self._start(index, vectors, steps, norm, self.replica.digests[index])
            posted.encode_seconds = encoded - started
            posted.dropped = dropped
            self.counters.rounds_dropped += dropped
            if self.on_post is not None:
                self.on_post(posted.key)

    def _start(
        self, index: int, vectors: Sequence[EncodedVector], steps: int, norm: float, digest: str
    ) -> RoundInFlight:
        """Post a round. `steps`: the inner steps behind the contribution."""
        H = self.schedule.turn_steps(self.schedule.turn_of(self.state.sequence))
        group = None if index == CONFIRMATION else self.replica.groups[index]
        report = self.report_now()
        contributions = [
            Contribution(
                vector,
                self.weight * steps,
                norm,
                anchor_digest=digest,
                layout_digest=lane.layout_digest,
                max_norm_ratio=None if group is None else group.max_norm_ratio,
                merge="mean" if group is None else group.merge,
                report=report,
                note=self.note(),
                round_weight=self.weight * H if self.engine.elastic else math.inf,
                work=self._share_of_round(steps, H),
                full_weight=self.weight * H,
                patience_seconds=self.patience_seconds,
            )
            for lane, vector in zip(self.replica.lanes, vectors, strict=True)
        ]
        key = RoundKey(self.state.sequence, index)
        pending = self.replica.start_round(key, contributions, self.sync.timeout_seconds)
        before = 0 if group is None else self.state.merged_at[index]
        posted = RoundInFlight(key, self.inner_steps, before + steps, pending)
        self.in_flight.append(posted)
        self.state.sequence += 1
        return posted

    def report_now(self) -> Report:
        """Complete the report of this worker for the header of a round."""
        return replace(
            self.report,
            inner_steps=self.inner_steps,
            bytes_sent=self.counters.bytes_sent,
            sync_seconds=self.counters.sync_seconds,
        )

    def _share_of_round(self, steps: int, H: int) -> float:
        """Return the latest `steps` inner steps as a share of H steps at the peak rate, by which norms are compared."""
        if self.rates is None or not steps:
            return min(1.0, steps / H)
        work = sum(self.rates.factor(step) for step in range(self.inner_steps - steps, self.inner_steps))
        return min(1.0, max(work / H, _LEAST_WORK))

    def end_round(self, posted: RoundInFlight) -> None:
        """Wait for a round, merge its mean if it has one, and tell of it."""
        result = None
        failure = None
        mean_norm = None
        started = time.monotonic()
        with self.count_seconds():
            try:
                result = posted.pending.wait()
            except RoundFailed as error:
                waited = time.monotonic() - started
                failure = error.reason
                self._end_without_result(posted, error)
            else:
                waited = time.monotonic() - started
                mean_norm = self._end_with_result(posted, result)
            ended = time.monotonic() - started
        if self.on_round is not None:
            codec_error = None if posted.dropped else self.replica.lanes[0].codec_errors[posted.key.fragment]
            self.on_round(
                RoundEvent(
                    key=posted.key,
                    inner_step=self.inner_steps,
                    norm=posted.norm,
                    mean_norm=mean_norm,
                    codec_error=codec_error,
                    result=result,
                    failure=failure,
                    encode_seconds=posted.encode_seconds,
                    flight_seconds=started - posted.posted_at,
                    waited_seconds=waited,
                    merge_seconds=None if mean_norm is None else ended - waited,
                    dropped=posted.dropped,
                )
            )

    def _end_without_result(self, posted: RoundInFlight, failure: RoundFailed) -> None:
        """Count a failed round. Its work is in this worker's parameters, and in its next outer gradient."""
        index = posted.key.fragment
        turn = self.schedule.turn_of(posted.key.sequence)
        self.counters.rounds_failed += 1
        self.failed(posted, failure)
        for method in self.methods:
            method.ended(index, None)
        if not posted.dropped:
            taken_back = [method.take_back(index, turn) for method in self.methods]
            if not all(taken_back):
                self.state.merged_at[index] = posted.steps_taken
        logger.warning("%s; training goes on from this worker's parameters", failure.reason)

    def _end_with_result(self, posted: RoundInFlight, result: RoundResult) -> float | None:
        """Take what a round has told, and merge its mean if it has one; returns the norm of the mean."""
        key = posted.key
        own = self.engine.worker
        self.others_done |= any(member.report.done for member in result.members if member.worker != own)
        for method in self.methods:
            method.heard(result.members)
        self.got_result(posted, result)
        for method in self.methods:
            method.ended(key.fragment, result.means_with(own))
        self.counters.bytes_sent += result.bytes_sent
        self.counters.contributions_refused += len(result.refused)
        for worker, reason in (*result.refused.items(), *result.clipped.items()):
            what = "was refused" if worker in result.refused else "counts less"
            logger.warning("round %d: the contribution of worker %d %s: %s", key.sequence, worker, what, reason)
        if own in result.refused and has_another_anchor(result, own):
            self.counters.rounds_failed += 1
            self.refused_for_its_anchor(posted)
            return None
        mean_norm = self.merge_mean(posted, result) if result.total_weight else None
        if mean_norm is not None and len(result.contributors) > 1 and not self.is_auxiliary(key):
            self.compared = (result.contributors, result.comparison.products)
        return mean_norm

    def outer_step(self, posted: RoundInFlight, result: RoundResult) -> float:
        """Take the outer step with a round's mean, which the parameters follow; returns the norm of the mean."""
        turn = self.schedule.turn_of(posted.key.sequence)
        mixing = 1.0 if posted.dropped else self.mixing
        with self.replica.merge_lock:
            norm = self.replica.merge(posted.key.fragment, result.means, mixing, turn, plain=result.plain)
            self.state.merged(posted.key, posted.steps_taken)
        return norm

    def confirm(self) -> None:
        """Take part in a last round without payload, in which every worker learns every other's final digest and
        report."""
        empty = EncodedVector(codec(self.sync.codec), PartLayout(0))
        self._start(CONFIRMATION, [empty] * len(self.replica.lanes), 0, 0.0, self.state.anchor_digest())
        result = self.in_flight.pop().pending.wait()
        self.counters.bytes_sent += result.bytes_sent
        self.confirmed = result.members

    # The clock

    @contextmanager
    def count_seconds(self) -> Iterator[None]:
        """Count the time inside as spent on rounds."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.counters.sync_seconds += time.monotonic() - started

    def _training_seconds(self) -> float:
        for device in {tensor.device for tensor in self.replica.tensors.averaged.values()}:
            if device.type == "cuda":  # steps that were only launched are not over
                torch.cuda.synchronize(device)
        return time.monotonic() - self.counters.sync_seconds - self.evaluation.seconds

    # Evaluating

    def refuse_while_evaluating(self) -> None:
        self.evaluation.refuse_training()

    def outer_parameters(self) -> AbstractContextManager[None]:
        """See DiLoCo.outer_parameters."""
        return self.evaluation.exchanged()

    # Saving

    def start_from_anchor(self) -> None:
        """Go on from a state that was another worker's: its work and what it has counted are not this worker's."""
        self.state.start_from_anchor()
        self.counters.bytes_sent = 0
        self.counters.sync_seconds = 0.0
        for method in self.methods:
            method.begin_anew()

    def settle(self) -> None:
        """Wait for the rounds in flight, without merging them: their time has not come."""
        with self.count_seconds():
            self.in_flight = [settle(posted) for posted in self.in_flight]
            self.before_saving()

    def saved(self) -> tuple[dict[str, TensorPieces], Numbers]:
        """Return what is saved: everything but the model and the inner optimizer. Call `settle` first."""
        self.refuse_while_evaluating()
        means, in_flight = saved_rounds(self.in_flight, self.state)
        taken = means_taken(self.in_flight, self.engine.worker)
        numbers = {
            **self.state.numbers(),
            **asdict(self.counters),
            "report": asdict(self.report),
            "in_flight": in_flight,
        }
        for method in self.methods:
            numbers |= method.saved_numbers()
        return self.state.saved_tensors(taken) | means, numbers

    def memory_to_load(self, numbers: Numbers) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
        """Return the memory to load a saved state into, and what to call then."""
        self.refuse_while_evaluating()
        self.state.check_fragments(numbers)
        means, rounds = restored_rounds(numbers["in_flight"], self.state)

        def loaded() -> None:
            self.state.loaded(numbers)
            self.counters = RoundCounters.from_numbers(numbers)
            self.report = Report(**numbers["report"] | {"stopping": False, "done": False})
            self.others_done = False
            for method in self.methods:
                method.loaded(numbers)
            self.in_flight = rounds()
            self.state.unmerged = self.in_flight[0].key.sequence if self.in_flight else self.state.sequence
            self.loaded()

        return self.state.saved_tensors() | means, loaded


def choose_replica(
    sync: SyncConfig, engine: Connection, tensors: ModelTensors
) -> type[OneRankReplica] | type[RankedReplica] | type[GatheredReplica]:
    """Choose the replica of a worker. Rounds that overlap with training are computed beside it on a CPU; a GPU needs no
    threads for that."""
    if engine.elastic and engine.ranks.count > 1:
        return GatheredReplica
    if set(engine.sizes) != {1}:
        return RankedReplica
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors.averaged.values())
    return BackgroundReplica if sync.overlap_steps and on_cpu else OneRankReplica
