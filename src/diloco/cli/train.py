"""`diloco train`: a run on this machine's workers, or this process's part of a run under torchrun."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated

import docstring_parser
from cyclopts import Parameter
from rich.console import Console
from rich.text import Text

from diloco.atomic_files import write_file
from diloco.cli.display.live import Display, PipeSafeConsole
from diloco.cli.display.report import print_report
from diloco.data.corpus import Corpus
from diloco.data.order import WorkerBatches, check_disjoint, validation_batches, worker_shards
from diloco.data.preparation.clusters import FeatureModel, LoadFeatures
from diloco.data.preparation.corpus_cache import prepare
from diloco.errors import ConfigError, DiLoCoError, WorkerFailed
from diloco.models.pretrained import check_model, short_name
from diloco.sinks.process import SinkProcesses
from diloco.sinks.registry import check_installed
from diloco.training.checkpoints.resume import check_resumable
from diloco.training.config.recipes import check_run_model
from diloco.training.config.run import RunConfig
from diloco.training.config.run_file import dotted, sections, to_toml
from diloco.training.processes.launcher import LocalWorkers
from diloco.training.processes.local_process import STOP_SIGNALS
from diloco.training.processes.run_lock import run_lock
from diloco.training.records.events import end_cut_line
from diloco.training.records.summary import SUMMARY_FILE, Summary, read_summary, write_summary

_HELP = """\
[bold]diloco train[/] \\[RUN.toml] \\[OPTIONS]

