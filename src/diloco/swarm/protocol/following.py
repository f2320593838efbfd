"""A worker's decisions in its own rounds: which leader it obeys, what it answers, when it gives up.

    inquiry    a new leader asks: the worker promises to obey no lower authority, and tells the mean that it has
    plan       it follows one that it can check, of the highest authority that it has promised nothing against
    giving up  a round fails for it when no majority can end it, so that training goes on. Nothing is lost by that: the
               next round carries this work (I6)
    others     most have ended a round that it has not posted, or it went on alone: then it fetches their state

A message of a leader counts only if no higher authority (plan.py) has sent one in this round. Each decision is a
function of the state here and of the message; node/participant.py carries them out.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco.swarm import timing
from diloco.swarm.network.limits import LruCache
from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol.attendance import seconds_to_post
from diloco.swarm.protocol.membership import Membership, Peer
from diloco.swarm.protocol.messages import (
    Done,
    Ended,
    Inquire,
    LedBy,
    NotPosted,
    Posted,
    Superseded,
    Trouble,
    Voted,
)
from diloco.swarm.protocol.missed_rounds import MissedRounds
from diloco.swarm.protocol.plan import MAX_WORKERS, NO_AUTHORITY, Authority, Plan
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.round import RoundState
from diloco.swarm.protocol.transfer_times import TransferTimes
from diloco.swarm.protocol.wire import PeerMessage

_MAX_PROMISES = 16
_MOST_TERMS = 1000  # that an authority may be ahead of the last one: no member can take the highest there is
_MOST_INQUIRIES = 8
"""Answer so many inquiries per peer and round while another member leads, then one after each pause, which doubles. So
a usurper can do little, and members whose views differ for long settle all the same."""
_MOST_LEFT_OUT = 32
"""Pass over a leader that leaves a member out of so many rounds. An honest one tries a member that cannot be in rounds
in every eighth, and each new leader tries it a few times more."""


@dataclass(frozen=True)
class StartTransfer:
    """Follow this plan: answer Done, and exchange its parts."""

    plan: Plan
    parts_seconds: float
    """How long the next parts of a worker may take."""


class UnknownSeat(CallRefused):
    """A worker of the plan is not known here to have an invitation of its own.

    It may be a newcomer: then the leader, asked at once, shows its credential, and offers the plan again. `trouble`:
    the accusation to send the leader, once it has shown none for `lost_seconds`.
    """

    def __init__(self, reason: str, trouble: Trouble | None) -> None:
        super().__init__(reason, "seat")
        self.trouble = trouble


class RoundFollower:
    def __init__(
        self,
        members: Membership,
        quorum: Quorum,
        missed: MissedRounds,
        transfers: TransferTimes,
        rounds: Mapping[int, RoundState],
        has_ended: Callable[[int], bool],
        has_seat: Callable[[str], bool],
    ) -> None:
        """`rounds`: those that this worker has posted and that have not ended here, by sequence.

        `has_ended`: whether a round has ended here. `has_seat`: whether a peer has an invitation of its own.
        """
        self._members = members
        self._quorum = quorum
        self._missed = missed
        self._transfers = transfers
        self._rounds = rounds
        self._has_ended = has_ended
        self._has_seat = has_seat
        self.leaders = LeaderWatch(members, transfers)
        self._promised: dict[int, Authority] = {}
        """The highest authority that has inquired about a round which this worker has not posted."""
        self._alone_since: float | None = None
        """When most others were first seen to be behind, and in another run than this worker."""

    def take_promise(self, sequence: int) -> Authority:
        """Return, and forget, the promise that binds this worker in a round which it posts now."""
        return self._promised.pop(sequence, NO_AUTHORITY)

    # Messages of leaders

    def hear_inquiry(self, sender: str, inquire: Inquire) -> PeerMessage:
        """A new leader asks for the state of a round. From here on leaders of lower authority are refused."""
        round_ = self._rounds.get(inquire.sequence)
        if (leader := self.leaders.usurped(sender, inquire.sequence, round_)) is not None:
            return LedBy(leader)
        refusal = self.refusal(sender, inquire.sequence, inquire.authority)
        if isinstance(refusal, Superseded) and round_ is not None:
            leader = round_.leader
            if leader is not None and leader != sender and self._members.is_live(leader):
                return LedBy(leader)  # a member that led before, and begins again, learns which one leads now
        if round_ is None or refusal is not None:
            return refusal or NotPosted()
        seen = round_.promise(inquire.authority)
        voted = None if round_.plan is None or round_.vote is None else Voted(round_.plan, round_.vote)
        return Posted(round_.contribution, *round_.limits, voted, seen)

    def hear_plan(self, sender: str, plan: Plan) -> PeerMessage | StartTransfer:
        """Raises CallRefused if this worker cannot follow the plan."""
        round_ = self._rounds.get(plan.key.sequence)
        if (refusal := self.refusal(sender, plan.key.sequence, plan.authority)) is not None or round_ is None:
            return refusal or NotPosted()
        if round_.plan is not None and round_.plan == plan:
            return Done()  # it was offered again, since the first answer was lost
        if plan.authority <= round_.authority:
            return Superseded(round_.authority)
        round_.check_plan(plan, sender, self._members.me)
        self._check_seats(round_, plan)
        self._quorum.check_plan(plan)
        if (peer := self._missed.find_excess(plan)) is not None:
            raise CallRefused(f"the plan counts {peer} as more rounds of work than it has missed", "rounds")
        round_.check_opposed(plan, self._quorum.last_plan)
        round_.follow(plan, self._members.now())
        return StartTransfer(plan, self._transfers.seconds_for_parts(plan, self._members.settings.lost_seconds))

    def refusal(self, sender: str, sequence: int, authority: Authority) -> PeerMessage | None:
        """Say why a leader's message is not obeyed, if so. Raises CallRefused."""
        if self._has_ended(sequence):
            return Ended()
        round_ = self._rounds.get(sequence)
        if -authority.minus_number != self._members.number_of(sender):
            raise CallRefused(f"the authority of worker {-authority.minus_number}, sent by another worker", "number")
        if round_ is None:
            return self._promise(sequence, authority)
        check_term(authority, round_.authority)
        return Superseded(round_.authority) if authority.leader < round_.authority.leader else None

    def _promise(self, sequence: int, authority: Authority) -> PeerMessage:
        """This worker has not posted the round yet, and will obey no leader of a lower authority in it."""
        before = self._promised.get(sequence, NO_AUTHORITY)
        check_term(authority, before)
        if authority.leader < before.leader:
            return Superseded(before)
        self._promised[sequence] = max(before, authority)
        while len(self._promised) > _MAX_PROMISES:
            past = [sequence for sequence in self._promised if self._has_ended(sequence)]
            del self._promised[min(past, default=max(self._promised))]  # a promise of a near round is not forgotten
        return NotPosted()

    def _check_seats(self, round_: RoundState, plan: Plan) -> None:
        """Raises UnknownSeat. If the leader shows no invitation for `lost_seconds`, the unknown worker is told to be a
        second key of one: a quarrel (troubles.py), since each member may have met another one of the two keys first."""
        unknown = [entry.peer for entry in plan.entries if not self._has_seat(entry.peer)]
        if not unknown:
            round_.unknown_since = None
            return
        now = self._members.now()
        reason = f"the worker {unknown[0]} has no invitation that is known here, or one of another worker"
        trouble: Trouble | None = None
        round_.unknown_since = round_.unknown_since or now
        if now - round_.unknown_since > self._members.settings.lost_seconds:
            round_.unknown_since = now
            trouble = Trouble(round_.sequence, plan.authority, unknown[0], reason[:200], lie=True)
        raise UnknownSeat(reason, trouble)

    # Its own rounds

    def why_give_up(self, round_: RoundState) -> str | None:
        """Say why this worker gives the round up, or None: most others are in a later one, or have been silent for
        long."""
        reason = None
        if not self._quorum.can_still_end(round_.sequence):
            reason = "most other workers are in a later one"
        if self._quorum.sees_majority():
            round_.minority_since = None
            return reason
        now = self._members.now()
        round_.minority_since = round_.minority_since or now
        if now - round_.minority_since > timing.MINORITY_SHARE * self._members.settings.lost_seconds:
            silent = "most other workers have fallen silent: no round ends without a majority (swarm.quorum)"
            return reason or silent
        return reason

    def why_too_few(self, round_: RoundState, leader: str) -> str | None:
        """Say why this worker gives up a round whose leader has too few workers left for a plan (one accuses another of
        a lie), or None. If another member is in a later round, all can meet there; the leader's word alone is not
        enough."""
        round_.turn_to(leader)
        others = [peer.status for peer in self._members.live() if peer.name != leader]
        if any(status.gave_up(round_.sequence) for status in others):
            return "too few workers are left in it, and others are in a later one"
        return None

    def leave_lost_leader(self, round_: RoundState) -> None:
        """If the leader that has the header is not live any more, the header goes to the member that leads now. Plan,
        vote and mean stay: the next leader asks for them (`hear_inquiry`)."""
        if round_.leader is not None and not self._members.is_live(round_.leader):
            round_.turn_to(None)

    def watch_leader(self, round_: RoundState) -> str | None:
        """Return the leader that is passed over now, or None. Rounds end in their order: no leader is to blame for a
        round that waits for an earlier one."""
        return self.leaders.watch(round_, may_go_on=self._may_go_on(round_))

    def pass_over_at_deadline(self, round_: RoundState) -> str | None:
        """Return the leader that is passed over since the round has not ended in time, or None."""
        return self.leaders.record_deadline(round_, may_go_on=self._may_go_on(round_))

    def _may_go_on(self, round_: RoundState) -> bool:
        is_next = round_.sequence == min(self._rounds)
        return is_next and self._members.may_go_on() and self._quorum.sees_majority()

    # Rounds of others

    def missed_round(self) -> int | None:
        """Return the round that this worker would post next if most others have ended it; None if they have not."""
        own = self._members.status
        sequence = own.next_round
        is_missed = own.has_state and sequence not in self._rounds and self._members.most_ended(sequence)
        return sequence if is_missed else None

    def went_on_alone_after(self, last: Plan | None) -> int | None:
        """Return the last round of most others if this worker was cut off and went on alone after it; else None.

        `last`: the plan of its last round. For `lost_seconds` most others have been behind, and were not in that plan.
        Only members that have contributed to a round are counted, however many join at once.
        """
        own = self._members.status
        known = [peer for peer in self._members.with_state() if peer.status.contributed_round >= 0]
        behind = [peer for peer in known if peer.status.ended_round < own.ended_round]
        others = [peer for peer in behind if last is None or last.entry(peer.name) is None]
        had_majority = last is not None and last.majority
        if not own.has_state or had_majority or 2 * len(others) <= 1 + len(known):
            self._alone_since = None
            return None
        now = self._members.now()
        self._alone_since = self._alone_since or now
        is_sure = now - self._alone_since > self._members.settings.lost_seconds
        return others[0].status.ended_round if is_sure else None

    def may_have_missed(self, round_: RoundState, ended: int) -> bool:
        """Whether the round `ended`, which has ended elsewhere, is one before this one that this worker gave up."""
        own = self._members.status
        return not round_.ended and own.ended_round < ended < round_.sequence and ended not in self._rounds


