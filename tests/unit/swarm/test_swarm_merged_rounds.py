"""What of a worker's rounds is lost when it takes over another state (protocol/merged_rounds.py)."""

from diloco.swarm.protocol.merged_rounds import MergedRounds
from diloco.swarm.protocol.messages import END_BYTES, MOST_ENDS, RoundsLost
from diloco.swarm.simulator.workers import plan


def merged(*rounds: tuple[int, int]) -> MergedRounds:
    """Of (round, tokens at its end)."""
    made = MergedRounds()
    for sequence, tokens in rounds:
        made.record(plan([0, 1], sequence), tokens)
    return made


def test_a_state_with_the_same_rounds_and_later_ones_loses_nothing() -> None:
    rounds = merged((5, 100), (6, 200))
    ends = {6: plan([0, 1], 6).digest[:END_BYTES]}
    assert rounds.take_over(ends, [plan([0, 1], 7)], 8, 250) is None
    assert rounds.ends_from(7).plan(0) == plan([0, 1], 7).digest[:END_BYTES]


def test_a_round_that_ended_otherwise_for_the_others_is_lost_with_the_work_since_the_one_before() -> None:
    rounds = merged((5, 100), (6, 200), (7, 300))
    assert rounds.take_over(
        {6: bytes([1] * END_BYTES), 7: plan([0, 1], 7).digest[:END_BYTES]}, [], 8, 350
    ) == RoundsLost(1, 250)
    assert rounds.ends_from(6).plan(0) == b"", "and is forgotten"


def test_rounds_after_the_state_are_lost() -> None:
    assert merged((5, 100), (6, 200), (7, 300)).take_over({}, [], 6, 350) == RoundsLost(2, 250)


def test_of_many_rounds_the_last_ones_are_known() -> None:
    rounds = merged(*((sequence, sequence) for sequence in range(MOST_ENDS + 3)))
    assert rounds.first == 3 and MergedRounds().first is None
