"""Validation in a swarm: one figure for each step, over the whole validation text, the same on every machine (ADR 29).

What is measured is the anchor after a round, which all members of that round have, bit for bit:

    after a round that is due      the i-th of its n members measures windows i, i + n, … of the validation text
    in the next rounds             each member's report carries its loss; once all shares have come in, every member
                                   adds them up, in worker order: the same bits everywhere
    a share does not come in       (its worker has left) the members measure again after the next round; if workers
                                   that are there withhold theirs a second time, the figure is of the other shares
    in every note                  the latest figure, for workers that join or return

A worker that was not in the round measures nothing. At the end of the run the anchor stays, and a share that does not
come in is measured by the workers that remain. A worker that leaves early measures nothing more.

No member's word alone is the figure. A share counts only with the number of tokens that its windows have, and with a
loss that is near the median of all shares (`add_up`). A figure in the notes counts if most members of a round tell it;
a worker that joins or returns believes most of the others. Of two members, where there is no majority, each holds the
other's share against its own, and tells in the event of which workers a figure comes.
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from diloco.engines.note import Note, ValidationFigure
from diloco.engines.rounds import Member
from diloco.history.events import EvaluationEvent
from diloco.history.log import EventLog
from diloco.outer.loop import OuterLoop
from diloco.training.config.run import RunConfig
from diloco.training.modes import Mode
from diloco.training.validation import Evaluation, Evaluator, Validation

_FEWEST = 3
"""Shares whose median one liar cannot move."""
_DEVIATIONS = 4.0
"""A share may be so many median deviations from the median."""
_LEAST_SHARE = 0.05
"""A share may always be this part of the median away from it."""
_OWN_SHARE = 0.5
"""The other one of two shares may be this part of this worker's own away from it. Each of the two bounds the other's,
so that beyond it their figures differ: honest shares are not so far apart."""
_OWN_NATS = 1.0
"""The other one of two shares may always be so many nats away from this worker's own."""
_LATE_ROUNDS = 2
"""A report may come so many rounds after the one that should have it."""
_MOST_OPEN = 4
"""Measurements that are open at a time."""
_MOST_NAMED = 64
"""Workers that an event names."""


@dataclass(frozen=True)
class _Round:
    """A merged round and its members, which share out the validation of the anchor after it."""

    sequence: int
    step: int
    members: tuple[int, ...]


@dataclass
class _Measurement:
    """The shares of one anchor that have come in, by worker."""

    round: _Round
    judged_at: int
    """The round after which a share that has not come in is withheld."""
    shares: dict[int, Evaluation] = field(default_factory=dict)


