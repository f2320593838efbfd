"""The rounds of a run, put together from the reports of the workers of this machine."""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from diloco.dashboard.columns import count, finite, number
from diloco.history.log import Event
from diloco.history.waterfall import TOLD

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
    """Its own account of the inner steps, without evaluations: the same measure on every machine."""
    phases: dict[str, float] = field(default_factory=dict)
    norm: float | None = None
    failure: str | None = None
    elsewhere: bool = False
    """A worker of another machine: known from its reports, in which a round's phases come with the next round."""

    def as_json(self, worker: int) -> dict[str, Any]:
        return {"worker": worker, **vars(self)}


@dataclass
class Round:
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
    mean_norm: float | None = None
    similarity: float | None = None
    codec_error: float | None = None
    seconds: float | None = None
    bytes_sent: int = 0
    """Of the worker that sent most."""
    digests: dict[str, int] = field(default_factory=dict)
    """Anchor digest -> how many members have it."""
    odd_workers: list[int] = field(default_factory=list)
    """Members whose anchor is not most members' anchor."""
    cosines: list[list[float]] = field(default_factory=list)
    """Of every pair of workers, in the latest rounds only: they are many."""
    cosine_low: float | None = None
    cosine_high: float | None = None

    @property
    def has_outcome(self) -> bool:
        return self.merged or self.failure is not None

    @property
    def straggler(self) -> int | None:
        """The worker for which the others waited: it computed a tenth longer than the median of them."""
        measure = "worked_seconds" if any(one.elsewhere for one in self.workers.values()) else "compute_seconds"
        known = {worker: getattr(one, measure) for worker, one in self.workers.items()}
        seconds: dict[int, float] = {worker: taken for worker, taken in known.items() if taken is not None}
        if len(seconds) < 2:
            return None
        slowest = max(seconds, key=lambda worker: seconds[worker])
        others = statistics.median(taken for worker, taken in seconds.items() if worker != slowest)
        return slowest if seconds[slowest] > 1.1 * others else None

    def as_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if name not in ("workers", "cosines")}
        workers = [self.workers[worker].as_json(worker) for worker in sorted(self.workers)]
        return plain | {"workers": workers, "straggler": self.straggler}


