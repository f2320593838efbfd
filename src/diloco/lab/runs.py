"""Many arms one after another: which ones are to be run, in which order, and how long it will take.

Experiments come in the order asked for; within one, its arms in their order, each with all seeds, so that what is most
important is finished first and with enough seeds.
"""

import logging
import math
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event
from pathlib import Path
from queue import Empty
from typing import Self, final

import torch

from diloco.errors import ConfigError, DiLoCoError
from diloco.lab.arm import Arm, Progress
from diloco.lab.code import simulation_code
from diloco.lab.experiment import Experiment, load
from diloco.lab.results import ResultFolder, Setting, key_of
from diloco.lab.run_options import SAVE_SECONDS
from diloco.lab.scales import Scale
from diloco.lab.simulation.checkpoint import Interrupted, Saving
from diloco.lab.simulation.simulator import simulate
from diloco.lab.texts import Texts
from diloco.training.processes.local_process import STOP_SIGNALS

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
_TOLD_SECONDS = 10.0
_ENDS_WITHIN_SECONDS = 5.0
_LARGE = 4.0
"""Times the cost of DiLoCo's arm: 64 replicas, say."""


@final
@dataclass(frozen=True)
class ArmTask:
    """One arm with one seed."""

    key: str
    """Key of the result, without its code."""
    code: str
    """The code that the result depends on (code.py)."""
    name: str
    arm: Arm
    seed: int
    text: str


def setting_of(texts: Texts, roles: Iterable[str]) -> Setting:
    """Return the setting that the folder of this run records."""
    corpora = {role: texts.open(role) for role in sorted(set(roles))}
    described = {
        role: f"{Path(getattr(texts, role)).name}: {corpus.train_tokens / 1e6:.1f}M tokens, vocabulary "
        f"{corpus.vocab_size}, {corpus.shards} shards ({corpus.meta.partition})"
        for role, corpus in corpora.items()
    }
    return Setting(texts.scale.name, {role: corpus.digest for role, corpus in corpora.items()}, described)


def code_of(experiment: Experiment, how: str) -> str:
    """The last part of a result's name: the simulation's code, the experiment's own, and a way that was asked for."""
    own = [part for part in (experiment.code, "" if how == "auto" else how.replace(" ", "")) if part]
    return ".".join([simulation_code(), *own])


def tasks_of(
    experiments: Sequence[Experiment], scale: Scale, seeds: Sequence[int], digests: dict[str, str], how: str = "auto"
) -> list[ArmTask]:
    """All arms of the experiments, each once, the most important first; those that cost most after all others."""
    tasks: dict[str, ArmTask] = {}
    for experiment in experiments:
        code = code_of(experiment, how)
        for name, arm in experiment.arms(scale).items():
            for seed in seeds:
                key = key_of(arm, seed, digests[experiment.text])
                task = ArmTask(key, code, f"{experiment.name}: {name}", arm, seed, experiment.text)
                tasks.setdefault(f"{key}-{code}", task)
    limit = _LARGE * cost(scale.diloco(), scale.vocab_size)
    return sorted(tasks.values(), key=lambda task: cost(task.arm, scale.vocab_size) > limit)


def cost(arm: Arm, vocab_size: int) -> float:
    """Return the cost in units that compare arms: tokens that are computed, times the parameters."""
    tokens = arm.steps * arm.updates_multiplier * arm.workers * arm.batch_size * arm.batch_multiplier
    return float(tokens * arm.sequence_length) * arm.model_config(vocab_size).num_parameters()


_COMPILING_SECONDS = 40.0
_STEP_SECONDS = 1e-3
_TOKEN_SECONDS = 31e-9
_TOKEN_AND_PARAMETER_SECONDS = 23.3e-15
"""Measured on an H200 with 8 to 12 processes at 1.3M and 4.3M parameters (docs/results.md): 62 and 130 ns a token. A
step takes a millisecond however small it is."""


