"""What the workers of a bucket decide, from listings and the store's clock alone: pure functions, without I/O.

Nobody leads. Any worker may do what is due, and `create` in the bucket makes the first one's word the only one.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from diloco.bucket.records import MAX_WORKERS, RoundPlan, WorkerBeat
from diloco.core.merging import MAX_WEIGHT_ROUNDS

POLL_SHARE = 0.1
"""A worker that waits looks again after this share of the time that it has waited: few requests, little lost time."""
_MISSES = 3
"""A live worker that was in none of so many rounds in a row is not waited for any more."""


def poll_seconds(waited_seconds: float, least: float, most: float) -> float:
    return min(max(least, POLL_SHARE * waited_seconds), most)


@dataclass(frozen=True)
class KnownMember:
    """A worker as its latest beat tells it."""

    beat: WorkerBeat
    modified: float
    """When the store got that beat."""

    def is_live(self, now: float) -> bool:
        return not self.beat.left and now - self.modified <= self.beat.lost_seconds


@dataclass
class RoundsSeen:
    """The rounds that this worker has seen end: who contributed, and how long they took."""

    last_in: dict[int, int] = field(default_factory=dict)
    """Worker -> the last round that had its post in the plan."""
    contributed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(fragment, worker) -> the last round of the fragment with its work in the mean."""
    rounds_of: dict[int, list[int]] = field(default_factory=dict)
    """Fragment -> its latest rounds with a mean."""
    ended_at: float | None = None
    """When the latest round's plan was made, by the store's clock."""
    usual_seconds: float | None = None
    """The time from one plan to the next, as a running mean."""

    def record(self, plan: RoundPlan, made_at: float) -> None:
        """A round has ended."""
        sequence = plan.key.sequence
        for post in plan.posts:
            self.last_in[post.worker] = max(sequence, self.last_in.get(post.worker, -1))
        if plan.has_mean:
            for number in plan.decision.contributors:
                self.contributed[plan.key.fragment, number] = sequence
            self.rounds_of.setdefault(plan.key.fragment, []).append(sequence)
            del self.rounds_of[plan.key.fragment][:-MAX_WEIGHT_ROUNDS]
        if self.ended_at is not None and made_at > self.ended_at:
            seconds = made_at - self.ended_at
            self.usual_seconds = seconds if self.usual_seconds is None else 0.5 * (self.usual_seconds + seconds)
        self.ended_at = made_at

    def rounds_missed(self, fragment: int, worker: int) -> int:
        """The rounds of a fragment since the last one with this worker's work in it, as far as they were seen."""
        last = self.contributed.get((fragment, worker))
        rounds = self.rounds_of.get(fragment, [])
        return len(rounds) if last is None else sum(sequence > last for sequence in rounds)


def expected_members(
    members: Mapping[int, KnownMember], seen: RoundsSeen, sequence: int, own: int, now: float
) -> set[int]:
    """The workers that a round waits for: live ones that have the state, and were in a plan not long ago."""
    expected = {own}
    for number, member in members.items():
        status = member.beat.status
        latest = max(seen.last_in.get(number, -1), member.beat.first_round - 1)
        if member.is_live(now) and status.has_state and latest >= sequence - 1 - _MISSES:
            expected.add(number)
    return expected


def seconds_to_plan(
    posted_at: Mapping[int, float], expected: Collection[int], now: float, patience_seconds: float
) -> float:
    """The seconds until a round may be planned: 0 if all that are expected have posted, or the patience is over that
    begins when half of them have; inf before."""
    if set(expected) <= posted_at.keys():
        return 0.0
    half = math.ceil(len(set(expected) | posted_at.keys()) / 2)
    times = sorted(posted_at.values())
    if len(times) < half:
        return math.inf
    return max(0.0, times[half - 1] + patience_seconds - now)


def rounds_of_work(seen: RoundsSeen, fragment: int, workers: Sequence[int]) -> tuple[int, ...]:
    """The rounds of work that each post counts as at most: one, and one more for each round that its worker missed."""
    counts = tuple(min(MAX_WEIGHT_ROUNDS, 1 + seen.rounds_missed(fragment, worker)) for worker in workers)
    return counts if any(count > 1 for count in counts) else ()


def next_number(taken: Collection[int | None]) -> int | None:
    """The lowest free worker number; None if all are taken."""
    return next((number for number in range(MAX_WORKERS) if number not in taken), None)


def is_state_due(next_round: int, newest_state: int | None, every: int) -> bool:
    """Whether the state before `next_round` is to be written for joiners."""
    return newest_state is None or next_round - newest_state >= every


def first_kept(states: Collection[int]) -> int | None:
    """The first round that joiners may still need, that after the last state but one; None: all may be needed.

    A joiner that has just begun to read the latest state finds it, and all rounds since, until two more are there.
    """
    return sorted(states)[-2] if len(states) >= 2 else None
