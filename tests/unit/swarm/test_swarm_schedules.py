"""Seeded schedules of faults (src/diloco/swarm/simulator/schedules.py): a few seeds, and shrunk ones that failed once.

`benchmarks/schedules.py` runs many.
"""

import pytest

from diloco.swarm.simulator import schedules
from diloco.swarm.simulator.schedules import Fault


@pytest.mark.parametrize("seed", [24, 28, 181, 213])
def test_whatever_happens_all_workers_have_one_mean_and_come_back(seed: int) -> None:
    """24: a worker returned on the smaller side of a split; 28: workers waited in rounds of different numbers.
    181: two that had given a round up met one that had ended it.
    213: two were cut apart while the third fetched the state.
    """
    assert schedules.run(seed).problems() == []


@pytest.mark.parametrize("seed", [8, 14, 310])
def test_two_that_lie_together_neither_stop_the_others_nor_give_them_two_means(seed: int) -> None:
    """Each lies in a way that is drawn from all.

    310: the sides of a split saw other members count on after a round that most were not in, and a worker that both
    sides reached was in a majority of each.
    """
    assert schedules.run(seed, lies=schedules.draw_lies(seed, 2)).problems() == []


def test_a_schedule_has_the_same_calls_at_the_same_times_in_every_run() -> None:
    """Else a seed that fails cannot be looked into."""
    one, other = (schedules.run(8, 4, [Fault(2.0, "lossy", 5.0, (0, 1, 2))], lies=("accuses",)) for _ in range(2))
    assert one.calls == other.calls


def test_neither_half_of_a_swarm_of_four_steps_while_it_is_split() -> None:
    ended = schedules.run(1, 4, [Fault(10.0, "split", 20.0, (0, 2, 3, 1))])
    assert ended.problems() == []


def test_a_worker_that_accuses_another_stops_no_round() -> None:
    """The accused was cut off before, so that the accuser is one of two that count."""
    ended = schedules.run(8, 3, [Fault(21.0, "split", 11.0, (0, 2, 1))], lies=("accuses",))
    assert ended.problems() == []


def test_two_runs_become_one_if_the_smaller_is_some_rounds_ahead() -> None:
    """They were split before the first common round. The leader has the lowest number and no mean that counts."""
    ended = schedules.run(3, 5, [Fault(0.2, "split", 14.0, (1, 0, 3, 2, 4))])
    assert ended.problems() == []
