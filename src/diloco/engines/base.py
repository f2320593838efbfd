"""The engine contract: who averages with whom. Everything that can fail, wait or travel is behind it.

- `start_round` returns at once; the transfer runs beside training. `PendingRound.wait` is bounded by the deadline.
- The divisor is the total weight of the contributions that are really in the mean, never the expected world size.
- Everyone gets the same bits: a part is accumulated in fp32 in worker order by one worker, its mean encoded once, and
  all decode those bytes. On the CPU every engine gives the same trajectory as `local`, bit for bit.
- A failed round changes no anchor and loses no local work: the worker trains on, and its next outer gradient carries
it.
- Nothing that arrives is unpickled.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from diloco.engines.rounds import Contribution, GlobalState, Member, RoundKey, RoundResult


class PendingRound(ABC):
    @abstractmethod
    def wait(self) -> RoundResult:
        """The result; raises RoundFailed if this round gave none, EngineError if no later one can."""


class Engine(ABC):
    """One worker's end of the averaging. `worker` is its number, from 0 to `workers` − 1."""

    worker: int
    workers: int

    @abstractmethod
    def start_round(self, key: RoundKey, contribution: Contribution, deadline_seconds: float) -> PendingRound:
        """Begin averaging `contribution` with the others' of the same key; returns at once."""

    @abstractmethod
    def members(self) -> tuple[Member, ...]:
        """The workers as last heard of, this one included."""

    @abstractmethod
    def serve_state(self, provider: Callable[[], GlobalState]) -> None:
        """`provider` gives this worker's view of the global state, for others to fetch.

        The latest one counts: an engine serves one optimizer at a time; two at once need an engine each.
        """

    @abstractmethod
    def fetch_state(self) -> GlobalState | None:
        """The global state if this worker must take it over, None if it holds it already."""

    @abstractmethod
    def close(self) -> None:
        """Leave the others; never waits for a peer."""
