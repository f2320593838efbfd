"""What a run is: every option of `diloco train`, as frozen dataclasses. Torch-free, so that `--help` is quick.

The defaults are the DiLoCo paper's; recipes.py has those of models that need others:
defaults < recipe of the model < run file < command line. `diloco train --print-config` shows the result.
"""

import re
from dataclasses import asdict, dataclass, field
from typing import Literal

from diloco.core.config import (
    COARSE_CODECS,
    FaultsConfig,
    OuterConfig,
    SyncConfig,
    refuse_by_ranks_in_a_swarm,
    refuse_combinations,
)
from diloco.core.options import Scope, option, scope, scopes
from diloco.core.rates import LearningRateCurve
from diloco.core.schedule import Schedule
from diloco.data.config import DataConfig
from diloco.errors import ConfigError
from diloco.methods.growing_rounds import GrowingRounds
from diloco.models.choice import ModelChoice
from diloco.models.lora import LoraConfig
from diloco.models.pretrained import uses_transformers
from diloco.swarm.config import SwarmConfig
from diloco.version import __version__

_CHECKPOINT_STEPS = 50  # between checkpoints, at least, if no interval is given
ELASTIC_ENGINES = ("swarm", "bucket")
SINK_NAMES = ("tensorboard", "wandb", "trackio")  # their classes are in sinks/registry.py


@dataclass(frozen=True)
class InnerConfig:
    """The inner optimizer, with warm-up, cosine decay and clipping."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: Muon for the matrices of the blocks, AdamW for the rest."""
    lr: float = 4e-4
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices; norms have none."""
    beta1: float = 0.9
    """Decay of AdamW's first moment."""
    beta2: float = 0.95
    """Decay of AdamW's second moment."""
    momentum: float | None = None
    """Muon's momentum (0.95)."""
    warmup_steps: int = 1000
    """Inner steps over which the learning rate rises from 0."""
    final_lr_ratio: float = 0.1
    """The cosine ends at this share of the peak."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this norm; none: never."""

    def __post_init__(self) -> None:
        above_zero("inner.lr", self.lr)
        at_least("inner.weight_decay", self.weight_decay, 0)
        if self.weight_decay == float("inf"):
            raise ConfigError("inner.weight_decay = inf must be finite")
        at_least("inner.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2"):
            between("inner." + name, getattr(self, name), 0, 1)
        if self.momentum is not None:
            between("inner.momentum", self.momentum, 0, 1)
            if self.optimizer != "muon":
                raise ConfigError(f"inner.momentum = {self.momentum} is Muon's: add --inner.optimizer muon")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ConfigError(f"inner.final_lr_ratio = {self.final_lr_ratio} must be from 0 to 1")
        if self.clip_norm is not None:
            above_zero("inner.clip_norm", self.clip_norm)


