"""One arm of an experiment: everything that determines a simulated run but its seed, its text and its device.

An `Arm` and an `ArmResult` are numbers and names only. Both become JSON and come back equal (`as_json`, `from_json`),
so that a finished arm is recognised and never run twice. Torch-free.

Steps count from the end of the shared pre-training phase; the learning rate follows one warm-up and one cosine over
pre-training and steps together.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import exp
from typing import Any, Literal, TypeVar

from diloco.core.config import OuterConfig, SyncConfig
from diloco.errors import ConfigError
from diloco.models.native.config import ModelConfig
from diloco.models.native.presets import preset
from diloco.network import NetworkLink
from diloco.training.config.run import InnerConfig

Table = TypeVar("Table")
MissedRule = Literal["token_weighted", "uniform", "age_decayed", "discarded"]
_LATER_FIELDS = {"hostile": (), "away": 0.0, "slow_rounds": (), "missed": "token_weighted", "repeat": 0}
"""Fields that were added after the first results, with their defaults: arms that do not use them keep their keys."""


@dataclass(frozen=True)
class Arm:
    """A method, the model and data that it trains, and the machines and faults that it is given."""

    name: str
    model: str | Mapping[str, Any] = "tiny"
    """A preset's name, or the fields of ModelConfig; vocab_size is the corpus's unless given."""
    mode: Literal["diloco", "data_parallel"] = "diloco"
    """data_parallel: one model, and a batch of workers · batch_size · batch_multiplier sequences in every step."""
    workers: int = 8
    steps: int = 1000
    """Inner steps of each worker after pre-training."""
    pretraining_steps: int = 0
    """Steps before, from which all arms with the same settings of it begin (weights and inner optimizer's state)."""
    pretraining_batch_size: int | None = None
    """Sequences in a step of pre-training (default: batch_size, as the paper has it)."""
    batch_size: int = 32
    """Sequences of a worker's inner step."""
    sequence_length: int = 256
    batch_multiplier: int = 1
    """For data_parallel: accumulate this many batches a step."""
    updates_multiplier: int = 1
    """For data_parallel: take this many times `steps`."""
    inner: Mapping[str, Any] = field(default_factory=dict)
    """Fields of InnerConfig: optimizer, lr, warmup_steps, clip_norm, …"""
    pretraining_inner: Mapping[str, Any] | None = None
    """The same for pre-training, if arms with other inner options begin from one beginning (default: as `inner`)."""
    outer: Mapping[str, Any] = field(default_factory=dict)
    """Fields of OuterConfig: optimizer, lr, momentum, …"""
    sync: Mapping[str, Any] = field(default_factory=dict)
    """Fields of SyncConfig: num_inner_steps, codec, fragments, overlap_steps, outer_overlap, …"""
    data: Literal["iid", "shards"] = "iid"
    """shards: worker i reads the corpus's shards i, i + workers, … only (a corpus partitioned by domain), and its
    weight is their number of tokens."""
    active_workers: tuple[int, ...] = ()
    """Adaptive compute: how many workers train in equal parts of the run, in order ((4, 8): doubled at half time)."""
    drop: float = 0.0
    """The probability that a worker's outer gradient is dropped: it trains on from its own θ (Figure 8)."""
    missed: MissedRule = "token_weighted"
    """How a contribution counts whose worker missed rounds before, with `drop`. token_weighted: by the inner steps
    behind it, as in a swarm; uniform: like any other, as in the paper; age_decayed: half for each missed round;
    discarded: a worker that missed a round throws its work away and begins at the new anchor."""
    hostile: tuple[int, ...] = ()
    """Workers that turn every outer gradient around before they send it: the wrong direction at an honest norm."""
    absences: tuple[tuple[int, int, int], ...] = ()
    """(worker, first step, end step): takes no steps from the first to before the end. From 0 on: a late joiner."""
    away: float = 0.0
    """The probability that a worker is away for a round (H steps), drawn from the seed. One worker always stays."""
    speeds: tuple[float, ...] = ()
    """Relative speed of each worker, 1 the nominal one (default: all 1)."""
    slow_rounds: tuple[float, ...] = ()
    """(p, s): with probability p a worker takes a round, or a data-parallel step, at s times its speed."""
    slow: Literal["wait", "fewer_steps"] = "wait"
    """What a speed below 1 means: the others wait in every round, or that worker takes fewer steps in a round."""
    step_seconds: float = 0.1
    """Seconds of an inner step at speed 1, for the simulated clock."""
    bits_per_second: float = 1e9
    """Bandwidth of each worker's link, for the simulated clock."""
    latency_seconds: float = 0.0
    eval_points: int = 20
    """Points of the validation curve, at rounds."""
    eval_windows: int = 256
    """Validation sequences an evaluation uses."""
    repeat: int = 0
    """1, 2, …: the same run once more, with the same seed, to measure what rounding alone changes."""

    def __post_init__(self) -> None:
        for name in ("workers", "steps", "batch_size", "sequence_length", "batch_multiplier", "updates_multiplier"):
            _at_least(name, getattr(self, name), 1)
        for name in ("eval_points", "eval_windows"):
            _at_least(name, getattr(self, name), 1)
        _at_least("pretraining_steps", self.pretraining_steps, 0)
        _at_least("repeat", self.repeat, 0)
        for table in ("inner_config", "pretraining_config", "outer_config", "sync_config", "link"):
            getattr(self, table)  # raises on a bad value
        self._check_mode()
        self._check_workers()
        if not 0 < self.step_seconds < float("inf"):
            raise ConfigError(f"step_seconds = {self.step_seconds} must be a finite number above 0")

    def _check_mode(self) -> None:
        if self.mode == "diloco":
            for name in ("batch_multiplier", "updates_multiplier"):
                if getattr(self, name) != 1:
                    raise ConfigError(f"{name} = {getattr(self, name)} is for mode data_parallel: leave it out")
            if self.sync_config.warm_start:
                raise ConfigError(
                    f"sync.warm_start = {self.sync_config.warm_start}: in the laboratory data-parallel steps at the "
                    "start are pretraining_steps, with pretraining_batch_size = workers · batch_size"
                )
            if self.sync_config.asynchronous:
                raise ConfigError(
                    "sync.asynchronous = true: asynchronous workers arrive when they are ready, and simulated ones are "
                    "taken in turn; compare them with diloco train"
                )
            if self.sync_config.dynamic_steps:
                raise ConfigError(
                    "sync.dynamic_steps follows measured speeds, which simulated workers do not have: give speeds and "
                    "slow = fewer_steps"
                )
            return
        sync = {key: value for key, value in self.sync.items() if key != "codec"}
        diloco_only = {
            "outer": self.outer,
            "active_workers": self.active_workers,
            "absences": self.absences,
            "sync": sync,
        }
        for name, value in diloco_only.items():
            if value:
                raise ConfigError(f"{name} = {value} has no effect with mode data_parallel: leave it out")
        if self.drop or self.away or self.slow != "wait":
            raise ConfigError(
                "drop, away and slow = fewer_steps have no effect with mode data_parallel: leave them out"
            )

    def _check_workers(self) -> None:
        if self.speeds and (len(self.speeds) != self.workers or min(self.speeds) <= 0):
            raise ConfigError(f"speeds = {self.speeds} must be {self.workers} numbers above 0, one for each worker")
        has_slow_workers = self.speeds or self.slow_rounds
        if self.slow == "fewer_steps" and (not has_slow_workers or max(self.speeds, default=1.0) > 1):
            raise ConfigError(f"slow = fewer_steps needs speeds of at most 1, or slow_rounds; speeds = {self.speeds}")
        if self.slow_rounds and not (
            len(self.slow_rounds) == 2 and 0 < min(self.slow_rounds) <= max(self.slow_rounds) < 1
        ):
            raise ConfigError(
                f"slow_rounds = {self.slow_rounds} must be a probability and a speed, both between 0 and 1"
            )
        if any(not 1 <= count <= self.workers for count in self.active_workers):
            raise ConfigError(f"active_workers = {self.active_workers} must be from 1 to workers = {self.workers}")
        for name in ("drop", "away"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)} must be at least 0 and below 1")
        sync = self.sync_config
        if self.hostile and (self.mode != "diloco" or sync.fragments > 1 or not sync.merges_at_once):
            raise ConfigError(f"hostile = {self.hostile} is for mode diloco with one fragment and without overlap")
        if any(not 0 <= worker < self.workers for worker in self.hostile):
            raise ConfigError(f"hostile = {self.hostile} must be workers below {self.workers}")
        if self.missed != "token_weighted" and (not self.drop or sync.fragments > 1 or not sync.merges_at_once):
            raise ConfigError(
                f"missed = {self.missed} is for arms with drop, one fragment and no overlap: drop = {self.drop}, "
                f"fragments = {sync.fragments}"
            )
        for worker, first, end in self.absences:
            if not (0 <= worker < self.workers and 0 <= first < end):
                raise ConfigError(
                    f"absences has ({worker}, {first}, {end}): give a worker below {self.workers}, a first step of at "
                    "least 0 and an end step above it"
                )

    # The tables, validated where they are used in a swarm

    @property
    def inner_config(self) -> InnerConfig:
        return _build_table(InnerConfig, "inner", self.inner)

    @property
    def pretraining_config(self) -> InnerConfig:
        inner = self.inner if self.pretraining_inner is None else self.pretraining_inner
        return _build_table(InnerConfig, "pretraining_inner", inner)

    @property
    def outer_config(self) -> OuterConfig:
        return _build_table(OuterConfig, "outer", self.outer)

    @property
    def sync_config(self) -> SyncConfig:
        return _build_table(SyncConfig, "sync", self.sync)

    @property
    def link(self) -> NetworkLink:
        return NetworkLink(self.bits_per_second, self.latency_seconds)

    def model_config(self, vocab_size: int) -> ModelConfig:
        """Return the model's shape with the corpus's vocabulary and this arm's sequence length."""
        if isinstance(self.model, str):
            return preset(self.model, vocab_size=vocab_size, max_sequence_length=self.sequence_length)
        shape = {"vocab_size": vocab_size, "max_sequence_length": self.sequence_length} | dict(self.model)
        return _build_table(ModelConfig, "model", shape)

    @property
    def total_steps(self) -> int:
        """Steps of the learning-rate schedule: pre-training included."""
        return self.pretraining_steps + self.steps * self.updates_multiplier

    # JSON

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Arm":
        field_names = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - field_names):
            raise ConfigError(f"an arm has no {', '.join(unknown)}: it has {', '.join(sorted(field_names))}")
        plain = dict(values)
        for name in ("active_workers", "speeds", "slow_rounds", "hostile"):
            plain[name] = tuple(plain.get(name, ()))
        plain["absences"] = tuple(tuple(absence) for absence in plain.get("absences", ()))
        return cls(**plain)

    def key(self) -> str:
        """Twelve hexadecimal digits of everything but the name: equal arms have equal keys."""
        values = {key: value for key, value in self.as_json().items() if key != "name"}
        for name, default in _LATER_FIELDS.items():
            if getattr(self, name) == default:
                del values[name]
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class RoundStatistics:
    """One round, over the workers that were in it."""

    step: int
    fragment: int
    contributors: int
    cosine: float | None
    """Mean over all pairs of outer gradients (Figures 10 and 11); None without a pair."""
    cosine_spread: float | None
    """Standard deviation over the pairs."""
    norm: float
    """Mean norm of the workers' outer gradients."""
    mean_norm: float | None
    """Norm of their mean; None if the round had none."""
    codec_error: float | None
    """‖sent − Δ‖ / ‖Δ‖ of worker 0's outer gradient; None if it is sent as it is."""
    norm_ratio: float | None = None
    """The largest norm over the lower median of the workers' norms, by which a swarm judges contributions."""


