"""How a worker finds the others: the environment that torchrun sets, or a file that local workers share.

A worker may be an *island*: what runs the loop sees one process with one device, and the engine keeps the world.
Frameworks (Hugging Face Trainer, Accelerate, Lightning, torchmetrics) look for torchrun's variables and for an
initialised torch.distributed. Where they find either, they wrap the model in DDP, share out the data, reduce metrics
and save on rank 0 only: gradients would be averaged at every step, and a worker that evaluates alone would wait for
ever. So both are taken out of their sight before they look; once it is too late that is refused.
"""

import os
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import overload

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from diloco.engines.ranked import RankedEngine, sizes_of
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.errors import ConfigError, RendezvousError

_OF_TORCHRUN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_OF_ITS_AGENT = "TORCHELASTIC_"
_KEPT = "TORCHELASTIC_ERROR_FILE"  # where torchrun looks for the traceback of a process that failed
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@overload
def connect(
    *, island: bool = ..., backend: str = ..., timeout_seconds: float = ..., start_seconds: float = ...
) -> TorchDistributedEngine: ...
@overload
def connect(
    *,
    ranks_per_worker: int | Sequence[int],
    backend: str = ...,
    timeout_seconds: float = ...,
    start_seconds: float = ...,
) -> RankedEngine: ...
def connect(
    *,
    ranks_per_worker: int | Sequence[int] | None = None,
    island: bool = False,
    backend: str = "gloo",
    timeout_seconds: float = 600.0,
    start_seconds: float = 120.0,
) -> TorchDistributedEngine | RankedEngine:
    """Take this process's place in a torch.distributed world: each rank is a worker, or several are one worker.

    Uses the world that is already there, or joins the one that torchrun's environment variables name. All must arrive
    within `start_seconds`; a round may take `timeout_seconds`.

    `island`: for a loop that a framework runs (Trainer, Accelerate, Lightning). It then sees a single process with one
    device, and leaves gradients and data alone. Call it first, before the framework looks around.

    `ranks_per_worker`: a number, or one for each worker; consecutive ranks are one worker. Before DiLoCo is built,
    shard the model over `engine.ranks.mesh("cuda")` (FSDP2) or replicate it over `engine.ranks.group` (DDP).
    """
    owns_world = not dist.is_initialized()
    if island:
        _check_island(owns_world, backend)
        keep_one_device()
    if owns_world:
        join_from_environment(start_seconds)
    if ranks_per_worker is not None:
        if island:
            raise ConfigError("island = True hides the other ranks from a framework: it takes no ranks_per_worker")
        sizes = sizes_of(ranks_per_worker, dist.get_world_size())
        return RankedEngine(sizes, backend=backend, timeout_seconds=timeout_seconds, owns_world=owns_world)
    engine = TorchDistributedEngine(backend=backend, timeout_seconds=timeout_seconds, owns_world=owns_world)
    if island:
        engine.hide_world()
        hide_place()
    return engine


def _check_island(owns_world: bool, backend: str) -> None:
    if not owns_world:
        raise ConfigError(
            "island = True, but torch.distributed is initialised already and shows the other workers: "
            "call diloco.connect(island=True) before anything else"
        )
    if backend != "gloo":
        raise ConfigError(f"island = True averages over gloo, but backend = {backend}: leave backend out")


def join_from_environment(start_seconds: float) -> None:
    """Initialise torch.distributed as torchrun's environment variables say."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if missing:
        raise ConfigError(
            f"this process does not know its place among the workers: {', '.join(missing)} not set. Start it with "
            "torchrun (torchrun --nproc-per-node 2 your_script.py), or train alone with engine=diloco.alone()"
        )
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    join(place, None, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), start_seconds)


def join(place: str, store: Store | None, rank: int, workers: int, start_seconds: float) -> None:
    """Initialise torch.distributed, over `store` or the environment's address; says what is wrong if that fails."""
    limit = timedelta(seconds=start_seconds)
    try:
        if store is None:
            dist.init_process_group("gloo", rank=rank, world_size=workers, timeout=limit)
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=workers, timeout=limit)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise rendezvous_error(place, rank, workers, start_seconds, error) from error


def gather_bytes(data: bytes) -> list[bytes]:
    """Gather bytes, of whatever number, from every rank of the world, in rank order. Collective."""
    if not dist.is_initialized():
        return [data]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(int(length) for length in lengths)
    rows = [torch.zeros(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(rows, torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8))
    return [bytes(row[: int(length)].tolist()) for row, length in zip(rows, lengths, strict=True)]


def rendezvous_error(place: str, rank: int, workers: int, seconds: float, error: Exception) -> RendezvousError:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return RendezvousError(f"the rendezvous address {place} is in use by another program: choose another port")
    return RendezvousError(
        f"worker {rank} did not meet all {workers} workers at {place} within {seconds:g} s: check that every worker "
        f"was started and can reach this address ({text.splitlines()[0] if text else error!r})"
    )


def hide_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Take what torchrun set out of the environment."""
    for name in list(environment):
        if name in _OF_TORCHRUN or (name.startswith(_OF_ITS_AGENT) and name != _KEPT):
            del environment[name]


def keep_one_device(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave this process the CUDA device of its local rank, as its only one; Trainer would use them all.

    More workers than devices share them in turn. Without CUDA nothing changes.
    """
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ConfigError(
            "island = True chooses this worker's CUDA device, but CUDA is in use already: call "
            "diloco.connect(island=True) before anything is put on a GPU"
        )
    count = torch.cuda.device_count()  # asks NVML, which leaves the choice open
    if not count:
        return
    named = environment.get(_VISIBLE)
    devices = [str(number) for number in range(count)] if named is None else named.split(",")[:count]
    environment[_VISIBLE] = devices[int(environment.get("LOCAL_RANK", 0)) % count].strip()