def seconds_on_an_h200(tasks: Sequence[ArmTask], vocab_size: int) -> float:
    """Return the seconds that the tasks would take on one shared H200, with shared beginnings and compiling."""
    seconds = _COMPILING_SECONDS
    beginnings = {}
    for task in tasks:
        arm = task.arm
        parameters = arm.model_config(vocab_size).num_parameters()
        token_seconds = _TOKEN_SECONDS + _TOKEN_AND_PARAMETER_SECONDS * parameters
        steps = arm.steps * arm.updates_multiplier
        batch = arm.workers * arm.batch_size * arm.batch_multiplier
        seconds += steps * max(_STEP_SECONDS, batch * arm.sequence_length * token_seconds)
        size = arm.pretraining_batch_size or arm.batch_size
        beginning = (task.seed, parameters, arm.pretraining_steps, size, arm.steps, repr(arm.pretraining_config))
        beginnings[beginning] = arm.pretraining_steps * size * arm.sequence_length * token_seconds
    return seconds + sum(beginnings.values())


_MPS = "nvidia-cuda-mps-control"
_MPS_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
_MPS_RUNNING = Path("/tmp/nvidia-mps/control")  # where NVIDIA's service listens unless it is told otherwise
_MPS_SECONDS = 60.0


@contextmanager
def gpu_shared(say: Say) -> Iterator[None]:
    """Run NVIDIA's Multi-Process Service for the processes that are started here, and end it after them.

    Without it processes take turns on the GPU. One that runs already is used and left alone.
    """
    control = shutil.which(_MPS)
    if control is None:
        say(f"{_MPS} is not installed: the processes take turns on the GPU")
    if control is None or _MPS_FOLDERS[0] in os.environ or _MPS_RUNNING.exists():
        yield
        return
    with tempfile.TemporaryDirectory(prefix="diloco-mps-") as folder:
        own = dict.fromkeys(_MPS_FOLDERS, folder)
        started = subprocess.run([control, "-d"], env=os.environ | own, timeout=_MPS_SECONDS, check=False)
        if started.returncode:
            say(f"{_MPS} -d failed ({started.returncode}): the processes take turns on the GPU")
            yield
            return
        os.environ.update(own)  # for the processes that are started from here on
        try:
            yield
        finally:
            subprocess.run([control], input=b"quit\n", timeout=_MPS_SECONDS, check=False)
            for name in _MPS_FOLDERS:
                del os.environ[name]


