"""A run on this machine, from its folder to its summary: `diloco train` with local workers. Torch-free.

swarm_run.py and join.py are the same for workers of a swarm, torchrun.py for one rank that torchrun has started. What
the user sees meanwhile comes from an `Observer`.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diloco.data.order import worker_shards
from diloco.data.preparation.corpus_cache import prepare
from diloco.errors import DiLoCoError, WorkerFailed, with_remedy
from diloco.history.log import read_events
from diloco.run_lock import run_lock
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.launcher import EndTogether, LocalWorkers, disk_is_full
from diloco.training.processes.local_process import LocalRank, heard_signals
from diloco.training.processes.run_setup import (
    check_data,
    check_device,
    check_out,
    check_room,
    create_run_folder,
    device_note,
    load_features,
    reopen_run_folder,
)
from diloco.training.records.run_folder import resume_command
from diloco.training.records.summary import Summary, write_summary

_LOOK_SECONDS = 5.0
Poll = Callable[[], None]


class Observer(Protocol):
    """Shows a run to its user."""

    def show_preparation(self, stage: str, done: int, total: int | None) -> None:
        """Progress of the data's preparation."""

    def note(self, text: str) -> None:
        """Something that the user should know."""

    def follow(self, folder: Path, *, resumed: bool) -> AbstractContextManager[Poll]:
        """Around training and the summary; the yielded function is called several times a second."""

    def with_stop_message(self, stop: Callable[[], None]) -> Callable[[], None]:
        """`stop`, with a message to the user at its first call."""


Observe = Callable[[RunConfig], AbstractContextManager[Observer]]


@dataclass(frozen=True)
class EndedRun:
    folder: Path
    summary: Summary
    error: DiLoCoError | None


def train_locally(config: RunConfig, resume: Path | None, observe: Observe) -> EndedRun:
    """Start a run with a fixed set of workers on this machine, or continue the one in the folder `resume`."""
    check_device(config)
    check_run_model(config)
    worker_shards(config.data.shards, 0, config.workers)
    with ExitStack() as until_summarized:
        if resume is None:
            check_out(config)
        else:
            until_summarized.enter_context(run_lock(resume))
        observer = until_summarized.enter_context(observe(config))
        if (note := device_note(config)) is not None:
            observer.note(note)
        corpus = prepare(config.data, observer.show_preparation, load_features(config))
        check_data(config, corpus, config.workers)
        check_room(config, corpus.vocab_size, resume)
        if resume is None:
            folder = create_run_folder(config)
            until_summarized.enter_context(run_lock(folder))
        else:
            folder = resume
            check_resumable(folder, range(config.workers), config, corpus.digest)
            reopen_run_folder(folder, config)
        sizes, resumed = config.sizes(), resume is not None
        ranks = [LocalRank(n, sizes, folder, corpus.folder, os.getpid(), resumed) for n in range(sum(sizes))]
        workers = LocalWorkers(config, ranks, EndTogether(config, folder))
        return run_to_end(config, folder, workers, observer, resumed=resume is not None)


def run_to_end(
    config: RunConfig, folder: Path, workers: LocalWorkers, observer: Observer, *, resumed: bool
) -> EndedRun:
    """Run the local workers and summarise what came of it."""
    with observer.follow(folder, resumed=resumed) as poll:
        watch = _DiskWatch(folder, observer.note)

        def watching() -> None:
            poll()
            watch.look()

        with _stop_on_signals(observer.with_stop_message(workers.stop)):
            error = _outcome(lambda: workers.run(watching))
        return EndedRun(folder, summarize_run(folder, config, error), error)


def _outcome(work: Callable[[], None]) -> DiLoCoError | None:
    try:
        work()
    except DiLoCoError as error:
        return error
    except OSError as error:
        return WorkerFailed(f"the run could not be followed to its end: {with_remedy(error)}")
    return None


class _DiskWatch:
    """Tells the user when the run folder's disk is full: the log, from which the display is made, stops then."""

    def __init__(self, folder: Path, note: Callable[[str], None]) -> None:
        self._folder, self._note = folder, note
        self._looked = time.monotonic()
        self._full = False

    def look(self) -> None:
        """Every few seconds, and once each time that the disk fills up."""
        if time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        full = disk_is_full(self._folder)
        if full and not self._full:
            self._note(
                f"the disk of {self._folder} is full: the last event written is of step {last_step(self._folder)}. "
                "Training goes on; events wait until there is room, and checkpoints are left out"
            )
        self._full = full


def last_step(folder: Path) -> int:
    """The last inner step in a run's log."""
    return max((event["step"] for event in read_events(folder) if event["type"] == "step"), default=0)


def summarize_run(folder: Path, config: RunConfig, error: DiLoCoError | None) -> Summary:
    try:
        return write_summary(folder, config, None if error is None else str(error))
    except OSError as problem:
        raise WorkerFailed(
            f"{'the workers have come to their end' if error is None else error}. The summary cannot be written into "
            f"{folder} ({problem.strerror or problem}), and the last event written is of step {last_step(folder)}. "
            f"Free some space{_from_checkpoint(folder)}"
        ) from error


def _from_checkpoint(folder: Path) -> str:
    complete = find_checkpoints(folder)[0]
    if not complete:
        return "; no checkpoint was written, so the run must begin again"
    return f"; `{resume_command(folder)}` then goes on from the checkpoint of step {complete[-1].step}"


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP call `stop`."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
