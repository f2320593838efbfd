"""One worker's rounds: in flight, settled, and as events.

A round in flight when a worker is saved is waited for and stays unmerged: it is *settled* (state.py).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any, Protocol

from diloco.core.merging import cosines, diverged
from diloco.engines.rounds import RoundKey, RoundPhases, RoundResult
from diloco.errors import RoundFailed


@dataclass
class RoundCounters:
    """One worker's counts of its rounds since it began, which are saved with it."""

    rounds_failed: int = 0
    rounds_dropped: int = 0
    resyncs: int = 0
    contributions_refused: int = 0
    bytes_sent: int = 0
    sync_seconds: float = 0.0
    """Spent on rounds instead of training: encoding, waiting, merging."""

    @staticmethod
    def from_numbers(numbers: Mapping[str, Any]) -> "RoundCounters":
        """Read the counts from a saved state; what an earlier version did not count is 0."""
        return RoundCounters(**{name: numbers[name] for name in RoundCounters.__dataclass_fields__ if name in numbers})


class PendingWorkerRound(Protocol):
    """One worker's round on its way, in all lanes of this rank."""

    @property
    def norm(self) -> float:
        """The norm of this worker's outer gradient; ask for it once `wait` has ended."""

    def wait(self) -> RoundResult:
        """Return the whole worker's result; raises RoundFailed if this round gave none, EngineError if no later one
        can."""


@dataclass
class RoundInFlight:
    """A round that is posted and not yet merged."""

    key: RoundKey
    at_step: int
    """The position in the schedule at which it was posted."""
    steps_taken: int
    """The inner steps that this worker had taken by then."""
    pending: PendingWorkerRound
    posted_at: float = field(default_factory=time.monotonic)
    """The time of the post on time.monotonic()'s clock; for a round that was saved, when it was loaded."""
    encode_seconds: float | None = None
    dropped: bool = False
    """Dropped on purpose (methods/dropped_rounds.py): there is no work in it, and the worker keeps its parameters."""

    @property
    def norm(self) -> float:
        """The norm of this worker's outer gradient, once the round has ended."""
        return self.pending.norm


@dataclass(frozen=True)
class Settled:
    """A round that has ended, with a result or without."""

    ended: RoundResult | RoundFailed
    norm: float

    def wait(self) -> RoundResult:
        if isinstance(self.ended, RoundFailed):
            raise self.ended
        return self.ended


def settle(posted: RoundInFlight) -> RoundInFlight:
    """Wait for the round's end without merging its mean."""
    if isinstance(posted.pending, Settled):
        return posted
    try:
        ended: RoundResult | RoundFailed = posted.pending.wait()
    except RoundFailed as failure:
        ended = failure
    return replace(posted, pending=Settled(ended, posted.norm))


def end_of(posted: RoundInFlight) -> RoundResult | RoundFailed:
    """Return how a settled round has ended."""
    assert isinstance(posted.pending, Settled)
    return posted.pending.ended


@dataclass(frozen=True, kw_only=True)
class RoundEvent:
    """One round as this worker saw it: either a result, or the reason why there is none.

    It has an attribute for each of ROUND_STATISTICS (history/events.py).
    """

    key: RoundKey
    inner_step: int
    norm: float
    """The norm of this worker's own outer gradient."""
    mean_norm: float | None
    codec_error: float | None
    """‖sent − Δ‖ / ‖Δ‖ of this worker's outer gradient Δ, measured on a share of it; None if it is sent as it is."""
    result: RoundResult | None
    failure: str | None
    encode_seconds: float | None = None
    flight_seconds: float = 0.0
    """The time from the post until this worker waited for the mean: it trained meanwhile."""
    waited_seconds: float = 0.0
    merge_seconds: float | None = None
    dropped: bool = False
    """This worker's outer gradient was dropped on purpose."""

    def phase_seconds(self) -> dict[str, Any]:
        """Return this worker's seconds of each phase, the engine's included; None if it was not measured or did not
        happen."""
        phases = RoundPhases() if self.result is None else self.result.phases
        return {
            "encode_seconds": self.encode_seconds,
            "flight_seconds": self.flight_seconds,
            "waited_seconds": self.waited_seconds,
            "merge_seconds": self.merge_seconds,
            **asdict(phases),
        }

    @property
    def seconds(self) -> float | None:
        """The seconds that the engine took for the round; None without a mean."""
        return None if self.result is None else self.result.seconds

    def cosines(self) -> list[tuple[int, int, float]]:
        """Return (worker, worker, cosine of their outer gradients) of every pair of contributors."""
        return [] if self.result is None else cosines(self.result.contributors, self.result.comparison.products)

    @property
    def similarity(self) -> float | None:
        """The mean of the `cosines`; None without a pair."""
        result = self.result
        return None if result is None else mean_cosine(result.contributors, result.comparison.products)


def mean_cosine(contributors: Sequence[int], products: Sequence[float]) -> float | None:
    """Return the mean cosine between the outer gradients of every pair of contributors; None without a pair."""
    pairs = cosines(contributors, products)
    return fmean(cosine for _, _, cosine in pairs) if pairs else None


def has_another_anchor(result: RoundResult, worker: int) -> bool:
    """Whether this worker, which was refused, has not the others' anchor: their mean must not be added to its own."""
    positions = diverged([member.anchor_digest for member in result.members])
    return any(result.members[position].worker == worker for position in positions)
