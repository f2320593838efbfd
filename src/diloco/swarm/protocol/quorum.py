"""Whether enough of the last agreed members are here to end a round (docs/protocol.md).

The members that count are those of the last round that has ended here: of its plan, or live and in an earlier mean;
less those whose contribution to it no honest worker sends, and those that are known to be dead (their machine refuses
connections), to have left or to be banned. Silence is no death: a silent member may be on the other side of a network
split, and go on there. So with three or more that count, more than half of them must be here. A side without them
ends no round and changes no anchor; its workers train on, and lose nothing when the split heals. After
`minority_seconds` of silence it goes on as a run of its own.

Two members cannot tell a split from a death: each goes on without the other, as with `swarm.quorum = any`.

Five members, as worker 0 sees them. Round 7 has ended here, with a plan of the workers 0, 1, 2 and 3. Worker 4 was too
slow for it, is live, and had work in round 6: so its number is in `Plan.counted`.

    question                               answer
    counting_members()                     {0, 1, 2, 3, 4}: a majority is three of them
    is_majority({0, 1, 2})                 True; of {0, 4} False

Then 3 falls silent. It may be on the other side of a split, and counts on:

    counting_members()                     {0, 1, 2, 3, 4}
    sees_majority()                        True: 0, 1, 2 and 4 are live

2 falls silent as well, and then 1. Worker 0 sees no majority: it and 4 are two of five.

    sees_majority()                        False: no round ends here

The machines of 1 and 3 refuse connections. They are dead, so that three members count:

    counting_members()                     {0, 2, 4}
    sees_majority()                        True: 0 and 4 are two of three

4 gives round 8 up, and posts round 9:

    can_still_end(8)                       True: 0, and 2 where it is, may end it
    the same, once 2 is back in round 9    False: 0 gives round 8 up too

Had 2 come back with the end of round 8, for which 2 and 4 have voted in a plan of a majority:

    has_most_votes(that end)               True: two of three, so that its mean counts here
    rules_out_others(that end)             True: no other mean of round 8 gets two of three votes
"""

from collections.abc import Collection

from diloco.swarm.network.transport import CallRefused
from diloco.swarm.protocol.certificate import Agreed
from diloco.swarm.protocol.membership import Membership, Peer
from diloco.swarm.protocol.plan import Plan
from diloco.swarm.protocol.wire import Malformed

FEWEST = 3
_MOST_VOTES = 1024
_KEPT = 16