@final
@dataclass(frozen=True)
class Conditions:
    """The machine, the texts and the limits with which arms are run."""

    texts: Texts
    folder: Path
    device: str
    seconds: float = math.inf
    """Begin no arm after this many."""
    processes: int = 1
    how: str = "auto"
    """How replicas are computed (`build` of simulation/simulator.py)."""
    save_seconds: float = SAVE_SECONDS
    """How often an arm in progress is saved."""
    any_code: bool = False
    """Arms that other code has finished count as finished."""
    files: tuple[Path, ...] = ()
    """Experiment files of one's own, which every process imports: they may add optimizers, codecs and merges."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"--processes {self.processes} must be at least 1")
        if not self.save_seconds >= 0:
            raise ConfigError(f"--save-seconds {self.save_seconds} must be at least 0 (inf: on Ctrl-C only)")

    def is_finished(self, task: ArmTask) -> bool:
        return ResultFolder(self.folder).has(task.key, None if self.any_code else task.code)

    def checkpoint(self, task: ArmTask) -> Path:
        """Return where the task is saved while it is in progress."""
        return self.folder / "checkpoints" / f"{task.key}-{task.code}.safetensors"


@final
class Runner:
    """Runs lists of tasks under the same conditions, in processes that stay from one list to the next.

    A process compiles each shape of arm once, so that a search that asks for arms in several waves pays for it once.
    """

    def __init__(self, conditions: Conditions, say: Say) -> None:
        self.conditions = conditions
        self._say = say
        self._ends = time.time() + conditions.seconds
        self._stack = ExitStack()
        self._processes: list[SpawnProcess] = []

    def __enter__(self) -> Self:
        self._stop = self._stack.enter_context(stop_on_signals())
        if self.conditions.processes > 1:
            if torch.device(self.conditions.device).type == "cuda":
                self._stack.enter_context(gpu_shared(self._say))
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, tasks: Sequence[ArmTask]) -> int:
        """Run what is not finished; the number of tasks that remain."""
        conditions = self.conditions
        say = self._say
        todo = [task for task in tasks if not conditions.is_finished(task)]
        for task in tasks:
            if conditions.is_finished(task):  # and a run may have ended before its checkpoint was removed
                conditions.checkpoint(task).unlink(missing_ok=True)
        say(f"{len(tasks)} arms and seeds, {len(tasks) - len(todo)} of them finished already")
        results = ResultFolder(conditions.folder)
        if others := sum(results.has(task.key, None) for task in todo):
            say(
                f"{others} of the others were finished by other code, and are run again: the code that a result "
                "depends on has changed (--any-code counts them as finished)"
            )
        vocab_size = conditions.texts.scale.vocab_size
        if todo and torch.device(conditions.device).type == "cuda":
            say(f"about {_duration(seconds_on_an_h200(todo, vocab_size))} on an H200; other GPUs differ")
        account = _Account([cost(task.arm, vocab_size) for task in todo], say)
        if self._processes:
            self._spread(todo, account)
        else:
            for index, task in enumerate(todo):
                if time.time() < self._ends and not self._stop():
                    account.add(index, _attempt(conditions, task, self._stop, say))
        remaining = sum(not conditions.is_finished(task) for task in tasks)
        if self._stop() and remaining:
            say(f"{remaining} remain; what was in progress is saved: run the same command again to continue")
            raise KeyboardInterrupt
        if account.failures:
            raise DiLoCoError(f"{len(account.failures)} arms failed, the first one: {account.failures[0]}")
        return remaining

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._waiting: Queue[tuple[int, ArmTask] | None] = context.Queue()
        self._outcomes: Queue[tuple[int, _TaskEnd | str | None]] = context.Queue()
        self._stopping = context.Event()
        given = (self.conditions, self._waiting, self._outcomes, self._ends, self._stopping)
        self._processes = [context.Process(target=_work, args=given) for _ in range(self.conditions.processes)]
        self._stack.callback(self._end)
        with signals_held():
            for process in self._processes:
                process.start()

    def _end(self) -> None:
        """Let idle processes end by themselves; one that is still busy after an error is killed."""
        for _ in self._processes:
            self._waiting.put(None)
        until = time.monotonic() + _ENDS_WITHIN_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
        self._waiting.cancel_join_thread()  # tasks that were not begun

    def _spread(self, todo: Sequence[ArmTask], account: "_Account") -> None:
        """Each process takes the next task when it has finished one, and says of each what became of it."""
        for item in enumerate(todo):
            self._waiting.put(item)
        left = len(todo)
        while left:
            if self._stop():
                self._stopping.set()
            try:
                index, outcome = self._outcomes.get(timeout=0.5)
            except Empty:
                ended = [process.exitcode for process in self._processes if process.exitcode is not None]
                if ended and not self._stopping.is_set():
                    count = f"{len(ended)} of {len(self._processes)} processes"
                    raise DiLoCoError(f"{count} ended early (exit code {ended[0]}): see above") from None
                if len(ended) == len(self._processes):
                    return
                continue
            account.add(index, outcome)
            left -= not isinstance(outcome, str)


class _Account:
    """Says what is done and how long the rest will take."""

    def __init__(self, costs: list[float], say: Say) -> None:
        self.costs = costs
        self.say = say
        self.done: list[int] = []
        self.failures: list[str] = []
        self._started = time.monotonic()

    def add(self, index: int, outcome: "_TaskEnd | str | None") -> None:
        """`outcome`: a text tells how far the task is, and None that it was stopped or not begun."""
        if isinstance(outcome, str):
            self.say(outcome)
            return
        if outcome is None:
            return
        self.done.append(index)
        if outcome.failed:
            self.failures.append(outcome.line)
        done = sum(self.costs[finished] for finished in self.done)
        left = (time.monotonic() - self._started) / done * (sum(self.costs) - done)
        self.say(f"[{len(self.done)}/{len(self.costs)}] {outcome.line}; about {_duration(left)} left")


@dataclass(frozen=True)
class _TaskEnd:
    line: str
    failed: bool = False


def _work(
    conditions: Conditions,
    waiting: "Queue[tuple[int, ArmTask] | None]",
    outcomes: "Queue[tuple[int, _TaskEnd | str | None]]",
    ends: float,
    stopping: Event,
) -> None:
    """One process: tasks in their order, as long as there is time."""
    stop = stop_with_parent(stopping)
    for path in conditions.files:
        load(path)
    while not stop():
        try:
            item = waiting.get(timeout=1.0)
        except Empty:
            continue
        if item is None:
            return
        tell = partial(_tell_parent, outcomes, item[0])
        in_time = time.time() < ends
        outcomes.put((item[0], _attempt(conditions, item[1], stop, tell) if in_time else None))


def _tell_parent(outcomes: "Queue[tuple[int, _TaskEnd | str | None]]", index: int, line: str) -> None:
    outcomes.put((index, line))


def _attempt(run: Conditions, task: ArmTask, stop: Callable[[], bool], tell: Say) -> _TaskEnd | None:
    """Run one task and keep its result; None if it is to stop before. An arm that fails is told, and others go on."""
    if torch.device(run.device).type == "cpu":
        torch.set_num_threads(run.texts.scale.threads)
    name = f"{task.name}, seed {task.seed}"
    saving = Saving(run.checkpoint(task), run.save_seconds, stop)
    corpus = run.texts.open(task.text)
    try:
        result = simulate(
            task.arm, task.seed, corpus, run.device,
            folder=run.folder, on_progress=_Teller(name, tell), how=run.how, saving=saving,
        )  # fmt: skip
    except Interrupted:
        return None
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError) as error:
        logger.exception("%s failed", name)
        return _TaskEnd(f"{name}: failed: {str(error)[:300]}", failed=True)
    ResultFolder(run.folder).write(task.key, task.code, result)
    saving.remove()
    resumed = f", continued from step {saving.resumed_at}" if saving.resumed_at else ""
    return _TaskEnd(f"{name}: perplexity {result.perplexity:.2f}, {result.seconds:.1f} s, {result.how}{resumed}")


class _Teller:
    """Says every ten seconds how far an arm is."""

    def __init__(self, name: str, tell: Say) -> None:
        self._name = name
        self._tell = tell
        self._phase = ""
        self._began = (0.0, 0)
        self._next = time.monotonic() + _TOLD_SECONDS

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._began = (now, progress.step)
        if now < self._next:
            return
        self._next = now + _TOLD_SECONDS
        seconds = now - self._began[0]
        taken = progress.step - self._began[1]
        left = f", about {_duration(seconds / taken * (progress.steps - progress.step))} left" if taken > 0 else ""
        where = "" if progress.phase == "training" else f" of the {progress.phase}"
        self._tell(f"{self._name}: step {progress.step:,} of {progress.steps:,}{where}{left}")


# Ctrl-C


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Says whether a signal has come. In another thread than the main one no signal can: it always says no."""
    came = False

    def stop(*_: object) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True

    in_main_thread = threading.current_thread() is threading.main_thread()
    heard = [number for number in STOP_SIGNALS if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, stop) for number in heard}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Processes that are started here hear no signal before they call `stop_with_parent`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stop_with_parent(stopping: Event) -> Callable[[], bool]:
    """Ignore the terminal's Ctrl-C in a process of the run: its parent hears it, and says so with `stopping`."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    return lambda: stopping.is_set() or not parent.is_alive()


# What is printed


def print_line(line: str) -> None:
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError as error:  # what reads, head say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from error


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def check_seeds(seeds: int) -> range:
    if seeds < 1:
        raise ConfigError(f"--seeds {seeds} must be at least 1 (a verdict needs 3)")
    return range(seeds)
