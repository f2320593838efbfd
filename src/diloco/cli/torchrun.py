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
from rich.console import Console

from diloco.atomic_files import write_file
from diloco.cli.display.live import Display
from diloco.cli.display.report import print_report
from diloco.cli.train import begin_again, both, check_data, is_complete, load_features, new_run_folder, noting
from diloco.data.corpus import Corpus
from diloco.data.preparation.corpus_cache import prepare
from diloco.engines.connect import join_from_environment
from diloco.errors import DiLoCoError
from diloco.sinks.process import SinkProcesses
from diloco.sinks.registry import check_installed
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.processes.run_lock import hold_as_worker, run_lock
from diloco.training.processes.worker import START_SECONDS, train_here
from diloco.training.records.summary import write_summary

_POLL_SECONDS = 0.1
_PREPARE_SECONDS = 3600.0
_NAME_BYTES = 4096


def train_as_rank(config: RunConfig, console: Console, resume: Path | None) -> None:
    """This process's worker, from the rendezvous to the summary; the first worker shows the display."""
    first = os.environ.get("RANK") == "0"
    console.quiet = not first  # one of them speaks for all
    if first:  # where the sinks will be
        check_installed(config.sink_names)
    if resume is not None and is_complete(console, resume, config):
        return
    join_from_environment(START_SECONDS)
    rank, processes = dist.get_rank(), dist.get_world_size()
    sizes = config.sizes(processes)
    workers = len(sizes)
    leader = int(os.environ.get("LOCAL_RANK", rank)) == 0
    config = replace(config, workers=workers)
    corpus = _prepared(config, leader)
    check_data(config, corpus, workers)
    resumed = resume is not None
    with ExitStack() as held:
        folder = _agreed_folder(config, rank, leader) if resume is None else resume
        if rank == 0:  # machines may have a folder in common: no other run goes on in it meanwhile
            held.enter_context(run_lock(folder))
        if resumed:
            worker = [worker for worker, size in enumerate(sizes) for _ in range(size)][rank]
            check_resumable(folder, [worker], config, corpus.digest)
            _meet()  # nobody changes anything before all have accepted it
        _take_folder(folder, config, leader, resumed)
        sinks = held.enter_context(SinkProcesses(config.sink_names if rank == 0 else (), folder, noting(console)))
        with _shown(config, console, folder, sinks.poll, resumed) if rank == 0 else nullcontext():
            error = _train(config, corpus, folder, sizes, resumed)
        if leader:
            summary = write_summary(folder, config, None if error is None else str(error))
            if rank == 0:
                print_report(console, folder, summary)
    if error is not None:
        raise error


def _train(config: RunConfig, corpus: Corpus, folder: Path, sizes: tuple[int, ...], resume: bool) -> DiLoCoError | None:
    try:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", sum(sizes)))
        train_here(config, corpus, folder, sizes, local_processes=local, resume=resume)
    except DiLoCoError as failure:
        return failure
    return None


def _take_folder(folder: Path, config: RunConfig, leader: bool, resume: bool) -> None:
    """For as long as this process lives."""
    if leader and resume:
        begin_again(folder, config)
    _meet()
    if dist.get_rank():
        hold_as_worker(folder)


def _prepared(config: RunConfig, leader: bool) -> Corpus:
    """Each machine tokenises (and downloads a model) once: its first worker, while the others wait."""
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
    """Worker 0 chooses the run folder; every machine has one of that name."""
    name = bytearray(_NAME_BYTES)
    if rank == 0:
        path = str(new_run_folder(config)).encode()
        name[: len(path)] = path
    shared = torch.frombuffer(name, dtype=torch.uint8)
    dist.broadcast(shared, 0)
    folder = Path(bytes(shared.tolist()).rstrip(b"\0").decode())
    if leader and rank != 0:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.toml", to_toml(config))
    _meet()
    return folder


@contextmanager
def _shown(
    config: RunConfig, console: Console, folder: Path, also: Callable[[], None], resumed: bool
) -> Iterator[None]:
    """The display in a thread of its own, while this one trains."""
    ended = threading.Event()
    with Display(console, config) as display:
        poll = both(display.follow(folder, resumed=resumed), also)

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