class LeaderWatch:
    """A worker's view of leaders: it follows the one with the lowest number, unless that one lets its round wait."""

    def __init__(self, members: Membership, transfers: TransferTimes) -> None:
        self._members = members
        self._settings = members.settings
        self._transfers = transfers
        self.attendance = members.attendance
        self.patience_seconds = 0.0
        """The patience that this node would have as a leader; other leaders are expected to have the same."""
        self._left_out: LruCache[Counter[str]] = LruCache(MAX_WORKERS)
        """Leader -> member -> the rounds in a row of this leader without the member, from one that it had posted."""
        self._unfair: set[str] = set()
        """Leaders that have left a member out of so many: while they are passed over, the next one asks first."""
        self._inquiries: Counter[str] = Counter()
        self._next_inquiry: dict[str, float] = {}
        self._sequence = -1

    def usurped(self, sender: str, sequence: int, round_: RoundState | None) -> str | None:
        """Name the leader to a peer that inquires too early or too often; None if the peer may inquire."""
        leader = self._members.leader()
        if sender in (leader, self._members.me) or leader is None:
            return None
        if round_ is not None and round_.plan is not None and round_.plan.leader == leader:
            return leader  # the peer may be left out of the plan, and take the leader for one that makes none
        if sequence > self._sequence:
            self._inquiries.clear()
            self._next_inquiry.clear()
            self._sequence = sequence
        now = self._members.now()
        lost_seconds = self._settings.lost_seconds
        waits = 0.0 if round_ is None else now - round_.started
        early = self._inquiries[sender] or (sender in self._unfair and not self.attendance.may_lead(sender, now))
        if (waits < lost_seconds and early) or now < self._next_inquiry.get(sender, 0.0):
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

    def record_end(self, plan: Plan) -> str | None:
        """A round has ended. Pass over its leader, and return its name, if it has left the same member out of many in a
        row: it may do so for ever, and another leader may not."""
        leader = plan.leader
        left_out = self._left_out.get(leader) or Counter()
        for peer in self._members.live():
            if plan.entry(peer.name) is not None:
                del left_out[peer.name]
            elif peer.name in left_out or peer.status.is_in(plan.key.sequence):
                left_out[peer.name] += 1
        self._left_out.put(leader, left_out)
        if leader == self._members.me or max(left_out.values(), default=0) < _MOST_LEFT_OUT:
            return None
        left_out.clear()
        self._unfair.add(leader)
        self.attendance.pass_over(leader, self._members.now())
        return leader

    def watch(self, round_: RoundState, *, may_go_on: bool) -> str | None:
        """Pass over a leader that has what it needs and does not go on; return its name. `may_go_on`: a majority is
        here."""
        leader = round_.leader or round_.denied_by
        now = self._members.now()
        if leader in (None, self._members.me) or not may_go_on or not self._most_wait(round_.sequence):
            round_.stuck_since = None
            return None
        if round_.plan is not None and round_.planned_at is not None and round_.stuck_since is not None:
            round_.stuck_since = max(round_.stuck_since, round_.planned_at)
        round_.stuck_since = round_.stuck_since or now
        seconds = self._leader_seconds(round_)
        led_for = 0.0
        if round_.plan is not None and round_.plan.leader == leader and round_.led_since is not None:
            led_for = now - round_.led_since
        if now - round_.stuck_since > seconds or led_for > timing.PLANS_SHARE * seconds:
            assert leader is not None
            return self._pass_over(leader, round_)
        return None

    def record_deadline(self, round_: RoundState, *, may_go_on: bool) -> str | None:
        """The deadline of this round is over: pass over the leader whose plan it was, and return its name."""
        leader = round_.leader
        followed = round_.plan is not None and leader == round_.plan.leader and leader != self._members.me
        return self._pass_over(leader, round_) if leader is not None and followed and may_go_on else None

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
        """Return how long a leader may take: with a plan for its transfer; without one for the slow workers, if some
        have not posted, and else only for its inquiry, which ends when the last member has answered or is lost."""
        stall = self._settings.stall_seconds
        if round_.leader is None:
            return timing.DENIED_SHARE * self._settings.lost_seconds
        if round_.plan is not None:
            longest = timing.LONGEST_STEP_SHARE * self._settings.timeout_seconds
            return stall + min(longest, self._transfers.limit(round_.plan, stall))
        missing = self._missing(round_.sequence)
        if not missing:
            return timing.PLAN_SHARE * self._settings.lost_seconds
        slowest = max(peer.status.step_seconds for peer in missing)
        return stall + self.patience_seconds + seconds_to_post(slowest, self._settings)

    def _missing(self, sequence: int) -> list[Peer]:
        """Return the members that a leader waits for before it makes a plan."""
        expected = [peer for peer in self._members.with_state() if self.attendance.expects(peer.name)]
        return [peer for peer in expected if not peer.status.is_in(sequence)]


def check_term(authority: Authority, seen: Authority) -> None:
    """Raise CallRefused, and so promise nothing, for a term far ahead of all that this worker has seen in the round."""
    if authority.term > seen.term + _MOST_TERMS:
        raise CallRefused(f"term {authority.term} is too far ahead of the last one, {seen.term}", "term")
