"""The scales of every experiment, and the regime that they share.

The paper trains 150M parameters for 24,000 shared steps and 64,000 more; its baselines with one and with eight times
the batch are 6 % apart in perplexity. Here every arm begins with a shared, data-parallel pre-training of a third of the
steps, and H is such that the DiLoCo arm has at least 50 rounds. A thousand steps from scratch would be another world:
there the baselines are a factor of 2.5 apart, and what counts is signal per step. The report prints how far apart they
are (`report/summary.py`), and says so if it is more than 15 %.

    smoke   seconds an arm on a CPU: whether everything runs; its numbers mean nothing
    cpu     a minute an arm on one core: a first look, with a model so small that its batches suffice
    gpu     three seconds an arm on one large GPU, eight at a time
    1m, 4m, 14m   the same text and batches at three sizes of the model: what `regime` asks of a scale is judged there,
            and how results change with size. For a text of 44M tokens (`--text`), read 3.3 times (14m: 4.4 times)

The rates were found with `diloco lab tune`, for the data-parallel side as for DiLoCo; those of 14m are where tuning
begins (`tuned` is False, and the report says so).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from diloco.errors import ConfigError
from diloco.lab.arm import Arm

Table = Mapping[str, Any]


OUTER_STEPS: dict[str, tuple[float, float]] = {
    "one worker": (0.55, 0.6),
    "short H": (0.7, 0.8),
    "long H": (1.0, 0.7),
    "sgd": (1.4, 0.0),
    "sgdm": (1.0, 0.6),
    "adam": (0.2, 0.9),
    "eager": (0.3, 0.8),
}
"""Where tuning begins. adam's second number is its beta1."""


@final
@dataclass(frozen=True)
class Scale:
    """The sizes of all arms at this scale, and the tuned numbers of DiLoCo and of its baselines."""

    name: str
    model: Table
    """Fields of ModelConfig but the vocabulary."""
    vocab_size: int
    text_bytes: int | None
    """The most that is read of the default text, stdlib; None: all of it."""
    workers: int
    steps: int
    pretraining_steps: int
    H: int
    batch_size: int
    sequence_length: int
    replicas: tuple[int, ...]
    """The numbers of workers of Table 3."""
    eval_windows: int
    warmup_steps: int
    pretraining_lr: float
    data_parallel_lr: float
    """Inner rate of data parallelism, with `workers` times the batch."""
    one_worker_lr: float
    inner_lr: float
    """Inner rate of DiLoCo's workers."""
    outer_lr: float
    outer_momentum: float
    final_lr_ratio: float = 0.05
    eval_points: int = 20
    threads: int = 1
    """CPU threads of a process: small matrices gain nothing from more, and lose on a busy machine."""
    smoke: bool = False
    """Only to see that everything runs: its numbers mean nothing, and no claim is judged by them."""
    tuned: bool = True
    """The rates were found with `diloco lab tune` at this scale."""
    outer_steps: Mapping[str, tuple[float, float]] = field(default_factory=lambda: OUTER_STEPS)
    """Outer rate and momentum of the methods that were tuned by themselves, by name: those of OUTER_STEPS."""
    muon_lr: float = 16e-3
    """Inner rate of Muon inside DiLoCo."""
    muon_data_parallel_lr: float = 16e-3

    def inner(self, lr: float, **more: Any) -> dict[str, Any]:
        return {"lr": lr, "warmup_steps": self.warmup_steps, "final_lr_ratio": self.final_lr_ratio} | more

    def diloco(self, name: str = "DiLoCo", **changes: Any) -> Arm:
        """Make DiLoCo as tuned; `sync`, `outer` and `inner` are added to its tables, other fields of Arm replaced."""
        sync = {"num_inner_steps": self.H, "codec": "fp32", "max_norm_ratio": None} | changes.pop("sync", {})
        outer = changes.pop("outer", {})
        if outer.get("optimizer", "nesterov") == "nesterov":
            outer = {"lr": self.outer_lr, "momentum": self.outer_momentum} | outer
        inner = self.inner(self.inner_lr) | changes.pop("inner", {})
        return self._arm(name, inner, sync=sync, outer=outer, **changes)

    def data_parallel(self, name: str = "8× batch, data-parallel", **changes: Any) -> Arm:
        """Make the baseline for equal steps and equal tokens: all workers' batches in every step."""
        inner = self.inner(self.data_parallel_lr) | changes.pop("inner", {})
        return self._arm(name, inner, mode="data_parallel", **changes)

    def one_worker(self, name: str = "1× baseline", **changes: Any) -> Arm:
        """Make the baseline without communication: one worker's batch in every step."""
        inner = self.inner(self.one_worker_lr) | changes.pop("inner", {})
        return self._arm(name, inner, mode="data_parallel", **{"workers": 1} | changes)

    def _arm(self, name: str, inner: Table, **changes: Any) -> Arm:
        arm = Arm(
            name=name,
            model=self.model,
            workers=self.workers,
            steps=self.steps,
            pretraining_steps=self.pretraining_steps,
            pretraining_batch_size=self.workers * self.batch_size,
            pretraining_inner=self.inner(self.pretraining_lr),
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            eval_points=self.eval_points,
            eval_windows=self.eval_windows,
            inner=inner,
        )
        return replace(arm, **changes)

    def changed(self, numbers: Mapping[str, Any]) -> "Scale":
        """Return this scale with other numbers. In `outer_steps` only the named methods are replaced."""
        outer_steps = dict(self.outer_steps) | dict(numbers.get("outer_steps", {}))
        return replace(self, **{**numbers, "outer_steps": outer_steps})

    def rounds(self, H: int | None = None) -> int:
        return self.steps // (H or self.H)

    def described(self) -> str:
        arm = self.data_parallel()
        config = arm.model_config(self.vocab_size)
        return (
            f"{config.num_parameters() / 1e6:.2f}M parameters ({config.num_layers} layers, width {config.hidden_size}, "
            f"vocabulary {self.vocab_size}), {self.workers} workers with batches of {self.batch_size} × "
            f"{self.sequence_length} tokens, {self.pretraining_steps} shared pre-training steps, then {self.steps} "
            f"steps, H = {self.H} ({self.rounds()} rounds), {self.tokens() / config.num_parameters():.0f} tokens a "
            f"parameter"
        )

    def tokens(self) -> int:
        """Count the tokens of a run with all workers, pre-training included."""
        steps = self.pretraining_steps + self.steps
        return steps * self.workers * self.batch_size * self.sequence_length


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "tie_embeddings": True,
    }


