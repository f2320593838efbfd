"""Start a run: one pipeline from its configuration to its summary, for every way to start. Torch-free.

    command                          way to start     its workers
    diloco train                     FixedWorkers     processes of this machine that begin and end together
    diloco train --engine swarm      SwarmFounder     processes of this machine, each started again if it dies
    diloco join                      SwarmJoiner      the same; configuration and text come from the swarm
    torchrun -m diloco train         TorchrunRank     this process is one rank of a worker

`start_run` takes the steps in order; a way to start says what is its own in a step (swarm_start.py, torchrun.py). What
cannot work is refused before there is a run folder. What the user sees meanwhile comes from an `Observer`.
"""

import os
import platform
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol

from diloco.atomic_files import write_file
from diloco.data.corpus import Corpus
from diloco.data.order import WorkerBatches, check_disjoint, check_validation, worker_shards
from diloco.data.preparation.corpus_cache import prepare
from diloco.data.preparation.partitions import FeatureModel, LoadFeatures
from diloco.errors import ConfigError, DiLoCoError, WorkerFailed, with_remedy
from diloco.history.log import end_cut_line
from diloco.history.run_history import read_history
from diloco.models.pretrained import check_model, short_name
from diloco.run_lock import run_lock
from diloco.training.checkpoints.manifests import find_checkpoints
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import to_toml
from diloco.training.processes.launcher import EndTogether, LocalWorkers, disk_is_full
from diloco.training.processes.local_process import NO_CUDA, LocalRank, ending_signals
from diloco.training.records.run_folder import RUN_FILE, resume_command
from diloco.training.records.summary import SUMMARY_FILE, Summary, read_summary, write_summary
from diloco.training.sizes.room import check_disk

_LOOK_SECONDS = 5.0
Poll = Callable[[], None]