Train a language model with DiLoCo: workers train apart, and average at times.

  --model M             tiny (default), 60m, 150m, 400m, llama-150m, llama-1b;
                        a folder (Llama family); hf:NAME_OR_PATH (any causal LM)
  --workers N           workers on this machine (default 2; 1 in a swarm)
  --ranks R             processes of each worker, a device each: 1 (default), 4,
                        or one number for each worker: 1,2
  --steps N             inner steps of each worker
  --H N                 inner steps between two rounds (sync.num_inner_steps)
  --codec C             how outer gradients travel: fp32, fp16, bf16, int8
  --data.source X       stdlib (Python's own library), a file or folder, hf:NAME
  --mode M              diloco (default), or data-parallel: the baseline
  --engine E            torch_distributed (default); swarm: others can join
  --seed N              of the initial parameters and the order of the data
  --out RUNDIR          the run folder (default runs/<date>-<model>)
  --resume RUNDIR       go on with a run that was stopped, killed, or has ended
  --device D            auto (default), cpu, cuda
  --sinks S             also write to tensorboard, wandb, trackio (with commas)
  --print-config        show every option with its value and meaning, and end

Every key of a run file is an option too: lr under \\[outer] is --outer.lr.
Under torchrun this process is one rank, and the environment says which.

Example:  diloco train --workers 4 --H 50 --outer.lr 0.5
          torchrun --nproc-per-node 2 -m diloco.cli.main train --steps 600"""


def train(
    file: Path | None = None,
    /,
    *,
    config: Annotated[RunConfig, Parameter(name="*")] = RunConfig(),  # noqa: B008 - frozen
    print_config: Annotated[bool, Parameter(name="--print-config")] = False,
    resume: Annotated[Path | None, Parameter(name="--resume")] = None,
    help_train: Annotated[bool, Parameter(name="--help-train")] = False,
) -> None:
    """Train a model with DiLoCo, or data-parallel as a baseline."""
    console = PipeSafeConsole()
    if help_train:
        console.print(_HELP, highlight=False)
    elif file is not None:
        raise ConfigError(f"the run file {file} must come first: diloco train {file} OPTIONS")
    elif print_config:
        console.print(Text(to_toml(config, _comments(config))), soft_wrap=True, end="")
    elif "TORCHELASTIC_RUN_ID" in os.environ or {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        if config.engine == "swarm":
            raise ConfigError(
                "engine = swarm under torchrun: each worker of a swarm is its own; start it with --workers"
            )
        from diloco.cli.torchrun import train_as_rank

        train_as_rank(config, console, resume)
    elif config.engine == "swarm":
        from diloco.cli.swarm import train_in_swarm

        train_in_swarm(config, console, resume)
    else:
        _train_locally(config, console, resume)


def _train_locally(config: RunConfig, console: Console, resume: Path | None) -> None:
    check_installed(config.sink_names)
    check_run_model(config)
    worker_shards(config.data.shards, 0, config.workers)
    with ExitStack() as until_summarized:
        if resume is not None:
            until_summarized.enter_context(run_lock(resume))
            if is_complete(console, resume, config):
                return
        else:
            check_out(config)
        with Display(console, config) as display:
            corpus = prepare(config.data, display.show_preparation, load_features(config))
            check_data(config, corpus, config.workers)
            folder = resume or new_run_folder(config)
            if resume is None:
                until_summarized.enter_context(run_lock(folder))
            else:
                check_resumable(folder, range(config.workers), config, corpus.digest)
                begin_again(folder, config)
            sinks = until_summarized.enter_context(SinkProcesses(config.sink_names, folder, noting(console)))
            workers = LocalWorkers(config, folder, corpus.folder, resume=resume is not None)
            poll = both(display.follow(folder, resumed=resume is not None), sinks.poll)
            with stop_on_signals(display.with_stop_message(workers.stop)):
                error = outcome(lambda: workers.run(poll))
        summary = summarized(folder, config, error)
    tell_end(console, folder, summary, error)


def tell_end(console: Console, folder: Path, summary: Summary, error: DiLoCoError | None) -> None:
    """What came of it; raises the error if there was one."""
    if summary["inner_steps"]:
        print_report(console, folder, summary)
    else:
        console.print(
            Text(f"diloco · {summary['status']} before the first step · run folder: {folder}"), soft_wrap=True
        )
    if error is not None:
        raise error


def summarized(folder: Path, config: RunConfig, error: DiLoCoError | None) -> Summary:
    try:
        return write_summary(folder, config, None if error is None else str(error))
    except OSError as problem:
        raise WorkerFailed(f"the run has ended, but its summary cannot be written into {folder}: {problem}") from error


def noting(console: Console) -> Callable[[str], None]:
    """Says what a person should know of, above the display."""
    return lambda note: console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)


def both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        first()
        second()

    return call


def load_features(config: RunConfig) -> LoadFeatures:
    """How to get a feature model if one is needed: torch is not imported before."""

    def load(folder: Path) -> FeatureModel:
        import torch

        from diloco.training.features import feature_model

        wanted = {"auto": "cuda" if torch.cuda.is_available() else "cpu"}.get(config.device, config.device)
        return feature_model(folder, wanted)

    return load


def outcome(work: Callable[[], None]) -> DiLoCoError | None:
    try:
        work()
    except DiLoCoError as error:
        return error
    except OSError as error:
        return WorkerFailed(f"the run could not be followed to its end: {error}")
    return None


def check_data(config: RunConfig, corpus: Corpus, workers: int) -> None:
    """Refuse a corpus that is too small for these workers or foreign to the model before any of them is started."""
    check_disjoint(corpus, workers)
    length, batch = config.data.sequence_length, config.training.batch_size
    for worker in range(workers):
        WorkerBatches(corpus, length, batch, worker_shards(corpus.shards, worker, workers), config.seed)
    validation_batches(corpus, length, batch)
    pretrained = check_model(config.model, weights=False)
    if pretrained is not None:
        pretrained.check(vocab_size=corpus.vocab_size, sequence_length=length)


def new_run_folder(config: RunConfig) -> Path:
    """Create the run folder with its config.toml; an existing folder with something in it is never written into."""
    folder = Path(config.out or Path("runs") / f"{datetime.now():%Y-%m-%d-%H%M%S}-{short_name(config.model)}")
    try:
        if config.out is None:
            folder = _make_unused(folder)
        else:
            _check_unused(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.toml", to_toml(config))
    except OSError as error:
        raise _not_writable(folder, error) from error
    return folder


def check_out(config: RunConfig) -> None:
    """Refuse an `out` that cannot become the run folder before anything is prepared or received, and leave nothing."""
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


def _check_unused(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"out = {folder} exists and is not an empty folder: choose another, or remove it")


def _not_writable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the run folder {folder} cannot be written ({error.strerror}): choose another --out")


def is_complete(console: Console, folder: Path, config: RunConfig) -> bool:
    """Whether a run to be resumed has nothing left to do; says so."""
    try:
        summary = read_summary(folder)
    except ConfigError:  # it has not ended, or its summary is damaged, which a new one will replace
        return False
    if summary["status"] != "complete" or summary["inner_steps"] < config.steps:
        return False
    console.print(
        Text(f"{folder} is complete with {summary['inner_steps']} steps: to train on, give --steps above that"),
        soft_wrap=True,
    )
    return True


def begin_again(folder: Path, config: RunConfig) -> None:
    """A run that goes on: with its configuration as it is now, and without the summary of an earlier end."""
    (folder / SUMMARY_FILE).unlink(missing_ok=True)
    end_cut_line(folder)
    write_file(folder / "config.toml", to_toml(config))


def _make_unused(folder: Path) -> Path:
    """Two runs started within a second get different folders."""
    number = 1
    while True:
        candidate = folder if number == 1 else folder.with_name(f"{folder.name}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            number += 1
        else:
            return candidate


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the run cleanly; the second time at once."""
    previous = {number: signal.signal(number, lambda *_: stop()) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _comments(config: RunConfig) -> dict[str, str]:
    """The text under each field of the configuration's dataclasses, by dotted key."""
    comments = {}
    for table, section in sections(config).items():
        for text in docstring_parser.parse_from_object(type(section)).params:
            comments[dotted(table, text.arg_name)] = " ".join((text.description or "").split())
    return comments