@dataclass(frozen=True)
class ArmResult:
    """The result of one seed of an arm."""

    arm: Arm
    seed: int
    curve: tuple[tuple[int, float], ...]
    """(step, validation loss of the outer parameters), from step 0, the end of pre-training, to the last step."""
    train_loss: float
    """Mean of the workers' training losses in the last tenth of the steps."""
    rounds: int
    rounds_failed: int
    """Contributions that were dropped or failed, summed over the workers."""
    bytes_sent_per_worker: float
    """In all rounds; mean over the workers."""
    data_parallel_bytes_per_worker: float
    """What averaging fp32 gradients in every step would have sent."""
    simulated_seconds: float
    """On the described machines and link."""
    utilisation: float
    """Simulated seconds spent on inner steps as a share of all; mean over the workers."""
    statistics: tuple[RoundStatistics, ...]
    tokens: int
    """Tokens that all workers trained on, pre-training not included."""
    parameters: int
    seconds: float
    """Seconds that this computer took, pre-training not included."""
    replica_step_seconds: float
    """Seconds of this computer for an inner step of one replica, rounds included; evaluations and compiling not."""
    memory_bytes: int | None
    """Most GPU memory in use; None on a CPU."""
    how: str
    """Way in which the replicas were computed: "stacked 8", "sequential", …"""
    corpus: str
    """The corpus's digest."""
    version: str
    """Version of this package."""
    machine: Mapping[str, Any]
    anchor_digest: str = ""
    """Digest of the outer parameters at the end; empty for data_parallel."""

    @property
    def loss(self) -> float:
        """Validation loss of the outer parameters at the end."""
        return self.curve[-1][1]

    @property
    def perplexity(self) -> float:
        return exp(min(self.loss, 700.0))

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ArmResult":
        plain = dict(values)
        plain["arm"] = Arm.from_json(plain["arm"])
        plain["curve"] = tuple((int(step), float(loss)) for step, loss in plain["curve"])
        plain["statistics"] = tuple(RoundStatistics(**row) for row in plain["statistics"])
        return cls(**plain)


@dataclass(frozen=True)
class Progress:
    """The position of a simulation, given to `on_progress`."""

    arm: str
    seed: int
    phase: Literal["pretraining", "training"]
    step: int
    steps: int
    loss: float | None
    """The latest validation loss."""


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{name} = {value} must be at least {least}")


def _build_table(kind: type[Table], name: str, values: Mapping[str, Any]) -> Table:
    known_fields = {item.name: item for item in fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(values) - set(known_fields)):
        raise ConfigError(f"{name} has no {', '.join(unknown)}: it has {', '.join(known_fields)}")
    required = {
        key for key, item in known_fields.items() if item.default is MISSING and item.default_factory is MISSING
    }
    if missing := sorted(required - set(values)):
        raise ConfigError(f"{name} lacks {', '.join(missing)}: give them, or a preset's name")
    return kind(**values)
