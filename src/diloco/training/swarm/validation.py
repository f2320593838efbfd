"""Validation in a swarm: one figure for each step, over the whole validation text, the same on every machine (ADR 29).

What is measured is the anchor after a round, which all members of that round have, bit for bit:

    after a round that is due      the i-th of its n members measures windows i, i + n, … of the validation text
    in the next rounds             each member's report carries its loss; once shares of all windows have come in,
                                   every member adds them up, in worker order: the same bits everywhere
    a share does not come in       (its worker has left) the members measure again after the next round
    in every note                  the latest figure, for workers that join or return

A worker that was not in the round measures nothing. At the end of the run the anchor stays, and a share that does not
come in is measured by the workers that remain. A worker that leaves early measures nothing more.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco.engines.rounds import Member
from diloco.outer.loop import OuterLoop
from diloco.training.config.run import RunConfig
from diloco.training.evaluation import Evaluation, Evaluator
from diloco.training.modes import Mode
from diloco.training.records.events import EventLog
from diloco.training.swarm.shard_claims import unpacked
from diloco.training.validation import Validation


@dataclass(frozen=True)
class _Round:
    """A merged round and its members, which share out the validation of the anchor after it."""

    sequence: int
    step: int
    members: tuple[int, ...]


class SwarmValidation(Validation):
    """One worker's part. SwarmPeers calls `after_round` and `read_note`."""

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
        """`stopped`: this worker is to end, and measures nothing more."""
        super().__init__(config, evaluator, outer.engine, events, leader=leader)
        self._outer, self._stopped = outer, stopped
        self._figure: Evaluation | None = None  # of announced_step
        self._shares: dict[int, dict[int, Evaluation]] = {}  # by step and worker, while they are not complete
        self._last: _Round | None = None  # the last merged round
        self._due: _Round | None = None  # to be measured now
        self._not_before = 0  # the round that carries the reports of the last measurement

    def measure_start(self, mode: Mode, *, joined: bool) -> None:
        """The worker that starts the run measures all; the others receive the figure with their first notes."""
        if not joined:
            self._due = _Round(-1, 0, (self._engine.worker,))
            super().measure_start(mode, joined=False)

    def after_round(self, sequence: int, members: Sequence[Member]) -> None:
        """After a round of this worker: take in the reports and notes, and see whether a measurement is due."""
        self._hear(members)
        for member in members:
            self.read_note(member.note)
        schedule, interval = self._outer.schedule, self._config.eval_interval
        step = schedule.post_step(sequence)
        self._last = _Round(sequence, step, tuple(sorted(member.worker for member in members)))
        due = step // interval > max(0, self.announced_step) // interval and step < self._config.steps
        last_of_its_step = schedule.post_step(sequence + 1) > step
        if due and last_of_its_step and sequence >= self._not_before:
            self._due = self._last

    def due(self, step: int) -> bool:
        """Only while the anchor is the one after that round."""
        del step
        return self._due is not None and self._is_anchor_after(self._due)

    def measure(self, mode: Mode) -> None:
        assert self._due is not None
        due, self._due = self._due, None
        with mode.outer_parameters():
            result = self._evaluator.measure(*self._share(due), self._stopped)
        if not self._stopped():
            self._not_before = self._outer.schedule.posts_until(due.step + self._outer.schedule.overlap_steps)
            self._events.emit("evaluation", step=due.step, loss=result.loss, tokens=result.tokens)
            self._record(mode, result, due.step)

    def measure_end(self, mode: Mode) -> None:
        """This worker's share, if it was in the last round; the confirmation carries it to the others."""
        if not mode.must_end and self._last is not None and self._is_anchor_after(self._last):
            self._record(mode, self._evaluator.measure(*self._share(self._last)), self._config.steps)

    def announce(self) -> None:
        """Nothing: `after_round` has done it."""

    def announce_end(self) -> None:
        """After the confirmation: shares that are missing are of workers that are gone; the leader measures them."""
        self._hear(self._engine.members())
        step, last = self._config.steps, self._last
        if self.announced_step >= step or self._outer.inner_steps < step or self._stopped() or not self._leader:
            return
        shares = self._shares.get(step, {})
        if last is not None and self._is_anchor_after(last):
            for index, worker in enumerate(last.members):
                if worker not in shares:
                    shares[worker] = self._evaluator.measure(index, len(last.members))
        if sum(share.tokens for share in shares.values()) != self._evaluator.all_tokens:
            shares = {self._engine.worker: self._evaluator.measure(0, 1)}
        self._announce(step, _sum(shares))

    # The latest figure, for workers that join or return

    def note(self) -> dict[str, object]:
        """What this worker's notes say of the latest figure."""
        if self._figure is None:
            return {}
        loss = self._figure.loss if math.isfinite(self._figure.loss) else None
        return {"validation": [self.announced_step, loss, self._figure.tokens]}

    def read_note(self, note: bytes) -> None:
        """Another worker's note; anything malformed is ignored."""
        match unpacked(note).get("validation"):
            case [int() as step, float() | int() | None as loss, int() as tokens] if tokens > 0:
                if self.announced_step < step <= self._outer.inner_steps:
                    self._announce(step, Evaluation(math.nan if loss is None else float(loss), tokens))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | self.note()

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

    def _record(self, mode: Mode, result: Evaluation, step: int) -> None:
        self._tell(mode, result, step)
        self._add(self._engine.worker, result, step)
        self._announce_complete()

    def _hear(self, members: Sequence[Member]) -> None:
        for member in members:
            report = member.report
            self._add(
                member.worker, Evaluation(report.validation_loss, report.validation_tokens), report.validation_step
            )
        self._announce_complete()

    def _add(self, worker: int, share: Evaluation, step: int) -> None:
        if step > self.announced_step and share.tokens:
            self._shares.setdefault(step, {})[worker] = share

    def _announce_complete(self) -> None:
        for step, shares in sorted(self._shares.items()):
            if sum(share.tokens for share in shares.values()) == self._evaluator.all_tokens:
                self._announce(step, _sum(shares))

    def _announce(self, step: int, whole: Evaluation) -> None:
        super()._announce(step, whole)
        self._figure = whole
        self._shares = {later: shares for later, shares in self._shares.items() if later > step}


def _sum(shares: Mapping[int, Evaluation]) -> Evaluation:
    """In worker order: the same bits on every machine."""
    tokens = sum(share.tokens for share in shares.values())
    loss = sum(share.loss * share.tokens for _, share in sorted(shares.items()))
    return Evaluation(loss / tokens, tokens)
