"""The leader dies after half of the votes, as docs/architecture.md tells it: decisions alone, without a node.

Worker 0 of five leads round 1; 1 and 2 have the whole mean and have voted, 3 and 4 have not.
"""

import pytest

from diloco.swarm.protocol.certificate import Agreed, Certificate, Vote
from diloco.swarm.protocol.following import RoundFollower
from diloco.swarm.protocol.leading import InquiryAnswers, LedRoundState, SteppedDown
from diloco.swarm.protocol.membership import Membership, Peer
from diloco.swarm.protocol.messages import Inquire, Posted
from diloco.swarm.protocol.missed_rounds import MissedRounds
from diloco.swarm.protocol.plan import Authority
from diloco.swarm.protocol.quorum import Quorum
from diloco.swarm.protocol.round import RoundPhase, RoundState
from diloco.swarm.protocol.shares import Shares
from diloco.swarm.protocol.status import OwnStatus, Status
from diloco.swarm.protocol.transfer_times import TransferTimes
from diloco.swarm.protocol.troubles import Quarrels
from diloco.swarm.settings import Settings
from diloco.swarm.shared_memory import SharedMemory
from diloco.swarm.simulator.workers import NAMES, plan
from diloco.swarm.trainer import PostedRound

NOW = 100.0
ALL = [0, 1, 2, 3, 4]
PLAN = plan(ALL, sequence=1)
ASKED = Authority(2, -1)
"""The authority with which worker 1 asks, above that of worker 0's plan."""


class Member:
    """What one of the five knows when worker 0 has just fallen silent, or is known to be dead."""

    def __init__(self, number: int, *, dead: bool = False) -> None:
        own = OwnStatus(number=number, has_state=True, contributed_round=0, ended_round=0, next_round=1)
        self.members = Membership(NAMES[number], Settings("", "worker-0"), own, lambda: NOW)
        for other in set(ALL) - {number}:
            status = Status(number=other, has_state=True, contributed_round=0, ended_round=0, next_round=1)
            peer = self.members.peers[NAMES[other]] = Peer(NAMES[other], b"", ())
            self.members.hear(peer, status, hello=True)
        self.quorum = Quorum(self.members)
        self.quorum.record_end(Agreed(plan(ALL), Certificate(0, (), {})))
        memory = SharedMemory.create(0)
        header = PLAN.entries[number].contribution.header
        posted = PostedRound(PLAN.key, header, b"", "fp32", 1, 0, memory, memory, 1000.0, 600.0)
        self.round = RoundState(posted, number, started=NOW - 10.0)
        self.round.follow(PLAN, NOW - 5.0)
        missed = MissedRounds()
        transfers = TransferTimes()
        self.follower = RoundFollower(
            self.members, self.quorum, missed, transfers, {1: self.round}, lambda _: False, lambda _: True
        )
        shares = Shares(self.members, transfers)
        quarrels = Quarrels(NAMES[number])
        self.led = LedRoundState(PLAN.key, self.members, self.quorum, missed, shares, quarrels, lambda: None, None)
        if number:
            self.members.peers[NAMES[0]].lose(NOW, gone=dead)
        self.follower.leave_lost_leader(self.round)

    def votes(self) -> "Member":
        self.round.vote_for(Vote(0, (), bytes(64)))
        return self

    def answer(self) -> Posted:
        """Return what this member answers to worker 1's inquiry."""
        answer = self.follower.hear_inquiry(NAMES[1], Inquire(1, ASKED))
        assert isinstance(answer, Posted)
        return answer


def inquire(voters: list[int], *, dead: bool = False) -> Certificate | None:
    """Return what worker 1 decides when the four that are left have answered."""
    four = {number: Member(number, dead=dead) for number in ALL[1:]}
    for number in voters:
        four[number].votes()
    posted = {NAMES[number]: member.answer() for number, member in four.items()}
    return four[1].led.judge_inquiry(InquiryAnswers(ASKED, posted, frozenset(posted)), banned=())


def test_a_voter_keeps_plan_and_vote_and_turns_to_the_next_leader() -> None:
    voted = Member(2).votes()
    assert voted.round.leader is None and voted.round.phase is RoundPhase.VOTED
    assert voted.members.leader() == NAMES[1]


def test_a_worker_that_has_answered_the_next_leader_votes_for_the_old_plan_no_more() -> None:
    late = Member(3)
    assert late.round.may_vote_for(PLAN)
    late.answer()
    assert not late.round.may_vote_for(PLAN)


def test_the_votes_that_were_given_are_told_to_the_next_leader() -> None:
    answer = Member(2).votes().answer()
    assert answer.complete is not None and answer.complete.plan == PLAN
    assert Member(3).answer().complete is None


def test_a_silent_leader_may_have_ended_the_round_with_two_votes_of_others_so_the_next_one_waits() -> None:
    with pytest.raises(SteppedDown, match="workers that are silent may have ended it"):
        inquire([1, 2])


def test_a_dead_leader_has_ended_nothing_so_the_next_one_makes_a_plan_of_its_own() -> None:
    assert inquire([1, 2], dead=True) is None


@pytest.mark.parametrize("dead", [False, True])
def test_three_votes_of_five_are_the_certificate_of_the_old_plan(dead: bool) -> None:
    certificate = inquire([1, 2, 3], dead=dead)
    assert certificate is not None and set(certificate.signatures) == {NAMES[1], NAMES[2], NAMES[3]}
