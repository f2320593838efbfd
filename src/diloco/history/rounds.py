"""The rounds of a run, put together from the reports of the workers of this machine."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.history.columns import finite, number
from diloco.history.events import ROUND_STATISTICS, RoundEndedEvent, RoundMember, RoundPostedEvent

REPORTED_PHASES = ("encode", "flight", "waited", "merge", "others", "send", "reduce")
"""The phases whose seconds a worker reports to the others with its next round, in the order in which
`MemberReport.last_round_seconds` has them after the round's number."""
_MOST_COSINES = 64 * 63 // 2
_KEPT_COSINES = 16  # rounds
_LONGEST_SECONDS = 1e9


@dataclass
class WorkerRound:
    """One worker's part in a round: when it posted, when it had the mean, and what it did in between."""

    started: float | None = None
    """When the inner steps of this round began, as far as is known."""
    posted: float | None = None
    ended: float | None = None
    compute_seconds: float | None = None
    worked_seconds: float | None = None
    """Seconds of the inner steps as the worker itself counts them, without evaluations: the same on every machine."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by the names of REPORTED_PHASES, without the phases that its engine could not measure."""
    norm: float | None = None
    failure: str | None = None
    elsewhere: bool = False
    """A worker of another machine: known from its reports, in which a round's phases come with the next round."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase. `wait`: for the others' contributions, and what no other phase explains; `flight`: inner
        steps between post and merge, during which the engine works (docs/events.md)."""
        phases = {name: seconds for name, seconds in self.seconds.items() if seconds > 0 and name != "waited"}
        waited = self.seconds.get("waited", 0.0)
        if not phases and not self.elsewhere and self.posted is not None and self.ended is not None:
            waited = max(waited, self.ended - self.posted)  # an event of an earlier version
        if waited > 0:
            phases["wait"] = waited
        return phases


@dataclass
class RoundHistory:
    """One outer step of one fragment."""

    sequence: int
    fragment: int = 0
    step: int = 0
    time: float = 0.0
    """When the first worker of this machine had its outcome."""
    workers: dict[int, WorkerRound] = field(default_factory=dict)
    contributors: list[int] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    clipped: dict[str, str] = field(default_factory=dict)
    """Contributions that were scaled down, with the reason."""
    failure: str | None = None
    merged: bool = False
    first_to_tell: dict[bool, int] = field(default_factory=dict)
    """The first worker of this machine that told the failure of the round (key True), and the first without (False)."""
    statistics: dict[str, float | None] = field(default_factory=lambda: dict.fromkeys(ROUND_STATISTICS))
    """The numbers of the round as a whole (ROUND_STATISTICS), by the last worker that told them."""
    first_to_know: dict[str, int] = field(default_factory=dict)
    """The first worker of this machine that told each of these numbers."""
    bytes_sent: int = 0
    """The bytes of the worker that sent most."""
    digests: dict[str, int] = field(default_factory=dict)
    """Anchor digest -> how many members have it."""
    odd_workers: list[int] = field(default_factory=list)
    """Members whose anchor is not most members' anchor."""
    cosines: list[list[float]] = field(default_factory=list)
    """The cosines of every pair of workers, in the latest rounds only: they are many."""
    pairs: int = 0
    """How many pairs of workers have a cosine; it stays when `cosines` are dropped, as do the lowest and highest."""
    cosine_low: float | None = None
    cosine_high: float | None = None

    @property
    def has_outcome(self) -> bool:
        """False for a round to which no worker brought any work, or that is under way."""
        return self.merged or self.failure is not None

    @property
    def straggler(self) -> int | None:
        """The worker for which the others waited: it computed a tenth longer than the median of them."""
        measure = "worked_seconds" if any(part.elsewhere for part in self.workers.values()) else "compute_seconds"
        known = {worker: getattr(part, measure) for worker, part in self.workers.items()}
        seconds: dict[int, float] = {worker: taken for worker, taken in known.items() if taken is not None}
        if len(seconds) < 2:
            return None
        slowest = max(seconds, key=lambda worker: seconds[worker])
        others = statistics.median(taken for worker, taken in seconds.items() if worker != slowest)
        return slowest if seconds[slowest] > 1.1 * others else None


