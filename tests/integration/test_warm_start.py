"""The warm start: data-parallel steps before the first round, by the same optimizer."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from diloco.core.config import SyncConfig
from diloco.engines.base import Engine
from diloco.engines.local import alone
from diloco.errors import ConfigError, EngineError
from diloco.history.events import Event, WarmStartEvent
from diloco.optimizer import DiLoCo
from diloco.swarm.protocol.status import MemberStatus, RunStatus
from diloco.training.modes import DataParallel
from diloco.training.processes.swarm_worker import wait_for_warm_start
from support.elastic import ElasticWorld
from support.problem import build, flat, loss_of, net, train
from support.threads import in_threads

WARM, H = 5, 3
SYNC = SyncConfig(H, "fp32", warm_start=WARM)


def data_parallel(engine: Engine, steps: int, codec: str) -> torch.Tensor:
    model = net(seed=engine.worker)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = DataParallel(model, inner, engine, sync=SyncConfig(1, codec))  # type: ignore[arg-type]
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, engine.worker, step).backward()
        optimizer.average_gradients()
        optimizer.step()
    return flat(model)


@pytest.mark.parametrize(
    ("codec", "of_gradients"), [("fp32", "fp32"), ("fp16", "fp16"), ("int4", "int4"), ("topk", "int4")]
)
def test_the_steps_of_a_warm_start_are_data_parallel_bit_for_bit(codec: str, of_gradients: str) -> None:
    sync = replace(SYNC, codec=codec)  # type: ignore[arg-type]
    stories = in_threads(3, lambda engine: train(engine, sync, WARM))
    expected = in_threads(3, lambda engine: data_parallel(engine, WARM, of_gradients))
    for story in stories:
        assert story.final == expected[0].tolist()
        assert not [event for event in story.events if event.result and event.result.total_weight]


def test_the_first_round_comes_h_steps_after_the_warm_start_with_equal_anchors() -> None:
    stories = in_threads(2, lambda engine: train(engine, SYNC, WARM + 2 * H))
    for story in stories:
        rounds = [event for event in story.events if event.result and event.result.total_weight]
        assert [event.inner_step for event in rounds] == [WARM + H, WARM + 2 * H]
        assert all(not event.result.refused for event in rounds if event.result)
        assert [event.result.total_weight for event in rounds if event.result] == [2 * H, 2 * H], "its own steps only"
        assert story.digests == stories[0].digests and story.final == stories[0].final


def test_bytes_of_the_warm_start_are_counted() -> None:
    with_it, without = (
        in_threads(2, lambda engine, sync=sync: train(engine, sync, WARM + H))[0].bytes_sent
        for sync in (SYNC, replace(SYNC, warm_start=0))
    )
    assert with_it > without + 4 * 2 * 10_000


@pytest.mark.parametrize("steps", [WARM - 2, WARM + 1])
def test_a_worker_alone_trains_through_a_warm_start_as_without_diloco(steps: int) -> None:
    story = train(alone(), replace(SYNC, num_inner_steps=50), steps)
    model, losses = net(), []
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(min(steps, WARM)):
        inner.zero_grad()
        loss = loss_of(model, 0, step)
        loss.backward()
        inner.step()
        losses.append(loss.item())
    assert story.losses[: len(losses)] == losses
    assert (story.final == flat(model).tolist()) == (steps <= WARM)


def test_a_run_that_ends_within_the_warm_start_leaves_all_workers_equal() -> None:
    stories = in_threads(2, lambda engine: train(engine, SYNC, WARM - 2))
    assert stories[0].final == stories[1].final and stories[0].digests[-1] == stories[1].digests[-1]
    assert len(set(stories[0].member_digests)) == 1


@pytest.mark.parametrize("saved_at", [2, WARM, WARM + 1])
def test_a_state_saved_around_the_warm_start_goes_on_bit_for_bit(saved_at: int) -> None:
    def run(engine: Engine, cut: int | None) -> torch.Tensor:
        model, optimizer = build(engine, SYNC)
        for step in range(WARM + 2 * H):
            if step == cut:
                kept = optimizer.state_dict(), {name: t.clone() for name, t in model.state_dict().items()}
                model, optimizer = build(engine, SYNC, seed=9)
                optimizer.load_state_dict(kept[0])
                model.load_state_dict(kept[1])
            optimizer.zero_grad()
            loss_of(model, engine.worker, step).backward()
            optimizer.step()
        optimizer.finish()
        return flat(model)

    def whole(engine: Engine) -> torch.Tensor:
        return run(engine, None)

    expected = in_threads(2, whole)
    assert torch.equal(expected[0], expected[1])
    for found in in_threads(2, lambda engine: run(engine, saved_at)):
        assert torch.equal(found, expected[0])


def test_a_worker_that_skips_a_warm_step_takes_it_with_the_gradients_of_the_others() -> None:
    def run(engine: Engine) -> torch.Tensor:
        model, optimizer = build(engine, SYNC)
        for step in range(WARM):
            optimizer.zero_grad()
            loss_of(model, engine.worker, step).backward()
            if engine.worker == 1 and step == 2:
                optimizer.skip_step()
            else:
                optimizer.step()
        optimizer.finish()
        return flat(model)

    one, other = in_threads(2, run)
    assert torch.equal(one, other)
    plain = in_threads(2, lambda engine: train(engine, SYNC, WARM))[0].final
    assert one.tolist() != plain


def test_gradients_that_are_not_finite_are_refused_and_all_go_on_equal() -> None:
    def run(engine: Engine) -> tuple[torch.Tensor, int]:
        model, optimizer = build(engine, SYNC)
        for step in range(WARM):
            optimizer.zero_grad()
            (loss_of(model, engine.worker, step) * (torch.nan if (engine.worker, step) == (1, 1) else 1)).backward()
            optimizer.step()
        optimizer.finish()
        return flat(model), optimizer.loop.counters.contributions_refused

    (one, refused), (other, _) = in_threads(2, run)
    assert torch.equal(one, other) and torch.isfinite(one).all() and refused == 1


def test_a_gradient_that_is_much_larger_than_the_others_is_in_the_mean() -> None:
    def run(engine: Engine) -> int:
        model, optimizer = build(engine, SYNC)
        for step in range(WARM):
            optimizer.zero_grad()
            (loss_of(model, engine.worker, step) * (100 if engine.worker == 1 else 1)).backward()
            optimizer.step()
        optimizer.finish()
        return optimizer.loop.counters.contributions_refused

    assert in_threads(3, run) == [0, 0, 0]


class Normed(nn.Module):
    """With running statistics, which differ between workers until a round averages them."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = net(), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.net(x))
        return out