_SMALLEST = OUTER_STEPS | {
    "one worker": (0.7, 0.5), "sgdm": (0.4, 0.8), "adam": (0.3, 0.9), "eager": (0.2, 0.8),
}  # fmt: skip
"""The numbers of the scale gpu, which cpu shares."""

SCALES: dict[str, Scale] = {
    "smoke": Scale(
        name="smoke",
        model=_shape(16, 2, 2, 1, 32),
        vocab_size=512,
        text_bytes=1_000_000,
        workers=8,
        steps=24,
        pretraining_steps=8,
        H=4,
        batch_size=2,
        sequence_length=16,
        replicas=(1, 4, 8),
        eval_windows=32,
        warmup_steps=4,
        pretraining_lr=5e-3,
        data_parallel_lr=5e-3,
        one_worker_lr=5e-3,
        inner_lr=5e-3,
        outer_lr=0.7,
        outer_momentum=0.5,
        smoke=True,
    ),
    "cpu": Scale(
        name="cpu",
        model=_shape(16, 2, 2, 1, 40),
        vocab_size=320,
        text_bytes=None,
        workers=8,
        steps=1600,
        pretraining_steps=800,
        H=32,
        batch_size=8,
        sequence_length=64,
        replicas=(1, 4, 8, 16),
        eval_windows=256,
        warmup_steps=20,
        pretraining_lr=1e-2,
        data_parallel_lr=16e-3,
        one_worker_lr=6e-3,
        inner_lr=8e-3,
        outer_lr=0.7,
        outer_momentum=0.9,
        outer_steps=_SMALLEST,
    ),
    "gpu": Scale(
        name="gpu",
        model=_shape(64, 2, 4, 2, 176),
        vocab_size=1024,
        text_bytes=None,
        workers=8,
        steps=3000,
        pretraining_steps=1500,
        H=50,
        batch_size=32,
        sequence_length=128,
        replicas=(1, 4, 8, 16, 64),
        eval_windows=1024,
        warmup_steps=150,
        pretraining_lr=6e-3,
        data_parallel_lr=16e-3,
        one_worker_lr=1e-3,
        inner_lr=4e-3,
        outer_lr=0.7,
        outer_momentum=0.9,
        outer_steps=_SMALLEST,
        threads=os.cpu_count() or 1,
    ),
}


def _sized(name: str, width: int, heads: int, intermediate: int, steps: int = 1500) -> Scale:
    """Make a scale of the three sizes, whose models have four layers; the largest takes more steps, for enough
    tokens."""
    return Scale(
        name=name,
        model=_shape(width, 4, heads, heads, intermediate),
        vocab_size=4096,
        text_bytes=None,
        workers=8,
        steps=steps,
        pretraining_steps=steps // 2,
        H=steps // 50,
        batch_size=32,
        sequence_length=256,
        replicas=(1, 2, 4, 8, 16),
        eval_windows=1024,
        warmup_steps=100,
        pretraining_lr=8e-3,
        data_parallel_lr=8e-3,
        one_worker_lr=2e-3,
        inner_lr=8e-3,
        outer_lr=0.7,
        outer_momentum=0.8,
        eval_points=10,
        threads=os.cpu_count() or 1,
        tuned=False,
        outer_steps=OUTER_STEPS | {"long H": (1.0, 0.6), "sgdm": (1.4, 0.5)},
    )


SCALES |= {
    "1m": replace(
        _sized("1m", 128, 2, 352),
        pretraining_lr=4e-3,
        data_parallel_lr=16e-3,
        one_worker_lr=1e-3,
        outer_lr=1.0,
        tuned=True,
    ),
    "4m": replace(_sized("4m", 256, 4, 704), tuned=True),
    "14m": _sized("14m", 512, 8, 1408, steps=2000),
}


def scale_of(name: str) -> Scale:
    if name not in SCALES:
        raise ConfigError(f"--scale {name}: the scales are {', '.join(SCALES)}")
    return SCALES[name]
