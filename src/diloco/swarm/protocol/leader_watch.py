"""A worker's view of leaders: it follows the one with the lowest number, unless that one lets its round wait."""

from collections import Counter

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol import timing
from diloco.swarm.protocol.attendance import seconds_to_post
from diloco.swarm.protocol.membership import Membership, Peer
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.round import RoundState
from diloco.swarm.protocol.transfer_times import TransferTimes

_MOST_TERMS = 1000  # that an authority may be ahead of the last one: no member can take the highest there is
_MOST_INQUIRIES = 8
"""Answer so many inquiries per peer and round while another member leads, then one after each pause, which doubles. So
a usurper can do little, and members whose views differ for long settle all the same."""


class LeaderWatch:
    def __init__(self, members: Membership, transfers: TransferTimes) -> None:
        self._members = members
        self._settings = members.settings
        self._transfers = transfers
        self.attendance = members.attendance
        self.patience_seconds = 0.0
        """The patience that this node would have as a leader; other leaders are expected to have the same."""
        self._inquiries: Counter[str] = Counter()
        self._next_inquiry: dict[str, float] = {}
        self._sequence = -1

    def usurped(self, sender: str, sequence: int, round_: RoundState | None) -> str | None:
        """The leader to name to a peer that inquires too early or too often; None if the peer may inquire."""
        leader = self._members.leader()
        if sender in (leader, self._members.me) or leader is None:
            return None
        if sequence > self._sequence:
            self._inquiries.clear()
            self._next_inquiry.clear()
            self._sequence = sequence
        now = self._members.now()
        lost_seconds = self._settings.lost_seconds
        waits = 0.0 if round_ is None else now - round_.started
        if (waits < lost_seconds and self._inquiries[sender]) or now < self._next_inquiry.get(sender, 0.0):
            return leader
        self._inquiries[sender] += 1
        above = self._inquiries[sender] - _MOST_INQUIRIES
        if above >= 0:
            self._next_inquiry[sender] = now + lost_seconds * 2**above
        return None

    def record_ended(self, leader: str, round_: RoundState) -> str | None:
        """The leader says that it has ended this round. If for long no mean of it counts here, the leader was in a run
        of its own: pass it over, and return its name. The side of a split that has a majority goes on, and the other
        takes over its state."""
        now = self._members.now()
        round_.ended_alone_since = None if round_.ended else round_.ended_alone_since or now
        since = round_.ended_alone_since
        if (
            since is not None
            and now - since > timing.ALONE_SHARE * self._settings.lost_seconds
            and leader != self._members.me
        ):
            round_.ended_alone_since = None
            return self._pass_over(leader, round_)
        return None

    def watch(self, round_: RoundState, *, may_go_on: bool) -> str | None:
        """Pass over a leader that has what it needs and does not go on; return its name. `may_go_on`: a majority is
        here."""
        leader = round_.leader
        now = self._members.now()
        if leader in (None, self._members.me) or not may_go_on or not self._most_wait(round_.sequence):
            round_.stuck_since = None
            return None
        if round_.plan is not None and round_.planned_at is not None and round_.stuck_since is not None:
            round_.stuck_since = max(round_.stuck_since, round_.planned_at)
        round_.stuck_since = round_.stuck_since or now
        if now - round_.stuck_since > self._leader_seconds(round_):
            assert leader is not None
            return self._pass_over(leader, round_)
        return None

    def _pass_over(self, leader: str, round_: RoundState) -> str:
        self.attendance.pass_over(leader, self._members.now())
        round_.turn_to(None)
        round_.stuck_since = None
        return leader

    def _most_wait(self, sequence: int) -> bool:
        """Most live members that have the state have posted this round."""
        statuses = [self._members.status, *(peer.status for peer in self._members.with_state())]
        return 2 * sum(status.is_in(sequence) for status in statuses) > len(statuses)

    def _leader_seconds(self, round_: RoundState) -> float:
        """How long a leader may take: with a plan for its transfer; without one for the slow workers, if some have not
        posted, and else only for its inquiry, which ends when the last member has answered or is lost."""
        stall = self._settings.stall_seconds
        if round_.plan is not None:
            longest = timing.LONGEST_STEP_SHARE * self._settings.timeout_seconds
            return stall + min(longest, self._transfers.limit(round_.plan, stall))
        missing = self._missing(round_.sequence)
        if not missing:
            return timing.PLAN_SHARE * self._settings.lost_seconds
        slowest = max(peer.status.step_seconds for peer in missing)
        return stall + self.patience_seconds + seconds_to_post(slowest, self._settings)

    def _missing(self, sequence: int) -> list[Peer]:
        """The members that a leader waits for before it makes a plan."""
        expected = [peer for peer in self._members.with_state() if self.attendance.expects(peer.name)]
        return [peer for peer in expected if not peer.status.is_in(sequence)]


def check_term(authority: Authority, seen: Authority) -> None:
    """Raise CallRefused, and so promise nothing, for a term far ahead of all that this worker has seen in the round."""
    if authority.term > seen.term + _MOST_TERMS:
        raise CallRefused(f"term {authority.term} is too far ahead of the last one, {seen.term}", "term")
