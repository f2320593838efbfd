"""Workers of different speeds in synchronous rounds: all arrive together, and all their work is in the mean.

Speeds are given: each worker's clock counts a fixed time for each of its inner steps, and no test waits for a real one.
"""

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.errors import ConfigError
from diloco.methods.dynamic_steps import DynamicSteps
from diloco.optimizer import DiLoCo
from support.elastic import ElasticWorld, Worker
from support.methods import method_of
from support.problem import Net, build, loss_of
from support.processes import in_processes
from support.threads import in_threads

H = 12
PLAIN = SyncConfig(H, "fp32", dynamic_steps=True, timeout_seconds=60.0)
SYNCS = {
    "plain": PLAIN,
    "fragments": replace(PLAIN, fragments=3),
    "overlap": replace(PLAIN, overlap_steps=4),
    "streaming": replace(PLAIN, codec="int8", fragments=3, overlap_steps=3, mixing=0.5),
    "warm start": replace(PLAIN, warm_start=5),
}
over_syncs = pytest.mark.parametrize("sync", SYNCS.values(), ids=SYNCS)
Seconds = Sequence[float]


class Run:
    """One worker that needs seconds[worker] for each inner step; its virtual time is the time of its own steps."""

    def __init__(self, engine: Engine, sync: SyncConfig, seconds: Seconds) -> None:
        self.worker = engine.worker
        self.model, self.optimizer = build(engine, sync)
        self.loop = self.optimizer.loop
        give_clock(self.optimizer, lambda: self.loop.state.steps_taken * seconds[engine.worker])
        self.weights: list[list[float]] = []
        self.loop.on_round = lambda event: self.weights.append([m.weight for m in event.result.members])

    def step(self) -> None:
        steps(self.model, self.optimizer, self.worker, self.loop.state.steps_taken)

    def until(self, position: int) -> None:
        while self.optimizer.position < position:
            self.step()


def give_clock(optimizer: DiLoCo, clock: Callable[[], float]) -> None:
    pace = method_of(optimizer.loop, DynamicSteps)
    assert pace is not None
    pace.clock = clock
    pace.begin_anew()


def steps(model: Net, optimizer: DiLoCo, worker: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, worker, number).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("sync", "seconds"),
    [*((sync, (1.0, 5.0, 1.5)) for sync in SYNCS.values()), (SYNCS["streaming"], (2.0, 40.0))],
    ids=[*SYNCS, "streaming, one step a turn"],
)
def test_after_the_first_round_each_takes_steps_by_its_speed_and_all_its_work_is_in_the_means(
    sync: SyncConfig, seconds: Seconds
) -> None:
    turns = 4

    def work(engine: Engine) -> tuple[Run, list[int]]:
        run, taken = Run(engine, sync, seconds), []
        for turn in range(1, turns + 1):
            run.until(sync.warm_start + turn * H)
            assert run.optimizer.position == sync.warm_start + turn * H, "all stand at the end of every turn"
            taken.append(run.loop.state.steps_taken - sync.warm_start)
        run.optimizer.finish()
        return run, taken

    runs = in_threads(len(seconds), work)
    assert len({run.optimizer.anchor_digest() for run, _ in runs}) == 1
    assert all(run.loop.counters.rounds_failed == 0 for run, _ in runs)
    for worker, (_, taken) in enumerate(runs):
        expected = max(1, int(H * min(1.0, 1.02 * min(seconds) / seconds[worker])))
        per_turn = [after - before for before, after in zip([0, *taken], taken, strict=False)]
        assert per_turn[-1] == per_turn[-2] == expected
        if not sync.overlap_steps:  # with it, steps between a fragment's last post and the end are not sent
            first = runs[0][0]
            in_means = sum(weights[worker] for weights in first.weights)
            assert in_means == taken[-1] * first.loop.state.num_fragments


