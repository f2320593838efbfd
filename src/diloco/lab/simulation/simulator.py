"""One arm with one seed: k workers on one device, with the very core, schedule, codecs and outer optimizers of a swarm.

The workers are taken in turn in one process over the local engine: an inner step of all (replicas.py), then `post` for
all, then `merge` for all. The curve is that of the outer parameters. An arm with a checkpoint is saved on the way
(checkpoint.py); one that is interrupted in the shared beginning begins that again (pretraining.py).
"""

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.data.corpus import Corpus
from diloco.engines.worker_ranks import ALONE
from diloco.errors import ConfigError
from diloco.lab.arm import Arm, ArmResult, Progress
from diloco.lab.simulation.batches import CorpusTokens
from diloco.lab.simulation.checkpoint import ArmCheckpoint, ArmState, Interrupted, run_identity
from diloco.lab.simulation.machines import Clock, pace_table, round_bytes, work_table
from diloco.lab.simulation.pretraining import beginning
from diloco.lab.simulation.replicas import Beginning, Replicas, ReplicaTask, Sequential, learning_rates
from diloco.lab.simulation.stacked import Stacked
from diloco.lab.simulation.workers import Workers
from diloco.models.native.model import NativeModel
from diloco.training.compute import Precision
from diloco.version import __version__

OnProgress = Callable[[Progress], None]


def simulate(
    arm: Arm,
    seed: int,
    corpus: Corpus,
    device: torch.device | str,
    *,
    folder: Path | None = None,
    on_progress: OnProgress | None = None,
    how: str = "auto",
    checkpoint: ArmCheckpoint | None = None,
) -> ArmResult:
    """Train the arm and measure it.

    `folder`: the lab folder, in which the shared beginning is kept for other processes.
    `how`: how the replicas are computed (`build`): auto, sequential, stacked or "stacked N".
    `checkpoint`: where and when to save the arm in progress; it goes on from what was saved there.
    """
    run = _Simulation(arm, seed, corpus, torch.device(device), on_progress, how, folder, checkpoint)
    with _fast_matrices(run.device):
        run.begin()
        run.train()
        return run.result()


