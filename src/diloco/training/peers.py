# ruff: noqa: B027 - hooks that may stay empty
"""What the training loop does because of the other workers: nothing but a check if they are a fixed set.

The loop calls the methods of `Peers` at their moments. swarm/peers.py is for workers that come and go.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from diloco.engines.base import Connection
from diloco.errors import EngineError
from diloco.outer.rounds import RoundEvent
from diloco.training.config.run import RunConfig

FAILURES_IN_A_ROW = 3
"""One failed round may be followed by a good one; this many in a row mean that something is broken."""


class Peers(ABC):
    """The other workers of the run, as one worker deals with them."""

    resyncs = 0
    """How often this worker has taken over the others' state since it began."""

    def begin(self, *, joined: bool, stopped: Callable[[], bool]) -> None:
        """Prepare for the first inner step. `joined`: this worker has the state of a run in progress."""

    def before_step(self) -> None:
        """Prepare for the next inner step."""

    def after_step(self, loss: float | None, tokens: int) -> None:
        """Take in that an inner step and its rounds are over."""

    def list_members(self) -> None:
        """Write the members to the event log, now and then."""

    def after_post(self, sequence: int) -> None:
        """Take in that a contribution was posted."""

    def after_round(self, event: RoundEvent) -> None:
        """Take in that a round was merged or has failed."""

    def restart(self) -> None:
        """Forget what was loaded of steps: the state is another worker's."""

    def tokens_by_worker(self) -> dict[str, int] | None:
        """Return the tokens of every worker of a swarm that are in the run, for the summary."""
        return None

    @abstractmethod
    def check_progress(self, failures: list[str], loss: float | None) -> None:
        """Raise EngineError if training on is of no use. `failures`: of the latest rounds, in a row; `loss`: the last
        one logged, None if none was."""

    def check_end(self) -> None:
        """Raise EngineError if the result is not to be trusted; called after the last round."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        del state


class FixedPeers(Peers):
    """A fixed set of workers, which start and end together."""

    def __init__(self, config: RunConfig, engine: Connection) -> None:
        self._config = config
        self._engine = engine

    def check_progress(self, failures: list[str], loss: float | None) -> None:  # noqa: ARG002 - failures say it
        if len(failures) >= FAILURES_IN_A_ROW:
            raise EngineError(
                f"the last {len(failures)} rounds failed, the last because: {failures[-1]}. If the loss is not finite, "
                f"lower inner.lr ({self._config.inner.lr}) or check the data"
            )

    def check_end(self) -> None:
        digests = {member.worker: member.anchor_digest for member in self._engine.members()}
        if len(set(digests.values())) > 1:
            raise EngineError(f"the workers ended with different anchors: {digests}; the run is not to be trusted")
