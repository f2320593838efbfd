"""The outer loop of one worker: which fragment is posted and merged when, and everything that may go wrong with it.

    post    Δ_i = anchor − θ_i of the fragments that are due, encoded and given to the engine   (core/outer_step.py)
    merge   the mean of the fragments whose time has come, through OuterOpt, back into θ_i      (core/outer_step.py)

A failed round changes nothing but a counter: the worker trains on from its own parameters, and its next outer gradient
carries that work, taken from the others' anchor if they went on. No wait is longer than `sync.timeout_seconds`.

Rounds are numbered in the order in which they are posted, which is the same on every worker. That makes an early
end safe: a worker that stops says so in its header, and all end after the same full turn through the fragments.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import SyncConfig
from diloco.core.fragments import Fragment, PartLayout, Span, assign, build_fragments, layout_digest
from diloco.core.merging import diverged, mean_cosine
from diloco.core.outer_optimizers import SGD, OuterOptimizer
from diloco.core.outer_step import outer_gradient, outer_step
from diloco.core.schedule import Schedule
from diloco.engines.base import Engine
from diloco.engines.rounds import Contribution, Report, RoundKey, RoundResult
from diloco.errors import ConfigError, RoundFailed
from diloco.held import Held, Numbers
from diloco.in_flight import Posted, outcome, restoring_rounds, saved_rounds, settle
from diloco.outer_state import OuterState
from diloco.parameters import ModelTensors

logger = logging.getLogger(__name__)

_CONFIRMATION = -1  # the "fragment" of the last round, in which only headers travel


@dataclass(frozen=True)
class RoundEvent:
    """One round as this worker saw it: either a result, or the reason why there is none."""

    key: RoundKey
    inner_step: int
    waited_seconds: float
    norm: float
    """Of this worker's own outer gradient."""
    mean_norm: float | None
    similarity: float | None
    """Mean cosine between the workers' outer gradients (Figure 10 of the paper); None for a single contributor."""
    result: RoundResult | None
    failure: str | None


