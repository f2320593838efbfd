"""Evaluating what the workers have in common: the anchor's parameters in the model for a while, then its own again.

Needs no extra memory: parameters and anchors change places (core/fragments.py). Training is refused meanwhile.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from diloco.errors import ConfigError
from diloco.outer.replica import Replica
from diloco.outer.state import OuterState


class AnchorEvaluation:
    """Evaluations of one worker; `active` while the anchors are in the model."""

    def __init__(self, state: OuterState, replica: Replica, *, serves_copies: bool) -> None:
        """`serves_copies`: other workers get copies of the anchors, from wherever they are, and need not wait."""
        self._state = state
        self._replica = replica
        self._serves_copies = serves_copies
        self.active = False
        self.seconds = 0.0
        """Spent with the anchors in the model."""

    def refuse_training(self) -> None:
        if self.active:
            raise ConfigError("inside outer_parameters(): leave the evaluation before training on")

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Parameters and anchors change places; refused inside itself. Live anchors are not served meanwhile."""
        self.refuse_training()
        started = time.monotonic()
        lock = self._state.lock
        # The lock is held for each exchange only if copies may be served in between, else during the whole evaluation.
        during_evaluation, during_exchange = (nullcontext(), lock) if self._serves_copies else (lock, nullcontext())
        with during_evaluation:
            with during_exchange:
                self._exchange()
            try:
                yield
            finally:
                with during_exchange:
                    self._exchange()
                self.seconds += time.monotonic() - started

    def _exchange(self) -> None:
        if not self.active:
            self._replica.average_buffers(self._replica.tensors.averaged_buffers)
        for fragment in self._state.fragments:
            fragment.exchange()
        self._replica.changed()
        self.active = not self.active
