"""Workers of several ranks: FSDP2 and DDP inside a worker, lanes between workers. Real processes over gloo.

Each world of processes is started once and tells all its stories; the tests then look at what it told.
"""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from diloco.core.config import SyncConfig
from diloco.engines.ranked import RankedEngine
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo
from support.processes import with_ranks
from support.ranks import RankStory, build_rank, rank_loss, told, train_rank, whole_parameters
from support.torchrun import Torchrun

pytestmark = pytest.mark.slow

PLAIN = SyncConfig(3, "fp32")
EAGER = SyncConfig(3, "fp32", outer_overlap="eager")
STREAMING = SyncConfig(5, "fp32", fragments=2, overlap_steps=2, mixing=0.5)
PARAMETERS = 10_179
Told = dict[str, Any]
EXAMPLE = Path(__file__).parents[3] / "examples" / "fsdp_loop.py"


# Stories: each rank runs them and tells what it saw


def _disturbed(engine: RankedEngine, disturb: Any) -> RankStory:
    """Something happens to the last rank of worker 1 after step 3; rounds are every second step."""
    model, optimizer = build_rank(engine, SyncConfig(2, "fp32"), sgd=True)
    story = RankStory()
    for step in range(8):
        optimizer.zero_grad()
        rank_loss(model, engine, step).backward()
        optimizer.inner_step()
        if step == 3 and engine.worker == 1 and engine.ranks.rank == engine.ranks.count - 1:
            disturb(model, optimizer)
        optimizer.post()
        optimizer.merge()
        story.digests.append(optimizer.anchor_digest())
    optimizer.finish()
    return told(story, model, optimizer, engine)


@torch.no_grad()
def _nan(model: Any, optimizer: DiLoCo) -> None:
    _local(model.exit.weight).view(-1)[0] = math.nan


@torch.no_grad()
def _diverged(model: Any, optimizer: DiLoCo) -> None:
    optimizer.loop.state.fragments[-1].anchor[7] += 1.0


