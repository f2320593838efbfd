"""`diloco train` under torchrun: this process is one rank of a worker, on this machine or on one of several.

The ranks take the steps of a start (start.py) together: rank 0 is observed and chooses the run folder, the first rank
of each machine prepares the text, and nothing is changed before all have accepted.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from diloco.training.config.run_file import to_toml
from diloco.training.processes.start import (
    EndedRun,
    Observe,
    Observer,
    Poll,
    WayToStart,
    check_data,
    check_device,
    check_room,
    create_run_folder,
    load_features,
    reopen_run_folder,
    summarize_run,
)
from diloco.training.processes.worker import START_SECONDS, train_here
from diloco.training.records.run_folder import RUN_FILE

_POLL_SECONDS = 0.1
_PREPARE_SECONDS = 3600.0
_NAME_BYTES = 4096


class TorchrunRank(WayToStart):
    """One rank, from the rendezvous to the summary. `run` returns the ended run on rank 0, which alone is observed; on
    the other ranks it returns None, or raises the error."""

    corpus: Corpus

    def check(self) -> None:
        check_device(self.config)
        join_from_environment(START_SECONDS)
        self._rank = dist.get_rank()
        processes = dist.get_world_size()
        self._ranks_of_workers = self.config.ranks_of_workers(processes)
        self._leads_machine = int(os.environ.get("LOCAL_RANK", self._rank)) == 0
        self._local_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes))
        self.config = replace(self.config, workers=len(self._ranks_of_workers))

    def check_out(self) -> None:
        """Check nothing: rank 0 alone will make the folder, and says then why it cannot."""

    def lock(self, folder: Path) -> AbstractContextManager[None]:
        """Lock the folder on rank 0 alone: machines may share it."""
        return run_lock(folder) if self._rank == 0 else nullcontext()

    def observe(self, observe: Observe) -> AbstractContextManager[Observer]:
        return observe(self.config) if self._rank == 0 else nullcontext(Unobserved())

    def prepare_text(self, observer: Observer) -> None:
        """Prepare the text once on each machine (and download a model): in its first rank, while the others wait."""
        del observer
        if not self._leads_machine:
            _meet()
        check_run_model(self.config)
        self.corpus = prepare(self.config.data, load_features=load_features(self.config))
        if self._leads_machine:
            _meet()
        check_data(self.config, self.corpus, self.config.workers)
        workers_here = max(1, self._local_processes * len(self._ranks_of_workers) // sum(self._ranks_of_workers))
        check_room(self.config, self.corpus.vocab_size, self.resume, workers=workers_here)

    def create_folder(self) -> Path:
        """Let rank 0 choose the run folder; every machine has one of that name."""
        name = bytearray(_NAME_BYTES)
        if self._rank == 0:
            path = str(create_run_folder(self.config)).encode()
            name[: len(path)] = path
        shared = torch.frombuffer(name, dtype=torch.uint8)
        dist.broadcast(shared, 0)
        folder = Path(bytes(shared.tolist()).rstrip(b"\0").decode())
        if self._leads_machine and self._rank != 0:
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / RUN_FILE, to_toml(self.config))
        return folder

    def check_resumable(self, folder: Path) -> None:
        worker = [worker for worker, size in enumerate(self._ranks_of_workers) for _ in range(size)][self._rank]
        check_resumable(folder, [worker], self.config, self.corpus.digest)
        _meet()  # no rank changes anything before all have accepted

    def reopen_folder(self, folder: Path) -> None:
        if self._leads_machine:
            reopen_run_folder(folder, self.config)

    def run(self, folder: Path, observer: Observer) -> EndedRun | None:
        _meet()  # rank 0 holds the folder's lock, and it is as the workers need it
        if self._rank:
            hold_as_worker(folder)
        with observer.follow(folder, resumed=self.resume is not None) as poll:
            with _polling(poll) if self._rank == 0 else nullcontext():
                error = self._train(folder)
            summary = summarize_run(folder, self.config, error) if self._leads_machine else None
        if self._rank == 0:
            assert summary is not None, "rank 0 is the first of its machine"
            return EndedRun(folder, summary, error)
        if error is not None:
            raise error
        return None

    def _train(self, folder: Path) -> DiLoCoError | None:
        try:
            train_here(
                self.config,
                self.corpus,
                folder,
                self._ranks_of_workers,
                local_processes=self._local_processes,
                resume=self.resume is not None,
            )
        except DiLoCoError as failure:
            return failure
        return None


class Unobserved(Observer):
    """Shows nothing: for every rank but the first."""

    def show_preparation(self, stage: str, done: int, total: int | None) -> None: ...

    def note(self, text: str) -> None: ...

    def follow(self, folder: Path, *, resumed: bool) -> AbstractContextManager[Poll]:  # noqa: ARG002
        return nullcontext(lambda: None)

    def with_stop_message(self, stop: Callable[[], None]) -> Callable[[], None]:
        return stop


def _meet() -> None:
    dist.monitored_barrier(timeout=timedelta(seconds=_PREPARE_SECONDS))


@contextmanager
def _polling(poll: Poll) -> Iterator[None]:
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
