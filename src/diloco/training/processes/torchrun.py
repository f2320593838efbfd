"""`diloco train` under torchrun: this process is one rank of a worker, on this machine or on one of several."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from diloco.atomic_files import write_file
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.connect import join_from_environment
from diloco.errors import DiLoCoError
from diloco.run_lock import hold_as_worker, run_lock
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.processes.run import EndedRun, Observe, summarize_run
from diloco.training.processes.run_setup import (
    check_data,
    check_device,
    check_room,
    create_run_folder,
    load_features,
    reopen_run_folder,
)
from diloco.training.processes.worker import START_SECONDS, train_here
from diloco.training.records.run_folder import RUN_FILE

_POLL_SECONDS = 0.1
_PREPARE_SECONDS = 3600.0
_NAME_BYTES = 4096


def train_as_rank(config: RunConfig, resume: Path | None, observe: Observe) -> EndedRun | None:
    """This process's rank, from the rendezvous to the summary. Returns the run on rank 0, which alone is observed; the
    other ranks return None, or raise the error."""
    check_device(config)
    join_from_environment(START_SECONDS)
    rank, processes = dist.get_rank(), dist.get_world_size()
    sizes = config.sizes(processes)
    leader = int(os.environ.get("LOCAL_RANK", rank)) == 0
    config = replace(config, workers=len(sizes))
    corpus = _prepare(config, leader)
    check_data(config, corpus, config.workers)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    check_room(config, corpus.vocab_size, resume, workers=max(1, local * len(sizes) // processes))
    resumed = resume is not None
    with ExitStack() as until_summarized:
        folder = _agreed_folder(config, rank, leader) if resume is None else resume
        if rank == 0:  # machines may share the folder: no other run may train in it meanwhile
            until_summarized.enter_context(run_lock(folder))
        if resumed:
            worker = [worker for worker, size in enumerate(sizes) for _ in range(size)][rank]
            check_resumable(folder, [worker], config, corpus.digest)
            _meet()  # no rank changes anything before all have accepted
        _take_folder(folder, config, leader, resumed)
        poll: Callable[[], None] | None = None
        if rank == 0:
            observer = until_summarized.enter_context(observe(config))
            poll = until_summarized.enter_context(observer.follow(folder, resumed=resumed))
        with nullcontext() if poll is None else _polling(poll):
            error = _train(config, corpus, folder, sizes, resumed)
        if leader:
            summary = summarize_run(folder, config, error)
            if rank == 0:
                return EndedRun(folder, summary, error)
    if error is not None:
        raise error
    return None


def _train(config: RunConfig, corpus: Corpus, folder: Path, sizes: tuple[int, ...], resume: bool) -> DiLoCoError | None:
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", sum(sizes)))
        train_here(config, corpus, folder, sizes, local_processes=local, resume=resume)
    except DiLoCoError as failure:
        return failure
    return None


def _take_folder(folder: Path, config: RunConfig, leader: bool, resume: bool) -> None:
    """Reopen the folder of a resumed run, and hold its lock for as long as this process lives."""
    if leader and resume:
        reopen_run_folder(folder, config)
    _meet()
    if dist.get_rank():
        hold_as_worker(folder)


def _prepare(config: RunConfig, leader: bool) -> Corpus:
    """Each machine tokenises (and downloads a model) once: its first rank, while the others wait."""
    if not leader:
        _meet()
    check_run_model(config)
    corpus = prepare(config.data, load_features=load_features(config))
    if leader:
        _meet()
    return corpus


def _meet() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=_PREPARE_SECONDS))


def _agreed_folder(config: RunConfig, rank: int, leader: bool) -> Path:
    """Rank 0 chooses the run folder; every machine has one of that name."""
    name = bytearray(_NAME_BYTES)
    if rank == 0:
        path = str(create_run_folder(config)).encode()
        name[: len(path)] = path
    shared = torch.frombuffer(name, dtype=torch.uint8)
    dist.broadcast(shared, 0)
    folder = Path(bytes(shared.tolist()).rstrip(b"\0").decode())
    if leader and rank != 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / RUN_FILE, to_toml(config))
    _meet()
    return folder


@contextmanager
def _polling(poll: Callable[[], None]) -> Iterator[None]:
    """Call `poll` several times a second in another thread, while this one trains."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            poll()

    thread = threading.Thread(target=watch, name="diloco-display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        poll()