class Rounds:
    """By sequence. A round is there from the first post on."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, Round] = {}
        self._with_cosines: deque[Round] = deque()
        self._ended: dict[int, float] = {}  # worker -> when its last round ended
        self._worked: dict[int, float] = {}  # worker -> its seconds of training without rounds, at its last report

    def posted(self, event: Event) -> None:
        one = self._worker(event)
        one.posted, one.started = event["time"], self._ended.get(event["worker"])
        if one.started is not None:
            one.compute_seconds = max(0.0, event["time"] - one.started)

    def began(self, worker: int, time: float) -> None:
        """The worker takes inner steps from now on."""
        self._ended[worker] = time

    def ended(self, event: Event) -> bool:
        """Whether it is the first that tells of this round's members."""
        one, round_ = self._worker(event), self.by_sequence[event["sequence"]]
        one.ended, one.norm, one.failure = event["time"], finite(event.get("norm")), _text(event.get("failure"))
        one.phases = _phases(event, one)
        self._ended[event["worker"]] = event["time"]
        round_.step, round_.fragment = count(event.get("step", 0)), count(event.get("fragment", 0))
        round_.time = round_.time or event["time"]
        if one.failure is not None:
            round_.failure = one.failure
        if event.get("mean_norm") is not None or event.get("contributors"):
            return self._merged(event, round_)
        return False

    def _merged(self, event: Event, round_: Round) -> bool:
        round_.merged = round_.merged or event.get("mean_norm") is not None
        for name in ("mean_norm", "similarity", "codec_error", "seconds"):
            setattr(round_, name, finite(event.get(name)))
        round_.bytes_sent = max(round_.bytes_sent, count(event.get("bytes_sent") or 0))
        round_.contributors = [count(worker) for worker in event.get("contributors") or ()]
        round_.refused |= {str(worker): str(why) for worker, why in (event.get("refused") or {}).items()}
        round_.clipped |= {str(worker): str(why) for worker, why in (event.get("clipped") or {}).items()}
        if round_.digests:
            return False
        self._keep_cosines(event.get("cosines") or [], round_)
        digests: dict[str, list[int]] = {}
        for member in event.get("members") or ():
            if member.get("anchor_digest"):
                digests.setdefault(str(member["anchor_digest"]), []).append(count(member["worker"]))
            self._told_part(member, round_)
        round_.digests = {digest: len(workers) for digest, workers in digests.items()}
        most = max(digests.values(), key=len, default=[])
        round_.odd_workers = sorted(w for workers in digests.values() if workers is not most for w in workers)
        return True

    def _keep_cosines(self, cosines: list[list[float]], round_: Round) -> None:
        round_.cosines = [pair for pair in cosines[:_MOST_COSINES] if len(pair) == 3]
        found = [value for pair in cosines if (value := number(pair[2])) == value]
        round_.cosine_low, round_.cosine_high = min(found, default=None), max(found, default=None)
        self._with_cosines.append(round_)
        if len(self._with_cosines) > _KEPT_COSINES:
            self._with_cosines.popleft().cosines = []

    def _told_part(self, member: dict[str, Any], round_: Round) -> None:
        """A member reports its seconds at every round: the difference is this round's work."""
        worker, report = count(member["worker"]), member.get("report") or {}
        worked = number(report.get("elapsed_seconds")) - number(report.get("sync_seconds"))
        before = self._worked.get(worker)
        if before is None or worked > before:
            self._worked[worker] = worked
        one = round_.workers.setdefault(worker, WorkerRound(elsewhere=worker not in self._ended))
        if before is not None and worked > before:
            one.worked_seconds = worked - before
        if not one.elsewhere:
            return
        one.compute_seconds = one.worked_seconds
        one.norm = finite(member.get("norm"))
        self._remote_phases(worker, report.get("last_round_seconds") or ())

    def _remote_phases(self, worker: int, told: Sequence[object]) -> None:
        """Of the round before, which ended for that worker when it did here: there is no clock that both share."""
        sequence, *seconds = [_seconds(one) for one in told] or [-1.0]
        before = self.by_sequence.get(int(sequence))
        part = None if before is None else before.workers.get(worker)
        if before is None or part is None or not part.elsewhere or len(seconds) != len(TOLD):
            return
        taken = dict(zip(TOLD, seconds, strict=True))
        part.ended = before.time
        part.posted = before.time - taken["flight"] - taken["waited"] - taken["merge"]
        if part.compute_seconds is not None:
            part.started = part.posted - taken["encode"] - part.compute_seconds
        taken["wait"] = taken.pop("waited")
        part.phases = {name: one for name, one in taken.items() if one > 0}

    def forget(self, after_step: int) -> None:
        """A resume has taken the later rounds back, and repeats the number of one to which no worker brought work."""
        self.by_sequence = {
            key: one for key, one in self.by_sequence.items() if one.step <= after_step and one.has_outcome
        }
        self._ended, self._worked = {}, {}

    def until(self, time: float | None) -> list[Round]:
        """The rounds with an outcome by then, in order; without those to which no worker brought any work."""
        known = [one for one in self.by_sequence.values() if one.has_outcome]
        ended = [one for one in known if time is None or one.time <= time]
        return sorted(ended, key=lambda one: one.sequence)

    def _worker(self, event: Event) -> WorkerRound:
        sequence, step = count(event["sequence"]), count(event.get("step", 0))
        round_ = self.by_sequence.setdefault(sequence, Round(sequence))
        round_.step = round_.step or step
        return round_.workers.setdefault(event["worker"], WorkerRound())


def _phases(event: Event, one: WorkerRound) -> dict[str, float]:
    """Seconds by phase. `wait`: for the others' contributions, and what no other phase explains; `flight`: inner steps
    between post and merge, during which the engine works (docs/events.md)."""
    names = ("encode", "flight", "others", "send", "reduce", "merge")
    found = {name: number(event.get(f"{name}_seconds")) for name in names}
    phases = {name: seconds for name, seconds in found.items() if seconds > 0}
    waited = number(event.get("waited_seconds"))
    if one.posted is not None and not phases:  # an event of an earlier version
        waited = max(waited, event["time"] - one.posted)
    if waited > 0:
        phases["wait"] = waited
    return phases


def _seconds(value: object) -> float:
    """0 for what is unknown, or cannot be: it comes from another machine."""
    found = number(value)
    return found if 0 <= found < _LONGEST_SECONDS else 0.0


def _text(value: object) -> str | None:
    return None if value is None else str(value)
