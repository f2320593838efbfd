"""Runs the tasks of `diloco lab`, in this process or in several, and says how far they are.

An interrupted run stops between two steps and saves its arms in progress (simulation/checkpoint.py); the same command
goes on from there. An arm that fails is reported, and the others are run all the same.
"""

import logging
import math
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
from diloco.lab.arm import Progress
from diloco.lab.experiment import load
from diloco.lab.gpu_sharing import shared_gpu
from diloco.lab.results import ResultFolder
from diloco.lab.run_options import SAVE_SECONDS
from diloco.lab.simulation.checkpoint import ArmCheckpoint, Interrupted
from diloco.lab.simulation.simulator import simulate
from diloco.lab.tasks import ArmTask, cost, seconds_on_an_h200
from diloco.lab.texts import Texts
from diloco.training.processes.local_process import STOP_SIGNALS

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Prints a line."""

_PROGRESS_SECONDS = 10.0
"""Between two lines about an arm in progress."""
_EXIT_SECONDS = 5.0
"""For idle processes to end by themselves; afterwards they are killed."""


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
    """The user's experiment files, which every process imports: they may add optimizers, codecs and merges."""

    def __post_init__(self) -> None:
        if self.processes < 1:
            raise ConfigError(f"--processes {self.processes} must be at least 1")
        if not self.save_seconds >= 0:
            raise ConfigError(f"--save-seconds {self.save_seconds} must be at least 0 (inf: on Ctrl-C only)")

    def is_finished(self, task: ArmTask) -> bool:
        return ResultFolder(self.folder).has(task.key, None if self.any_code else task.code)

    def checkpoint_path(self, task: ArmTask) -> Path:
        """Return the path of the file in which the task is saved while it is in progress."""
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
                self._stack.enter_context(shared_gpu(self._say))
            self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, tasks: Sequence[ArmTask]) -> int:
        """Run the tasks that are not finished. Returns the number that remain, because there was no time for them."""
        conditions = self.conditions
        say = self._say
        todo = [task for task in tasks if not conditions.is_finished(task)]
        for task in tasks:
            if conditions.is_finished(task):  # and a run may have ended before its checkpoint was removed
                conditions.checkpoint_path(task).unlink(missing_ok=True)
        say(f"{len(tasks)} arms and seeds, {len(tasks) - len(todo)} of them finished already")
        results = ResultFolder(conditions.folder)
        if outdated := sum(results.has(task.key, None) for task in todo):
            say(
                f"{outdated} of the others were finished by other code, and are run again: the code that a result "
                "depends on has changed (--any-code counts them as finished)"
            )
        vocab_size = conditions.texts.scale.vocab_size
        if todo and torch.device(conditions.device).type == "cuda":
            say(f"about {_duration(seconds_on_an_h200(todo, vocab_size))} on an H200; other GPUs differ")
        account = _Account([cost(task.arm, vocab_size) for task in todo], say)
        if self._processes:
            self._distribute(todo, account)
        else:
            for index, task in enumerate(todo):
                if time.time() < self._ends and not self._stop():
                    account.add(index, _run_task(conditions, task, self._stop, say))
        remaining = sum(not conditions.is_finished(task) for task in tasks)
        if self._stop() and remaining:
            say(f"{remaining} remain; what was in progress is saved: run the same command again to continue")
            raise KeyboardInterrupt
        if account.failures:
            raise DiLoCoError(f"{len(account.failures)} arms failed, the first one: {account.failures[0]}")
        return remaining

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._tasks: Queue[tuple[int, ArmTask] | None] = context.Queue()
        self._reports: Queue[_Report] = context.Queue()
        self._stopping = context.Event()
        arguments = (self.conditions, self._tasks, self._reports, self._ends, self._stopping)
        self._processes = [context.Process(target=_work, args=arguments) for _ in range(self.conditions.processes)]
        self._stack.callback(self._end_processes)
        with signals_held():
            for process in self._processes:
                process.start()

    def _end_processes(self) -> None:
        """Let idle processes end by themselves; one that is still busy after an error is killed."""
        for _ in self._processes:
            self._tasks.put(None)
        until = time.monotonic() + _EXIT_SECONDS
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))
            if process.is_alive():
                process.kill()
        self._tasks.cancel_join_thread()  # tasks that were not begun

    def _distribute(self, todo: Sequence[ArmTask], account: "_Account") -> None:
        """Give each process the next task whenever it has ended one, until all have ended or the run is to stop."""
        for numbered_task in enumerate(todo):
            self._tasks.put(numbered_task)
        running = len(todo)
        while running:
            if self._stop():
                self._stopping.set()
            try:
                report = self._reports.get(timeout=0.5)
            except Empty:
                exit_codes = [process.exitcode for process in self._processes if process.exitcode is not None]
                if exit_codes and not self._stopping.is_set():
                    count = f"{len(exit_codes)} of {len(self._processes)} processes"
                    raise DiLoCoError(f"{count} ended early (exit code {exit_codes[0]}): see above") from None
                if len(exit_codes) == len(self._processes):
                    return
                continue
            if report.progress is not None:
                self._say(report.progress)
                continue
            account.add(report.index, report.end)
            running -= 1


@dataclass(frozen=True)
class _TaskEnd:
    """The end of a task, finished or failed, in a line."""

    line: str
    failed: bool = False