@dataclass(frozen=True)
class TrainingConfig:
    """The loop around the optimizer: batches, evaluation, samples."""

    batch_size: int = 512
    """Sequences of one worker's inner step."""
    accumulation: int | None = option(None, may_differ="in a swarm")
    """Split that batch into this many micro-batches, to save memory (default: 1 on the CPU; on a GPU as few as fit its
    memory, found before training)."""
    eval_interval: int | None = option(None, may_change=True)
    """Inner steps between evaluations of the outer parameters (default: about ten in the run, at rounds)."""
    eval_windows: int = option(256, may_change=True)
    """Validation sequences an evaluation uses, shared out among the workers."""
    log_interval: int = option(10, may_change=True, may_differ="in a swarm")
    """Inner steps between two loss lines in events.jsonl."""
    sample_prompt: str = option("", may_change=True, may_differ="in a swarm", unused_with=("training.sample_tokens", 0))
    """What the sample at the end starts with, in a run on conversations the user's message; empty: the start of a text,
    or a question of the validation text (default: `def ` if the text is Python)."""
    sample_tokens: int = option(80, may_change=True, may_differ="in a swarm")
    """Length of that sample in tokens; 0: none."""
    sample_interval: int | None = option(
        None, may_change=True, may_differ="in a swarm", unused_with=("training.sample_tokens", 0)
    )
    """Inner steps between samples during training, of the first worker's own parameters (default: only at the end)."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "eval_windows", "log_interval"):
            at_least("training." + name, getattr(self, name), 1)
        if self.accumulation is not None:
            at_least("training.accumulation", self.accumulation, 1)
        at_least("training.sample_tokens", self.sample_tokens, 0)
        if self.sample_interval is not None:
            at_least("training.sample_interval", self.sample_interval, 1)
        if self.eval_interval is not None:
            at_least("training.eval_interval", self.eval_interval, 1)
        if self.batch_size % self.least_accumulation:
            raise ConfigError(
                f"training.batch_size = {self.batch_size} is not a multiple of training.accumulation = "
                f"{self.accumulation}: micro-batches must be equal"
            )

    @property
    def least_accumulation(self) -> int:
        """The accumulation as given; 1 if it is left open, where it may become more on a GPU."""
        return 1 if self.accumulation is None else self.accumulation


@dataclass(frozen=True)
class ComputeConfig:
    """How a worker computes."""

    sharding: Literal["fsdp", "ddp"] = "fsdp"
    """Among several ranks: fsdp cuts parameters and optimizer state among them, ddp has a copy on each."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Precision of matrix products and activations; weights are fp32. auto: bf16 on a GPU that has it, else fp32."""
    compile: bool | None = None
    """torch.compile (default: on a GPU, for models of 50M parameters and more)."""
    checkpoint_activations: bool = False
    """Recompute activations block by block in the backward pass, to save memory."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving the whole state of a run, so that `diloco train --resume RUN` continues it bit for bit."""

    interval: int | None = option(None, may_differ="in a swarm")
    """Inner steps between checkpoints (default: about ten in the run, after rounds, at least 50 steps apart; and one at
    the end); 0: none, also not at the end."""
    keep: int = option(2, unused_with=("checkpoint.interval", 0))
    """The number of the newest checkpoints that stay; more, while not all workers are known to have them."""
    asynchronous: bool = option(True, unused_with=("checkpoint.interval", 0))
    """Write beside training, from a copy; false: training waits, and needs no copy."""

    def __post_init__(self) -> None:
        if self.interval is not None:
            at_least("checkpoint.interval", self.interval, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    model: ModelChoice = field(default_factory=ModelChoice)
    recipe: Literal["warm", "plain", "paper"] | None = None
    """The defaults of all that is not given (default: warm for tiny where it can have a warm start, else plain)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    workers: int = option(2, may_change=True, may_differ="in a swarm")
    """Workers on this machine; under torchrun its world size counts instead."""
    ranks: str = option("1", may_change=True, may_differ="in a swarm")
    """Processes of each worker, a device each: a number, or one for each worker as in 1,2."""
    steps: int = option(88_000, may_change=True)
    """Inner steps of each worker."""
    mode: Literal["diloco", "data-parallel"] = "diloco"
    """data-parallel averages gradients at every step: the baseline, with the same model, data and byte counting."""
    engine: Literal["torch_distributed", "swarm", "bucket"] = "torch_distributed"
    """A fixed set of workers, or ones that others join (`diloco join`) and leave: in a swarm, or in a bucket."""
    bucket: str | None = option(None, may_change=True, may_differ="always")
    """Where the workers of engine = bucket meet: s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or
    file:///FOLDER/RUN, on a disk that all of them share."""
    backend: Literal["gloo", "nccl"] = option("gloo", may_change=True, may_differ="always")
    """What carries the outer gradients; nccl needs a CUDA device for each worker."""
    seed: int = 0
    """Seed for the initial parameters and the order of the data."""
    out: str | None = option(None, may_change=True, may_differ="always")
    """The run folder (default: runs/<date>-<model>)."""
    device: Literal["auto", "cpu", "cuda"] = option("auto", may_change=True, may_differ="always")
    """Where the workers compute; auto takes CUDA devices in turn if there are any."""
    threads: int | None = option(None, may_change=True, may_differ="always")
    """CPU threads of each worker (default: the cores shared out among the local workers; in a swarm among all of this
    user's workers on the machine)."""
    port: int | None = option(None, may_change=True, may_differ="always")
    """TCP port on which local workers meet (default: none needed, they meet at a file). In a swarm, the port at which
    the first local worker is reached, the next one is at the next port (default: any that are free)."""
    host: str | None = option(None, may_change=True, may_differ="always")
    """In a swarm, the address of this machine to listen at (default: all, IPv4 and IPv6)."""
    announce: str | None = option(None, may_change=True, may_differ="always")
    """In a swarm, what others should call instead of this machine's own addresses: HOST or HOST:PORT, or a multiaddr;
    several with commas."""
    sinks: str | None = option(None, may_change=True, may_differ="always")
    """Where the run is written to as well: tensorboard, wandb, trackio; several with commas (default: nowhere)."""
    dashboard: int | None = option(None, may_change=True, may_differ="always")
    """TCP port of this machine, on loopback, where a page shows the run while it trains (0: any free port)."""
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig, metadata=scope(unused_with=("mode", "data-parallel")))
    sync: SyncConfig = field(default_factory=SyncConfig)
    faults: FaultsConfig = field(default_factory=FaultsConfig, metadata=scope(unused_with=("mode", "data-parallel")))
    data: DataConfig = field(default_factory=DataConfig, metadata=scope(may_differ="in a swarm"))
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig, metadata=scope(may_change=True, may_differ="always"))
    checkpoint: CheckpointConfig = field(
        default_factory=CheckpointConfig, metadata=scope(may_change=True, may_differ="always")
    )
    swarm: SwarmConfig = field(
        default_factory=SwarmConfig, metadata=scope(may_change=True, unused_with=("engine", "torch_distributed"))
    )

    def __post_init__(self) -> None:
        at_least("workers", self.workers, 1)
        at_least("steps", self.steps, 1)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} must be from 0 to 2**63 - 1")
        if self.backend == "nccl" and self.device != "cuda":
            raise ConfigError(f"backend = nccl sends from CUDA devices, but device = {self.device}: add --device cuda")
        if self.threads is not None:
            at_least("threads", self.threads, 1)
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must be from 1 to 65535")
        if self.dashboard is not None and not 0 <= self.dashboard <= 65535:
            raise ConfigError(f"dashboard = {self.dashboard} must be a port, from 1 to 65535, or 0 for any free one")
        for name in self.sink_names:
            if name not in SINK_NAMES or self.sink_names.count(name) > 1:
                raise ConfigError(f"sinks = {self.sinks}: each must be one of {', '.join(SINK_NAMES)}, and only once")
        refuse_combinations(self.sync, self.faults)
        self._check_lora()
        self._check_compute()
        self._check_ranks()
        self._check_engine()
        if self.sync.asynchronous:
            self._check_asynchronous()

    @property
    def elastic(self) -> bool:
        """Whether workers join and leave while others train."""
        return self.engine in ELASTIC_ENGINES

    @property
    def sink_names(self) -> tuple[str, ...]:
        return () if self.sinks is None else tuple(name.strip() for name in self.sinks.split(","))

    def _check_lora(self) -> None:
        if self.lora.rank is None:
            return
        given = f"lora.rank = {self.lora.rank}"
        if not uses_transformers(self.model.name):
            raise ConfigError(
                f"{given} puts adapters into a pre-trained model of transformers, and model = {self.model.name}: give "
                "hf:NAME_OR_PATH (a folder of a Llama too), or leave LoRA out"
            )
        if self.inner.optimizer == "muon":
            raise ConfigError(f"{given}: Muon is for whole matrices, and adapters are thin ones; use adamw")
        if set(self.ranks.split(",")) != {"1"}:
            raise ConfigError(f"{given} is for workers of one rank, and ranks = {self.ranks}: leave out one of the two")

    def _check_compute(self) -> None:
        if self.mode == "data-parallel" and self.sync.codec in COARSE_CODECS:
            raise ConfigError(
                f"sync.codec = {self.sync.codec} leaves most of a vector to later rounds and needs error feedback, "
                "which mode data-parallel does not have: use int4, e3m0 or a finer one"
            )
        if self.compute.precision == "fp16" and self.mode == "data-parallel":
            raise ConfigError(
                "compute.precision = fp16 has a loss scale for each worker, whose gradients cannot be averaged as they "
                "are: use bf16 or fp32 in mode data-parallel"
            )
        if self.compute.precision == "fp16" and self.sync.warm_start and not self.elastic:
            raise ConfigError(
                f"compute.precision = fp16 has a loss scale for each worker, and sync.warm_start = "
                f"{self.sync.warm_start} averages gradients: use bf16 or fp32, or leave the warm start out"
            )
        if self.sync.offload and (self.backend == "nccl" or self.mode == "data-parallel"):
            raise ConfigError(
                f"sync.offload keeps anchors in CPU memory: it is for mode diloco over gloo (backend = {self.backend}, "
                f"mode = {self.mode})"
            )
        if self.sync.offload and self.device == "cpu":
            raise ConfigError(
                "sync.offload = true has no effect with device = cpu, where anchors are in CPU memory always: leave "
                "out one of the two"
            )

    def _check_ranks(self) -> None:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.ranks):
            raise ConfigError(f"ranks = {self.ranks} must be a number of at least 1, or one for each worker as in 1,2")
        several = set(self.ranks.split(",")) != {"1"}
        if several and self.sync.warm_start and self.engine != "swarm":
            raise ConfigError(
                f"sync.warm_start = {self.sync.warm_start} is for workers of one rank, and ranks = {self.ranks}: train "
                "these steps with ranks = 1, and begin the run with the model that they give (--model RUN/model)"
            )
        if several and self.training.sample_interval is not None:
            raise ConfigError(
                f"training.sample_interval = {self.training.sample_interval} is for workers of one rank, and ranks = "
                f"{self.ranks}: leave it out; the sample at the end is written all the same"
            )
        if several and self.sync.second_moment_every is not None:
            raise ConfigError(
                f"sync.second_moment_every = {self.sync.second_moment_every} is for workers of one rank, and ranks = "
                f"{self.ranks}: leave out one of the two"
            )
        if several and self.mode == "data-parallel":
            raise ConfigError(
                f"ranks = {self.ranks}, but in mode data-parallel every rank averages with every other: give that many "
                "--workers instead"
            )
        if not several and self.compute.sharding != "fsdp":
            raise ConfigError(
                f"compute.sharding = {self.compute.sharding} has no effect on workers of one rank: add --ranks 2, say"
            )
        rows = self.training.batch_size
        accumulation = self.training.least_accumulation
        for size in map(int, self.ranks.split(",")):
            if rows % (size * accumulation):
                raise ConfigError(
                    f"training.batch_size = {rows} cannot be shared out evenly among {size} ranks"
                    + (f" in {accumulation} micro-batches each" if accumulation > 1 else "")
                    + f": make it a multiple of {size * accumulation}"
                )

    def _check_asynchronous(self) -> None:
        several = set(self.ranks.split(",")) != {"1"}
        if self.elastic or several:
            given = f"ranks = {self.ranks}" if several else f"engine = {self.engine}"
            raise ConfigError(
                f"sync.asynchronous = true and {given}: it is for a fixed set of workers of one rank, of which the "
                "first holds the anchor; leave out one of the two (a swarm waits for slow workers no longer than "
                "needed: sync.dynamic_steps)"
            )
        if self.outer.optimizer != "nesterov" or self.outer.course():
            raise ConfigError(
                "sync.asynchronous = true delays the momentum of the outer optimizer nesterov, with constant numbers; "
                f"leave out outer.optimizer = {self.outer.optimizer} and {', '.join(self.outer.course()) or 'the rest'}"
            )

    def _check_bucket(self) -> None:
        if self.engine != "bucket":
            if self.bucket is not None:
                raise ConfigError(f"bucket = {self.bucket} is where the workers of engine = bucket meet: add it")
            return
        if self.bucket is None:
            raise ConfigError("engine = bucket needs the place where the workers meet: add --bucket s3://BUCKET/RUN")
        if "://" not in self.bucket:
            raise ConfigError(
                f"bucket = {self.bucket} must be s3://BUCKET/RUN, gs://BUCKET/RUN, az://CONTAINER/RUN or "
                "file:///FOLDER/RUN"
            )
        if self.port is not None:
            raise ConfigError(f"port = {self.port} has no effect with engine = bucket: leave it out")
        for name, default in asdict(SwarmConfig()).items():
            if name not in ("min_workers", "patience") and getattr(self.swarm, name) != default:
                raise ConfigError(f"swarm.{name} = {getattr(self.swarm, name)} is for engine = swarm: leave it out")

    def _check_engine(self) -> None:
        """Refuse what a swarm or a bucket cannot do, and options that only they have."""
        if self.engine != "swarm":
            for name in ("host", "announce"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} = {getattr(self, name)} is for a swarm: add --engine swarm")
        self._check_bucket()
        if not self.elastic:
            return
        if self.mode != "diloco":
            raise ConfigError(
                f"mode = {self.mode} averages among a fixed set of workers: leave out engine = {self.engine}"
            )
        if self.sync.warm_start >= self.steps:
            raise ConfigError(
                f"sync.warm_start = {self.sync.warm_start}: with engine = {self.engine} one worker takes these steps "
                f"alone, and with steps = {self.steps} none would be left for the others; lower it or raise steps"
            )
        if set(self.ranks.split(",")) != {"1"}:
            if self.engine == "bucket":
                raise ConfigError(
                    f"ranks = {self.ranks}: with engine = bucket a worker has one rank; start a worker for each device "
                    "(--workers)"
                )
            refuse_by_ranks_in_a_swarm(self.sync)
        if self.backend != "gloo":
            raise ConfigError(f"backend = {self.backend} has no effect with engine = {self.engine}: leave it out")
        if self.data.partition != "iid":
            raise ConfigError(
                f"data.partition = {self.data.partition} weighs each worker by its part of the text, and with engine = "
                f"{self.engine} the parts change hands: use iid"
            )
        if self.port is not None and self.port + self.workers - 1 > 65535:
            raise ConfigError(f"port = {self.port} with {self.workers} workers, a port each, goes beyond 65535")

    def ranks_of_workers(self, processes: int | None = None) -> tuple[int, ...]:
        """Return the ranks of each worker: of `workers` workers, or of as many as `processes` processes make."""
        given = tuple(map(int, self.ranks.split(",")))
        if len(given) == 1:
            if processes is None:
                return given * self.workers
            if processes % given[0]:
                raise ConfigError(f"{processes} processes cannot be workers of ranks = {self.ranks}: start a multiple")
            return given * (processes // given[0])
        if processes is None and len(given) != self.workers:
            raise ConfigError(f"ranks = {self.ranks} is for {len(given)} workers, but workers = {self.workers}")
        if processes is not None and sum(given) != processes:
            raise ConfigError(f"ranks = {self.ranks} needs {sum(given)} processes, but there are {processes}")
        return given

    @property
    def eval_interval(self) -> int:
        """The inner steps between evaluations: as given, or about ten in the run, at ends of rounds."""
        if self.training.eval_interval is not None:
            return self.training.eval_interval
        return self._tenth_of_the_run()

    def evaluation_due(self, step: int) -> bool:
        """Return whether a fixed set of workers evaluates after this step: after rounds, which count from the warm
        start."""
        warm_start = self.sync.warm_start
        interval = self.eval_interval
        if self.sync.dynamic_steps and step > warm_start:
            since = step - warm_start
            H = self.sync.num_inner_steps
            return self._ends_turn(step) and since // interval > (since - H) // interval
        return (step if step <= warm_start else step - warm_start) % interval == 0

    def _ends_turn(self, step: int) -> bool:
        """Return whether all workers reach this step: with `sync.dynamic_steps` they pass over steps, but not over the
        ends of their turns."""
        return (step - self.sync.warm_start) % self.sync.num_inner_steps == 0

    @property
    def checkpoint_interval(self) -> int:
        """The inner steps between checkpoints: as given, or about ten in the run; 0: none."""
        return self._default_checkpoint_interval() if self.checkpoint.interval is None else self.checkpoint.interval

    def _tenth_of_the_run(self) -> int:
        """Return about a tenth of the steps, in whole rounds."""
        H = self.sync.num_inner_steps
        return max(H, round(self.steps / 10 / H) * H)

    def checkpoint_due(self, step: int) -> bool:
        """Return whether every worker saves after this inner step; the same for all."""
        if self.sync.dynamic_steps and step > self.sync.warm_start:
            before = step - self.sync.num_inner_steps
            return self._ends_turn(step) and self.checkpoints_until(step) > self.checkpoints_until(before)
        if self.checkpoint.interval is not None:
            return self.checkpoint.interval > 0 and step % self.checkpoint.interval == 0
        warm_start = self.sync.warm_start
        interval = self._default_checkpoint_interval()
        if step <= warm_start:
            return step % interval == 0
        after_round = step - warm_start - self.sync.overlap_steps  # what was posted is merged: nothing to wait for
        return after_round > 0 and after_round % interval == 0

    def checkpoints_until(self, step: int) -> int:
        """Return how many are due by then, for workers that may jump over a step."""
        if self.checkpoint.interval is not None:
            return step // self.checkpoint.interval if self.checkpoint.interval else 0
        warm_start = self.sync.warm_start
        interval = self._default_checkpoint_interval()
        return min(step, warm_start) // interval + max(0, step - warm_start - self.sync.overlap_steps) // interval

    def _default_checkpoint_interval(self) -> int:
        """Return the steps between checkpoints for about ten in the run, at ends of rounds, and not closer than a short
        run is repeated."""
        H = self.sync.num_inner_steps
        return max(self._tenth_of_the_run(), -(-_CHECKPOINT_STEPS // H) * H)

    @property
    def num_checkpoints(self) -> int:
        """Return how many a run writes from its first step to its last, one at its end among them."""
        if self.checkpoint.interval == 0:
            return 0
        return self.checkpoints_until(self.steps) + (not self.checkpoint_due(self.steps))

    def identity(self, corpus_digest: str, model: str) -> str:
        """Return text that must be the same on all workers: all options but those that may differ between machines.

        `model` describes the built model: its name may be a path, which is one machine's own. In a swarm
        `corpus_digest` is of the text that is shared out, also for a worker that brings its own.
        """
        swarm = self.elastic
        common = {
            key: value
            for key, value in self.values().items()
            if (is_shared(key) if swarm else _scope(key).may_differ != "always")
            and not key.startswith(("swarm.", "model."))
        }
        return repr((__version__, corpus_digest, model, sorted(common.items())))

    def values(self) -> dict[str, object]:
        """Return all values by dotted key."""
        values: dict[str, object] = {}
        for name, value in asdict(self).items():
            values |= (
                {f"{name}.{key}": entry for key, entry in value.items()} if isinstance(value, dict) else {name: value}
            )
        return values

    def shared(self) -> dict[str, object]:
        """Return the options that a joiner of a swarm receives, by dotted key; without model.name, which may be a
        path."""
        return {key: value for key, value in self.values().items() if is_shared(key)}

    def lasting(self, corpus_digest: str, model: str) -> dict[str, object]:
        """Return by dotted key the options that a run and the checkpoints it resumes from must have in common."""
        values = {
            key: value for key, value in self.values().items() if not may_change(key) and not key.startswith("model.")
        }
        return values | {"corpus": corpus_digest, "model": model}

    @property
    def tokens_per_step(self) -> int:
        """The tokens of one worker's inner step."""
        return self.training.batch_size * self.data.sequence_length


def learning_rates(inner: InnerConfig, steps: int) -> LearningRateCurve:
    """Return the inner optimizer's learning rate as a function of the step, in a run of `steps` steps."""
    return LearningRateCurve(inner.lr, steps, inner.warmup_steps, inner.final_lr_ratio)


def turns(config: RunConfig) -> Schedule:
    """Return the schedule of a model of one fragment: with several, each of them is averaged once in the same steps."""
    sync = config.sync
    growth = None if sync.growth is None else GrowingRounds(sync.growth, learning_rates(config.inner, config.steps))
    return Schedule(sync.num_inner_steps, (0,), sync.overlap_steps, sync.warm_start, growth)


def num_rounds(config: RunConfig) -> int:
    """Return the rounds of each fragment in the whole run, the last one perhaps with fewer steps."""
    return turns(config).turns_until(config.steps)


def may_change(key: str) -> bool:
    """Return whether a resumed run may have another value of this key."""
    return bool(_scope(key).may_change)


def is_shared(key: str) -> bool:
    """Return whether this key is the same on all machines of a swarm, so that joiners receive it."""
    return _scope(key).may_differ not in ("in a swarm", "always")


def _scope(key: str) -> Scope:
    return scopes(RunConfig).get(key, Scope())


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} = {value} must be at least {least}")


def above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} = {value} must be a finite number above 0")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ConfigError(f"{name} = {value} must be at least {low} and below {high}")
