"""A round of a whole worker: the same round in every lane, and one outcome for all its ranks.

All lanes decide on the same claims (the whole worker's norm, weight and digest) and so come to the same decision. Here
the ranks of a worker make sure of it: the round is good if it is good in all lanes of all ranks; if a lane fails, no
lane is merged, and if a rank cannot go on, none of its worker does. So a worker is never in two rounds at once.
"""

from collections.abc import Sequence
from dataclasses import replace

from diloco.engines.base import PendingRound
from diloco.engines.rounds import Comparison, Contribution, RoundKey, RoundPhases, RoundResult
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import EngineError, RoundFailed
from diloco.outer.replica import Lane
from diloco.outer.rounds import Outcome


class WorkerRound:
    """A round in flight in all lanes of this rank."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        ranks: WorkerRanks,
        key: RoundKey,
        contributions: Sequence[Contribution],
        seconds: float,
    ) -> None:
        self._key, self._ranks = key, ranks
        self.norm = contributions[0].norm
        self._error: EngineError | None = None  # raised where all ranks can hear of it
        self._pending: list[PendingRound] = []
        try:
            for lane, contribution in zip(lanes, contributions, strict=True):
                self._pending.append(lane.engine.start_round(key, contribution, seconds))
        except EngineError as error:
            self._error = error

    def wait(self) -> Outcome:
        """Raises RoundFailed or EngineError on all ranks of the worker or on none."""
        results: list[RoundResult] = []
        failures: list[RoundFailed] = []
        try:
            for pending in self._pending:
                try:
                    results.append(pending.wait())
                except RoundFailed as failure:
                    failures.append(failure)
        except EngineError as error:
            self._error = self._error or error
        self._ranks.agree(self._error)
        self._agree_on(failures, results)
        here = [[float(one.bytes_sent), float(one.bytes_received), *one.comparison.numbers] for one in results]
        sent, received, *numbers = self._ranks.sums(*(sum(column) for column in zip(*here, strict=True)))
        whole = replace(
            results[0],
            bytes_sent=int(sent),
            bytes_received=int(received),
            seconds=max(result.seconds for result in results),
            comparison=Comparison.of_numbers(numbers, len(results[0].contributors)),
            phases=RoundPhases(),  # each lane has its own
        )
        return Outcome(whole, [result.mean for result in results])

    def _agree_on(self, failures: Sequence[RoundFailed], results: Sequence[RoundResult]) -> None:
        rows = self._ranks.gather_numbers(
            bool(failures),
            bool(results),
            any(failure.stopping for failure in failures),
            any(failure.resync for failure in failures),
        )
        failed, succeeded, stopping, resync = (any(column) for column in zip(*rows, strict=True))
        if failed:
            reason = failures[0].reason if failures else f"round {self._key.sequence} failed on another rank"
            # What failed here in part, others may have merged.
            raise RoundFailed(reason, stopping=stopping, resync=resync or succeeded)
