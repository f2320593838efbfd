"""The outer loop of one worker: which fragment is posted and merged when, and everything that may go wrong with it.

    post    Δ_i = anchor − θ_i of the fragments that are due, encoded and given to the engine   (core/outer_step.py)
    merge   the mean of the fragments whose time has come, through OuterOpt, back into θ_i      (core/outer_step.py)

A failed round changes nothing but a counter: the worker trains on from its own parameters, and its next outer gradient
carries that work, taken from the others' anchor if they went on. No wait is longer than `sync.timeout_seconds`.

Rounds are numbered in the order in which they are posted, which is the same on every worker. That makes an early
end safe: a worker that stops says so in its header, and all end after the same full turn through the fragments.

A worker of several ranks runs this on each of them, in step: every rank posts and merges its own lanes (lane.py), and
what a round decides is decided for the whole worker (worker_round.py).

This is the loop of a fixed membership. What is different where workers come and go is in elastic_loop.py.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial

from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import Fragment, PartLayout, assign
from diloco.core.options import common_values
from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.core.schedule import Schedule
from diloco.engines.base import Connection
from diloco.engines.rounds import Contribution, Report, RoundKey
from diloco.errors import RoundFailed
from diloco.outer.catch_up import CatchingUp
from diloco.outer.evaluation import OuterParameters
from diloco.outer.in_flight import Posted, outcome, restoring_rounds, saved_rounds, settle
from diloco.outer.lane import Group, Lane
from diloco.outer.model_tensors import ModelTensors
from diloco.outer.ranks.worker_round import Outcome, RoundEvent, WorkerRound, similarity, went_astray
from diloco.outer.replica import Replica
from diloco.outer.state import OuterState
from diloco.outer.tensor_pieces import Numbers, TensorPieces

logger = logging.getLogger(__name__)

_CONFIRMATION = -1  # the "fragment" of the last round, in which only headers travel


class OuterLoop:
    """Owns the fragments. `inner_steps` is counted by whoever takes them; then `post`, then `merge`."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Connection,
        sync: SyncConfig,
        outer: OuterOptimizer,
        weight: float,
        identity: str,
        inner_parameters: Callable[[], Iterable[Tensor]],
    ) -> None:
        """`inner_parameters` are those that the inner optimizer has at the moment of the call."""
        self.inner_parameters = inner_parameters
        self.engine, self.sync, self.weight = engine, sync, weight
        self.on_post: Callable[[RoundKey], None] | None = None
        self.on_round: Callable[[RoundEvent], None] | None = None
        self.on_cut: Callable[[], None] | None = None
        """Called before a round is merged that a worker that stops has cut short: the last moment to save."""
        self.on_resync: Callable[[str, int], None] | None = None
        """Called after an elastic worker took over the others' state: why, and which round is next."""
        self.note: Callable[[], bytes] = bytes
        """What else to tell elastic workers with every post, and joiners with the state, who ask in another thread."""
        self.ends_at: int | None = None
        self.report = Report()
        self.rounds_failed = 0
        self.resyncs = 0
        self.contributions_refused = 0
        self.bytes_sent = 0
        self.sync_seconds = 0.0
        self._lay_out(tensors, outer, identity)
        self._last_sequence: int | None = None  # set once somebody stops: after this round everyone does
        self._posted: list[Posted] = []
        self._evaluation = OuterParameters(self.state, self.replica)
        self._serve()
        self.behind = CatchingUp(self.state, self.replica, self.schedule)
        self.behind.join()
        self.joined_at = self.inner_steps
        """The position at which this worker began."""

    def _lay_out(self, tensors: ModelTensors, outer: OuterOptimizer, identity: str) -> None:
        """Fragments, their schedule, the lanes, and the memory that travels."""
        sync = self.sync
        groups = [Group(tuple(names), outer) for names in assign(list(tensors.averaged), sync.fragments)]
        offsets = Schedule.spread(sync.num_inner_steps, len(groups)).offsets
        if tensors.averaged_buffers:  # a plain mean is the outer optimizer SGD(1.0); they travel with the last fragment
            groups.append(Group(tuple(tensors.averaged_buffers), SGD(lr=1.0)))
            offsets = (*offsets, offsets[-1])
        self.schedule = Schedule(sync.num_inner_steps, offsets, sync.overlap_steps)
        common = (self.schedule, outer, common_values(sync), identity)
        self.replica = Replica(tensors, self.engine, groups, sync, common)
        self.state = OuterState(self.replica.lanes, self.replica.num_lanes, groups, self.engine.ranks)

    def _serve(self) -> None:
        for lane in self.state.lanes:
            lane.engine.serve_state(partial(self.state.global_state, lane))

    @property
    def fragments(self) -> list[Fragment]:
        return self.state.fragments

    @property
    def inner_steps(self) -> int:
        return self.state.inner_steps

    @inner_steps.setter
    def inner_steps(self, steps: int) -> None:
        self.state.inner_steps = steps

    @property
    def steps_taken(self) -> int:
        """The inner steps of this worker itself; less than its position if that has jumped or it joined late."""
        return self.state.steps_taken

    @property
    def arrived_note(self) -> bytes:
        """What the source of the latest state that was taken over told besides."""
        return self.behind.note

    def end_at(self, position: int) -> None:
        """The run ends there for all workers."""
        self.ends_at = position

    @property
    def sequence(self) -> int:
        """Rounds posted so far."""
        return self.state.sequence

    @property
    def rounds(self) -> int:
        """Merged rounds, of all fragments."""
        return self.state.rounds

    # Posting and merging by the schedule

    def post(self) -> None:
        """Give the engine the outer gradients that are due after the inner steps taken so far."""
        self.refuse_inside_evaluation()
        for index in self.schedule.posts_at(self.inner_steps):
            self._post(index)

    def merge(self) -> None:
        """Take back the rounds whose time has come; waits for them if the network is behind."""
        self.refuse_inside_evaluation()
        while self._posted and self._posted[0].at_step <= self.inner_steps - self.schedule.overlap_steps:
            self._merge_next()

    def merge_pending(self) -> None:
        """Take back all rounds in flight now; every worker must do so at the same step."""
        self.refuse_inside_evaluation()
        while self._posted:
            self._merge_next()

    def _merge_next(self) -> None:
        self._merge(self._posted.pop(0))

    @property
    def in_flight(self) -> int:
        return len(self._posted)

    # The end

    @property
    def stopping(self) -> bool:
        """A worker has asked for the end (`report.stopping`): leave the loop and call `finish`."""
        return self._last_sequence is not None

    def finish(self, *, early: bool, before_confirming: Callable[[], None] | None) -> None:
        """See DiLoCo.finish.

        The last turn is taken even if this worker has nothing left: another may have (a round it missed, an early
        end at this very step). Without work a round is headers only.
        """
        self.merge_pending()
        self._last_turn(early=early)
        for index in range(self.state.num_fragments):
            self.behind.fragment(index)
        self._adopt_anchors()
        if before_confirming is not None:
            before_confirming()
        self._confirm()
        self._last_sequence = None  # all have ended together, and may train on together
        self.report = replace(self.report, stopping=False)

    def _last_turn(self, *, early: bool) -> None:
        self.report = replace(self.report, stopping=self.report.stopping or early)
        if self._last_sequence is None:
            self._last_sequence = self.state.sequence + self.state.num_fragments - 1
        for index in self.schedule.rotation(self.inner_steps):
            if self.state.sequence <= self._last_sequence:
                self._post(index)
                self.merge_pending()

    def _adopt_anchors(self) -> None:
        for fragment in self.fragments:
            fragment.adopt_anchor()
        self.replica.changed()

    def _confirm(self) -> None:
        """A last round without payload: everyone learns everyone's final digest and report."""
        vector = EncodedVector(codec(self.sync.codec), PartLayout(0))
        digest, report = self.anchor_digest(), self._report()

        def contribution(lane: Lane) -> Contribution:
            return Contribution(vector, 0.0, 0.0, digest, lane.layout_digest, report=report, note=self.note())

        self._start(_CONFIRMATION, contribution, 0.0)
        self.bytes_sent += self._posted.pop().pending.wait().result.bytes_sent

    # One round

    def _post(self, index: int) -> None:
        started = time.monotonic()
        self.replica.check_unchanged(self.inner_parameters())
        self.behind.fragment(index)
        norm = self._encode(index)
        report, work = self._report(), self.steps_taken - self.state.merged_at[index]

        def contribution(lane: Lane) -> Contribution:
            return Contribution(
                vector=lane.vectors[index],
                weight=self.weight * work,
                norm=norm,
                anchor_digest=self.state.digests[index],
                layout_digest=lane.layout_digest,
                max_norm_ratio=self.sync.max_norm_ratio,
                report=report,
                note=self.note(),
            )

        self._start(index, contribution, norm)
        if self.on_post is not None:
            self.on_post(self._posted[-1].key)
        self.sync_seconds += time.monotonic() - started

    def _encode(self, index: int) -> float:
        """The outer gradient of a fragment into the lanes' vectors; the norm of the whole worker's."""
        self.replica.settle_buffers(self.replica.groups[index].names)
        own = math.hypot(*(lane.encode(index) for lane in self.state.lanes))
        told = self.engine.ranks.gather_numbers(own, self.report.stopping)
        self.report = replace(self.report, stopping=any(stopping for _, stopping in told))
        return math.hypot(*(norm for norm, _ in told))

    def _report(self) -> Report:
        return replace(
            self.report,
            inner_steps=self.inner_steps,
            bytes_sent=self.bytes_sent,
            sync_seconds=self.sync_seconds,
        )

    def _start(self, index: int, contribution: Callable[[Lane], Contribution], norm: float) -> None:
        key = RoundKey(self.state.sequence, index)
        pending = WorkerRound(self.state.lanes, self.engine.ranks, key, contribution, self.sync.timeout_seconds)
        self._posted.append(Posted(key, self.inner_steps, self.steps_taken, norm, pending))
        self.state.sequence += 1

    def _merge(self, posted: Posted) -> None:
        started = time.monotonic()
        ended, failure, mean_norm = None, None, None
        try:
            ended = posted.pending.wait()
            if ended.result.stopping:
                self._before_cut(posted)
        except RoundFailed as error:
            failure = error.reason
            self._note(posted.key, stopping=error.stopping, resync=failure if error.resync else None)
        waited = time.monotonic() - started
        if ended is None:
            self.rounds_failed += 1
            logger.warning("%s; training goes on from this worker's parameters", failure)
        else:
            mean_norm = self._take_in(posted, ended)
        self.sync_seconds += time.monotonic() - started
        result = None if ended is None else ended.result
        if self.on_round is not None:
            cosine = similarity(result, mean_norm) if result is not None and mean_norm is not None else None
            self.on_round(
                RoundEvent(posted.key, self.inner_steps, waited, posted.norm, mean_norm, cosine, result, failure)
            )

    def _before_cut(self, posted: Posted) -> None:
        """This worker's state, but for the round's number, is as it was before it posted: it can be saved as such.

        Not if it stops itself (it has saved before its last rounds), nor if it has trained on since.
        """
        if self.on_cut is None or self.stopping or posted.at_step != self.inner_steps:
            return
        later, self._posted = self._posted, []
        sequence, self.state.sequence = self.state.sequence, posted.key.sequence
        try:
            self.on_cut()
        finally:
            self._posted, self.state.sequence = later, sequence

    def _take_in(self, posted: Posted, ended: Outcome) -> float | None:
        """Merge a round's mean, if it has one; its norm."""
        result, key = ended.result, posted.key
        self.bytes_sent += result.bytes_sent
        resync = "its anchor is not the others'" if result.resync else None
        self._note(key, stopping=result.stopping, resync=resync)
        self.contributions_refused += len(result.refused)
        for worker, reason in result.refused.items():
            logger.warning("round %d: the contribution of worker %d was refused: %s", key.sequence, worker, reason)
        if went_astray(result, self.engine.worker):
            self.rounds_failed += 1
            self.behind.astray.add(key.fragment)
            return None
        return self._apply(posted, ended) if result.total_weight else None

    def _apply(self, posted: Posted, ended: Outcome) -> float | None:
        """The outer step with a round's mean; the mean's norm."""
        index = posted.key.fragment
        with self.state.lock:
            own = [
                lane.merge(index, mean, self.sync.mixing)
                for lane, mean in zip(self.state.lanes, ended.means, strict=True)
            ]
            self.state.merged(posted.key, posted.work)
        self.state.gather_digests([index])
        self.replica.changed(index)
        return math.hypot(*(norm for (norm,) in self.engine.ranks.gather_numbers(math.hypot(*own))))

    def _note(self, key: RoundKey, *, stopping: bool, resync: str | None) -> None:
        """What a round tells of the others, whether it gave a mean or not. `resync`: why to take theirs over, if so."""
        if resync is not None:
            self.behind.missed[key.fragment] = resync
        if stopping:
            last = key.sequence + self.state.num_fragments - 1
            self._last_sequence = last if self._last_sequence is None else min(last, self._last_sequence)

    # Evaluation

    def refuse_inside_evaluation(self) -> None:
        self._evaluation.refuse_inside()

    def outer_parameters(self) -> AbstractContextManager[None]:
        """See DiLoCo.outer_parameters."""
        return self._evaluation.exchanged()

    def anchor_digest(self) -> str:
        return self.state.anchor_digest()

    # Saving

    def settle(self) -> None:
        """Wait for the rounds in flight, without merging them: their time has not come."""
        started = time.monotonic()
        self._posted = [settle(posted) for posted in self._posted]
        self.sync_seconds += time.monotonic() - started

    def unsavable(self) -> str | None:
        """Why the state of this moment is not one to go on from, if it is not; call `settle` first."""
        ended = [outcome(posted) for posted in self._posted]
        if self.stopping or any(one.stopping for one in ended):
            return "a round has been cut short by a worker that stops"
        if self.behind.missed or any(one.resync for one in ended):
            return "this worker's anchors may not be the others'"
        return None

    def saved(self) -> tuple[dict[str, TensorPieces], Numbers]:
        """Everything but the model and the inner optimizer; call `settle` first."""
        self.refuse_inside_evaluation()
        held, in_flight = saved_rounds(self._posted, self.state)
        counters = {name: getattr(self, name) for name in _COUNTERS}
        numbers = {**self.state.numbers(), **counters, "report": asdict(self.report), "in_flight": in_flight}
        return self.state.held() | held, numbers

    def restoring(self, numbers: Numbers) -> tuple[dict[str, TensorPieces], Callable[[], None]]:
        """The memory to load a saved state into, and what to call then."""
        self.refuse_inside_evaluation()
        self.state.check_fragments(numbers)
        held, rounds = restoring_rounds(numbers["in_flight"], self.state)

        def loaded() -> None:
            self.state.loaded(numbers)
            for name in _COUNTERS:
                setattr(self, name, numbers[name])
            self.report = Report(**numbers["report"] | {"stopping": False})
            self._last_sequence = None
            self.behind.clear()
            self._posted = rounds()
            self.state.unmerged = self._posted[0].key.sequence if self._posted else self.sequence

        return self.state.held() | held, loaded


_COUNTERS = ("rounds_failed", "resyncs", "contributions_refused", "bytes_sent", "sync_seconds")
