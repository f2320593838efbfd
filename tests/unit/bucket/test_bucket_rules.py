"""What the workers of a bucket decide (bucket/rules.py): pure functions of listings and the store's clock."""

import math

import pytest

from diloco.bucket import rules
from diloco.bucket.records import RoundPlan, WorkerBeat
from diloco.core.merging import MAX_WEIGHT_ROUNDS
from diloco.engines.rounds import RoundKey
from diloco.swarm.protocol.status import Status
from support.bucket import plan_of


def member(number: int, *, at: float, has_state: bool = True, first_round: int = 0, left: bool = False) -> object:
    status = Status(number=number, has_state=has_state)
    return rules.KnownMember(WorkerBeat(status, 40.0, first_round, left), at)


def seen_after(*plans: RoundPlan) -> rules.RoundsSeen:
    seen = rules.RoundsSeen()
    for index, plan in enumerate(plans):
        seen.record(plan, 10.0 * index)
    return seen


def test_a_round_waits_for_live_workers_that_have_the_state_and_were_in_a_round_not_long_ago() -> None:
    members = {
        1: member(1, at=90.0),
        2: member(2, at=50.0),  # silent for longer than it said
        3: member(3, at=90.0, has_state=False),
        4: member(4, at=90.0, left=True),
        5: member(5, at=90.0, first_round=8),  # it has joined, and was in no round yet
        6: member(6, at=90.0),  # it is alive, and has been in none for long
    }
    seen = rules.RoundsSeen(last_in={0: 7, 1: 7, 2: 7, 3: 7, 4: 7, 6: 2})
    assert rules.expected_members(members, seen, 8, own=0, now=95.0) == {0, 1, 5}


def test_a_round_is_planned_at_once_when_all_have_posted_and_else_when_patience_with_the_rest_is_over() -> None:
    posted = {0: 100.0, 1: 103.0}
    assert rules.seconds_to_plan(posted, {0, 1}, now=103.0, patience_seconds=60.0) == 0.0
    assert rules.seconds_to_plan(posted, {0, 1, 2}, now=110.0, patience_seconds=60.0) == pytest.approx(53.0)
    assert rules.seconds_to_plan(posted, {0, 1, 2}, now=170.0, patience_seconds=60.0) == 0.0
    assert rules.seconds_to_plan(posted, {0, 1, 2, 3, 4}, now=1e9, patience_seconds=60.0) == math.inf


def test_a_worker_that_missed_rounds_of_a_fragment_counts_with_the_work_of_as_many_and_no_more_than_the_bound() -> None:
    both, alone = [plan_of(RoundKey(0, 0), (0, 1))], [plan_of(RoundKey(n, 0), (0,)) for n in range(1, 10)]
    assert rules.rounds_of_work(seen_after(*both), 0, [0, 1]) == ()
    assert rules.rounds_of_work(seen_after(*both, *alone[:2]), 0, [0, 1]) == (1, 3)
    assert rules.rounds_of_work(seen_after(*both, *alone), 0, [0, 1]) == (1, MAX_WEIGHT_ROUNDS)
    assert rules.rounds_of_work(seen_after(*both, *alone[:2]), 1, [0, 1]) == (), (
        "of another fragment there was no round"
    )


def test_the_usual_time_follows_the_times_between_plans_on_the_stores_clock() -> None:
    seen = rules.RoundsSeen()
    for made_at in (3600.0, 3610.0, 3640.0):
        seen.record(plan_of(RoundKey(0, 0), (0,)), made_at)
    assert seen.usual_seconds == 20.0


def test_polling_follows_the_time_waited_between_its_bounds() -> None:
    assert [rules.poll_seconds(waited, 0.5, 10.0) for waited in (0.0, 20.0, 1e6)] == [0.5, 2.0, 10.0]


def test_joiners_get_a_state_every_few_rounds_and_all_rounds_since_the_last_but_one() -> None:
    assert rules.is_state_due(0, None, 10)
    assert not rules.is_state_due(9, 0, 10) and rules.is_state_due(10, 0, 10)
    assert rules.first_kept([]) is None and rules.first_kept([10]) is None
    assert rules.first_kept([30, 10, 20]) == 20


def test_the_lowest_free_number_is_taken_and_strange_names_take_none() -> None:
    assert rules.next_number({0, 1, None, 3}) == 2
    assert rules.next_number(set(range(1024))) is None
