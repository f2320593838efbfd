"""A run on this machine, from its folder to its summary: `diloco train` with local workers. Torch-free.

swarm_run.py and join.py are the same for workers of a swarm, torchrun.py for one rank that torchrun has started. What
the user sees meanwhile comes from an `Observer`.
"""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from diloco.data.order import worker_shards
from diloco.data.preparation.corpus_cache import prepare
from diloco.errors import DiLoCoError, WorkerFailed
from diloco.run_lock import run_lock
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.processes.launcher import LocalWorkers
from diloco.training.processes.local_process import heard_signals
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
from diloco.training.records.summary import Summary, write_summary

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


class Workers(Protocol):
    """The local processes of a run."""

    def run(self, poll: Poll) -> None:
        """Start them and wait for their end; raises DiLoCoError."""

    def stop(self) -> None:
        """Ask them to end; called a second time, kill them."""


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
        workers = LocalWorkers(config, folder, corpus.folder, resume=resume is not None)
        return run_to_end(config, folder, workers, observer, resumed=resume is not None)


def run_to_end(config: RunConfig, folder: Path, workers: Workers, observer: Observer, *, resumed: bool) -> EndedRun:
    """Run the local workers and summarise what came of it."""
    with observer.follow(folder, resumed=resumed) as poll:
        with _stop_on_signals(observer.with_stop_message(workers.stop)):
            error = _outcome(lambda: workers.run(poll))
        return EndedRun(folder, _summarize(folder, config, error), error)


def _outcome(work: Callable[[], None]) -> DiLoCoError | None:
    try:
        work()
    except DiLoCoError as error:
        return error
    except OSError as error:
        return WorkerFailed(f"the run could not be followed to its end: {error}")
    return None


def _summarize(folder: Path, config: RunConfig, error: DiLoCoError | None) -> Summary:
    try:
        return write_summary(folder, config, None if error is None else str(error))
    except OSError as problem:
        raise WorkerFailed(f"the run has ended, but its summary cannot be written into {folder}: {problem}") from error


@contextmanager
def _stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP call `stop`."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in heard_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
