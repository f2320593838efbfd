"""The outer loop of one worker: post what is due, merge what has come back.

    post    Δ_i = anchor − θ_i of a fragment that is due, encoded and given to the engine        (core/outer_step.py)
    merge   the mean of a fragment whose time has come, through OuterOpt, back into θ_i          (core/outer_step.py)

The loop is the same for every kind of run. A `Policy` says what differs: what is due, what a round does to the anchor,
what a missed round means, and which workers stop together. fixed.py is the policy of workers that are there from the
first step to the last, elastic.py that of workers that come and go, methods/asynchronous.py that of workers without
rounds.

A failed round changes nothing but a counter: the worker trains on from its own parameters, and its next outer gradient
carries that work, taken from the others' anchor if they went on. No wait is longer than `sync.timeout_seconds`.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, replace

from torch.optim import Optimizer

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import FaultsConfig, SyncConfig
from diloco.core.fragments import PartLayout
from diloco.core.methods.round_lengths import GrowingRounds, LearningRateCurve
from diloco.core.options import common_values
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.engines.base import Connection
from diloco.engines.rounds import Contribution, Member, Report, RoundKey
from diloco.errors import RoundFailed
from diloco.outer.background import kind_of_replica
from diloco.outer.evaluation import Evaluation
from diloco.outer.methods.dropped import Drops
from diloco.outer.methods.eager_starts import take_back
from diloco.outer.methods.pace import Pace
from diloco.outer.methods.second_moments import second_moments
from diloco.outer.policy import Policy
from diloco.outer.ranks.replica import RankedReplica
from diloco.outer.replica import Replica
from diloco.outer.rounds import Outcome, Posted, RoundEvent, RoundTimes, has_another_anchor, settle
from diloco.outer.saving import means_taken, restored_rounds, saved_rounds
from diloco.outer.state import OuterState
from diloco.outer.tensors.groups import lay_groups
from diloco.outer.tensors.model_tensors import ModelTensors
from diloco.outer.tensors.tensor_pieces import Numbers, TensorPieces

logger = logging.getLogger(__name__)

_COUNTERS = ("rounds_failed", "rounds_dropped", "resyncs", "contributions_refused", "bytes_sent", "sync_seconds")
_LEAST_WORK = 1e-18  # the rate of the last steps may be next to 0
_CONFIRMATION = -1  # the "fragment" of the last round, in which only headers travel


class OuterLoop:
    """Owns the fragments. `inner_steps` is counted by the caller that takes them; then `post`, then `merge`."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        sync: SyncConfig,
        outer: OuterOptimizer,
        policy: "Callable[[OuterLoop], Policy]",
        *,
        weight: float,
        identity: str,
        inner: Optimizer,
        restoring: bool = False,
        growth: GrowingRounds | None = None,
        faults: FaultsConfig | None = None,
    ) -> None:
        """`inner`: the inner optimizer, which must not get other parameters later.

        `restoring`: a saved state is loaded next, so only the layouts are compared, and no tensor is sent.
        `growth`: of the rounds, if `sync.growth` is given. `faults`: on purpose, for experiments.
        """
        self.engine, self.sync, self.weight = engine, sync, weight
        self.on_post: Callable[[RoundKey], None] | None = None
        self.on_round: Callable[[RoundEvent], None] | None = None
        self.on_cut: Callable[[], None] | None = None
        """Called before merging a round in which a worker stops: the last moment to save."""
        self.on_resync: Callable[[str, int], None] | None = None
        """Called after an elastic worker took over the others' state, with the reason and the next round."""
        self.tells_progress = True
        """An elastic worker tells its engine after each step how far it is; False: the caller does that, and more."""
        self.note: Callable[[], bytes] = bytes
        """What else elastic workers are told with every post, and joiners with the state, in another thread."""
        self.arrived_note = b""
        """The note that came with the latest state that this worker took over."""
        self.confirmed: tuple[Member, ...] = ()
        """The workers that have confirmed the last parameters, this one included; none before the end."""
        self.rates: LearningRateCurve | None = None
        """Of the inner steps, if it is known: steps at a low rate are less work."""
        self.ends_at: int | None = None
        self.report = Report()
        self.patience_seconds = 0.0
        """How much longer than `sync.timeout_seconds` this worker, which has no steps left, waits for the others."""
        self.others_done = False
        """Another worker has taken all its steps, and this one has not called `finish` since."""
        self.compared: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())
        """The contributors to the latest mean of several workers, and their inner products."""
        self.rounds_failed = self.rounds_dropped = self.resyncs = self.contributions_refused = self.bytes_sent = 0
        self.sync_seconds = 0.0
        self.in_flight: list[Posted] = []
        self.restoring, self._inner = restoring, inner
        self._has_feedback = sync.feedback_decay is not None
        late = sync.outer_overlap != "none"
        self._merge_after, self.mixing = (math.inf, 1.0) if late else (float(sync.overlap_steps), sync.mixing)
        """Inner steps until a merge (inf: until the next post), and the share of its own parameters that it keeps."""
        self._drops = None if faults is None else Drops(faults, engine.worker)
        self._lay_out(tensors, outer, (identity, *([faults] if faults else [])), growth)
        self.policy = policy(self)
        self.evaluation = Evaluation(self.state, self.replica, serves_copies=self.policy.serves_copies)
        self.pace = Pace(self) if sync.dynamic_steps else None
        self.policy.join()
        self.joined_at = self.inner_steps
        """The position at which this worker began."""

    def _lay_out(
        self, tensors: ModelTensors, outer: OuterOptimizer, more: tuple[object, ...], growth: GrowingRounds | None
    ) -> None:
        """Fragments, their schedule, and the memory that travels. `more`: what else is the same on all workers."""
        moments = second_moments(self.sync, self.engine, self._inner, tensors.averaged)
        groups, self.schedule = lay_groups(tensors, self.sync, outer.held_by(self.engine.worker), growth, moments)
        common = (self.schedule, outer, common_values(self.sync), *more)
        build = kind_of_replica(self.sync, tensors) if set(self.engine.sizes) == {1} else RankedReplica
        self.replica: Replica | RankedReplica = build(tensors, self.engine, groups, self.sync, common)
        self.state = OuterState(self.replica)

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
        """A round of buffers or second moments."""
        return self.replica.groups[key.fragment].auxiliary

    @property
    def stopping(self) -> bool:
        """A worker has asked for the end (`report.stopping`): leave the loop and call `finish`."""
        return self.policy.stopping

    def end_at(self, position: int) -> None:
        """The run ends there for all workers: no jump leads past it."""
        self.ends_at = position
        self.state.jump_back_to(position)

    # Posting and merging by the schedule

    def post(self) -> None:
        """Give the engine the outer gradients that are due after the inner steps taken so far."""
        self.refuse_while_evaluating()
        for index in self.policy.due():
            self.post_fragment(index)

    def merge(self) -> None:
        """Take back the rounds whose time has come; waits for them if the network is behind."""
        self.refuse_while_evaluating()
        while self.in_flight and self.in_flight[0].at_step <= self.inner_steps - self._merge_after:
            self.merge_next()

    def merge_pending(self) -> None:
        """Take back all rounds in flight now; every worker must do so at the same step."""
        self.refuse_while_evaluating()
        while self.in_flight:
            self.merge_next()

    def merge_next(self) -> None:
        posted = self.in_flight.pop(0)
        self.end_round(posted)
        self.policy.after_round(posted)

    def finish(self, *, early: bool, before_confirming: Callable[[], None] | None) -> None:
        """See DiLoCo.finish."""
        self.policy.finish(early=early, before_confirming=before_confirming or (lambda: None))
        self.report = replace(self.report, stopping=False, done=False)
        self.others_done = False

    # One round

    def post_fragment(self, index: int) -> None:
        """Take a fragment's outer gradient and give it to the engine."""
        report = self.report if self.pace is None else self.pace.report(self.report)
        started, turn = time.monotonic(), self.sequence // self.state.num_fragments
        self.replica.check_unchanged([parameter for group in self._inner.param_groups for parameter in group["params"]])
        moments, done = self.replica.groups[index].moments, self.report.done
        resting = moments is not None and (done or not moments.due(turn))  # only a header travels
        dropped = self._drops is not None and not done and not resting and self._drops.hit(self.sequence)
        norm, self.report = self.replica.encode(index, turn, report, dropped=dropped)
        steps = 0 if dropped or resting else self.inner_steps - self.state.jumped - self.state.merged_at[index]
        vectors, encoded = [lane.sending[index].vector for lane in self.replica.lanes], time.monotonic()
        self._start(index, vectors, steps, norm, self.replica.digests[index])
        self.in_flight[-1].encode_seconds, self.in_flight[-1].dropped = encoded - started, dropped
        self.rounds_dropped += dropped
        if self.on_post is not None:
            self.on_post(self.in_flight[-1].key)
        self.sync_seconds += time.monotonic() - started

    def _start(self, index: int, vectors: Sequence[EncodedVector], steps: int, norm: float, digest: str) -> None:
        """`steps`: the inner steps behind the contribution."""
        turn = self.sequence // self.state.num_fragments
        H = self.schedule.num_inner_steps if self.schedule.growth is None else self.schedule.turn_steps(turn)
        report = replace(
            self.report, inner_steps=self.inner_steps, bytes_sent=self.bytes_sent, sync_seconds=self.sync_seconds
        )
        group = None if index == _CONFIRMATION else self.replica.groups[index]
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
                work=self._work(steps, H),
                full_weight=self.weight * H,
                patience_seconds=self.patience_seconds,
            )
            for lane, vector in zip(self.replica.lanes, vectors, strict=True)
        ]
        key = RoundKey(self.sequence, index)
        pending = self.replica.start_round(key, contributions, self.sync.timeout_seconds)
        self.in_flight.append(Posted(key, self.inner_steps, steps + self.state.merged_at[index], pending))
        self.state.sequence += 1

    def _work(self, steps: int, H: int) -> float:
        """The latest `steps` inner steps as a share of H steps at the peak rate, by which norms are compared."""
        if self.rates is None or not steps:
            return min(1.0, steps / H)
        work = sum(self.rates.factor(step) for step in range(self.inner_steps - steps, self.inner_steps))
        return min(1.0, max(work / H, _LEAST_WORK))

    def end_round(self, posted: Posted) -> None:
        """Wait for a round, let the policy merge its mean, and tell of it."""
        started = time.monotonic()
        result, failure, mean_norm = None, None, None
        try:
            outcome = posted.pending.wait()
        except RoundFailed as error:
            failure, waited = error.reason, time.monotonic() - started
            self.rounds_failed += 1
            self.policy.failed(posted, error)
            if self._has_feedback:
                self.state.end_feedback(posted.key.fragment, None)
            turn = posted.key.sequence // self.state.num_fragments
            if not posted.dropped and not take_back(self.replica.lanes, posted.key.fragment, turn):
                self.state.merged_at[posted.key.fragment] = posted.work
            logger.warning("%s; training goes on from this worker's parameters", failure)
        else:
            result, waited = outcome.result, time.monotonic() - started
            mean_norm = self._take_in(posted, outcome)
        taken = time.monotonic() - started
        self.sync_seconds += taken
        several = result is not None and mean_norm is not None and len(result.contributors) > 1
        if result is not None and several and not self.is_auxiliary(posted.key):
            self.compared = (result.contributors, result.comparison.products)
        if self.on_round is not None:
            lost = None if posted.dropped else self.replica.lanes[0].codec_errors[posted.key.fragment]
            merging = None if mean_norm is None else taken - waited
            times = RoundTimes(posted.encode_seconds, started - posted.posted_at, waited, merging)
            seen = (posted.key, self.inner_steps, posted.pending.norm, mean_norm, lost, result, failure, times)
            self.on_round(RoundEvent(*seen, posted.dropped))

    def _take_in(self, posted: Posted, outcome: Outcome) -> float | None:
        """Merge a round's mean, if it has one; its norm."""
        result, key = outcome.result, posted.key
        self.others_done |= any(one.report.done for one in result.members if one.worker != self.engine.worker)
        self.policy.heard(posted, result)
        if self._has_feedback:
            self.state.end_feedback(key.fragment, outcome.means_with(self.engine.worker))
        self.bytes_sent += result.bytes_sent
        self.contributions_refused += len(result.refused)
        for worker, reason in (*result.refused.items(), *result.clipped.items()):
            what = "was refused" if worker in result.refused else "counts less"
            logger.warning("round %d: the contribution of worker %d %s: %s", key.sequence, worker, what, reason)
        if self.engine.worker in result.refused and has_another_anchor(result, self.engine.worker):
            self.rounds_failed += 1
            self.policy.refused_for_its_anchor(posted)
            return None
        return self.policy.merge(posted, outcome) if result.total_weight else None

    def outer_step(self, posted: Posted, outcome: Outcome) -> float:
        """The anchor takes the outer step with a round's mean, and the parameters follow; the mean's norm."""
        with self.replica.merge_lock:
            mixing, turn = 1.0 if posted.dropped else self.mixing, posted.key.sequence // self.state.num_fragments
            norm = self.replica.merge(posted.key.fragment, outcome.means, mixing, turn, plain=outcome.result.plain)
            self.state.merged(posted.key, posted.work)
        return norm

    def confirm(self) -> None:
        """A last round without payload: every worker learns every other's final digest and report."""
        empty = EncodedVector(codec(self.sync.codec), PartLayout(0))
        self._start(_CONFIRMATION, [empty] * len(self.replica.lanes), 0, 0.0, self.state.anchor_digest())
        result = self.in_flight.pop().pending.wait().result
        self.bytes_sent += result.bytes_sent
        self.confirmed = result.members

    def refuse_while_evaluating(self) -> None:
        if self.evaluation.active:
            self.evaluation.refuse_training()

    def outer_parameters(self) -> AbstractContextManager[None]:
        """See DiLoCo.outer_parameters."""
        return self.evaluation.exchanged()

    # Saving

    def settle(self) -> None:
        """Wait for the rounds in flight, without merging them: their time has not come."""
        started = time.monotonic()
        self.in_flight = [settle(posted) for posted in self.in_flight]
        self.policy.settle()
        self.sync_seconds += time.monotonic() - started

    def unsavable(self) -> str | None:
        """Why the state of this moment is not one to go on from, if it is not; call `settle` first."""
        return self.policy.unsavable()

    def saved(self) -> tuple[dict[str, TensorPieces], Numbers]:
        """Everything but the model and the inner optimizer; call `settle` first."""
        self.refuse_while_evaluating()
        means, in_flight = saved_rounds(self.in_flight, self.state)
        taken = means_taken(self.in_flight, self.engine.worker)
        counters = {name: getattr(self, name) for name in _COUNTERS}
        numbers = {**self.state.numbers(), **counters, "report": asdict(self.report), "in_flight": in_flight}
        numbers |= {"pace": self.pace.saved()} if self.pace else {}
        return self.state.saved_tensors(taken) | means, numbers

    def memory_to_load(self, numbers: Numbers) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
        """The memory to load a saved state into, and what to call then."""
        self.refuse_while_evaluating()
        self.state.check_fragments(numbers)
        means, rounds = restored_rounds(numbers["in_flight"], self.state)

        def loaded() -> None:
            self.state.loaded(numbers)
            for name in _COUNTERS:
                setattr(self, name, numbers.get(name, 0))  # an earlier version saved fewer
            self.report = Report(**numbers["report"] | {"stopping": False, "done": False})
            self.others_done = False
            if self.pace is not None and "pace" in numbers:
                self.pace.loaded(numbers["pace"])
            self.in_flight = rounds()
            self.state.unmerged = self.in_flight[0].key.sequence if self.in_flight else self.sequence
            self.policy.loaded()

        return self.state.saved_tensors() | means, loaded