class Quorum:
    def __init__(self, members: Membership) -> None:
        self._members = members
        self._settings = members.settings
        self.agreed: Agreed | None = None
        """The end of the last round here, or at the worker that gave this one its state."""
        self._counted: dict[int, frozenset[str]] = {}
        """The members that counted for the last rounds, by round."""
        self._votes: dict[int, int] = {}
        """The last round that this worker has voted in, by the last one that had ended for it then."""

    @property
    def last_plan(self) -> Plan | None:
        return None if self.agreed is None else self.agreed.plan

    @property
    def last_ended(self) -> int:
        return -1 if self.last_plan is None else self.last_plan.key.sequence

    # Which members count

    def counting_members(self) -> set[str]:
        """Return the members of the last round, less the dead; empty if any number is enough: fewer than three are
        left.

        A leader that leaves live members out of its plan does not make the others fewer than they are: those that
        counted before count on.
        """
        if self.last_plan is None:
            return set()
        with_state = {peer.name for peer in self._members.with_state()}
        before = self._counted.get(self.last_ended, frozenset())
        return self._without_the_dead(self._counting_by_plan() | (before & with_state))

    def _counting_by_plan(self) -> set[str]:
        """Return the members that count by the plan of the last round, which is the same for all that have ended it."""
        if self.last_plan is None:
            return set()
        names = {entry.peer for entry in self.last_plan.entries}
        return names | {name for name, number in self._members.numbers.items() if number in self.last_plan.counted}

    def _without_the_dead(self, names: set[str]) -> set[str]:
        """Leave out the members that are known to be liars, dead or gone; empty if fewer than three are left."""
        members = self._members
        last = self.last_plan
        if last is None or self._settings.quorum == "any":
            return set()
        names = names - last.liars
        present = [
            peer for peer in members.peers.values() if self._has_proved_its_key(peer) and self._may_be_there(peer)
        ]
        known = {members.me} | {peer.name for peer in present if peer.name in names or _has_been_in_rounds(peer)}
        return names & known if len(known) >= FEWEST else set()

    def _has_proved_its_key(self, peer: Peer) -> bool:
        """Whether this node has heard the peer, or the peer has signed the certificate of the last round. A peer that
        others only name may be invented."""
        return peer.heard_at > 0 or (self.agreed is not None and peer.name in self.agreed.certificate.signatures)

    def _may_be_there(self, peer: Peer) -> bool:
        """Whether the peer is neither known to be dead or gone, nor silent for too long."""
        silent_seconds = self._members.now() - peer.lost_at if peer.lost_at and not peer.live else 0.0
        return not peer.gone and not peer.left and silent_seconds < self._settings.minority_seconds

    def numbers_that_count_next(self) -> tuple[int, ...]:
        """Return the numbers of the live members that have the state, and whose work was in an earlier mean."""
        live = [self._members.status, *(peer.status for peer in self._members.with_state())]
        return tuple(sorted({status.number for status in live if status.has_state and status.contributed_round >= 0}))

    # Are these a majority?

    def is_majority(self, names: Collection[str]) -> bool:
        """Whether these are most of the members that count; any number is, where they are fewer than three.

        Which ones count on though the last plan left them out, members on two sides of a split see differently. So it
        must be a majority of those that the plan names too: two such majorities share a member, whatever each sees.
        """
        return self.is_majority_by_plan(names) and _are_most(names, self.counting_members())

    def is_majority_by_plan(self, names: Collection[str]) -> bool:
        """Whether these are most of the members that the plan of the last round names: another member, which has ended
        the same round, may count no others."""
        return _are_most(names, self._without_the_dead(self._counting_by_plan()))

    def was_majority_in(self, sequence: int, names: Collection[str]) -> bool:
        """Whether these are most of the members that counted for a round; False where fewer than three did."""
        counted = self._counted.get(sequence) or self.counting_members()
        return bool(counted) and 2 * len(counted.intersection(names)) > len(counted)

    def sees_majority(self) -> bool:
        """Whether a majority is live, as this node sees it."""
        return self.is_majority([self._members.me, *(peer.name for peer in self._members.live())])

    def can_still_end(self, sequence: int) -> bool:
        """Whether most can still be in this round, and have not given it up for a later one."""
        statuses = {peer.name: peer.status for peer in self._members.live()} | {self._members.me: self._members.status}
        gone_on = {name for name, status in statuses.items() if status.gave_up(sequence)}
        return self.is_majority(self.counting_members() - gone_on)

    def has_most_votes(self, agreed: Agreed) -> bool:
        """Whether most of the members that count here have voted for this end of a round, where there are any.

        A certificate has the votes of most workers of its plan; some that lie together could make a plan of their own.
        """
        return self.is_majority(agreed.certificate.signatures)

    def rules_out_others(self, agreed: Agreed) -> bool:
        """Whether no other plan of the same round can count: it had a majority, and most that count here have voted."""
        return agreed.plan.majority and bool(self.counting_members()) and self.has_most_votes(agreed)

    def check_plan(self, plan: Plan) -> None:
        """A plan is followed if its leader knows the last round (else other members count for it), and if most members
        that count here are in it (else the leader may ask again, when it has heard the same). Raises CallRefused."""
        if self.last_plan is not None and self.last_plan.majority and plan.last_ended < self.last_ended:
            raise CallRefused(f"round {self.last_ended} has ended, and the plan's leader does not know that", "plan")
        if not self.is_majority([entry.peer for entry in plan.entries]):
            raise CallRefused("the plan does not have most of the members that count", "minority")

    def check_last_end(self, agreed: Agreed | None, sequence: int) -> None:
        """A member that gives this worker the state before round `sequence` shows the last round that has ended for it;
        None: none has. Raises Malformed unless most of the members that say that their work was in that round, or in a
        later one, have voted for it."""
        last = sequence - 1 if agreed is None else min(sequence - 1, agreed.plan.key.sequence)
        contributors = {
            member.name for member in self._members.with_state() if 0 <= last <= member.status.contributed_round
        }
        voted = set() if agreed is None else contributors.intersection(agreed.certificate.signatures)
        if len(contributors) >= FEWEST and 2 * len(voted) <= len(contributors):
            raise Malformed(f"{len(voted)} of {len(contributors)} members have voted for the last round that it shows")

    # What has happened

    def record_end(self, agreed: Agreed) -> None:
        """A round has ended here: from now on those count that its plan names."""
        if self.last_plan is None or agreed.plan.key.sequence >= self.last_plan.key.sequence:
            self._counted[agreed.plan.key.sequence] = frozenset(self.counting_members())
            self.agreed = agreed
            for sequence in sorted(self._counted)[:-_KEPT]:
                del self._counted[sequence]

    def adopt_end(self, agreed: Agreed | None) -> None:
        """This worker takes over a member's state, and with it the last round that has ended for that member."""
        self.agreed = agreed
        self._counted.clear()

    @property
    def last_voted(self) -> int:
        """The last round in which this worker has voted for a plan of a majority: it votes in none twice."""
        return max(self._votes.values(), default=-1)

    def record_vote(self, plan: Plan) -> None:
        if plan.majority:
            self._votes[self.last_ended] = max(plan.key.sequence, self._votes.get(self.last_ended, -1))
            for base in sorted(self._votes)[:-_MOST_VOTES]:
                del self._votes[base]

    def forget_votes_after(self, last_ended: int) -> None:
        """This worker has the state after that round. Votes after a later one were given in a run that it leaves."""
        self._votes = {base: voted for base, voted in self._votes.items() if base <= last_ended}


def _are_most(names: Collection[str], counted: Collection[str]) -> bool:
    return not counted or 2 * len(set(names).intersection(counted)) > len(counted)


def _has_been_in_rounds(peer: Peer) -> bool:
    """Whether the peer has the state, or has been in a mean: then it may be fetching the state after missed rounds."""
    return peer.status.has_state or peer.status.contributed_round >= 0
