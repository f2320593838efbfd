"""The tables of a run file that belong to training itself: [inner], [training], [compute], [checkpoint]. Torch-free.

The defaults are the DiLoCo paper's.
"""

from dataclasses import dataclass
from typing import Literal

from diloco.core.options import option
from diloco.errors import ConfigError


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
        """As given; 1 if it is left open, where it may become more on a GPU."""
        return 1 if self.accumulation is None else self.accumulation


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
    """Saving the whole state of a run, so that `diloco train --resume RUN` continues it bit for bit."""

    interval: int | None = option(None, may_differ="in a swarm")
    """Inner steps between checkpoints (default: about ten in the run, after rounds, at least 50 steps apart; and one at
    the end); 0: none, also not at the end."""
    keep: int = option(2, unused_with=("checkpoint.interval", 0))
    """So many of the newest stay; more, while not all workers are known to have them."""
    asynchronous: bool = option(True, unused_with=("checkpoint.interval", 0))
    """Write beside training, from a copy; false: training waits, and needs no copy."""

    def __post_init__(self) -> None:
        if self.interval is not None:
            at_least("checkpoint.interval", self.interval, 0)
        at_least("checkpoint.keep", self.keep, 1)


def at_least(name: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(f"{name} = {value} must be at least {least}")


def above_zero(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} = {value} must be a finite number above 0")


def between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value < high:
        raise ConfigError(f"{name} = {value} must be at least {low} and below {high}")