class _Simulation:
    """One call of `simulate`: `begin`, `train`, then `result`."""

    def __init__(
        self,
        arm: Arm,
        seed: int,
        corpus: Corpus,
        device: torch.device,
        on_progress: OnProgress | None,
        how: str,
        folder: Path | None,
        checkpoint: ArmCheckpoint | None,
    ) -> None:
        self.folder = folder
        self.checkpoint = checkpoint
        self.first_step = 0
        """Steps that an earlier process has taken."""
        self.arm = arm
        self.seed = seed
        self.corpus = corpus
        self.device = device
        self.how = how
        self.config = arm.model_config(corpus.vocab_size)
        self.text = CorpusTokens(corpus, device)
        self.validation = self.text.validation(arm.eval_windows, arm.sequence_length)
        self.clock = Clock(arm, pace_table(arm, seed))
        self.curve: list[tuple[int, float]] = []
        self.workers: Workers | None = None
        self.evaluation_seconds = 0.0
        self._on_progress = on_progress
        self._precision = Precision("auto", device, ALONE)

    # The beginning

    def begin(self) -> None:
        start = beginning(
            self.arm,
            self.config,
            self.seed,
            self.text,
            self.corpus.digest,
            self._build,
            self.folder,
            self.how,
            self._report_pretraining,
        )
        self.started = time.monotonic()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.replicas = self._build(self._replica_task(), start)
        if self.arm.mode == "diloco":
            self.workers = Workers(self.arm, self.seed, self.replicas, self.text, self.clock)
        if self.checkpoint is not None:
            self.identity = run_identity(self.arm, self.seed, self.corpus.digest, self.replicas.how, self.device)
            saved = self.checkpoint.read(self.identity)
            if saved is not None:
                self._load(saved)
                self.checkpoint.resumed_at = self.first_step

    def _build(self, task: ReplicaTask, start: Beginning) -> Replicas:
        return build(task, start, self.how)

    def _report_pretraining(self, step: int) -> None:
        self._report("pretraining", step, self.arm.pretraining_steps)
        if self.checkpoint is not None and self.checkpoint.stop():
            raise Interrupted

    def _replica_task(self) -> ReplicaTask:
        """Draw each worker's windows. A data-parallel arm has one replica, whose batch has those of all workers."""
        arm = self.arm
        steps = arm.steps * arm.updates_multiplier
        size = arm.batch_size * arm.batch_multiplier
        windows_by_worker = [
            self.text.windows(self.text.ranges(arm, worker), steps, size, arm.sequence_length, (self.seed, worker))
            for worker in range(arm.workers)
        ]
        places = (
            np.stack(windows_by_worker, 1) if arm.mode == "diloco" else np.concatenate(windows_by_worker, 1)[:, None]
        )
        rates = learning_rates(arm.inner_config, arm.pretraining_steps, steps, arm.total_steps, self.device)
        masked = not work_table(arm, self.seed).all()
        on_device = torch.from_numpy(places).to(self.device)
        return ReplicaTask(self.config, arm.inner_config, self.text, on_device, rates, masked=bool(masked))

    # Training

    def train(self) -> None:
        arm = self.arm
        steps = arm.steps * arm.updates_multiplier
        due = self._evaluation_steps(steps)
        if not self.first_step:
            self._evaluate(0)
        for step in range(self.first_step + 1, steps + 1):
            if self.workers is not None:
                self.workers.take_step()
            else:
                self.replicas.take_step()
                self.clock.take_step([True] * arm.workers, [True] * arm.workers)
                self.clock.average_gradients(self._gradient_bytes)
            if step == steps and self.workers is not None:
                self.workers.finish()
            if step in due:
                self._evaluate(step)
            if step == self._timed_from(steps):
                self._synchronize()
                self.timed = time.monotonic()
                self.evaluation_seconds = 0.0
            self._report("training", step, steps)
            if self.checkpoint is not None and step < steps and self.checkpoint.due():
                self._save(step, self.checkpoint)

    def _timed_from(self, steps: int) -> int:
        """Return the step after which speed is measured: the end of this process's first round, in which the step was
        compiled."""
        first_round = self.arm.sync_config.num_inner_steps if self.workers is not None else 10
        return self.first_step + min(first_round, (steps - self.first_step + 1) // 2)

    def _save(self, step: int, checkpoint: ArmCheckpoint) -> None:
        self._synchronize()
        tensors = {f"replicas/{name}": tensor for name, tensor in self.replicas.memory().items()}
        seconds = time.monotonic() - self.started
        numbers = {"step": step, "seconds": seconds, "curve": self.curve, "clock": self.clock.saved()}
        if self.workers is not None:
            state = self.workers.saved()
            if state is None:
                return  # the next step tries again
            tensors |= {f"workers/{name}": tensor for name, tensor in state.tensors.items()}
            numbers |= state.numbers
        checkpoint.write(ArmState(tensors, numbers), self.identity)
        if checkpoint.stop():
            raise Interrupted

    def _load(self, saved: ArmState) -> None:
        numbers = saved.numbers
        self.first_step = numbers["step"]
        self.started = time.monotonic() - numbers["seconds"]
        self.curve = [(step, loss) for step, loss in numbers["curve"]]
        self.clock.load(numbers["clock"])
        self.replicas.load(saved.with_prefix("replicas/"), self.first_step)
        if self.workers is not None:
            self.workers.load(ArmState(saved.with_prefix("workers/"), numbers), self.first_step)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _evaluation_steps(self, steps: int) -> set[int]:
        """Return the steps to evaluate at: ends of rounds, where the outer parameters are new."""
        H = self.arm.sync_config.num_inner_steps if self.workers is not None else 1
        distance = steps / self.arm.eval_points
        return {min(steps, max(1, round(distance * point / H)) * H) for point in range(1, self.arm.eval_points)} | {
            steps
        }

    def _evaluate(self, step: int) -> None:
        self._synchronize()
        started = time.monotonic()
        if self.workers is None:
            loss = self._loss(self.replicas.models[0])
        else:
            source = self.workers.most_advanced()
            with self.workers.optimizers[source].outer_parameters():
                loss = self._loss(self.replicas.models[source])
        self.curve.append((step, loss))
        self.evaluation_seconds += time.monotonic() - started

    @torch.no_grad()
    def _loss(self, model: torch.nn.Module) -> float:
        assert isinstance(model, NativeModel)
        pieces = torch.split(self.validation, 64)
        with self._precision.autocast():
            sums = [model.loss(rows[:, :-1], rows[:, 1:]) * len(rows) for rows in pieces]
        return float(torch.stack(sums).double().sum()) / len(self.validation)

    @property
    def _gradient_bytes(self) -> int:
        return max(_gradient_bytes(self.config.num_parameters(), self.arm))

    def _report(self, phase: str, step: int, steps: int) -> None:
        if self._on_progress is not None:
            loss = self.curve[-1][1] if self.curve else None
            self._on_progress(Progress(self.arm.name, self.seed, phase, step, steps, loss))  # type: ignore[arg-type]

    # The result

    def result(self) -> ArmResult:
        arm = self.arm
        workers = self.workers
        self._synchronize()
        ended = time.monotonic()
        steps = arm.steps * arm.updates_multiplier
        timed = max(1, steps - self._timed_from(steps))
        num_replicas = self.replicas.losses.shape[1]
        data_parallel = float(np.mean(_gradient_bytes(self.config.num_parameters(), arm)))
        last = self.replicas.losses[-max(1, steps // 10) :]
        return ArmResult(
            arm=arm,
            seed=self.seed,
            curve=tuple(self.curve),
            train_loss=float(last[last > 0].mean()),
            rounds=workers.rounds if workers is not None else steps,
            rounds_failed=workers.rounds_failed if workers is not None else 0,
            bytes_sent_per_worker=workers.bytes_sent / arm.workers if workers is not None else data_parallel * steps,
            data_parallel_bytes_per_worker=data_parallel * steps,
            simulated_seconds=self.clock.seconds,
            utilisation=self.clock.utilisation,
            statistics=tuple(workers.statistics) if workers is not None else (),
            tokens=self._tokens(),
            parameters=self.config.num_parameters(),
            seconds=ended - self.started,
            replica_step_seconds=(ended - self.timed - self.evaluation_seconds) / (timed * num_replicas),
            memory_bytes=torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
            how=self.replicas.how,
            corpus=self.corpus.digest,
            version=__version__,
            machine=machine(self.device),
            anchor_digest=workers.optimizers[workers.most_advanced()].anchor_digest() if workers is not None else "",
        )

    def _tokens(self) -> int:
        arm = self.arm
        inner_steps = (
            arm.steps * arm.updates_multiplier * arm.workers if self.workers is None else self.workers.steps_taken
        )
        return inner_steps * arm.batch_size * arm.batch_multiplier * arm.sequence_length


# How replicas are computed


_STACKED_BELOW = {"cuda": 50_000_000, "cpu": 100_000}
"""Parameters. On a GPU launches dominate a small model's step; on a CPU (8 replicas, one core: 0.01M parameters 0.31 ms
a step stacked and 1.4 ms in turn, 0.16M 11 and 10 ms, 1.3M 135 and 31 ms) stacking only saves Python's own time."""
_STACK_BYTES = 16 * 2**30
"""The most activations of one stack on a GPU: the same on every device, so that stacks are the same too."""


def build(task: ReplicaTask, beginning: Beginning, how: str = "auto") -> Replicas:
    """Build the replicas. `how`: auto, sequential, stacked, or "stacked N" for stacks of N replicas."""
    if how == "auto":
        how = choose(task.config.num_parameters(), task.places.device)
    name, _, size = how.partition(" ")
    if name == "sequential" and not size:
        return Sequential(task, beginning)
    if name != "stacked" or (size and not size.isdigit()) or size == "0":
        raise ConfigError(f"how = {how!r} must be auto, sequential, stacked, or stacked N with a number of replicas")
    return Stacked(task, beginning, min(int(size), task.replicas) if size else largest_stack(task))


def choose(parameters: int, device: torch.device) -> str:
    return "stacked" if parameters < _STACKED_BELOW.get(device.type, 0) else "sequential"


def largest_stack(task: ReplicaTask) -> int:
    """Return the replicas of a stack: all, or as many as fit into its memory. All stacks but the last are equal."""
    if task.places.device.type != "cuda":
        return task.replicas
    c = task.config
    (_, k, B) = task.places.shape
    activations = 2 * c.num_layers * (20 * c.hidden_size + 5 * c.intermediate_size) * B * task.length  # bytes, bf16
    fit = max(1, _STACK_BYTES // activations)
    return int(-(-k // -(-k // min(k, fit))))


# Bytes, and the machine


def _gradient_bytes(parameters: int, arm: Arm) -> list[int]:
    """Return what each worker sends to average gradients once, in fp32 or with the codec of a data-parallel arm."""
    name = arm.sync.get("codec", "fp32") if arm.mode == "data_parallel" else "fp32"
    vector = EncodedVector(codec(name), PartLayout(parameters), torch.device("meta"))
    return round_bytes(vector, arm.workers)


def machine(device: torch.device) -> dict[str, object]:
    """Describe the machine in words that say nothing of its owner."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {"device": name, "cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}


@contextmanager
def _fast_matrices(device: torch.device) -> Iterator[None]:
    """Allow TF32 where fp32 matrices are left on a GPU."""
    precision = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
