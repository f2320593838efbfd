"""The policy of asynchronous workers: no worker waits for another, but at the end.

After its H inner steps a worker sends its outer gradient, taken from where it began them, to the anchor in worker 0's
process (engines/asynchronous/server.py), which moves at once (core/methods/delayed_nesterov.py). The worker goes on
from the answer, the anchor as it is then, with all that others have sent meanwhile. A worker's own anchor, which
evaluation and checkpoints see, is the one that it was last given.

All start together, as with a fixed membership, and end together: a worker that has taken all its steps waits in
`finish` until every other has, or is lost. A stop ends all at their next arrival.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from diloco.codecs.encoded import EncodedVector
from diloco.core.fragments import Fragment
from diloco.engines.asynchronous.engine import AsynchronousEngine
from diloco.engines.asynchronous.server import AnchorServer
from diloco.engines.rounds import Contribution, RoundKey, RoundResult
from diloco.errors import ConfigError
from diloco.outer.fixed import FixedMembership
from diloco.outer.loop import OuterLoop
from diloco.outer.rounds import Outcome, Posted

_END = -1  # the "fragment" of a request without an outer gradient


class AsynchronousWorkers(FixedMembership):
    """For an AsynchronousEngine, and a model of one fragment."""

    def __init__(self, loop: OuterLoop) -> None:
        super().__init__(loop)
        if loop.state.num_fragments > 1:
            raise ConfigError(
                "sync.asynchronous = true and a model with buffers that are averaged (batch norm): asynchronous "
                "workers average parameters only; use synchronous rounds, or another normalization"
            )
        assert isinstance(loop.engine, AsynchronousEngine)
        self._engine: AsynchronousEngine = loop.engine
        self._stops = False

    @property
    def _fragment(self) -> Fragment:
        return self.state.fragments[0]

    def join(self) -> None:
        super().join()
        server = None
        if self._engine.worker == 0:
            vector, ratio = self.replica.lanes[0].sending[0].vector, self.loop.sync.max_norm_ratio
            server = AnchorServer(self._engine.workers, self._fragment, vector, ratio)
        self._engine.open(server)

    # Arrivals

    def heard(self, posted: Posted, result: RoundResult) -> None:
        del posted
        if self.loop.pace is not None:
            self.loop.pace.hear(result.members)
        self._stops |= any(member.report.stopping for member in result.members)

    def merge(self, posted: Posted, outcome: Outcome) -> float | None:
        """Go on from the anchor's answer; the length of the way there."""
        before = self._fragment.anchor.clone()
        self._take(outcome.means[0])
        self.state.merged(posted.key, posted.work)
        self.state.set_rounds(0, self._engine.arrivals)
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

    def finish(self, *, early: bool, before_confirming: Callable[[], None]) -> None:
        """Send what is left, wait until every other worker is done or lost, and take the anchor, which is the same
        for all."""
        loop, state = self.loop, self.state
        loop.report = replace(loop.report, stopping=loop.report.stopping or early, done=True)
        if state.steps_taken > state.merged_at[0]:
            loop.post_fragment(0)
            loop.merge_pending()
        quiet = loop.sync.timeout_seconds + self._patience_seconds()
        anchor = self._engine.end("done", RoundKey(state.sequence, _END), self._last_word(), quiet)
        with state.lock:
            self._fragment.anchor.copy_(anchor)
        state.start_from_anchor()
        state.set_rounds(0, self._engine.arrivals)
        self.replica.lanes[0].take_digests()
        before_confirming()
        self._engine.end("confirm", RoundKey(state.sequence, _END), self._last_word(), loop.sync.timeout_seconds)
        loop.confirmed = self._engine.members()
        self._stops = False
        self._begin()

    def _last_word(self) -> Contribution:
        loop = self.loop
        report = replace(
            loop.report, inner_steps=loop.inner_steps, bytes_sent=loop.bytes_sent, sync_seconds=loop.sync_seconds
        )
        lane = self.replica.lanes[0]
        return Contribution(
            lane.sending[0].vector, 0.0, 0.0, self.state.anchor_digest(), lane.layout_digest, report=report, work=0.0
        )

    # Saving

    def settle(self) -> None:
        if self._engine.server is not None:
            self.state.set_rounds(0, self._engine.server.save())

    def unsavable(self) -> str | None:
        return None

    def loaded(self) -> None:
        super().loaded()
        self._stops = False
        if self._engine.server is not None:
            self._engine.server.load(self.state.merged_rounds[0])
