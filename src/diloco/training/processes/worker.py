"""A worker process of a fixed set: finds the other workers, builds its training and runs it.

`diloco train` starts local workers (launcher.py), which begin at `train_local_rank`; under torchrun every process is a
rank and calls `train_here`. A worker of a swarm (swarm_worker.py) shares `device_of`, `on_stop_signals` and
`run_training`.
"""

import os
import platform
import signal
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

from diloco.data.corpus import Corpus
from diloco.engines.connect import gather_bytes, join, rendezvous_error
from diloco.engines.ranked import RankedEngine
from diloco.engines.torch_distributed import TorchDistributedEngine
from diloco.engines.worker_ranks import WorkerRanks
from diloco.errors import ConfigError
from diloco.history.log import EventLog, NoEvents
from diloco.training.checkpoints.resume import Start, agree_on_start
from diloco.training.config.run import RunConfig
from diloco.training.loop import Training
from diloco.training.processes.local_process import NO_CUDA, RENDEZVOUS_FILE, STOP_SIGNALS, LocalRank, ending_signals
from diloco.training.sizes.estimate import emit_sizes, sharing

START_SECONDS = 120.0


def train_local_rank(config: RunConfig, local: LocalRank) -> None:
    """Train in a process that the launcher has started, from the rendezvous on."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _meet_locally(config, local)
    corpus = Corpus.open(local.corpus_folder)
    train_here(
        config, corpus, local.run_folder, local.ranks_of_workers, local_processes=local.processes, resume=local.resume
    )


def train_here(
    config: RunConfig,
    corpus: Corpus,
    run_folder: Path,
    ranks_of_workers: tuple[int, ...],
    *,
    local_processes: int,
    resume: bool = False,
) -> None:
    """Run this process's rank in an initialised torch.distributed world.

    `ranks_of_workers`: how many each worker has; only its first one writes events. `resume`: continue from the run
    folder's checkpoints.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    device = device_of(config, local_rank)
    torch.set_num_threads(config.threads or max(1, (os.cpu_count() or 1) // local_processes))
    engine = _engine(config, ranks_of_workers)
    check_devices(device, engine.ranks)
    start = agree_on_start(run_folder, engine.worker, engine.workers, gather_bytes) if resume else None
    events = EventLog(run_folder, engine.worker) if engine.ranks.rank == 0 else NoEvents()
    if local_rank == 0 and engine.ranks.rank == 0:
        emit_sizes(config, corpus.vocab_size, engine, device, local_processes, events.emit, run_folder)
    training = Training(
        config,
        corpus,
        engine,
        events,
        device,
        run_folder,
        leader=local_rank == 0,
        restoring=start is not None and start.checkpoint is not None,
        sharing=sharing(local_processes),
    )
    on_stop_signals(training.request_stop)
    run_training(training, start)
    engine.close()
    events.close()


def run_training(training: Training, start: Start | None = None) -> None:
    """Train to the end, from `start` if it is given; after an error write how far this worker came."""
    try:
        if start is not None:
            training.resume(start)
        training.run()
    except Exception as error:
        training.fail(error)
        raise


def on_stop_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at a stop signal. The launcher has blocked these signals until here."""
    for number in ending_signals():
        signal.signal(number, lambda *_: stop())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _engine(config: RunConfig, ranks_of_workers: tuple[int, ...]) -> TorchDistributedEngine | RankedEngine:
    seconds = config.sync.timeout_seconds
    if set(ranks_of_workers) == {1}:
        return TorchDistributedEngine(backend=config.backend, timeout_seconds=seconds, owns_world=True)
    return RankedEngine(ranks_of_workers, backend=config.backend, timeout_seconds=seconds, owns_world=True)


def device_of(config: RunConfig, local_rank: int) -> torch.device:
    """Return where this process computes; of several CUDA devices each local rank takes the next one."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(NO_CUDA)
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check_devices(device: torch.device, ranks: WorkerRanks) -> None:
    """Refuse two ranks of a worker on one CUDA device, which NCCL would refuse with an unclear message."""
    machine = zlib.crc32(platform.node().encode())
    places = ranks.gather_numbers(machine, -1 if device.index is None else device.index)
    if device.type == "cuda" and len(set(places)) < ranks.count:
        raise ConfigError(
            f"{ranks.count} ranks of a worker share {len(set(places))} CUDA devices: each needs its own; use fewer "
            "ranks or workers, or --device cpu"
        )


def _meet_locally(config: RunConfig, local: LocalRank) -> None:
    """Meet the other workers through a file in the run folder, or at `port` of this machine if it is given."""
    if config.port is None:
        meeting = local.run_folder / RENDEZVOUS_FILE
        file = FileStore(str(meeting), local.processes)
        join(str(meeting), file, local.process, local.processes, START_SECONDS)
        return
    where = f"127.0.0.1:{config.port}"
    try:
        store = TCPStore("127.0.0.1", config.port, local.processes, is_master=local.process == 0)
    except (dist.DistNetworkError, dist.DistStoreError, RuntimeError) as error:
        raise rendezvous_error(where, local.process, local.processes, START_SECONDS, error) from error
    join(where, store, local.process, local.processes, START_SECONDS)
