"""What a run is: every option of `diloco train`, as frozen dataclasses. Torch-free, so that `--help` is quick.

The defaults are the DiLoCo paper's. What must differ for a small model is in recipes.py, one for each that needs it:
defaults < recipe of the model < run file < command line. `diloco train --print-config` shows what came out.
"""

import re
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from diloco.core.config import OuterConfig, SyncConfig
from diloco.data.config import DataConfig
from diloco.engines.swarm.config import SwarmConfig
from diloco.errors import ConfigError
from diloco.version import __version__

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
    """Of Muon (0.95)."""
    warmup_steps: int = 1000
    """Inner steps over which the learning rate rises from 0."""
    final_lr_ratio: float = 0.1
    """The cosine ends at this share of the peak."""
    clip_norm: float | None = 1.0
    """Gradients are scaled down to this norm; none: never."""

    def __post_init__(self) -> None:
        _above_zero("inner.lr", self.lr)
        _at_least("inner.weight_decay", self.weight_decay, 0)
        if self.weight_decay == float("inf"):
            raise ConfigError("inner.weight_decay = inf must be finite")
        _at_least("inner.warmup_steps", self.warmup_steps, 0)
        for name in ("beta1", "beta2"):
            _between("inner." + name, getattr(self, name), 0, 1)
        if self.momentum is not None:
            _between("inner.momentum", self.momentum, 0, 1)
            if self.optimizer != "muon":
                raise ConfigError(f"inner.momentum = {self.momentum} is Muon's: add --inner.optimizer muon")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ConfigError(f"inner.final_lr_ratio = {self.final_lr_ratio} must be from 0 to 1")
        if self.clip_norm is not None:
            _above_zero("inner.clip_norm", self.clip_norm)


