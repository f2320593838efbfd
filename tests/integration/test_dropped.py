"""Dropped communication: the paper's rule, by a seed, without a word between the workers."""

import pytest
import torch

import diloco
from diloco.core.config import FaultsConfig, SyncConfig
from diloco.engines.base import Engine
from diloco.engines.local import alone
from diloco.errors import ConfigError
from diloco.methods.dropped_rounds import DroppedRounds
from diloco.training.config.run import RunConfig
from support.elastic import ElasticWorld
from support.in_turn import InTurn
from support.problem import anchors, build, flat, net, train
from support.threads import in_threads

FAULTS = FaultsConfig(0.5, seed=4)
WORKERS, H = 3, 2


def hits(rounds: int, faults: FaultsConfig = FAULTS) -> list[tuple[int, int]]:
    drops = [DroppedRounds(faults, worker) for worker in range(WORKERS)]
    return [(worker, n) for worker in range(WORKERS) for n in range(rounds) if drops[worker].drops(n)]


def test_the_share_that_is_dropped_is_the_one_asked_for_and_another_seed_drops_others() -> None:
    assert 0.27 < len(hits(2000, FaultsConfig(0.3))) / (2000 * WORKERS) < 0.33
    assert hits(50) == hits(50) != hits(50, FaultsConfig(0.5, seed=5))


@pytest.mark.parametrize(
    "sync",
    [SyncConfig(H, "fp32"), SyncConfig(3, "int8", overlap_steps=1, mixing=0.5), SyncConfig(H, "topk")],
    ids=["plain", "overlap", "error feedback"],
)
def test_a_dropped_outer_gradient_has_the_trajectory_of_one_that_was_lost_on_the_way(sync: SyncConfig) -> None:
    dropped, lost = InTurn(WORKERS, sync, more={"faults": FAULTS}), InTurn(WORKERS, sync, fail_at=hits(40))
    for _ in range(14):
        dropped.step()
        lost.step()
    for mine, theirs in zip(dropped.models, lost.models, strict=True):
        assert torch.equal(flat(mine), flat(theirs))
    assert sum(one.loop.counters.rounds_dropped for one in dropped.optimizers) >= 5
    assert all(one.loop.counters.rounds_failed == 0 for one in dropped.optimizers)


def test_a_worker_that_is_dropped_keeps_its_parameters_and_sends_its_work_later() -> None:
    events: list[diloco.outer.rounds.RoundEvent] = []
    world = InTurn(2, SyncConfig(H, "fp32"), more={"faults": FaultsConfig(0.5, seed=2)})
    drops = [DroppedRounds(FaultsConfig(0.5, seed=2), worker) for worker in range(2)]
    first = next(n for n in range(50) if drops[0].drops(n) and not drops[1].drops(n) and not drops[0].drops(n + 1))
    world.step(first * H)
    world.optimizers[0].loop.on_round = events.append
    world.step(H - 1)
    world.inner_step()
    own = flat(world.models[0])
    world.post()
    world.merge()
    assert torch.equal(flat(world.models[0]), own), "it goes on from its own parameters"
    assert torch.equal(flat(world.models[1]), anchors(world.optimizers[1])), "the other one follows the anchor"
    assert len(set(world.digests())) == 1, "the anchor is the same on all"
    world.step(H)
    assert [event.dropped for event in events] == [True, False]
    alone_in_it, next_one = (event.result for event in events)
    assert alone_in_it is not None and alone_in_it.contributors == (1,)
    assert next_one is not None and next_one.members[0].weight >= 2 * H


def test_all_steps_are_in_a_mean_at_the_end_and_all_end_equal() -> None:
    def run(engine: Engine) -> tuple[list[float], float]:
        story = train(engine, SyncConfig(3, fragments=2, max_norm_ratio=None), 13, faults=FAULTS)
        by_fragment = {0: 0.0, 1: 0.0, 2: 0.0}
        for event in story.events:
            if event.result is not None:
                by_fragment[event.key.fragment] += event.result.total_weight
        return story.final, min(by_fragment.values())

    stories = in_threads(WORKERS, run)
    assert all(story == (stories[0][0], 13.0 * WORKERS) for story in stories)


@pytest.mark.parametrize("overlap", ["eager", "delayed"])
def test_eager_updates_keep_the_work_of_a_dropped_round_and_workers_end_equal(overlap: str) -> None:
    sync = SyncConfig(H, outer_overlap=overlap)  # type: ignore[arg-type]
    stories = in_threads(WORKERS, lambda engine: train(engine, sync, 11, faults=FAULTS))
    assert all(story.final == stories[0].final for story in stories)
    assert sum(result.total_weight for result in stories[0].results) == 11.0 * WORKERS


def test_a_worker_alone_takes_an_outer_step_with_the_work_of_two_rounds() -> None:
    story = train(alone(), SyncConfig(H), 12, faults=FAULTS)
    weights = [event.result.total_weight for event in story.events if event.result is not None]
    assert sum(weights) == 12 and 0.0 in weights and max(weights) >= 2 * H


def test_workers_of_a_swarm_that_are_dropped_stay_in_it_and_a_joiner_follows() -> None:
    world = ElasticWorld(2, SyncConfig(H, "fp32"), faults=FAULTS)
    world.step(times=5 * H)
    world.join(2)
    world.step(times=5 * H)
    assert len(world.digests()) == 1
    world.finish()
    assert len({tuple(flat(worker.model).tolist()) for worker in world.workers.values()}) == 1
    assert sum(worker.loop.counters.rounds_dropped for worker in world.workers.values()) >= 4
    assert all(
        worker.loop.counters.resyncs == worker.loop.counters.rounds_failed == 0 for worker in world.workers.values()
    )


def test_other_faults_on_another_worker_are_another_run() -> None:
    def run(engine: Engine) -> str:
        with pytest.raises(diloco.errors.EngineError) as error:
            build(engine, SyncConfig(H), faults=FAULTS if engine.worker else None)
        return str(error.value)

    told = in_threads(2, lambda engine: run(engine) if engine.worker else str(build(engine, SyncConfig(H))))
    assert "trains something else" in told[1]


def test_drops_with_asynchronous_workers_are_refused_by_the_run_and_by_the_optimizer() -> None:
    sync, model = SyncConfig(H, asynchronous=True), net()
    with pytest.raises(ConfigError, match="what asynchronous workers always do"):
        RunConfig(sync=sync, faults=FAULTS)
    with pytest.raises(ConfigError, match="what asynchronous workers always do"):
        diloco.DiLoCo(model, torch.optim.AdamW(model.parameters()), alone(), sync=sync, faults=FAULTS)


def test_growth_without_the_learning_rates_is_refused_with_the_remedy() -> None:
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    with pytest.raises(ConfigError, match=r"learning_rates=diloco.LearningRateCurve\("):
        diloco.DiLoCo(model, inner, alone(), sync=SyncConfig(growth=0.01))
    with pytest.raises(ConfigError, match=r"no effect without sync\.growth"):
        diloco.DiLoCo(model, inner, alone(), learning_rates=diloco.LearningRateCurve(0.1, 10))