class SwarmValidation(Validation):
    """One worker's part in the validation of a swarm. SwarmPeers calls `after_round` and `record_absence`."""

    def __init__(
        self,
        config: RunConfig,
        evaluator: Evaluator,
        outer: OuterLoop,
        events: EventLog,
        *,
        leader: bool,
        stopped: Callable[[], bool],
    ) -> None:
        """`stopped` says whether this worker is to end, and measures nothing more."""
        super().__init__(config, evaluator, outer.engine, events, leader=leader)
        self._outer = outer
        self._stopped = stopped
        self._figure: Evaluation | None = None  # of announced_step
        self._last: _Round | None = None  # the last merged round
        self._due: _Round | None = None  # to be measured now
        self._open: dict[int, _Measurement] = {}  # by step, while shares are missing
        self._withheld = 0  # measurements in a row that lacked the share of a worker that was there
        self._absent = True  # this worker has missed rounds, and may lack figures that the others have
        self._not_before = 0  # the round that carries the reports of the last measurement

    def measure_start(self, mode: Mode, *, joined: bool) -> None:
        """Measure all, as the worker that starts the run; the others receive the figure with their first notes."""
        if not joined:
            self._due = _Round(-1, 0, (self._engine.worker,))
            super().measure_start(mode, joined=False)

    def after_round(self, sequence: int, members: Sequence[Member], notes: Mapping[int, Note]) -> None:
        """Take in the reports and notes of a round of this worker, and see whether a measurement is due.

        `notes`: those of the other members, by worker.
        """
        self._take_in_shares(members)
        self._go_on_without_withheld(sequence, {member.worker for member in members})
        self._take_in_figures(notes)
        schedule = self._outer.schedule
        interval = self._config.eval_interval
        step = schedule.post_step(sequence)
        self._last = _Round(sequence, step, tuple(sorted(member.worker for member in members)))
        due = step // interval > max(0, self.announced_step) // interval and step < self._config.steps
        last_of_its_step = schedule.post_step(sequence + 1) > step
        if due and last_of_its_step and sequence >= self._not_before:
            self._due = self._last

    def record_absence(self) -> None:
        """Note that this worker has taken over the others' state, who may have figures of rounds that it was not in."""
        self._absent = True

    def due(self, step: int) -> bool:
        """Return whether to measure now: only while the anchor is the one after that round."""
        del step
        return self._due is not None and self._is_anchor_after(self._due)

    def measure(self, mode: Mode) -> None:
        assert self._due is not None
        due = self._due
        self._due = None
        with mode.outer_parameters():
            result = self._evaluator.measure(*self._share(due), self._stopped)
        if not self._stopped():
            self._not_before = self._outer.schedule.posts_until(due.step + self._outer.schedule.overlap_steps)
            self._events.emit(EvaluationEvent(step=due.step, loss=result.loss, tokens=result.tokens))
            self._record(mode, result, due)

    def measure_end(self, mode: Mode) -> None:
        """Measure this worker's share, if it was in the last round; the confirmation carries it to the others."""
        if not mode.must_end and self._last is not None and self._is_anchor_after(self._last):
            last = replace(self._last, step=self._config.steps)
            self._record(mode, self._evaluator.measure(*self._share(last)), last)

    def announce(self) -> None:
        """Do nothing: `after_round` has done it."""

    def announce_end(self) -> None:
        """Measure, as the leader, the shares that are missing after the confirmation: their workers are gone."""
        self._take_in_shares(self._engine.members())
        step = self._config.steps
        last = self._last
        if self.announced_step >= step or self._outer.inner_steps < step or self._stopped() or not self._leader:
            return
        shares = dict(self._open[step].shares) if step in self._open else {}
        if last is not None and self._is_anchor_after(last):
            for index, worker in enumerate(last.members):
                if worker not in shares:
                    shares[worker] = self._evaluator.measure(index, len(last.members))
        if sum(share.tokens for share in shares.values()) != self._evaluator.all_tokens:
            shares = {self._engine.worker: self._evaluator.measure(0, 1)}
        self._announce_shares(step, shares)

    # The latest figure, for workers that join or return

    def note(self) -> ValidationFigure | None:
        """Return what this worker's notes say of the latest figure."""
        if self._figure is None:
            return None
        return ValidationFigure(self.announced_step, self._figure.loss, self._figure.tokens)

    def _take_in_figures(self, notes: Mapping[int, Note]) -> None:
        """Take over a later figure that most members have in their notes; for a worker that was absent, most others."""
        figures = Counter(_key(note.validation) for note in notes.values() if note.validation is not None)
        if not figures:
            return
        (step, loss, tokens), votes = figures.most_common(1)[0]
        enough = 2 * votes > len(notes) + (0 if self._absent else 1)
        if enough and self.announced_step < step <= self._outer.inner_steps and tokens <= self._evaluator.all_tokens:
            members = [worker for worker, note in notes.items() if _key(note.validation) == (step, loss, tokens)]
            figure = Evaluation(math.nan if loss is None else loss, tokens)
            self._absent = False
            self._announce(step, figure, told_by=sorted(members)[:_MOST_NAMED])

    def state_dict(self) -> dict[str, Any]:
        if self._figure is None:
            return super().state_dict()
        loss = self._figure.loss if math.isfinite(self._figure.loss) else None
        return super().state_dict() | {"validation": [self.announced_step, loss, self._figure.tokens]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if "validation" in state:
            _, loss, tokens = state["validation"]
            self._figure = Evaluation(math.nan if loss is None else loss, tokens)

    # Shares

    def _is_anchor_after(self, merged: _Round) -> bool:
        return self._outer.state.unmerged == merged.sequence + 1

    def _share(self, merged: _Round) -> tuple[int, int]:
        return merged.members.index(self._engine.worker), len(merged.members)

    def _record(self, mode: Mode, result: Evaluation, measured: _Round) -> None:
        self._report(mode, result, measured.step)
        self._open[measured.step] = _Measurement(
            measured, self._not_before + _LATE_ROUNDS, {self._engine.worker: result}
        )
        for step in sorted(self._open)[:-_MOST_OPEN]:
            del self._open[step]
        self._announce_complete()

    def _take_in_shares(self, members: Sequence[Member]) -> None:
        """Take in the shares of open measurements; one with another number of tokens than it has is no share."""
        for member in members:
            report = member.report
            measured = self._open.get(report.validation_step)
            if measured is None or member.worker not in measured.round.members:
                continue
            index = measured.round.members.index(member.worker)
            if report.validation_tokens == self._evaluator.share_tokens(index, len(measured.round.members)):
                share = Evaluation(report.validation_loss, report.validation_tokens)
                measured.shares.setdefault(member.worker, share)
        self._announce_complete()

    def _missing(self, measured: _Measurement) -> set[int]:
        """Return the members whose share has not come in. A member without a window has none."""
        members = measured.round.members
        return {
            worker
            for index, worker in enumerate(members)
            if worker not in measured.shares and self._evaluator.share_tokens(index, len(members))
        }

    def _announce_complete(self) -> None:
        for step, measured in sorted(self._open.items()):
            if step > self.announced_step and not self._missing(measured):
                self._withheld = 0
                self._announce_shares(step, measured.shares)

    def _go_on_without_withheld(self, sequence: int, there: set[int]) -> None:
        """Leave out of the figure a worker that is there and withholds its share for the second time: else no figure
        would ever be complete."""
        for step, measured in sorted(self._open.items()):
            missing = self._missing(measured)
            if step <= self.announced_step or sequence < measured.judged_at or not missing <= there:
                continue
            del self._open[step]
            self._withheld += 1
            if self._withheld > 1 and len(measured.shares) > len(missing):
                self._announce_shares(step, measured.shares, withheld=sorted(missing)[:_MOST_NAMED])

    def _announce_shares(self, step: int, shares: Mapping[int, Evaluation], **more: object) -> None:
        whole, doubtful = add_up(shares, self._engine.worker)
        self._absent = False
        named = {"doubtful": doubtful} if doubtful else {}
        self._announce(step, whole, measured_by=sorted(shares)[:_MOST_NAMED], **named, **more)

    def _announce(self, step: int, whole: Evaluation, **more: Any) -> None:
        super()._announce(step, whole, **more)
        self._figure = whole
        self._open = {later: measured for later, measured in self._open.items() if later > step}


def add_up(shares: Mapping[int, Evaluation], own: int) -> tuple[Evaluation, dict[int, float]]:
    """Return the figure of all shares, in worker order: the same bits on every machine; and those that are too far off.

    Honest shares measure the same anchor on windows in turn, and are alike. A share further from the median than four
    median deviations, and than a twentieth of it, counts as that far; one that is not finite counts as the median. Of
    two shares this worker's `own` takes the median's place, and the other one counts up to half as much again, or up to
    a nat more.
    """
    ordered = sorted((worker, share) for worker, share in shares.items() if share.tokens)
    tokens = sum(share.tokens for _, share in ordered)
    losses = [share.loss if math.isfinite(share.loss) else math.inf for _, share in ordered]
    if len(ordered) >= _FEWEST:
        middle = statistics.median_low(losses)
        spread = statistics.median_low([abs(loss - middle) for loss in losses]) if math.isfinite(middle) else math.nan
        bound = max(_DEVIATIONS * spread, _LEAST_SHARE * middle)
    elif own in shares and shares[own].tokens:
        middle = shares[own].loss
        bound = max(_OWN_SHARE * middle, _OWN_NATS)
    else:
        middle = math.inf
        bound = math.inf
    if not math.isfinite(middle):
        loss = sum(share.loss * share.tokens for _, share in ordered)
        return Evaluation(loss / tokens if tokens else math.nan, tokens), {}
    doubtful = {worker: loss for (worker, _), loss in zip(ordered, losses, strict=True) if abs(loss - middle) > bound}
    total = 0.0
    for worker, share in ordered:
        loss = share.loss
        if worker in doubtful:
            loss = min(max(loss, middle - bound), middle + bound) if math.isfinite(loss) else middle
        total += loss * share.tokens
    return Evaluation(total / tokens, tokens), doubtful


def _key(figure: ValidationFigure | None) -> tuple[int, float | None, int]:
    """Return the figure as a tuple that can be compared: nan is not equal to itself."""
    if figure is None:
        return (-1, None, 0)
    return (figure.step, None if math.isnan(figure.loss) else figure.loss, figure.tokens)