class OuterLoop:
    """Owns the fragments. `inner_steps` is counted by whoever takes them; then `post`, then `merge`."""

    def __init__(
        self,
        tensors: ModelTensors,
        engine: Engine,
        sync: SyncConfig,
        outer: OuterOptimizer,
        weight: float,
        identity: str,
        inner_parameters: Callable[[], Iterable[Tensor]],
    ) -> None:
        """`inner_parameters` are those that the inner optimizer has at the moment of the call."""
        self.inner_parameters = inner_parameters
        self.tensors, self.engine, self.sync, self.weight = tensors, engine, sync, weight
        self.on_post: Callable[[RoundKey], None] | None = None
        self.on_round: Callable[[RoundEvent], None] | None = None
        self.report = Report()
        self.rounds_failed = 0
        self.contributions_refused = 0
        self.bytes_sent = 0
        self.sync_seconds = 0.0
        self._lay_out(outer, identity)
        self._last_sequence: int | None = None  # set once somebody stops: after this round everyone does
        self._posted: list[Posted] = []
        self._behind: set[int] = set()  # fragments whose anchor may not be the others': compare before the next post
        self._astray: set[int] = set()  # of those, the ones whose parameters came from an anchor that nobody else had
        self._exchanged = False
        engine.serve_state(self.state.global_state)
        state = engine.fetch_state()
        if state is not None:
            self.state.take_over(state)

    def _lay_out(self, outer: OuterOptimizer, identity: str) -> None:
        """Fragments, their schedule, and the memory that travels."""
        groups = assign(list(self.tensors.averaged), self.sync.fragments)
        fragments = build_fragments(self.tensors.averaged, groups, outer)
        offsets = Schedule.spread(self.sync.num_inner_steps, len(fragments)).offsets
        buffers = self.tensors.averaged_buffers
        if buffers:  # a plain mean is the outer optimizer SGD(1.0); they travel with the last fragment
            fragments += build_fragments(buffers, [list(buffers)], SGD(lr=1.0))
            offsets = (*offsets, offsets[-1])
        self.schedule = Schedule(self.sync.num_inner_steps, offsets, self.sync.overlap_steps)
        self._vectors = [self._vector(fragment.layout, fragment.anchor.device) for fragment in fragments]
        others = [(name, t.shape, t.dtype) for name, t in sorted(self.tensors.equal_at_start.items())]
        layout = layout_digest(fragments, others, self.schedule, outer, self.sync, identity)
        self.state = OuterState(fragments, self.tensors.equal_at_start, layout)

    def _vector(self, layout: PartLayout, device: torch.device) -> EncodedVector:
        return EncodedVector(codec(self.sync.codec), layout, device)

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
        due = self.inner_steps - self.schedule.overlap_steps
        while self._posted and self._posted[0].at_step <= due:
            self._merge(self._posted.pop(0))

    def merge_pending(self) -> None:
        """Take back all rounds in flight now; every worker must do so at the same step."""
        self.refuse_inside_evaluation()
        while self._posted:
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
        self.report = replace(self.report, stopping=self.report.stopping or early)
        if self._last_sequence is None:
            self._last_sequence = self.state.sequence + len(self.fragments) - 1
        for index in self.schedule.rotation(self.inner_steps):
            if self.state.sequence <= self._last_sequence:
                self._post(index)
                self.merge_pending()
        for index, fragment in enumerate(self.fragments):
            self._catch_up(index)
            fragment.adopt_anchor()
        if before_confirming is not None:
            before_confirming()
        self._confirm()
        self._last_sequence = None  # all have ended together, and may train on together
        self.report = replace(self.report, stopping=False)

    def _confirm(self) -> None:
        """A last round without payload: everyone learns everyone's final digest and report."""
        vector = self._vector(PartLayout(0), torch.device("cpu"))
        contribution = Contribution(
            vector, 0.0, 0.0, self.anchor_digest(), self.state.layout_digest, report=self._report()
        )
        self._start(_CONFIRMATION, contribution)
        self.bytes_sent += self._posted.pop().pending.wait().bytes_sent

    # One round

    def _work_behind(self, index: int) -> int:
        return self.inner_steps - self.state.merged_at[index]

    def _post(self, index: int) -> None:
        started = time.monotonic()
        self.tensors.check_unchanged(self.inner_parameters())
        self._catch_up(index)
        fragment, vector = self.fragments[index], self._vectors[index]
        norms = []
        for span, delta in outer_gradient(fragment):
            norms.append(float(torch.linalg.vector_norm(delta)))
            vector.encode(span.first_part, delta)
        contribution = Contribution(
            vector=vector,
            weight=self.weight * self._work_behind(index),
            norm=_total_norm(norms),
            anchor_digest=self.state.digests[index],
            layout_digest=self.state.layout_digest,
            max_norm_ratio=self.sync.max_norm_ratio,
            report=self._report(),
        )
        self._start(index, contribution)
        if self.on_post is not None:
            self.on_post(self._posted[-1].key)
        self.sync_seconds += time.monotonic() - started

    def _report(self) -> Report:
        return replace(
            self.report,
            inner_steps=self.inner_steps,
            bytes_sent=self.bytes_sent,
            sync_seconds=self.sync_seconds,
        )

    def _start(self, index: int, contribution: Contribution) -> None:
        key = RoundKey(self.state.sequence, index)
        pending = self.engine.start_round(key, contribution, self.sync.timeout_seconds)
        self._posted.append(Posted(key, self.inner_steps, contribution.norm, pending))
        self.state.sequence += 1

    def _merge(self, posted: Posted) -> None:
        started = time.monotonic()
        result, failure, mean_norm = None, None, None
        try:
            result = posted.pending.wait()
        except RoundFailed as error:
            failure = error.reason
            self._note(posted.key, stopping=error.stopping, resync=error.resync)
        waited = time.monotonic() - started
        if result is None:
            self.rounds_failed += 1
            logger.warning("%s; training goes on from this worker's parameters", failure)
        else:
            mean_norm = self._take_in(posted, result)
        self.sync_seconds += time.monotonic() - started
        if self.on_round is not None:
            similarity = _similarity(result, mean_norm) if result is not None and mean_norm is not None else None
            self.on_round(
                RoundEvent(posted.key, self.inner_steps, waited, posted.norm, mean_norm, similarity, result, failure)
            )

    def _take_in(self, posted: Posted, result: RoundResult) -> float | None:
        """Merge a round's mean, if it has one; its norm."""
        sequence, index = posted.key.sequence, posted.key.fragment
        self.bytes_sent += result.bytes_sent
        self._note(posted.key, stopping=result.stopping, resync=result.resync)
        self.contributions_refused += len(result.refused)
        for worker, reason in result.refused.items():
            logger.warning("round %d: the contribution of worker %d was refused: %s", sequence, worker, reason)
        if self._diverged(result):
            self.rounds_failed += 1
            self._astray.add(index)
            return None
        if result.total_weight == 0:
            return None
        fragment: Fragment = self.fragments[index]
        norms: list[float] = []

        def mean(span: Span) -> Tensor:
            delta = result.mean.decode(span.first_part, span.num_parts)
            norms.append(float(torch.linalg.vector_norm(delta)))
            return delta

        with self.state.lock:
            outer_step(fragment, mean, self.sync.mixing)
            self.state.merged(index, posted.at_step)
        return _total_norm(norms)

    def _note(self, key: RoundKey, *, stopping: bool, resync: bool) -> None:
        """What a round tells of the others, whether it gave a mean or not."""
        if resync:
            self._behind.add(key.fragment)
        if stopping:
            last = key.sequence + len(self.fragments) - 1
            self._last_sequence = last if self._last_sequence is None else min(last, self._last_sequence)

    def _diverged(self, result: RoundResult) -> bool:
        """Whether this worker's anchor is not the others': their mean must not be added to it."""
        strays = diverged([member.anchor_digest for member in result.members])
        me = self.engine.worker
        return me in result.refused and any(result.members[position].worker == me for position in strays)

    # Evaluation

    def refuse_inside_evaluation(self) -> None:
        if self._exchanged:
            raise ConfigError("inside outer_parameters(): leave the evaluation before training on")

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """See DiLoCo.outer_parameters. Needs no memory: parameters and anchors change places."""
        self.refuse_inside_evaluation()
        with self.state.lock:
            self._exchange()
            try:
                yield
            finally:
                self._exchange()

    def _exchange(self) -> None:
        for fragment in self.fragments:
            fragment.exchange()
        self._exchanged = not self._exchanged

    def anchor_digest(self) -> str:
        return self.state.anchor_digest()

    # Falling behind

    def _catch_up(self, index: int) -> None:
        """After a missed round: the others' anchor, but this worker's own parameters, whose work comes next.

        One fragment at a time, since others may be in flight. A worker that went astray takes the parameters too, and
        its work since is lost: it started from an anchor that nobody else had.
        """
        if index not in self._behind:
            return
        self._behind.discard(index)
        state = self.engine.fetch_state()
        if state is None:
            return
        self.state.take_over_fragment(index, state)
        if index in self._astray:
            self._astray.discard(index)
            self.fragments[index].adopt_anchor()
            self.state.merged_at[index] = self.inner_steps
        logger.info("worker %d has the others' anchor of fragment %d again", self.engine.worker, index)

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
        if self._behind or any(one.resync for one in ended):
            return "this worker's anchors may not be the others'"
        return None

    def saved(self) -> tuple[dict[str, Held], Numbers]:
        """Everything but the model and the inner optimizer; call `settle` first."""
        self.refuse_inside_evaluation()
        held, in_flight = saved_rounds(self._posted, self.state)
        counters = {name: getattr(self, name) for name in _COUNTERS}
        numbers = {**self.state.numbers(), **counters, "report": asdict(self.report), "in_flight": in_flight}
        return self.state.held() | held, numbers

    def restoring(self, numbers: Numbers) -> tuple[dict[str, Held], Callable[[], None]]:
        """The memory to load a saved state into, and what to call then."""
        self.refuse_inside_evaluation()
        self.state.check_fragments(numbers)
        held, rounds = restoring_rounds(numbers["in_flight"], self.state)

        def loaded() -> None:
            self.state.loaded(numbers)
            for name in _COUNTERS:
                setattr(self, name, numbers[name])
            self.report = Report(**numbers["report"] | {"stopping": False})
            self._last_sequence, self._behind, self._astray = None, set(), set()
            self._posted = rounds()

        return self.state.held() | held, loaded


_COUNTERS = ("rounds_failed", "contributions_refused", "bytes_sent", "sync_seconds")


def _total_norm(norms: list[float]) -> float:
    return math.hypot(*norms)


def _similarity(result: RoundResult, mean_norm: float) -> float | None:
    members = [member for member in result.members if member.worker in result.contributors]
    return mean_cosine([member.weight for member in members], [member.norm for member in members], mean_norm)