def saved_and_loaded(engine: RankedEngine) -> dict[str, Any]:
    """The state of one optimizer, with a round in flight, goes by parameter name into one that never trained."""
    (model, optimizer), (other_model, other) = (build_rank(engine, STREAMING) for _ in range(2))
    for step in range(8):
        optimizer.zero_grad()
        rank_loss(model, engine, step).backward()
        optimizer.step()
    in_flight = len(optimizer.loop.in_flight)
    state = optimizer.state_dict()
    held = optimizer.loop.saved()[0]
    local = {name: _local(p) for name, p in model.named_parameters()}
    rows = {name: sum(len(piece.tensor) for piece in held[f"outer.anchor.{name}"].pieces) for name in local}
    other.load_state_dict(copy.deepcopy(state))
    other_model.load_state_dict(model.state_dict())
    for one, with_model in ((optimizer, model), (other, other_model)):
        for step in range(8, 12):
            one.zero_grad()
            rank_loss(with_model, engine, step).backward()
            one.step()
    return {
        "in flight": in_flight,
        "rows": rows == {name: len(tensor) for name, tensor in local.items()},
        "digests": optimizer.anchor_digest() == other.anchor_digest(),
        "parameters": torch.equal(whole_parameters(model), whole_parameters(other_model)),
    }


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def scaled(engine: RankedEngine) -> dict[str, Any]:
    """GradScaler, with one gradient of one rank not finite: the whole worker skips that step, and no other does."""
    model, optimizer = build_rank(engine, PLAIN, sgd=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(6):
        optimizer.zero_grad()
        loss = rank_loss(model, engine, step)
        if step == 2 and engine.worker == 1 and engine.ranks.rank == engine.ranks.count - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    optimizer.finish()
    finite = bool(whole_parameters(model).isfinite().all())
    return {"skipped": optimizer.skipped_steps, "scale": scaler.get_scale(), "finite": finite}


class Mixed(nn.Module):
    """Frozen and shared tensors, statistics, a parameter with fewer rows than ranks, and a scalar."""

    def __init__(self, worker: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((5, 3), float(worker)))
        self.gain = nn.Parameter(torch.full((1,), float(worker)))
        self.frozen = nn.Parameter(torch.full((5,), worker + 0.5, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("running", torch.full((3,), float(10 * worker + rank)))
        self.register_buffer("count", torch.tensor(worker + 7))
        self.register_buffer("none", torch.zeros(0, dtype=torch.int64))


def mixed(engine: RankedEngine) -> dict[str, Any]:
    model = Mixed(engine.worker, engine.ranks.rank)
    optimizer = DiLoCo(model, torch.optim.SGD([model.weight, model.gain], lr=0.1), engine, sync=SyncConfig(1, "fp32"))
    start = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model.running += engine.worker + engine.ranks.rank  # each rank counts by itself
        model.weight += 1.0 + engine.worker
    optimizer.step()
    optimizer.finish()
    return {"start": start, "end": {name: tensor.tolist() for name, tensor in model.state_dict().items()}}


def refused(engine: RankedEngine) -> dict[str, str]:
    """Each with a model of one parameter, on the workers of several ranks; nothing has been sent when it is refused."""
    answers: dict[str, str] = {}
    if engine.ranks.count == 1:
        return answers
    mesh = engine.ranks.mesh("cpu")
    tensors = {
        "columns": distribute_tensor(torch.zeros(4, 4), mesh, [Shard(1)]),
        "transposed": torch.zeros(4, 3).T,
    }
    for name, tensor in tensors.items():
        model = nn.ParameterDict({"weight": nn.Parameter(tensor)})
        with pytest.raises(ConfigError) as caught:
            DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), engine)
        answers[name] = str(caught.value)
    return answers


def tell(engine: RankedEngine) -> Told:
    return {
        "fsdp": train_rank(engine, PLAIN, 10),
        "ddp": train_rank(engine, PLAIN, 10, "ddp"),
        "streaming": train_rank(engine, STREAMING, 14),
        "eager": train_rank(engine, EAGER, 10, "ddp"),
        "adamw int8": train_rank(engine, SyncConfig(3, "int8"), 7),
        "early": train_rank(engine, SyncConfig(4, "fp32"), 20, stop_after=6 if engine.worker == 1 else None),
        "unequal": train_rank(engine, STREAMING, 7 if engine.worker == 1 else 18),
        "nan": _disturbed(engine, _nan),
        "diverged": _disturbed(engine, _diverged),
        "saved": saved_and_loaded(engine),
        "scaled": scaled(engine),
        "mixed": mixed(engine),
        "refused": refused(engine),
    }


# What they saw


@pytest.fixture(scope="module")
def ones() -> list[Told]:
    """Two workers of one rank each: what the others are compared with."""
    return with_ranks((1, 1), tell)


@pytest.fixture(scope="module", params=[(2, 2), (1, 2)], ids=["2 + 2 ranks", "1 + 2 ranks"])
def world(request: pytest.FixtureRequest) -> tuple[tuple[int, ...], list[Told]]:
    return request.param, with_ranks(request.param, tell)


World = tuple[tuple[int, ...], list[Told]]
TRAJECTORIES = ("fsdp", "ddp", "streaming", "eager", "early", "unequal")


@pytest.mark.parametrize("name", TRAJECTORIES)
def test_the_trajectory_is_that_of_single_ranks_up_to_rounding(ones: list[Told], world: World, name: str) -> None:
    sizes, ranks = world
    workers = [worker for worker, size in enumerate(sizes) for _ in range(size)]
    for worker, rank in zip(workers, ranks, strict=True):
        story: RankStory = rank[name]
        reference: RankStory = ones[worker][name]
        assert story.steps == reference.steps
        assert story.final == pytest.approx(reference.final, abs=1e-5)
        assert story.evaluated == pytest.approx(reference.evaluated, rel=1e-4)
        assert story.norms == pytest.approx(reference.norms, rel=1e-4)


@pytest.mark.parametrize("name", [*TRAJECTORIES, "adamw int8", "nan", "diverged"])
def test_i1_all_ranks_of_all_workers_have_the_same_digests_at_every_step_and_the_same_parameters(
    world: World, name: str
) -> None:
    _, ranks = world
    first: RankStory = ranks[0][name]
    assert len(set(first.digests)) > 1
    for rank in ranks:
        story: RankStory = rank[name]
        assert story.final == first.final
        assert story.digests[-1] == first.digests[-1]
        assert set(story.member_digests) == {first.digests[-1]}
        if name not in ("diverged", "early", "unequal"):  # in which one worker is apart for some steps, on purpose
            assert story.digests == first.digests


def test_i2_anchors_are_held_once_in_each_worker_whatever_its_ranks_share(world: World) -> None:
    sizes, ranks = world
    for name in ("fsdp", "ddp"):
        elements = [rank[name].state_elements for rank in ranks]
        assert sum(elements) == PARAMETERS * len(sizes)
        assert all(count < 0.6 * PARAMETERS for count in elements[-2:])


def test_a_worker_reports_the_bytes_of_all_its_ranks(ones: list[Told], world: World) -> None:
    _, ranks = world
    sent = {rank["fsdp"].bytes_sent for rank in ranks}
    assert len(sent) == 1
    assert sent.pop() == pytest.approx(ones[0]["fsdp"].bytes_sent, rel=0.05)


def test_nan_in_one_rank_s_shard_refuses_the_whole_worker_in_every_lane(world: World) -> None:
    _, ranks = world
    for rank in ranks:
        story: RankStory = rank["nan"]
        assert story.refused >= 1
        assert all(math.isfinite(value) for value in story.final)


def test_a_lane_with_another_anchor_is_found_and_the_whole_worker_resynchronised(world: World) -> None:
    sizes, ranks = world
    failed = [rank["diverged"].failed for rank in ranks]
    assert failed == [0] * sizes[0] + [1] * sizes[1]


def test_i5_a_state_with_a_round_in_flight_goes_by_parameter_name_into_another_optimizer(world: World) -> None:
    _, ranks = world
    for rank in ranks:
        assert rank["saved"] == {"in flight": 1, "rows": True, "digests": True, "parameters": True}


def test_a_step_that_overflows_on_one_rank_is_skipped_by_its_whole_worker_and_no_other(world: World) -> None:
    sizes, ranks = world
    fine, overflowed = ({"skipped": n, "scale": scale, "finite": True} for n, scale in ((0, 1024.0), (1, 512.0)))
    assert [rank["scaled"] for rank in ranks] == [fine] * sizes[0] + [overflowed] * sizes[1]


def two_ranks_alone(engine: RankedEngine) -> RankStory:
    return train_rank(engine, PLAIN, 7)


def test_a_single_worker_of_two_ranks_trains_as_a_single_rank_and_sends_nothing() -> None:
    [single], pair = with_ranks((1,), two_ranks_alone), with_ranks((2,), two_ranks_alone)
    for rank in pair:
        assert rank.final == pytest.approx(single.final, abs=1e-5)
        assert rank.digests == pair[0].digests
        assert rank.bytes_sent == 0


def test_frozen_tensors_buffers_and_parameters_of_few_rows_are_the_same_on_all_ranks(world: World) -> None:
    sizes, ranks = world
    for rank in ranks:
        assert rank["mixed"] == ranks[0]["mixed"]
    start, end = ranks[0]["mixed"]["start"], ranks[0]["mixed"]["end"]
    assert start["count"] == 7 and start["frozen"] == [0.5] * 5 and start["running"] == [0.0] * 3
    # worker i moved by 1 + i, and its ranks counted i + rank each: means of both workers
    assert end["running"] == pytest.approx([sum(w + (size - 1) / 2 for w, size in enumerate(sizes)) / 2] * 3)
    assert end["weight"][0] == end["weight"][4] and end["gain"] == start["gain"]


def test_what_is_not_cut_by_rows_over_the_worker_s_ranks_is_refused_with_the_remedy(world: World) -> None:
    sizes, ranks = world
    for rank in ranks[sizes[0] if sizes[0] == 1 else 0 :]:
        assert "Shard(dim=1)" in rank["refused"]["columns"]
        assert "fully_shard(model, mesh=engine.ranks.mesh(device_type))" in rank["refused"]["columns"]
        assert "make it contiguous" in rank["refused"]["transposed"]


def test_the_example_with_fsdp2_runs_under_torchrun_and_all_ranks_end_with_the_same_parameters(tmp_path: Path) -> None:
    output = Torchrun(EXAMPLE, 4, tmp_path).wait()
    ends = re.findall(r"worker (\d) rank (\d)  final loss ([\d.]+)  parameters ([0-9a-f]{16})", output)
    assert sorted((worker, rank) for worker, rank, _, _ in ends) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert len({(loss, digest) for _, _, loss, digest in ends}) == 1
    assert float(ends[0][2]) < 0.5  # the targets' variance is about 3