class RoundsHistory:
    """The rounds by sequence number, each from the first post of a worker on."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, RoundHistory] = {}
        self.merged: set[int] = set()
        self.failed: set[int] = set()
        self.refused = 0
        """Contributions that are in no mean."""
        self.last_contributions: dict[int, int] = {}
        """Worker -> the last merged round that has its contribution."""
        self.in_progress: int | None = None
        """The round that was posted last, until a worker has its outcome."""
        self._with_cosines: deque[RoundHistory] = deque()
        self._ended: dict[int, float] = {}  # worker -> when its last round ended
        self._worked: dict[int, float] = {}  # worker -> its seconds of training without rounds, at its last report

    def posted(self, event: RoundPostedEvent) -> None:
        """Take in a worker's post."""
        part = self._part(event)
        part.posted = event.time
        part.started = self._ended.get(event.worker)
        if part.started is not None:
            part.compute_seconds = max(0.0, event.time - part.started)
        self.in_progress = event.sequence

    def began(self, worker: int, time: float) -> None:
        """Note that the worker takes inner steps from now on."""
        self._ended[worker] = time

    def ended(self, event: RoundEndedEvent) -> bool:
        """Take in a worker's outcome. Returns whether the event is the first that tells the round's members."""
        part = self._part(event)
        part.ended = event.time
        part.norm = event.norm
        part.failure = event.failure
        part.seconds = {
            name: taken for name in REPORTED_PHASES if (taken := getattr(event, f"{name}_seconds")) is not None
        }
        self._ended[event.worker] = event.time
        if self.in_progress == event.sequence:
            self.in_progress = None
        round_ = self.by_sequence[event.sequence]
        round_.step = event.step
        round_.fragment = event.fragment
        round_.time = round_.time or event.time
        round_.first_to_tell.setdefault(event.failure is not None, event.worker)
        round_.first_to_know = dict.fromkeys(_known_statistics(event), event.worker) | round_.first_to_know
        if event.failure is not None:
            round_.failure = event.failure
            self.failed.add(event.sequence)
        if event.mean_norm is None and not event.contributors and not event.members:
            return False
        return self._take_in_plan(event, round_)

    def _take_in_plan(self, event: RoundEndedEvent, round_: RoundHistory) -> bool:
        """Take in what the workers agreed on in the round. Returns whether its members were not known before."""
        if event.mean_norm is not None:
            round_.merged = True
            self.merged.add(event.sequence)
            for worker in event.contributors:
                self.last_contributions[worker] = max(event.sequence, self.last_contributions.get(worker, 0))
        round_.statistics |= _known_statistics(event)  # a worker that got the mean afterwards knows fewer
        round_.bytes_sent = max(round_.bytes_sent, event.bytes_sent)
        round_.contributors = list(event.contributors)
        refused_before = len(round_.refused)
        round_.refused |= {str(worker): str(reason) for worker, reason in event.refused.items()}
        round_.clipped |= {str(worker): str(reason) for worker, reason in event.clipped.items()}
        self.refused += len(round_.refused) - refused_before
        if event.cosines and not round_.pairs:
            self._keep_cosines(event.cosines, round_)
        if round_.digests:
            return False
        digests: dict[str, list[int]] = {}
        for member in event.members:
            if member.anchor_digest:
                digests.setdefault(member.anchor_digest, []).append(member.worker)
            self._take_in_report(member, round_)
        round_.digests = {digest: len(workers) for digest, workers in digests.items()}
        most = max(digests.values(), key=len, default=[])
        round_.odd_workers = sorted(w for workers in digests.values() if workers is not most for w in workers)
        return True

    def _keep_cosines(self, cosines: Sequence[Any], round_: RoundHistory) -> None:
        kept = cosines[:_MOST_COSINES]
        pairs: list[Any] = [pair for pair in kept if isinstance(pair, list | tuple) and len(pair) == 3]
        values = [value for pair in pairs if (value := number(pair[2])) == value]
        round_.cosines = pairs
        round_.pairs = len(values)
        round_.cosine_low = min(values, default=None)
        round_.cosine_high = max(values, default=None)
        self._with_cosines.append(round_)
        if len(self._with_cosines) > _KEPT_COSINES:
            self._with_cosines.popleft().cosines = []

    def _take_in_report(self, member: RoundMember, round_: RoundHistory) -> None:
        """Take in a member's report. Its seconds of training since its last report are its work for this round."""
        worker = member.worker
        report = member.report
        worked = number(report.elapsed_seconds) - number(report.sync_seconds)
        before = self._worked.get(worker)
        if before is None or worked > before:
            self._worked[worker] = worked
        part = round_.workers.setdefault(worker, WorkerRound(elsewhere=worker not in self._ended))
        if before is not None and worked > before:
            part.worked_seconds = worked - before
        if not part.elsewhere:
            return
        part.compute_seconds = part.worked_seconds
        part.norm = member.norm
        self._take_in_phases(worker, report.last_round_seconds)

    def _take_in_phases(self, worker: int, reported: Sequence[object]) -> None:
        """Take in the phases of the last round of a worker of another machine.

        The machines share no clock: its round counts as ended when the same round ended on this machine.
        """
        sequence, *seconds = [_seconds(value) for value in reported] or [-1.0]
        last = self.by_sequence.get(int(sequence))
        part = None if last is None else last.workers.get(worker)
        if last is None or part is None or not part.elsewhere or len(seconds) != len(REPORTED_PHASES):
            return
        taken = dict(zip(REPORTED_PHASES, seconds, strict=True))
        part.ended = last.time
        part.posted = last.time - taken["flight"] - taken["waited"] - taken["merge"]
        if part.compute_seconds is not None:
            part.started = part.posted - taken["encode"] - part.compute_seconds
        part.seconds = taken

    def forget(self, after_step: int, merged: int | None = None) -> None:
        """Forget the rounds after the step of a resume, and those without an outcome, whose numbers are used again.

        `merged`: so many had been merged in the checkpoint. A run that is stopped ends with one more, at the same step.
        """
        counted = sorted(self.merged)[:merged]
        taken_back = self.merged.difference(counted)
        self.by_sequence = {
            sequence: round_
            for sequence, round_ in self.by_sequence.items()
            if round_.step <= after_step and round_.has_outcome and sequence not in taken_back
        }
        self.merged = {sequence for sequence, round_ in self.by_sequence.items() if round_.merged}
        self.failed = {sequence for sequence, round_ in self.by_sequence.items() if round_.failure is not None}
        self.refused = sum(len(round_.refused) for round_ in self.by_sequence.values())
        self.last_contributions = last_contributions(self.until(None))
        self.in_progress = None
        self._ended = {}
        self._worked = {}

    def until(self, time: float | None) -> list[RoundHistory]:
        """Return the rounds with an outcome by then, in order; without those to which no worker brought any work."""
        known = [round_ for round_ in self.by_sequence.values() if round_.has_outcome]
        ended = [round_ for round_ in known if time is None or round_.time <= time]
        return sorted(ended, key=lambda round_: round_.sequence)

    def was_first_to_tell(self, event: RoundEndedEvent) -> bool:
        """Return whether the event's worker was the first of this machine to tell this outcome of the round."""
        round_ = self.by_sequence.get(event.sequence)
        return round_ is not None and round_.first_to_tell.get(event.failure is not None) == event.worker

    def was_first_to_know(self, event: RoundEndedEvent, statistic: str) -> bool:
        """Return whether the event's worker was the first of this machine to tell this number of the round."""
        round_ = self.by_sequence.get(event.sequence)
        return round_ is not None and round_.first_to_know.get(statistic) == event.worker

    def last_merged(self) -> RoundHistory | None:
        """Return the merged round with the highest number."""
        return self.by_sequence[max(self.merged)] if self.merged else None

    def _part(self, event: RoundPostedEvent | RoundEndedEvent) -> WorkerRound:
        round_ = self.by_sequence.setdefault(event.sequence, RoundHistory(event.sequence))
        round_.step = round_.step or event.step
        return round_.workers.setdefault(event.worker, WorkerRound())


def last_contributions(rounds: Sequence[RoundHistory]) -> dict[int, int]:
    """Return worker -> the last merged round that has its contribution; `rounds` are in their order."""
    return {worker: round_.sequence for round_ in rounds if round_.merged for worker in round_.contributors}


def mean_contributions(rounds: Sequence[RoundHistory]) -> float:
    """Return the mean number of contributions to a merged round; 1 if there is none."""
    counts = [len(round_.contributors) for round_ in rounds if round_.merged]
    return statistics.fmean(counts) if counts else 1.0


def _known_statistics(event: RoundEndedEvent) -> dict[str, float]:
    return {name: value for name in ROUND_STATISTICS if (value := getattr(event, name)) is not None}


def _seconds(value: object) -> float:
    """Return the seconds that another machine tells; 0 if they are unknown or impossible."""
    taken = finite(value)
    return taken if taken is not None and 0 <= taken < _LONGEST_SECONDS else 0.0
