"""The torch.distributed engine in real processes: I7 (bytes at the socket), I8 (the local trajectory, bit for bit)."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diloco.core.config import FaultsConfig, SyncConfig
from diloco.core.outer_optimizers import SGD, Adam, Nesterov
from diloco.core.rates import Course, LearningRateCurve
from diloco.engines.base import Engine
from diloco.engines.rounds import GlobalState
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.errors import EngineError
from diloco.optimizer import DiLoCo
from diloco.training.modes import DataParallel
from support.problem import Story, anchors, build, flat, loss_of, net, train
from support.processes import in_processes
from support.sockets import tcp_bytes_sent
from support.threads import in_threads

pytestmark = pytest.mark.slow


# I8: functions of an engine, which must give the same on both


def plain(engine: Engine) -> Story:
    return train(engine, SyncConfig(5), 13)


def every_step(engine: Engine) -> Story:
    return train(engine, SyncConfig(1, "fp32"), 6)


def int8_adam_weighted(engine: Engine) -> Story:
    return train(engine, SyncConfig(3, "int8"), 10, outer=Adam(), weight=1.0 + engine.worker)


def fragments_bf16(engine: Engine) -> Story:
    return train(engine, SyncConfig(6, "bf16", fragments=2), 14)


def streaming(engine: Engine) -> Story:
    return train(engine, SyncConfig(5, "int8", fragments=4, overlap_steps=3, mixing=0.5), 14)


def sparse_streaming(engine: Engine) -> Story:
    sync = SyncConfig(5, "topk", fragments=2, overlap_steps=2, mixing=0.5, prune=0.25)
    return train(engine, sync, 14, weight=1.0 + engine.worker)


def overlap_without_mixing(engine: Engine) -> Story:
    return train(engine, SyncConfig(4, overlap_steps=2), 11)


def eager_fragments(engine: Engine) -> Story:
    return train(engine, SyncConfig(4, "int4", fragments=2, outer_overlap="eager"), 14)


def warm_start(engine: Engine) -> Story:
    return train(engine, SyncConfig(4, "int4", warm_start=5), 14)


def varying_with_drops(engine: Engine) -> Story:
    sync = SyncConfig(3, "int8", fragments=2, overlap_steps=1, growth=0.018)
    course = Course(2, start_momentum=0.1, final_lr=0.3, plain_rounds=1, rounds=4)
    rates, faults = LearningRateCurve(0.01, 14), FaultsConfig(0.3, seed=1)
    return train(engine, sync, 14, outer=Nesterov(course=course), learning_rates=rates, faults=faults)


def second_moments(engine: Engine) -> Story:
    return train(engine, SyncConfig(3, "int8", fragments=2, second_moment_every=2), 13)


def early_end(engine: Engine) -> Story:
    return train(engine, SyncConfig(4), 20, stop_after=6 if engine.worker == 1 else None)


def early_end_of_all(engine: Engine) -> Story:
    return train(engine, SyncConfig(6, "fp32", fragments=2), 20, stop_after=7 + engine.worker)


def _disturbed(engine: Engine, disturb: Callable[[int, nn.Module, DiLoCo], None]) -> Story:
    model, optimizer = build(engine, SyncConfig(2, "fp32"))
    story = Story()
    optimizer.loop.on_round = lambda event: _back_to_the_anchor(optimizer) if event.failure else None
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, engine.worker, step).backward()
        optimizer.inner_step()
        disturb(step, model, optimizer)
        optimizer.post()
        optimizer.merge()
        story.digests.append(optimizer.anchor_digest())
    optimizer.finish()
    story.digests.append(optimizer.anchor_digest())
    story.steps = optimizer.loop.counters.rounds_failed
    story.final, story.bytes_sent = flat(model).tolist(), optimizer.loop.counters.bytes_sent
    assert bool(anchors(optimizer).isfinite().all())
    return story


def _back_to_the_anchor(optimizer: DiLoCo) -> None:
    """What a user may do when all parameters are lost."""
    for fragment in optimizer.loop.state.fragments:
        fragment.adopt_anchor()


def one_nan_then_all_nan(engine: Engine) -> Story:
    def disturb(step: int, model: Any, optimizer: DiLoCo) -> None:
        if (step == 3 and engine.worker == 1) or step == 5:
            with torch.no_grad():
                model.exit.weight[0, 0] = math.nan

    return _disturbed(engine, disturb)


def one_diverges(engine: Engine) -> Story:
    def disturb(step: int, model: Any, optimizer: DiLoCo) -> None:
        if step == 3 and engine.worker == 1:
            with torch.no_grad():
                optimizer.loop.state.fragments[0].anchor[7] += 1.0
                model.entrance.weight.view(-1)[7] += 1.0

    return _disturbed(engine, disturb)


def data_parallel(engine: Engine) -> Story:
    model = net(seed=engine.worker)
    sync = SyncConfig(1, "fp32")
    optimizer = DataParallel(model, torch.optim.AdamW(model.parameters(), lr=1e-2), engine, sync=sync)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(model, engine.worker, step).backward()
        optimizer.average_gradients()
        optimizer.step()
    optimizer.finish()
    return Story([optimizer.anchor_digest()], final=flat(model).tolist(), bytes_sent=optimizer.counters.bytes_sent)


STORIES = (
    plain,
    every_step,
    int8_adam_weighted,
    fragments_bf16,
    streaming,
    sparse_streaming,
    overlap_without_mixing,
    eager_fragments,
    warm_start,
    varying_with_drops,
    second_moments,
    early_end,
    early_end_of_all,
    one_nan_then_all_nan,
    one_diverges,
    data_parallel,
)


def all_stories(engine: TorchDistributedEngine) -> dict[str, Story]:
    return {tell.__name__: tell(engine).without_mean() for tell in STORIES}


@pytest.fixture(scope="module", params=[1, 2, 3])
def told(request: pytest.FixtureRequest) -> list[dict[str, Story]]:
    """What the workers of one world of processes saw, in all stories."""
    return in_processes(request.param, all_stories)


@pytest.mark.parametrize("tell", STORIES)
def test_i8_the_trajectory_is_that_of_the_local_engine_bit_for_bit(
    told: list[dict[str, Story]], tell: Callable[[Engine], Story]
) -> None:
    local = [story.without_mean() for story in in_threads(len(told), tell)]
    distributed = [world[tell.__name__] for world in told]
    assert distributed == local
    assert len({story.digests[-1] for story in distributed}) == 1
    assert all(story.final == distributed[0].final for story in distributed)


def test_a_worker_that_diverges_over_the_network_is_healed_and_counted(told: list[dict[str, Story]]) -> None:
    failed = [world["one_diverges"].steps for world in told]
    assert failed == [0 if worker != 1 else 1 for worker in range(len(told))]


def test_i6_a_round_in_which_all_are_refused_is_counted_as_failed_and_the_next_one_works(
    told: list[dict[str, Story]],
) -> None:
    for world in told:
        story = world["one_nan_then_all_nan"]
        assert story.steps == 1
        assert story.digests[5] == story.digests[3] != story.digests[7]


# I7


def bytes_by_both_counts(engine: TorchDistributedEngine) -> dict[str, tuple[int, int]]:
    counts = {}
    for name in ("fp32", "fp16", "int8", "topk"):
        model = net(seed=0, width=200)
        inner = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizer = DiLoCo(model, inner, engine, sync=SyncConfig(1, name), outer=SGD())
        dist.barrier()
        before = tcp_bytes_sent()
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, engine.worker, step).backward()
            optimizer.step()
        dist.barrier()
        counts[name] = (optimizer.loop.counters.bytes_sent, tcp_bytes_sent() - before)
        dist.barrier()  # a worker that leaves closes the others' sockets, and what they have sent is forgotten
    return counts


@pytest.mark.parametrize("workers", [2, 3])
def test_i7_the_bytes_reported_are_the_bytes_on_the_wire_within_framing(workers: int) -> None:
    for counts in in_processes(workers, bytes_by_both_counts):
        for reported, on_the_wire in counts.values():
            # gloo's own messages around each part, and the inner products of each round: some hundred bytes a peer
            assert reported <= on_the_wire <= 1.03 * reported + 4096 * (workers - 1)
        assert counts["fp32"][0] > 500_000
        assert counts["fp16"][0] / counts["fp32"][0] == pytest.approx(0.5, abs=0.01)
        assert counts["int8"][0] / counts["fp32"][0] == pytest.approx(0.254, abs=0.01)
        assert counts["topk"][0] / counts["fp32"][0] == pytest.approx((0.0293 + 0.0645) / 2 / 4, abs=0.003)


# The start, and what goes wrong there


class Odd(nn.Module):
    """Tensors that gloo does not know or cannot send as they are."""

    def __init__(self, worker: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4, 3), float(worker)))
        self.frozen_bf16 = nn.Parameter(torch.full((5,), worker + 0.5, dtype=torch.bfloat16), requires_grad=False)
        self.transposed = nn.Parameter(torch.full((3, 2), float(worker)).T, requires_grad=False)
        self.flags: torch.Tensor
        self.register_buffer("flags", torch.tensor([worker == 0, worker != 0]))
        self.register_buffer("count", torch.tensor(worker + 7))
        self.register_buffer("short", torch.full((2,), worker, dtype=torch.int16))
        self.register_buffer("none", torch.zeros(0, dtype=torch.int64))
        self.register_buffer("running", torch.full((3,), float(worker)))
        self.register_buffer("table", torch.full((2,), float(worker)), persistent=False)


def odd_start(engine: Engine) -> dict[str, Any]:
    model = Odd(engine.worker)
    DiLoCo(model, torch.optim.SGD([model.weight], lr=0.1), engine, sync=SyncConfig(1))
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()} | {"table": model.table.tolist()}


def refused_at_start(engine: TorchDistributedEngine) -> dict[str, str]:
    """Workers that do not belong together, each time with engines of their own, which it breaks."""
    answers = {}
    odd = engine.worker == 1

    def attempt(name: str, sync: SyncConfig, model: nn.Module, **options: Any) -> None:
        own = TorchDistributedEngine(timeout_seconds=20.0)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with pytest.raises(EngineError) as caught:
            DiLoCo(model, torch.optim.SGD(parameters, lr=0.1), own, sync=sync, **options)
        answers[name] = str(caught.value)

    frozen = nn.Linear(3, 5 if odd else 4)
    frozen.bias.requires_grad_(False)
    frozen.weight = nn.Parameter(torch.zeros(2, 2))
    attempt("H", SyncConfig(3 if odd else 2), net())
    attempt("codec", SyncConfig(2, "int8" if odd else "fp16"), net())
    attempt("model", SyncConfig(2), net(width=50 if odd else 48))
    attempt("outer", SyncConfig(2), net(), outer=SGD() if odd else Adam())
    attempt("data", SyncConfig(2), net(), identity="other corpus" if odd else "corpus")
    attempt("frozen shape", SyncConfig(2), frozen)
    return answers


def odd_provider(engine: TorchDistributedEngine) -> str:
    """An error inside the engine's thread that is not torch.distributed's: it must come out, not hang."""
    own = TorchDistributedEngine(timeout_seconds=20.0)

    def provider() -> GlobalState:
        raise ValueError("no such tensor")

    own.serve_state(provider)
    with pytest.raises(EngineError) as caught:
        own.fetch_state()
    return str(caught.value)


def at_the_start(engine: TorchDistributedEngine) -> dict[str, Any]:
    return {"odd": odd_start(engine), "refused": refused_at_start(engine), "provider": odd_provider(engine)}


@pytest.fixture(scope="module")
def starts() -> list[dict[str, Any]]:
    return in_processes(2, at_the_start)


def test_frozen_parameters_and_buffers_of_any_dtype_and_layout_are_worker_0s_at_the_start(
    starts: list[dict[str, Any]],
) -> None:
    local = in_threads(2, odd_start)
    assert [start["odd"] for start in starts] == local
    first, second = local
    assert second == first | {"table": [1.0, 1.0]}  # what is not saved with the model is computed by each worker
    assert first["count"] == 7 and first["frozen_bf16"] == [0.5] * 5 and first["flags"] == [True, False]


def test_workers_that_train_something_else_are_refused_before_the_first_step(starts: list[dict[str, Any]]) -> None:
    for start in starts:
        assert start["refused"].keys() == {"H", "codec", "model", "outer", "data", "frozen shape"}
        for name, text in start["refused"].items():
            assert "trains something else than worker" in text, name


def test_an_unexpected_error_inside_the_engine_reaches_whoever_waits(starts: list[dict[str, Any]]) -> None:
    assert all("no such tensor" in start["provider"] for start in starts)


def restored_by_worker_0_alone(engine: TorchDistributedEngine) -> str:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(EngineError) as caught:
        DiLoCo(model, inner, engine, sync=SyncConfig(2), restoring=engine.worker == 0)
    return str(caught.value)


def test_restoring_on_one_worker_only_is_told_at_once() -> None:
    for text in in_processes(2, restored_by_worker_0_alone):
        assert "build DiLoCo with the same `restoring` on every one" in text