@pytest.mark.parametrize(
    ("sync", "slow_steps"),
    [
        (PLAIN, [12, 4]),
        (SYNCS["warm start"], [4, 4]),  # its steps tell the speeds
        (SYNCS["fragments"], [4 + 2, 4]),  # of three: known after the first, 8 of 12 positions are left
    ],
    ids=["plain", "warm start", "fragments"],
)
def test_a_slow_worker_takes_all_steps_only_until_the_speeds_are_known(sync: SyncConfig, slow_steps: list[int]) -> None:
    def work(engine: Engine) -> list[int]:
        run, taken = Run(engine, sync, (1.0, 3.0)), [sync.warm_start]
        for turn in (1, 2):
            run.until(sync.warm_start + turn * H)
            taken.append(run.loop.state.steps_taken)
        run.optimizer.finish()
        return [after - before for before, after in pairwise(taken)]

    assert in_threads(2, work) == [[H, H], slow_steps]


@over_syncs
def test_a_run_that_was_saved_in_a_turn_goes_on_bit_for_bit(sync: SyncConfig) -> None:
    seconds = (1.0, 3.0)

    def whole(engine: Engine) -> tuple[str, list[int], dict[str, Any], dict[str, Any]]:
        run = Run(engine, sync, seconds)
        run.until(2 * H + sync.warm_start + H // 4)  # both have posted the same rounds
        saved = deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
        run.until(5 * H + sync.warm_start)
        return run.optimizer.anchor_digest(), [run.loop.state.steps_taken], *saved

    def resumed(engine: Engine) -> tuple[str, list[int]]:
        run = Run(engine, sync, seconds)
        run.model.load_state_dict(stories[engine.worker][2])
        run.optimizer.load_state_dict(stories[engine.worker][3])
        run.until(5 * H + sync.warm_start)
        return run.optimizer.anchor_digest(), [run.loop.state.steps_taken]

    stories = in_threads(2, whole)
    assert stories[0][1] != stories[1][1]
    assert in_threads(2, resumed) == [story[:2] for story in stories]


@pytest.mark.parametrize(
    ("sync", "counts"), [*((sync, (3 * H, 7)) for sync in SYNCS.values()), (SYNCS["streaming"], (5, 30))]
)
def test_workers_that_end_apart_end_with_the_same_parameters_and_train_on(
    sync: SyncConfig, counts: tuple[int, int]
) -> None:
    def work(engine: Engine) -> tuple[str, int, str]:
        run = Run(engine, sync, (1.0, 3.0))
        for _ in range(sync.warm_start + counts[engine.worker]):
            run.step()
        run.optimizer.finish()
        first, position = run.optimizer.anchor_digest(), run.optimizer.position
        run.until(position + 2 * H)
        run.optimizer.finish()
        return first, position, run.optimizer.anchor_digest()

    first, second = in_threads(2, work)
    assert first == second


def test_a_stop_of_the_fast_worker_ends_all_together() -> None:
    def work(engine: Engine) -> str:
        run = Run(engine, SYNCS["streaming"], (1.0, 3.0))
        while run.optimizer.position < (3 * H - 1 if engine.worker == 0 else 100) and not run.optimizer.stopping:
            run.step()
        run.optimizer.finish(early=engine.worker == 0)
        return run.optimizer.anchor_digest()

    first, second = in_threads(2, work)
    assert first == second


def test_the_position_goes_no_further_than_the_end_of_the_run() -> None:
    def work(engine: Engine) -> tuple[int, str]:
        run = Run(engine, PLAIN, (1.0, 40.0))
        run.loop.end_at(3 * H + 5)
        run.until(3 * H + 5)
        ended = run.optimizer.position
        run.optimizer.finish()
        return ended, run.optimizer.anchor_digest()

    first, second = in_threads(2, work)
    assert first == second and first[0] == 3 * H + 5


def test_speeds_that_change_change_the_steps() -> None:
    seconds = [1.0, 3.0]

    def work(engine: Engine) -> list[int]:
        run, taken, clock = Run(engine, PLAIN, (1.0, 1.0)), [], [0.0]
        give_clock(run.optimizer, lambda: clock[0])
        for turn in range(1, 7):
            before = run.loop.state.steps_taken
            while run.optimizer.position < turn * H:
                clock[0] += seconds[engine.worker] if turn < 4 else 1.0
                run.step()
            taken.append(run.loop.state.steps_taken - before)
        return taken

    assert in_threads(2, work)[1] == [H, H // 3, H // 3, H // 3, H, H]


def test_equal_workers_train_as_without_it() -> None:
    def work(engine: Engine, sync: SyncConfig) -> str:
        model, optimizer = build(engine, sync)
        if sync.dynamic_steps:
            give_clock(optimizer, lambda: float(optimizer.loop.state.steps_taken))
        for step in range(3 * H):
            steps(model, optimizer, engine.worker, step)
        optimizer.finish()
        return optimizer.anchor_digest()

    dynamic = in_threads(2, lambda engine: work(engine, PLAIN))
    assert dynamic == in_threads(2, lambda engine: work(engine, SyncConfig(H, "fp32")))


def test_what_does_not_go_together_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match=r"sync\.dynamic_steps = true: a worker counts its own share"):
        replace(PLAIN, outer_overlap="eager")
    with pytest.raises(ConfigError, match=r"sync\.growth = 0\.1 and sync\.dynamic_steps = true"):
        replace(PLAIN, growth=0.1)


def swarm_steps(world: ElasticWorld, seconds: Seconds, turns: int) -> dict[int, list[int]]:
    """The steps that each worker took in each turn, each in a thread of its own."""
    taken: dict[int, list[int]] = {number: [] for number in world.workers}

    def run(worker: Worker) -> None:
        state = worker.loop.state
        give_clock(worker.optimizer, lambda: state.steps_taken * seconds[worker.number])
        first = worker.optimizer.position // H
        for turn in range(first + 1, first + turns + 1):
            before = state.steps_taken
            while worker.optimizer.position < turn * H:
                steps(worker.model, worker.optimizer, worker.number, state.steps_taken)
            taken[worker.number].append(state.steps_taken - before)

    threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in world.workers.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100.0)
    return taken


