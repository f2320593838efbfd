"""Workers of a real swarm that die or freeze in the middle of a transfer: the others end the round without a loss."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco.core.config import SyncConfig
from support.swarm.processes import Worker, Workers
from support.swarm.trainers import Round, average, gradient

pytestmark = pytest.mark.slow

H = 3
NUMEL = 4_000_000
SYNC = SyncConfig(H, "fp32", timeout_seconds=60.0, max_norm_ratio=None)
"""All are trusted: along a line of one dimension a worker that missed a round points against the others."""


class Expected:
    """What the anchors and parameters must be, from the workers in each round. All are sizes of ramps."""

    def __init__(self) -> None:
        self.anchor = 0.0
        self.parameters: dict[int, float] = {}
        self.work: dict[int, int] = {}
        self.steps: dict[int, int] = {}

    def train(self, worker: int, steps: int = H) -> None:
        for step in range(self.steps.get(worker, 0), self.steps.get(worker, 0) + steps):
            self.parameters[worker] = self.parameters.get(worker, self.anchor) - gradient(worker, step)
        self.steps[worker] = self.steps.get(worker, 0) + steps
        self.work[worker] = self.work.get(worker, 0) + steps

    def average(self, *workers: int) -> None:
        total = sum(self.work[worker] for worker in workers)
        self.anchor = sum(self.work[worker] * self.parameters[worker] for worker in workers) / total
        for worker in workers:
            self.parameters[worker], self.work[worker] = self.anchor, 0

    def holds(self, told: list[Round], weights: dict[int, float]) -> None:
        """All of these ended the round with the same anchor: the mean of these and of no other."""
        assert [one.failure for one in told] == [None] * len(told)
        assert [one.weights for one in told] == [weights] * len(told)
        assert len({one.digest for one in told}) == 1
        assert [one.anchor for one in told] == pytest.approx([self.anchor] * len(told), rel=1e-5)


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    with Workers(tmp_path, lost_seconds=8.0, patience=60.0) as workers:
        yield workers


def begin(workers: list[Worker]) -> None:
    for worker in workers:
        worker.say(True)


def test_whoever_dies_or_freezes_in_a_transfer_is_left_out_and_nobody_elses_work_is_lost(workers: Workers) -> None:
    names = [f"machine-{index}" for index in range(4)]
    zero, one, two, three = everyone = workers.start_all(names, average, NUMEL, SYNC)
    expected = Expected()

    def train(*numbers: int) -> None:
        for number in numbers:
            expected.train(number)

    def end_calmly(*numbers: int) -> None:
        train(*numbers)
        expected.average(*numbers)
        expected.holds([everyone[number].hear(200.0) for number in numbers], dict.fromkeys(numbers, 3.0))

    def stop_within_a_transfer(victim: int, *others: int) -> None:
        """In a later round if the transfer was too quick: a worker sends one vector at least, of four bytes each."""
        numbers = sorted([victim, *others])
        while True:
            begin([everyone[number] for number in numbers])
            if everyone[victim].stop_carrying(NUMEL, 4 * NUMEL):
                return
            end_calmly(*numbers)

    begin(everyone)
    end_calmly(0, 1, 2, 3)

    stop_within_a_transfer(3, 0, 1, 2)
    three.kill()
    train(0, 1, 2)
    expected.average(0, 1, 2)
    expected.holds([worker.hear(200.0) for worker in (zero, one, two)], dict.fromkeys(range(3), 3.0))

    stop_within_a_transfer(0, 1, 2)  # it leads
    zero.freeze()
    train(0, 1, 2)
    expected.average(1, 2)
    expected.holds([worker.hear(200.0) for worker in (one, two)], {1: 3.0, 2: 3.0})
    zero.thaw()
    late = zero.hear(200.0)
    assert late.failure is not None and late.resyncs == 1
    assert late.anchor == pytest.approx(expected.anchor, rel=1e-5)

    begin([zero, one, two])
    train(0, 1, 2)
    expected.average(0, 1, 2)  # the work of the round that it missed too
    expected.holds([worker.hear(200.0) for worker in (zero, one, two)], {0: 6.0, 1: 3.0, 2: 3.0})

    stop_within_a_transfer(0, 1, 2)
    zero.kill()
    train(1, 2)
    expected.average(1, 2)
    expected.holds([worker.hear(200.0) for worker in (one, two)], {1: 3.0, 2: 3.0})