@dataclass(frozen=True)
class _Report:
    """What a process says of a task: a line about its progress or, without one, that it is done with the task."""

    index: int
    progress: str | None = None
    end: _TaskEnd | None = None
    """None: the task was stopped, or not begun because there was no time."""


class _Account:
    """Says which tasks have ended and how long the rest will take."""

    def __init__(self, costs: list[float], say: Say) -> None:
        self.costs = costs
        self.say = say
        self.ended: list[int] = []
        self.failures: list[str] = []
        self._started = time.monotonic()

    def add(self, index: int, end: _TaskEnd | None) -> None:
        """Count a task that has ended. `end` None: it was stopped, or not begun."""
        if end is None:
            return
        self.ended.append(index)
        if end.failed:
            self.failures.append(end.line)
        spent = sum(self.costs[task] for task in self.ended)
        seconds_left = (time.monotonic() - self._started) / spent * (sum(self.costs) - spent)
        self.say(f"[{len(self.ended)}/{len(self.costs)}] {end.line}; about {_duration(seconds_left)} left")


def _work(
    conditions: Conditions,
    tasks: "Queue[tuple[int, ArmTask] | None]",
    reports: "Queue[_Report]",
    ends: float,
    stopping: Event,
) -> None:
    """Run tasks in their order, as one of several processes, as long as there is time."""
    stop = stop_with_parent(stopping)
    for path in conditions.files:
        load(path)
    while not stop():
        try:
            numbered_task = tasks.get(timeout=1.0)
        except Empty:
            continue
        if numbered_task is None:
            return
        index, task = numbered_task
        say = partial(_report_progress, reports, index)
        in_time = time.time() < ends
        reports.put(_Report(index, end=_run_task(conditions, task, stop, say) if in_time else None))


def _report_progress(reports: "Queue[_Report]", index: int, line: str) -> None:
    reports.put(_Report(index, progress=line))


def _run_task(conditions: Conditions, task: ArmTask, stop: Callable[[], bool], say: Say) -> _TaskEnd | None:
    """Run one task and keep its result. Returns its end, also that of an arm that failed; None if it was stopped."""
    if torch.device(conditions.device).type == "cpu":
        torch.set_num_threads(conditions.texts.scale.threads)
    name = f"{task.name}, seed {task.seed}"
    checkpoint = ArmCheckpoint(conditions.checkpoint_path(task), conditions.save_seconds, stop)
    corpus = conditions.texts.open(task.text)
    try:
        result = simulate(
            task.arm,
            task.seed,
            corpus,
            conditions.device,
            folder=conditions.folder,
            on_progress=_ProgressLines(name, say),
            how=conditions.how,
            checkpoint=checkpoint,
        )
    except Interrupted:
        return None
    except (RuntimeError, ValueError, TypeError, AssertionError, LookupError) as error:
        logger.exception("%s failed", name)
        return _TaskEnd(f"{name}: failed: {str(error)[:300]}", failed=True)
    ResultFolder(conditions.folder).write(task.key, task.code, result)
    checkpoint.remove()
    resumed = f", continued from step {checkpoint.resumed_at}" if checkpoint.resumed_at else ""
    return _TaskEnd(f"{name}: perplexity {result.perplexity:.2f}, {result.seconds:.1f} s, {result.how}{resumed}")


class _ProgressLines:
    """Says every ten seconds how far an arm is."""

    def __init__(self, name: str, say: Say) -> None:
        self._name = name
        self._say = say
        self._phase = ""
        self._phase_started = 0.0
        self._phase_first_step = 0
        self._next_line = time.monotonic() + _PROGRESS_SECONDS

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.phase != self._phase:
            self._phase = progress.phase
            self._phase_started = now
            self._phase_first_step = progress.step
        if now < self._next_line:
            return
        self._next_line = now + _PROGRESS_SECONDS
        seconds = now - self._phase_started
        steps = progress.step - self._phase_first_step
        left = f", about {_duration(seconds / steps * (progress.steps - progress.step))} left" if steps > 0 else ""
        phase = "" if progress.phase == "training" else f" of the {progress.phase}"
        self._say(f"{self._name}: step {progress.step:,} of {progress.steps:,}{phase}{left}")


# Ctrl-C


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether a stop signal has come; a second signal raises KeyboardInterrupt at once.

    In another thread than the main one no signal can come, and the function always says no.
    """
    has_come = False

    def stop(*_: object) -> None:
        nonlocal has_come
        if has_come:
            raise KeyboardInterrupt
        has_come = True

    in_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in STOP_SIGNALS if in_main_thread and signal.getsignal(number) is not signal.SIG_IGN]
    former_handlers = {number: signal.signal(number, stop) for number in handled}
    try:
        yield lambda: has_come
    finally:
        for number, handler in former_handlers.items():
            signal.signal(number, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Block stop signals in the processes that are started inside, until they call `stop_with_parent`."""
    former_mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former_mask)


def stop_with_parent(stopping: Event) -> Callable[[], bool]:
    """Ignore the terminal's Ctrl-C in a process of the run, whose parent handles it and sets `stopping`.

    Returns a function that says whether to stop: `stopping` is set, or the parent has died.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None
    return lambda: stopping.is_set() or not parent.is_alive()


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