def test_in_a_swarm_a_slow_worker_arrives_by_itself_and_a_joiner_too() -> None:
    """Rounds of this world end only when all have posted, and no worker is called for."""
    world = ElasticWorld(2, PLAIN)
    assert swarm_steps(world, (1.0, 3.0), 3) == {0: [H, H, H], 1: [H, H // 3, H // 3]}
    joiner = world.join(2)
    assert joiner.optimizer.position == 3 * H
    assert swarm_steps(world, (1.0, 3.0, 2.0), 3) == {0: [H] * 3, 1: [H // 3] * 3, 2: [H, H // 2, H // 2]}
    assert len(world.digests()) == 1
    assert not any(worker.loop.counters.rounds_failed for worker in world.workers.values())


def test_a_worker_of_a_swarm_that_is_called_before_it_arrives_goes_on_from_there() -> None:
    world = ElasticWorld(2, PLAIN)
    world.step(0, times=H - 1)
    world.inner_step(0)
    world.post(0)
    world.step(1, times=3)
    world.swarm.call(0)
    world.inner_step(1)
    world.post(1)
    world.merge()
    assert [worker.optimizer.position for worker in world.workers.values()] == [H, H]
    assert len(world.digests()) == 1
    swarm_steps(world, (1.0, 3.0), 2)
    assert [worker.optimizer.position for worker in world.workers.values()] == [3 * H, 3 * H]
    assert len(world.digests()) == 1


# Real processes


def ended_at(engine: Engine, sync: SyncConfig, seconds: Seconds) -> tuple[str, int, int]:
    run = Run(engine, sync, seconds)
    run.until(2 * H)
    run.optimizer.finish()
    return run.optimizer.anchor_digest(), run.loop.state.steps_taken, run.loop.counters.rounds_failed


@pytest.mark.slow
def test_over_gloo_the_trajectory_is_that_of_the_local_engine() -> None:
    there = in_processes(2, ended_at, PLAIN, (1.0, 3.0))
    assert there == in_threads(2, lambda engine: ended_at(engine, PLAIN, (1.0, 3.0)))
