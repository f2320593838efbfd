"""Asynchronous workers: none waits for another, but at the end (Asynchronous Local-SGD, arXiv 2401.09135, Algorithm 3).

After its H inner steps a worker sends its outer gradient, taken from where it began them, to the anchor in worker 0's
process (engines/asynchronous.py), which moves at once. The worker goes on from the answer, the anchor as it is
then, with all that others have sent meanwhile. A worker's own anchor, which evaluation and checkpoints see, is the one
that it was last given.

Each outer gradient g moves the anchor θ when it arrives, whichever worker sent it. Momentum that followed every arrival
would add up stale gradients; so gradients are gathered, and the momentum m moves with every N-th arrival only:

    a ← a + g
    every N-th arrival:   m ← β m + a / N
                          θ ← θ − ε ((1 − c N + c) β m + g / N)
                          a ← 0
    otherwise:            θ ← θ − ε (c β m + g / N)

c spreads the momentum's part over the N arrivals: 0, the default, adds all of it at once. With N = 1 this is Nesterov
at every arrival, and for a single worker DiLoCo itself. Usually N is the number of workers.

All start together, as with a fixed membership, and end together: a worker that has taken all its steps waits in
`finish` until every other has, or is lost. A stop ends all at their next arrival.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from diloco.codecs.encoded import EncodedVector
from diloco.core.config import SyncConfig
from diloco.core.fragments import Fragment
from diloco.core.outer_optimizers import Nesterov, OuterOptimizer
from diloco.engines.asynchronous import SERVED_ANCHOR, AnchorServer, AsynchronousEngine, FixedEngine
from diloco.engines.base import Connection
from diloco.engines.rounds import CONFIRMATION, Contribution, RoundKey, RoundResult
from diloco.errors import ConfigError
from diloco.outer.fixed import FixedLoop
from diloco.outer.rounds import RoundInFlight


@dataclass(frozen=True)
class DelayedNesterov(OuterOptimizer):
    """Delayed Nesterov, with ε = `lr`, β = `momentum`, N = `period`, c = `spread`. `round_number` counts the
    arrivals."""

    name = "delayed nesterov"
    state_names = ("momentum", "gathered", SERVED_ANCHOR)
    lr: float = 0.7
    momentum: float = 0.9
    period: int = 1
    spread: float = 0.0

    def __post_init__(self) -> None:
        if self.lr <= 0 or not 0 <= self.momentum < 1:
            raise ConfigError(f"lr = {self.lr} must be above 0, momentum = {self.momentum} at least 0 and below 1")
        if self.period < 1 or not 0 <= self.spread <= 1 / self.period:
            raise ConfigError(
                f"period = {self.period} must be at least 1, and spread = {self.spread} from 0 to 1 / period"
            )

    def update(self, theta: Tensor, delta: Tensor, state: Mapping[str, Tensor], round_number: int) -> None:
        m, a, N = state["momentum"], state["gathered"], self.period
        a.add_(delta)
        factor = self.spread
        if round_number % N == 0:
            m.mul_(self.momentum).add_(a, alpha=1.0 / N)
            a.zero_()
            factor = 1.0 - self.spread * N + self.spread
        if N > 1:
            delta.div_(N)
        if factor:
            delta.add_(m, alpha=factor * self.momentum)
        theta.sub_(delta, alpha=self.lr)


def asynchronous_parts(
    engine: Connection, outer: OuterOptimizer, sync: SyncConfig
) -> tuple[AsynchronousEngine, DelayedNesterov]:
    """Build the engine and the outer optimizer of asynchronous workers from those that were given
    (outer/arguments.py)."""
    assert isinstance(engine, FixedEngine) and isinstance(outer, Nesterov)
    delayed = DelayedNesterov(outer.lr, outer.momentum, sync.momentum_arrivals or engine.workers)
    return AsynchronousEngine(engine, engine.anchor_link(sync.timeout_seconds)), delayed


class AsynchronousLoop(FixedLoop):
    """The outer loop over an AsynchronousEngine, of a model of one fragment."""

    _stops = False

    @property
    def _anchor(self) -> AsynchronousEngine:
        assert isinstance(self.engine, AsynchronousEngine)
        return self.engine

    @property
    def _fragment(self) -> Fragment:
        return self.state.fragments[0]

    def join(self, *, restoring: bool) -> None:
        if self.state.num_fragments > 1:
            raise ConfigError(
                "sync.asynchronous = true and a model with buffers that are averaged (batch norm): asynchronous "
                "workers average parameters only; use synchronous rounds, or another normalization"
            )
        super().join(restoring=restoring)
        server = None
        if self.engine.worker == 0:
            vector = self.replica.lanes[0].sending[0].vector
            server = AnchorServer(self.engine.workers, self._fragment, vector, self.sync.max_norm_ratio)
        self._anchor.open(server)

    # Arrivals

    def got_result(self, posted: RoundInFlight, result: RoundResult) -> None:
        del posted
        self._stops |= any(member.report.stopping for member in result.members)

    def merge_mean(self, posted: RoundInFlight, result: RoundResult) -> float | None:
        """Go on from the anchor's answer; returns how far the anchor has moved."""
        before = self._fragment.anchor.clone()
        self._take(result.mean)
        self.state.merged(posted.key, posted.steps_taken)
        self.state.set_rounds(0, self._anchor.arrivals)
        return float(torch.linalg.vector_norm(self._fragment.anchor - before))

    @torch.no_grad()
    def _take(self, anchor: EncodedVector) -> None:
        with self.state.lock:
            fragment = self._fragment
            for span in fragment.spans():
                values = anchor.decode(span.first_part, span.num_parts)
                fragment.anchor[span.slice].copy_(values)
            fragment.adopt_anchor()
            self.replica.lanes[0].take_digests()
        self.replica.changed()

    # The end

    @property
    def stopping(self) -> bool:
        return self._stops

    def end_together(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """Send what is left, wait until every other worker is done or lost, and take the anchor, the same for all."""
        state = self.state
        timeout = self.sync.timeout_seconds
        self.report = replace(self.report, stopping=self.report.stopping or early, done=True)
        if state.steps_taken > state.merged_at[0]:
            self.post_fragment(0)
            self.merge_pending()
        quiet = timeout + self._time_of_two_rounds()
        anchor = self._anchor.end("done", RoundKey(state.sequence, CONFIRMATION), self._last_word(), quiet)
        with state.lock:
            self._fragment.anchor.copy_(anchor)
        state.start_from_anchor()
        state.set_rounds(0, self._anchor.arrivals)
        self.replica.lanes[0].take_digests()
        before_confirming()
        self._anchor.end("confirm", RoundKey(state.sequence, CONFIRMATION), self._last_word(), timeout)
        self.confirmed = self.engine.members()
        self._stops = False
        self._begin()

    def _last_word(self) -> Contribution:
        lane = self.replica.lanes[0]
        vector = lane.sending[0].vector
        digest = self.state.anchor_digest()
        return Contribution(vector, 0.0, 0.0, digest, lane.layout_digest, report=self.report_now(), work=0.0)

    # Saving

    def before_saving(self) -> None:
        if self._anchor.server is not None:
            self.state.set_rounds(0, self._anchor.server.save())

    def unsavable(self) -> str | None:
        return None

    def loaded(self) -> None:
        super().loaded()
        self._stops = False
        if self._anchor.server is not None:
            self._anchor.server.load(self.state.merged_rounds[0])
