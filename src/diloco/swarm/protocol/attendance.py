"""Which members a round waits for, and for how long.

One that was in none of the last three rounds is passed over, and tried now and then.

A member may be live, have the state and never post, or post and never send its parts, or never vote for the mean. Each
round would wait for it. Every member counts the rounds that each other one has missed, from the plans that were carried
out. After three, rounds do not wait for it any more, but for every second one, then every fourth, then every eighth,
and the next one after it has fetched the state. A member that posts in time is in the round all the same, unless in
three in a row it has not voted, or was left out because others could not exchange parts with it. So a worker that was
only slow or unlucky is back soon, and one that never comes costs every eighth round. The record is of the member's key:
one that leaves and comes back, as often as it likes, has the record that it had.

A contribution that points against the others' costs a second transfer (audit/directions.py). After three in a row it
is refused from the beginning, and compared again in every second round, then every fourth, then every eighth.

A leader that lets the others wait is passed over as a leader, and the next member leads.

For a slow member that it does wait for, a round waits as long as patience lasts (`Patience`); then the member is told
to post what it has, and the round waits for the inner step that it is in (`seconds_to_post`).
"""

import statistics
from collections import deque
from collections.abc import Iterable

from diloco.swarm import timing
from diloco.swarm.network.limits import LruCache
from diloco.swarm.protocol.certificate import Agreed
from diloco.swarm.protocol.plan import MAX_WORKERS
from diloco.swarm.settings import Settings

MISSES = 3
_RAREST = 3  # a power of two: every eighth round
_MOST_CHANCES = 2 * MISSES
_ROUNDS_OF_PATIENCE = 5
"""The usual time between rounds is the median of so many."""


class Attendance:
    def __init__(self) -> None:
        self._absences = _Misses()
        self._troubles = _Misses()
        self._against = _Misses()
        """Rounds in which a member's contribution pointed against the others'."""
        self._poor_leaders: LruCache[tuple[float, float]] = LruCache(MAX_WORKERS)
        """Member -> the time on the node's clock until which it is passed over as a leader, and for how long it is."""

    def record(self, agreed: Agreed, there: Iterable[str]) -> None:
        """A round has ended. `there`: the live members that have the state."""
        present = {entry.peer for entry in agreed.plan.entries}
        for name in present:
            self._absences.forget(name)
            if name not in agreed.late:
                self._troubles.forget(name)
        for name in agreed.late:
            self._troubles.add(name)
        for name in set(there) - present:
            self._absences.add(name)
        for name in agreed.plan.opposed_peers:
            self._against.add(name)
        for entry in agreed.plan.contributors:
            self._against.forget(entry.peer)

    def record_trouble(self, name: str) -> None:
        """The member has posted, and the round goes on without it: others cannot exchange parts with it."""
        self._troubles.add(name)

    def expects(self, name: str) -> bool:
        """Whether the next round waits for this member to post."""
        return self._absences.has_a_chance(name)

    def takes(self, name: str) -> bool:
        """Whether the next round has this member in its plan, if it has posted."""
        return self._troubles.has_a_chance(name)

    def compares(self, name: str) -> bool:
        """Whether the next round compares the direction of its contribution; else it is refused from the beginning."""
        return self._against.has_a_chance(name)

    def record_passed_over(self, name: str) -> None:
        """The member has posted, and a round was planned without it."""
        self._troubles.pass_over(name)

    def record_state(self, name: str) -> None:
        """The member has fetched the state, and can be in the next round. Its line is no better for that."""
        self._absences.give_a_chance(name)

    def pass_over(self, leader: str, now: float, seconds: float = timing.PASSED_OVER_SECONDS) -> None:
        """The leader has led a round that did not go on, or that has ended in two ways."""
        until, before = self._poor_leaders.get(leader) or (0.0, 0.0)
        if now + seconds <= until:
            return
        longer = max(seconds, min(timing.LONGEST_PASSED_OVER_SECONDS, 2 * before))
        self._poor_leaders.put(leader, (now + longer, longer))

    def may_lead(self, name: str, now: float) -> bool:
        return (self._poor_leaders.get(name) or (0.0, 0.0))[0] < now


class Patience:
    """How long a round waits for the other half of the workers: `swarm.patience` of the usual time between rounds.

    Every member knows how long rounds take, led by itself or not: it may have to lead the next one.
    """

    def __init__(self, settings: Settings, now: float) -> None:
        self._settings = settings
        self._started = now
        self._usual_seconds: deque[float] = deque(maxlen=_ROUNDS_OF_PATIENCE)
        """The seconds from the end of a round until half of the workers were ready for the next one, in the last
        rounds."""
        self._last_end: float | None = None
        """When a round last ended."""

    def seconds(self, now: float) -> float:
        """Return how long a round waits after half of the workers are ready."""
        since = now - (self._last_end or self._started)
        usual = statistics.median(self._usual_seconds) if self._usual_seconds else since
        return max(timing.LEAST_PATIENCE_SHARE * self._settings.lost_seconds, self._settings.patience * usual)

    def record_end_here(self, half_ready_at: float | None, now: float) -> None:
        """A round that this member leads has ended. `half_ready_at`: when half of the workers were ready, if ever."""
        if half_ready_at is not None and self._last_end is not None:
            self._usual_seconds.append(half_ready_at - self._last_end)
        self._last_end = now

    def record_end_elsewhere(self, posted_at: float, now: float) -> None:
        """A round that another member leads has ended; this one had posted it then."""
        if self._last_end is not None:
            self._usual_seconds.append(max(0.0, posted_at - self._last_end))
        self._last_end = now


def seconds_to_post(slowest_step_seconds: float, settings: Settings, least_seconds: float = 0.0) -> float:
    """Return how long workers that were told to post may take, of which the slowest takes so long for an inner step:
    they post after the step that they are in."""
    longest = timing.LONGEST_STEP_SHARE * settings.timeout_seconds
    return min(max(least_seconds, timing.STEP_SHARE * slowest_step_seconds), longest)


class _Misses:
    """The rounds in a row that each member has missed, and those that have passed it over since its chance."""

    def __init__(self) -> None:
        self._counts: LruCache[tuple[int, int]] = LruCache(MAX_WORKERS)

    def add(self, name: str) -> None:
        misses, passed = self._counts.get(name) or (0, 0)
        used = self.has_a_chance(name)
        self._counts.put(name, (misses + 1, 0) if used else (misses, passed + 1))

    def pass_over(self, name: str) -> None:
        misses, passed = self._counts.get(name) or (0, 0)
        self._counts.put(name, (misses, passed + 1))

    def give_a_chance(self, name: str) -> None:
        """Let the next round count on the member. After `_MOST_CHANCES` misses this does nothing: a member may say in
        every round that it has just fetched the state."""
        misses, _ = self._counts.get(name) or (0, 0)
        if misses < _MOST_CHANCES:
            self._counts.put(name, (misses, 1 << _RAREST))

    def has_a_chance(self, name: str) -> bool:
        misses, passed = self._counts.get(name) or (0, 0)
        rare = misses - MISSES + 1
        return rare <= 0 or passed + 1 >= 1 << min(rare, _RAREST)

    def forget(self, name: str) -> None:
        self._counts.drop(name)