def test_running_statistics_stay_a_workers_own_until_the_first_round() -> None:
    def run(engine: Engine) -> tuple[torch.Tensor, int]:
        model = Normed()
        optimizer = DiLoCo(model, torch.optim.AdamW(model.parameters(), lr=1e-2), engine, sync=SYNC)
        for step in range(WARM + H):
            optimizer.zero_grad()
            loss_of(model, engine.worker, step).backward()
            optimizer.step()
        optimizer.finish()
        assert model.norm.running_mean is not None
        return torch.cat((flat(model), model.norm.running_mean)), optimizer.loop.counters.contributions_refused

    (one, refused), (other, _) = in_threads(2, run)
    assert torch.equal(one, other) and not refused


def test_a_lost_gradient_ends_the_run_since_no_worker_may_step_alone() -> None:
    with pytest.raises(EngineError, match="step 3 of the warm start has no mean gradient"):
        in_threads(2, lambda engine: train(engine, SYNC, WARM), fail_at={(0, 2 - WARM), (1, 2 - WARM)})


def test_what_a_warm_start_cannot_average_is_refused() -> None:
    model, optimizer = build(alone(), SYNC)

    def closure() -> float:
        return float(loss_of(model, 0, 0))

    with pytest.raises(ConfigError, match=r"step\(closure\) within sync.warm_start = 5"):
        optimizer.step(closure)
    with pytest.raises(ConfigError, match=r"sync\.warm_start = -1 must be at least 0"):
        SyncConfig(warm_start=-1)


def alone_for(steps: int) -> torch.Tensor:
    """The parameters of one worker that trains without DiLoCo."""
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        inner.zero_grad()
        loss_of(model, 0, step).backward()
        inner.step()
    return flat(model)


@pytest.mark.parametrize("sync", [SYNC, SyncConfig(4, fragments=2, warm_start=WARM, outer_overlap="eager")])
def test_in_a_swarm_the_founder_takes_the_warm_start_alone_and_joiners_begin_where_it_ends(sync: SyncConfig) -> None:
    world = ElasticWorld(1, sync)
    world.step(times=2)
    joining = threading.Thread(target=world.join, args=(1,), daemon=True)
    joining.start()
    world.step(0, times=WARM - 3)
    joining.join(0.05)
    assert joining.is_alive() and 1 not in world.workers, "it waits for the end of the warm start"
    world.step(0)
    joining.join(60)
    assert torch.equal(flat(world.workers[0].model), alone_for(WARM))
    joiner = world.workers[1]
    assert joiner.loop.inner_steps == WARM and torch.equal(flat(joiner.model), alone_for(WARM))
    rounds = []
    joiner.loop.on_round = rounds.append
    world.step(times=2 * sync.num_inner_steps)
    world.finish()
    assert len(world.digests()) == 1
    assert torch.equal(flat(joiner.model), flat(world.workers[0].model))
    first = joiner.loop.schedule.post_step(0) - WARM
    assert rounds[0].result.total_weight == 2 * first, "the warm start is in no mean"


@pytest.mark.parametrize("saved_at", [2, WARM])
def test_the_founder_of_a_swarm_goes_on_with_its_warm_start_bit_for_bit(saved_at: int) -> None:
    whole, cut = ElasticWorld(1, SYNC), ElasticWorld(1, SYNC)
    whole.step(times=WARM + 2 * H)
    cut.step(times=saved_at)
    kept = cut.workers[0].optimizer.state_dict(), cut.workers[0].model.state_dict()
    resumed = ElasticWorld(1, SYNC)
    resumed.workers[0].optimizer.load_state_dict(kept[0])
    resumed.workers[0].model.load_state_dict(kept[1])
    resumed.step(times=WARM + 2 * H - saved_at)
    assert torch.equal(flat(resumed.workers[0].model), flat(whole.workers[0].model))
    assert resumed.digests() == whole.digests()


def test_a_joiner_tells_how_far_the_warm_start_is_and_stops_waiting_if_its_founder_is_lost() -> None:
    def status(*members: tuple[int, bool]) -> RunStatus:
        listed = tuple(MemberStatus(n, has_state=True, position=p, live=live) for n, (p, live) in enumerate(members))
        return RunStatus("", listed, None, {}, {})

    for last in (status((WARM, True)), status((3, False)), status()):
        told: list[Event] = []
        answers = iter([status((2, True)), status((3, True)), last])
        wait_for_warm_start(answers.__next__, WARM, told.append)
        assert told == [WarmStartEvent(step=2, steps=WARM)] and next(answers, None) is None
