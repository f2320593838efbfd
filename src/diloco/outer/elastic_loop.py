"""The outer loop where workers come and go: what is different from a fixed membership (outer_loop.py).

The others do not wait for ever. A round that they want is posted at once, with the work there is, and this worker's
*position* jumps to where that round belongs in the schedule; the *work* behind a contribution is counted apart
(`steps_taken`), and so is its weight. Whoever misses a round or went astray takes over the others' state right away
(catching_up.py). Whoever stops leaves alone; all end together only where the run ends (`end_at`).

The m-th round is the same fragment on every worker, whenever it joined: `Schedule.fragment_of` says which.
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor

from diloco.core.config import SyncConfig
from diloco.core.outer_optimizers import OuterOptimizer
from diloco.engines.base import Connection
from diloco.engines.rounds import RoundKey
from diloco.errors import ConfigError, RoundFailed
from diloco.outer.in_flight import Posted
from diloco.outer.loop import OuterLoop
from diloco.outer.model_tensors import ModelTensors
from diloco.outer.ranks.worker_round import Outcome

logger = logging.getLogger(__name__)


class ElasticLoop(OuterLoop):
    """For an engine that is elastic."""

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
        if engine.ranks.count > 1:
            raise ConfigError(
                f"a worker of {engine.ranks.count} ranks cannot be in a swarm whose workers come and go: use ranks = 1"
            )
        self._leaving = False
        super().__init__(tensors, engine, sync, outer, weight, identity, inner_parameters)
        self.state.sound = True

    def _serve(self) -> None:
        """Copies, since they are asked for in another thread; none before this worker has a state of its own."""
        self.state.sound = False
        for lane in self.state.lanes:
            lane.engine.serve_state(partial(self.state.copied_state, lane, lambda: self.note()))

    def end_at(self, position: int) -> None:
        """No jump leads past it; a worker that joined after the end is at the end."""
        super().end_at(position)
        past = min(self.state.jumped, max(0, self.inner_steps - position))
        self.state.inner_steps -= past
        self.state.jumped -= past

    # Posting and merging

    def post(self) -> None:
        """What is due after the inner steps taken so far, and what the others wait for no longer.

        Each fragment once at most: a worker that is ahead of the others takes a step before it posts the next round.
        """
        self.refuse_inside_evaluation()
        posted: set[int] = set()
        while self._post_next(posted):
            pass

    def _post_next(self, posted: set[int]) -> bool:
        """One thing that must be done before the next inner step; False if there is none."""
        sequence = self.sequence
        step, wanted = self.schedule.post_step(sequence), self.engine.wanted(sequence)
        if not wanted and step > self.inner_steps:
            return False
        if self.ends_at is not None and sequence > self._last_of_all():
            return False
        if self.behind.missed:  # a post from an old anchor would be refused. Not tried after every step
            return bool(wanted or self.schedule.posts_at(self.inner_steps)) and self._resync()
        position = max(self.inner_steps, step if self.ends_at is None else min(step, self.ends_at))
        index = self.schedule.fragment_of(sequence)
        if index in posted:
            return False
        if any(one.key.fragment == index for one in self._posted):
            self._merge_next()  # the one before it comes first
        else:
            self.state.jump_to(position)
            self._post(index)
            posted.add(index)
        return True

    def _merge_next(self) -> None:
        self._merge(self._posted.pop(0))
        if self.behind.missed and not self._leaving:
            while self._posted:  # what is in them of this worker's work must not come again
                self._merge(self._posted.pop(0))
            self._resync()

    def _merge(self, posted: Posted) -> None:
        super()._merge(posted)
        if not self.behind.missed:
            self.state.unmerged = posted.key.sequence + 1

    def _take_in(self, posted: Posted, ended: Outcome) -> float | None:
        norm = super()._take_in(posted, ended)
        index = posted.key.fragment
        if index in self.behind.astray:
            self.state.sound = False
            self.behind.missed.setdefault(index, f"round {posted.key.sequence}: its anchor is not the others'")
        return norm

    def _apply(self, posted: Posted, ended: Outcome) -> float | None:
        """Not if an earlier round was missed: the anchor then comes with the others' state."""
        if self.behind.missed:
            self.behind.owed.append((posted, ended))
            return None
        return super()._apply(posted, ended)

    def _resync(self) -> bool:
        """Take over the others' state; False if it cannot be had now, and is to be tried again at the next post."""
        started, reason, owed = time.monotonic(), next(iter(self.behind.missed.values())), self.behind.owed
        taken = self.behind.everything()
        if taken is not None:
            for posted, ended in owed:
                if not taken:
                    super()._apply(posted, ended)
                elif posted.key.sequence < self.sequence:
                    self.behind.follow(posted, self.sync.mixing)
            self.state.unmerged, self.state.sound = self.sequence, True
        self.sync_seconds += time.monotonic() - started
        if taken:
            self._taken_over(reason)
        return taken is not None

    def _taken_over(self, reason: str) -> None:
        if self.ends_at is not None:
            self.end_at(self.ends_at)
        self.resyncs += 1
        if self.on_resync is not None:
            self.on_resync(reason, self.sequence)

    def _note(self, key: RoundKey, *, stopping: bool, resync: str | None) -> None:
        """Whoever stops leaves alone."""
        del stopping
        super()._note(key, stopping=False, resync=resync)

    # The end

    def finish(self, *, early: bool, before_confirming: Callable[[], None] | None) -> None:
        """Early: what is in flight is merged, and no more. Else a last turn and the confirmation, if they work."""
        self._leaving = early
        self.merge_pending()
        if not early:
            self._last_turn(early=False)
        self._adopt_anchors()
        if before_confirming is not None:
            before_confirming()
        if not early:
            self._confirm()
        self._leaving = False

    def _last_of_all(self) -> int:
        """The last round of a run that ends here: one turn through all fragments after the last scheduled one."""
        end = self.inner_steps if self.ends_at is None else self.ends_at
        return self.schedule.posts_until(end) + self.state.num_fragments - 1

    def _last_turn(self, *, early: bool) -> None:
        del early
        last = self._last_of_all()
        while self.sequence <= last and (not self.behind.missed or self._resync()):
            self._post(self.schedule.fragment_of(self.sequence))
            self.merge_pending()

    def _confirm(self) -> None:
        try:
            super()._confirm()
        except RoundFailed as failure:
            self.rounds_failed += 1
            logger.warning("no other worker has confirmed the last parameters: %s", failure.reason)
        self.state.unmerged = self.sequence
