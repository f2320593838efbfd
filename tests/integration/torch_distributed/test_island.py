"""connect(island=True): a framework in the same process sees no other worker, and the rounds go on."""

from pathlib import Path

import pytest
import torch

import diloco
from diloco.engines.connect import hide_place, keep_one_device
from diloco.errors import ConfigError
from support.torchrun import Torchrun

TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "ROLE_NAME": "default",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
KEPT = {"PATH": "/bin", "TORCHELASTIC_ERROR_FILE": "/tmp/error.json", "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "7"}

_WORKER = """
import os
import torch, torch.distributed as dist, diloco
torch.set_num_threads(1)
engine = diloco.connect(island=True)
assert not dist.is_initialized()
assert not [name for name in os.environ if "RANK" in name or "WORLD_SIZE" in name or "MASTER" in name]
model = torch.nn.Linear(8, 1, bias=False)
inner = torch.optim.SGD(model.parameters(), lr=1.0)
optimizer = diloco.DiLoCo(model, inner, engine, sync=diloco.SyncConfig(num_inner_steps=1), outer=diloco.SGD(1.0))
start = model.weight.detach().clone()

# A world of the framework's own, made and ended meanwhile, is another one.
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
assert dist.get_world_size() == 1
model.weight.grad = torch.full_like(start, float(engine.worker))
optimizer.step()
assert torch.equal(model.weight, start - 0.5), (model.weight, start)  # the mean of what the two did
group = dist.group.WORLD
optimizer.finish()
engine.close()
assert dist.group.WORLD is group  # closing the engine leaves it alone
dist.destroy_process_group()
print("worker", engine.worker, "fine")
"""


def test_what_torchrun_set_is_hidden_and_nothing_else() -> None:
    environment = TORCHRUN | KEPT
    hide_place(environment)
    assert environment == KEPT


@pytest.mark.parametrize(
    ("count", "named", "local_rank", "kept"),
    [
        (4, None, "2", "2"),
        (2, "5, 7", "1", "7"),
        (1, None, "3", "0"),  # more workers than devices share them
        (2, "GPU-a,GPU-b,GPU-gone", "3", "GPU-b"),
        (0, None, "1", None),
        (0, "", "1", ""),
    ],
)
def test_each_local_worker_keeps_the_one_cuda_device_of_its_local_rank(
    count: int, named: str | None, local_rank: str, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    environment = {"LOCAL_RANK": local_rank} | ({} if named is None else {"CUDA_VISIBLE_DEVICES": named})
    keep_one_device(environment)
    assert environment.get("CUDA_VISIBLE_DEVICES") == kept


def test_an_island_is_refused_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="before anything is put on a GPU"):
        keep_one_device({})


def test_an_island_is_refused_once_there_is_a_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ConfigError, match="before anything else"):
        diloco.connect(island=True)


def test_an_island_over_nccl_is_refused() -> None:
    with pytest.raises(ConfigError, match="backend = nccl"):
        diloco.connect(island=True, backend="nccl")


@pytest.mark.slow
def test_two_islands_average_while_nothing_else_in_their_processes_sees_a_world(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_WORKER)
    output = Torchrun(script, 2, tmp_path).wait()
    told = [line for line in output.splitlines() if line.startswith("worker")]  # beside the warning of a single round
    assert sorted(told) == ["worker 0 fine", "worker 1 fine"]


_REPLICAS = """
import torch, diloco
from torch.nn.parallel import DistributedDataParallel
from diloco.errors import ConfigError
torch.set_num_threads(1)
engine = diloco.connect()

def refused(build):
    try:
        build()
    except ConfigError as error:
        assert "DistributedDataParallel over 2 processes (ranks 0, 1)" in str(error), error
        assert "data-parallel training" in str(error) and "process_group=engine.ranks.group" in str(error)
        return True
    return False

def adam(model):
    return torch.optim.Adam(model.parameters())

model = torch.nn.Linear(3, 1)
around = DistributedDataParallel(model)
assert refused(lambda: diloco.DiLoCo(around, adam(around), engine, H=2))   # the wrapper itself
assert refused(lambda: diloco.DiLoCo(model, adam(model), engine, H=2))     # what is inside it
del around
model = torch.nn.Linear(3, 1)
optimizer = diloco.DiLoCo(model, adam(model), engine, H=2)
later = DistributedDataParallel(model)                                     # as a framework does after DiLoCo is built
later(torch.ones(1, 3)).sum().backward()
assert refused(optimizer.step)
optimizer.unfinished.silence()
engine.close()
print("worker", engine.worker, "fine")
"""


@pytest.mark.slow
def test_ddp_around_all_workers_is_refused_whenever_it_was_built(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(_REPLICAS)
    output = Torchrun(script, 2, tmp_path).wait()
    assert sorted(line for line in output.splitlines() if line.startswith("worker")) == [
        "worker 0 fine",
        "worker 1 fine",
    ]