@dataclass(frozen=True)
class TrainingConfig:
    """The loop around the optimizer: batches, evaluation, samples."""

    batch_size: int = 512
    """Sequences of one worker's inner step."""
    accumulation: int = 1
    """Split that batch into so many micro-batches, to save memory."""
    eval_interval: int | None = None
    """Inner steps between evaluations of the outer parameters (default: about ten in the run, at rounds)."""
    eval_windows: int = 256
    """Validation sequences an evaluation uses, shared out among the workers."""
    log_interval: int = 10
    """Inner steps between two loss lines in events.jsonl."""
    sample_prompt: str = "def "
    """What the sample at the end starts with; empty: the start of a text."""
    sample_tokens: int = 80
    """Length of that sample in tokens; 0: none."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "eval_windows", "log_interval"):
            _at_least("training." + name, getattr(self, name), 1)
        _at_least("training.sample_tokens", self.sample_tokens, 0)
        if self.eval_interval is not None:
            _at_least("training.eval_interval", self.eval_interval, 1)
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"training.batch_size = {self.batch_size} is not a multiple of training.accumulation = "
                f"{self.accumulation}: micro-batches must be equal"
            )


@dataclass(frozen=True)
class ComputeConfig:
    """How a worker computes."""

    sharding: Literal["fsdp", "ddp"] = "fsdp"
    """Among several ranks: fsdp cuts parameters and optimizer state among them, ddp has a copy on each."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of matrix products and activations; weights are fp32 always. auto: bf16 on a GPU that has it, else fp32."""
    compile: bool | None = None
    """torch.compile (default: on a GPU, for models of 50M parameters and more)."""
    checkpoint_activations: bool = False
    """Recompute activations block by block in the backward pass, to save memory."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving the whole state of a run, so that `diloco train --resume RUN` goes on as if nothing had happened."""

    interval: int | None = None
    """Inner steps between checkpoints (default: about ten in the run, after rounds); 0: none, also not at the end."""
    keep: int = 2
    """So many of the newest stay; more, while not all workers are known to have them."""
    asynchronous: bool = True
    """Write beside training, from a copy in CPU memory; false: training waits, and needs no copy."""

    def __post_init__(self) -> None:
        if self.interval is not None:
            _at_least("checkpoint.interval", self.interval, 0)
        _at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class RunConfig:
    """A whole run."""

    model: str = "tiny"
    """Preset: tiny, 60m, 150m, 400m (the paper's), llama-150m, llama-1b (OpenDiLoCo's). Or a pre-trained model: the
    folder of a Llama, or hf:NAME_OR_PATH for any causal language model of transformers."""
    workers: int = 2
    """Workers on this machine; under torchrun its world size counts instead."""
    ranks: str = "1"
    """Processes of each worker, a device each: a number, or one for each worker as in 1,2."""
    steps: int = 88_000
    """Inner steps of each worker."""
    mode: Literal["diloco", "data-parallel"] = "diloco"
    """data-parallel averages gradients at every step: the baseline, with the same model, data and byte counting."""
    engine: Literal["torch_distributed", "swarm"] = "torch_distributed"
    """Who averages with whom: a fixed set of workers, or a swarm that others join (`diloco join`) and leave."""
    backend: Literal["gloo", "nccl"] = "gloo"
    """What carries the outer gradients; nccl needs a CUDA device for each worker."""
    seed: int = 0
    """Of the initial parameters and the order of the data."""
    out: str | None = None
    """The run folder (default: runs/<date>-<model>)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the workers compute; auto takes CUDA devices in turn if there are any."""
    threads: int | None = None
    """CPU threads of each worker (default: the cores shared out among the local workers)."""
    port: int | None = None
    """TCP port on which local workers meet (default: none needed, they meet at a file). In a swarm, the port at which
    the first local worker is reached, the next one is at the next port (default: any that are free)."""
    host: str | None = None
    """In a swarm, the address of this machine to listen at (default: all, IPv4 and IPv6)."""
    announce: str | None = None
    """In a swarm, what others should call instead of this machine's own addresses: HOST or HOST:PORT, or a multiaddr;
    several with commas."""
    sinks: str | None = None
    """Where the run is written to as well: tensorboard, wandb, trackio; several with commas (default: nowhere)."""
    inner: InnerConfig = field(default_factory=InnerConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    swarm: SwarmConfig = field(default_factory=SwarmConfig)

    def __post_init__(self) -> None:
        _at_least("workers", self.workers, 1)
        _at_least("steps", self.steps, 1)
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed = {self.seed} must be from 0 to 2**63 - 1")
        if self.backend == "nccl" and self.device != "cuda":
            raise ConfigError(f"backend = nccl sends from CUDA devices, but device = {self.device}: add --device cuda")
        if self.threads is not None:
            _at_least("threads", self.threads, 1)
        if self.port is not None and not 1 <= self.port <= 65535:
            raise ConfigError(f"port = {self.port} must be from 1 to 65535")
        for name in self.sink_names:
            if name not in SINK_NAMES or self.sink_names.count(name) > 1:
                raise ConfigError(f"sinks = {self.sinks}: each must be one of {', '.join(SINK_NAMES)}, and only once")
        self._check_compute()
        self._check_ranks()
        self._check_engine()

    @property
    def sink_names(self) -> tuple[str, ...]:
        return () if self.sinks is None else tuple(name.strip() for name in self.sinks.split(","))

    def _check_compute(self) -> None:
        if self.compute.precision == "fp16" and self.mode == "data-parallel":
            raise ConfigError(
                "compute.precision = fp16 has a loss scale for each worker, whose gradients cannot be averaged as they "
                "are: use bf16 or fp32 in mode data-parallel"
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
        if several and self.mode == "data-parallel":
            raise ConfigError(
                f"ranks = {self.ranks}, but in mode data-parallel every rank averages with every other: give that many "
                "--workers instead"
            )
        if not several and self.compute.sharding != "fsdp":
            raise ConfigError(
                f"compute.sharding = {self.compute.sharding} has no effect on workers of one rank: add --ranks 2, say"
            )
        rows, accumulation = self.training.batch_size, self.training.accumulation
        for size in map(int, self.ranks.split(",")):
            if rows % (size * accumulation):
                raise ConfigError(
                    f"training.batch_size = {rows} cannot be shared out evenly among {size} ranks"
                    + (f" in {accumulation} micro-batches each" if accumulation > 1 else "")
                    + f": make it a multiple of {size * accumulation}"
                )

    def _check_engine(self) -> None:
        """What a swarm cannot do, and what only a swarm can."""
        if self.engine != "swarm":
            for name in ("host", "announce"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"{name} = {getattr(self, name)} is for a swarm: add --engine swarm")
            return
        if self.mode != "diloco":
            raise ConfigError(f"mode = {self.mode} averages among a fixed set of workers: leave out engine = swarm")
        if self.ranks != "1":
            raise ConfigError(
                f"ranks = {self.ranks}: a worker of a swarm has one rank; start a worker for each device (--workers)"
            )
        if self.backend != "gloo":
            raise ConfigError(f"backend = {self.backend} has no effect with engine = swarm: leave it out")
        if self.data.partition != "iid":
            raise ConfigError(
                f"data.partition = {self.data.partition} weighs each worker by its part of the text, and in a swarm "
                "the parts change hands: use iid"
            )
        if self.port is not None and self.port + self.workers - 1 > 65535:
            raise ConfigError(f"port = {self.port} with {self.workers} workers, a port each, goes beyond 65535")

    def sizes(self, processes: int | None = None) -> tuple[int, ...]:
        """The ranks of each worker, of `workers` workers, or of as many as so many processes make."""
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
        """Inner steps between evaluations: as given, or about ten in the run, at ends of rounds."""
        if self.training.eval_interval is not None:
            return self.training.eval_interval
        return self._about_ten()

    def _about_ten(self) -> int:
        H = self.sync.num_inner_steps
        return max(H, round(self.steps / 10 / H) * H)

    def checkpoint_due(self, step: int) -> bool:
        """Whether every worker saves after this inner step; the same for all."""
        if self.checkpoint.interval is not None:
            return self.checkpoint.interval > 0 and step % self.checkpoint.interval == 0
        after_round = step - self.sync.overlap_steps  # when what was posted has been merged: nothing to wait for
        return after_round > 0 and after_round % self._about_ten() == 0

    def checkpoints_until(self, step: int) -> int:
        """How many are due by then, for workers that may jump over a step."""
        if self.checkpoint.interval is not None:
            return step // self.checkpoint.interval if self.checkpoint.interval else 0
        return max(0, step - self.sync.overlap_steps) // self._about_ten()

    def identity(self, corpus_digest: str, model: str) -> str:
        """What must be the same on all workers: everything but what concerns one machine alone.

        `model` describes the built model: its name may be a path, which is one machine's own. In a swarm
        `corpus_digest` is of the text that is shared out, also for a worker that brings its own.
        """
        if self.engine == "swarm":
            shared = {key: value for key, value in self.shared().items() if not key.startswith("swarm.")}
            return repr((__version__, corpus_digest, model, sorted(shared.items())))
        data = replace(self.data, source="stdlib", tokenizer=None, cache_dir=None)
        data = replace(data, partition="iid", feature_model=None)  # what they give is in the corpus and its digest
        checkpoint = replace(self.checkpoint, keep=2, asynchronous=True)
        here = replace(self, out=None, device="auto", backend="gloo", threads=None, port=None, sinks=None)
        everyones = replace(here, model=model, data=data, checkpoint=checkpoint, compute=ComputeConfig())
        return repr((__version__, corpus_digest, everyones))

    def values(self) -> dict[str, object]:
        """By dotted key."""
        values: dict[str, object] = {}
        for name, value in asdict(self).items():
            values |= {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        return values

    def shared(self) -> dict[str, object]:
        """Of a swarm: what a joiner is told, by dotted key. The model is not among it: it may be a path."""
        return {key: value for key, value in self.values().items() if is_shared(key)}

    def lasting(self, corpus_digest: str, model: str) -> dict[str, object]:
        """By dotted key, what a run must have in common with its checkpoints to go on from them."""
        values = {key: value for key, value in self.values().items() if not may_change(key)}
        return values | {"corpus": corpus_digest, "model": model}

    @property
    def tokens_per_step(self) -> int:
        """Of one worker."""
        return self.training.batch_size * self.data.sequence_length


MAY_CHANGE = (
    "workers", "ranks", "compute.", "sync.offload", "steps", "out", "device", "backend", "threads", "port", "sinks",
    "host", "announce", "swarm.",
    "sync.timeout_seconds", "checkpoint.", "data.source", "data.tokenizer", "data.feature_model", "data.cache_dir",
    "training.eval_interval", "training.eval_windows", "training.log_interval", "training.sample_prompt",
    "training.sample_tokens",
)  # fmt: skip
"""Keys and tables that a run may have otherwise when it goes on; data may have moved, but must be the same corpus."""

OWN = (
    "model", "workers", "ranks", "out", "device", "backend", "threads", "port", "host", "announce", "sinks",
    "compute.", "sync.offload", "data.", "training.accumulation", "training.log_interval", "training.sample_prompt",
    "training.sample_tokens", "checkpoint.", "swarm.invitation_days",
)  # fmt: skip
"""Keys and tables that each machine of a swarm decides for itself; the text is known by its digest."""


def may_change(key: str) -> bool:
    """Whether a run may go on with another value of this key."""
    return _among(key, MAY_CHANGE)


def is_shared(key: str) -> bool:
    """Whether this key is the same on all machines of a swarm."""
    return key == "data.sequence_length" or not _among(key, OWN)


def _among(key: str, listed: tuple[str, ...]) -> bool:
    return any(key == one or (one.endswith(".") and key.startswith(one)) for one in listed)


def _at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} = {value} must be at least {least}")


def _above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} = {value} must be a finite number above 0")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ConfigError(f"{name} = {value} must be at least {low} and below {high}")
