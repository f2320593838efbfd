"""Evaluating what the workers have in common: the anchor's parameters in the model for a while, then its own again.

Needs no memory: parameters and anchors change places (core/fragments.py). Training is refused meanwhile.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from diloco.errors import ConfigError
from diloco.outer.replica import Replica
from diloco.outer.state import OuterState


class OuterParameters:
    """Of one worker."""

    def __init__(self, state: OuterState, replica: Replica) -> None:
        self._state, self._replica = state, replica
        self._inside = False

    def refuse_inside(self) -> None:
        if self._inside:
            raise ConfigError("inside outer_parameters(): leave the evaluation before training on")

    @contextmanager
    def exchanged(self) -> Iterator[None]:
        """Live tensors are not served meanwhile; copies are, from wherever the anchor is: no joiner waits so long."""
        self.refuse_inside()
        lock, elastic = self._state.lock, self._replica.engine.elastic
        with nullcontext() if elastic else lock:
            with lock if elastic else nullcontext():
                self._exchange()
            try:
                yield
            finally:
                with lock if elastic else nullcontext():
                    self._exchange()

    def _exchange(self) -> None:
        if not self._inside:
            self._replica.settle_buffers(self._replica.tensors.averaged_buffers)
        for fragment in self._state.fragments:
            fragment.exchange()
        self._replica.changed()
        self._inside = not self._inside