class Observer(Protocol):
    """Shows a run to its user."""

    def show_preparation(self, stage: str, done: int, total: int | None) -> None:
        """Show the progress of the data's preparation."""

    def note(self, text: str) -> None:
        """Show something that the user should know."""

    def follow(self, folder: Path, *, resumed: bool) -> AbstractContextManager[Poll]:
        """Show training and the summary; the function that the context yields is called several times a second."""

    def with_stop_message(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Return `stop` with a message to the user at its first call."""


Observe = Callable[[RunConfig], AbstractContextManager[Observer]]


@dataclass(frozen=True)
class EndedRun:
    """A run that has come to an end on this machine."""

    folder: Path
    summary: Summary
    error: DiLoCoError | None


class WayToStart(ABC):
    """One way to start a run: what the ways have not in common."""

    def __init__(self, config: RunConfig, resume: Path | None) -> None:
        """`resume` is the folder of the run to continue; None: a new run."""
        self.config = config
        self.resume = resume

    @abstractmethod
    def check(self) -> None:
        """Refuse what this machine cannot do, before anything is prepared or received."""

    def check_out(self) -> None:
        """Refuse a place where the folder of a new run cannot be."""
        check_out(self.config)

    def lock(self, folder: Path) -> AbstractContextManager[None]:
        """Keep every other process from training in the run folder."""
        return run_lock(folder)

    def observe(self, observe: Observe) -> AbstractContextManager[Observer]:
        return observe(self.config)

    @abstractmethod
    def prepare_text(self, observer: Observer) -> None:
        """Prepare or receive the text; refuse it if it does not fit, and a run for which there is no room."""

    def create_folder(self) -> Path:
        """Make the folder of a new run, with all that its workers find there."""
        return create_run_folder(self.config)

    @abstractmethod
    def check_resumable(self, folder: Path) -> None:
        """Refuse to resume what the workers would refuse, before anything in the run folder is changed."""

    def reopen_folder(self, folder: Path) -> None:
        reopen_run_folder(folder, self.config)

    @abstractmethod
    def run(self, folder: Path, observer: Observer) -> EndedRun | None:
        """Run this machine's workers to their end; None if another process tells the end."""


def start_run(way: WayToStart, observe: Observe) -> EndedRun | None:
    """Take a run from its configuration to its summary."""
    way.check()
    with ExitStack() as until_summarized:
        if way.resume is None:
            way.check_out()
        else:
            until_summarized.enter_context(way.lock(way.resume))
        observer = until_summarized.enter_context(way.observe(observe))
        way.prepare_text(observer)
        if way.resume is None:
            folder = way.create_folder()
            until_summarized.enter_context(way.lock(folder))
        else:
            folder = way.resume
            way.check_resumable(folder)
            way.reopen_folder(folder)
        return way.run(folder, observer)


class FixedWorkers(WayToStart):
    """A fixed set of workers, all on this machine."""

    corpus: Corpus

    def check(self) -> None:
        check_device(self.config)
        check_run_model(self.config)
        worker_shards(self.config.data.shards, 0, self.config.workers)

    def prepare_text(self, observer: Observer) -> None:
        note = device_note(self.config)
        if note is not None:
            observer.note(note)
        self.corpus = prepare(self.config.data, observer.show_preparation, load_features(self.config))
        check_data(self.config, self.corpus, self.config.workers)
        check_room(self.config, self.corpus.vocab_size, self.resume)

    def check_resumable(self, folder: Path) -> None:
        check_resumable(folder, range(self.config.workers), self.config, self.corpus.digest)

    def run(self, folder: Path, observer: Observer) -> EndedRun:
        ranks_of_workers = self.config.ranks_of_workers()
        resumed = self.resume is not None
        ranks = [
            [LocalRank(process, ranks_of_workers, folder, self.corpus.folder, os.getpid(), resumed)]
            for process in range(sum(ranks_of_workers))
        ]
        workers = LocalWorkers(self.config, ranks, EndTogether(self.config, folder))
        return run_to_end(self.config, folder, workers, observer, resumed=resumed)


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
            error = _error_of(lambda: workers.run(watching))
        return EndedRun(folder, summarize_run(folder, config, error), error)


def _error_of(work: Callable[[], None]) -> DiLoCoError | None:
    """Do the work, and return the error of the run with which it ended."""
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
        self._folder = folder
        self._note = note
        self._looked = time.monotonic()
        self._full = False

    def look(self) -> None:
        """Look every few seconds, and tell once each time that the disk fills up."""
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
    """Return the last inner step in a run's log."""
    return max((worker.reached for worker in read_history(folder).local_workers.values()), default=0)


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
    """Call `stop` at Ctrl-C, SIGTERM and SIGHUP."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in ending_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


# The run folder


def create_run_folder(config: RunConfig) -> Path:
    """Make a new folder with its config.toml; refuse one that exists and is not empty."""
    folder = Path(config.out or Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{short_name(config.model.name)}")
    try:
        if config.out is None:
            folder = _make_unused(folder)
        else:
            _check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / RUN_FILE, to_toml(config))
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


def reopen_run_folder(folder: Path, config: RunConfig) -> None:
    """Write the present configuration of a run that is resumed, and remove the summary of its earlier end."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    end_cut_line(folder)
    write_file(folder / RUN_FILE, to_toml(config))


def completed_steps(folder: Path, config: RunConfig) -> int | None:
    """Return the inner steps of a run that has nothing left to do; None if it can be resumed."""
    try:
        summary = read_summary(folder)
    except ConfigError:  # the run has not ended, or its summary is damaged and will be replaced
        return None
    steps: int = summary["inner_steps"]
    return steps if summary["status"] == "complete" and steps >= config.steps else None


def check_out(config: RunConfig) -> None:
    """Refuse an `out` that cannot become the run folder before anything is prepared or received; create nothing."""
    folder = Path(config.out or "runs")
    missing = [path for path in (folder, *folder.parents) if config.out is not None and not path.exists()]
    try:
        if config.out is not None:
            _check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_writable(folder, error) from error
    finally:
        for path in missing:
            with suppress(OSError):
                path.rmdir()


def _make_unused(folder: Path) -> Path:
    """Make a folder that is not there yet: two runs started within a second get different ones."""
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return candidate


def _check_unused(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out = {folder} exists and is not an empty folder: choose another, or remove it")


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the run folder {folder} cannot be written ({error.strerror}): choose another --out")


# What is checked before a run starts


def check_device(config: RunConfig) -> None:
    """Refuse a GPU that is not there before there is a run folder; torch is imported only if one is asked for."""
    if config.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError(NO_CUDA)


def device_note(config: RunConfig) -> str | None:
    """Return what the user should know of a device that is here and is not used."""
    if config.device == "auto" and (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return "the workers compute on the CPU: Apple GPUs (MPS) are not supported"
    return None


def check_room(config: RunConfig, vocab_size: int, folder: Path | None = None, workers: int | None = None) -> None:
    """Refuse a run whose checkpoints do not fit on the disk. `folder`: of a resumed run; `workers`: on this machine."""
    length = config.data.sequence_length
    parameters = config.model.num_parameters(vocab_size=vocab_size, sequence_length=length)
    trainable = None
    if config.lora.rank is not None:
        from diloco.models.registry import model_outline  # imports torch

        outline = model_outline(config.model, vocab_size=vocab_size, sequence_length=length, lora=config.lora)
        trainable = sum(parameter.numel() for parameter in outline.parameters() if parameter.requires_grad)
    check_disk(config, parameters, folder or Path(config.out or "runs"), workers, trainable=trainable)


def load_features(config: RunConfig) -> LoadFeatures:
    """Return what loads data.feature_model if the preparation needs it; only then torch is imported."""

    def load(folder: Path) -> FeatureModel:
        import torch

        from diloco.training.features import feature_model

        device = {"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(config.device, config.device)
        return feature_model(folder, device)

    return load


def check_data(config: RunConfig, corpus: Corpus, workers: int) -> None:
    """Refuse a corpus that is too small for these workers, or does not fit the model, before a worker is started."""
    check_disjoint(corpus, workers)
    length = config.data.sequence_length
    batch = config.training.batch_size
    for worker in range(workers):
        WorkerBatches(corpus, length, batch, worker_shards(corpus.shards, worker, workers), config.seed)
    check_validation(corpus, length, config.training.eval_windows)
    check_vocabulary(config, corpus)


def check_vocabulary(config: RunConfig, corpus: Corpus) -> None:
    """Refuse a pre-trained model that has fewer token vectors than the corpus has tokens, or shorter sequences."""
    pretrained = check_model(config.model.name, weights=False)
    if pretrained is not None:
        pretrained.check(vocab_size=corpus.vocab_size, sequence_length=config.data.sequence_length)
