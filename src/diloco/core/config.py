"""The options of the outer loop: `[outer]` and `[sync]` of a run file. Torch-free, so that `--help` is quick."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any, Literal

from diloco.core.options import option
from diloco.core.rates import Course
from diloco.errors import ConfigError

_LONGEST_SECONDS = 86_400.0
_DATA_PARALLEL = ("mode", "data-parallel")
Merge = Literal["mean", "clipped"]
"""How contributions become a mean: core/merging.py, core/merges.py."""
FEWEST_TO_MERGE: dict[str, int] = {"mean": 1, "clipped": 4}
"""The ways to merge, each with the fewest contributions that it takes: a round with fewer is averaged plainly."""
COARSE_CODECS = ("2bit", "topk")
"""They leave out so much of a vector that they are made for error feedback."""
OUTER_NUMBERS: dict[str, dict[str, float]] = {
    "nesterov": {"lr": 0.7, "momentum": 0.9},
    "sgd": {"lr": 1.0},
    "sgdm": {"lr": 0.7, "momentum": 0.9},
    "adam": {"lr": 0.3, "beta1": 0.9, "beta2": 0.99, "epsilon": 0.1},
}
"""The numbers of each outer optimizer, with their defaults (those of core/outer_optimizers.py)."""


def check_outer_number(name: str, value: float, optimizer: str, option_name: str | None = None) -> None:
    """Refuse a number of an outer optimizer that is out of range. `option_name`: the option that it is given by, if
    that has another name than the number."""
    if name in ("lr", "epsilon"):
        valid = 0 < value < math.inf
        rule = "finite and above 0"
    else:
        valid = 0 <= value < 1
        rule = "at least 0 and below 1"
    if not valid:
        raise ConfigError(f"outer.{option_name or name} = {value} of the outer optimizer '{optimizer}' must be {rule}")


def check_course(course: Course, optimizer: str) -> None:
    """Refuse a course that has no effect on that outer optimizer, or leaves the range of its numbers."""
    for name in ("warmup_rounds", "plain_rounds"):
        if getattr(course, name) < 0:
            raise ConfigError(f"outer.{name} = {getattr(course, name)} must be at least 0")
    for number in ("lr", "momentum"):
        for name in (f"start_{number}", f"final_{number}"):
            if getattr(course, name) is None:
                continue
            if number not in OUTER_NUMBERS[optimizer]:
                raise ConfigError(
                    f"outer.{name} = {getattr(course, name)} has no effect on the outer optimizer '{optimizer}', which "
                    f"has no {number}: leave it out"
                )
            check_outer_number(number, getattr(course, name), optimizer, name)
    starts = course.start_lr is not None or course.start_momentum is not None
    if starts != (course.warmup_rounds > 0):
        raise ConfigError(
            f"outer.warmup_rounds = {course.warmup_rounds}, outer.start_lr = {course.start_lr}, outer.start_momentum = "
            f"{course.start_momentum}: a warm-up needs a number of rounds, and a number to begin with"
        )


@dataclass(frozen=True)
class OuterConfig:
    """The outer optimizer. A number left out takes that optimizer's own default."""

    optimizer: Literal["nesterov", "sgd", "sgdm", "adam"] = "nesterov"
    """The optimizer that applies the mean outer gradient to the anchor."""
    lr: float | None = None
    """Outer learning rate (nesterov, sgdm: 0.7; sgd: 1.0; adam: 0.3)."""
    momentum: float | None = None
    """Momentum of nesterov and sgdm (0.9)."""
    beta1: float | None = None
    """Decay of adam's first moment (0.9)."""
    beta2: float | None = None
    """Decay of adam's second moment (0.99)."""
    epsilon: float | None = None
    """Adam's ε (0.1, the paper's remedy for its instability)."""
    warmup_rounds: int = 0
    """Rounds over which start_lr and start_momentum become lr and momentum, linearly."""
    start_lr: float | None = None
    """Outer learning rate of the first round, with warmup_rounds (default: lr)."""
    start_momentum: float | None = None
    """Outer momentum of the first round, with warmup_rounds (default: momentum)."""
    final_lr: float | None = None
    """Outer learning rate of the last round, reached along a cosine (default: lr)."""
    final_momentum: float | None = None
    """Outer momentum of the last round, reached along a cosine (default: momentum)."""
    plain_rounds: int = 0
    """The number of rounds at the end that are plain means of the workers' parameters."""

    def __post_init__(self) -> None:
        useful = OUTER_NUMBERS[self.optimizer]
        for name, value in self.given().items():
            check_outer_number(name, value, self.optimizer)
            if name not in useful:
                raise ConfigError(
                    f"outer.{name} = {value} has no effect on the outer optimizer '{self.optimizer}': leave it out (it "
                    f"takes {', '.join(useful)}), or choose another with --outer.optimizer"
                )
        check_course(Course(**self.course(), rounds=1), self.optimizer)

    def given(self) -> dict[str, float]:
        """Return the optimizer's own numbers that were given."""
        names = {name for numbers in OUTER_NUMBERS.values() for name in numbers}
        return {name: value for name, value in asdict(self).items() if name in names and value is not None}

    def course(self) -> dict[str, Any]:
        """Return the options that were given for the course of these numbers over the run."""
        numbers = {name: getattr(self, name) for name in ("start_lr", "start_momentum", "final_lr", "final_momentum")}
        counts = {name: getattr(self, name) for name in ("warmup_rounds", "plain_rounds") if getattr(self, name)}
        return {name: value for name, value in numbers.items() if value is not None} | counts


@dataclass(frozen=True)
class FaultsConfig:
    """Faults on purpose, for experiments."""

    drop: float = 0.0
    """The share of outer gradients that are dropped, at random: their worker goes on from its own parameters."""
    seed: int | None = None
    """Decides which ones (default: the seed of the run)."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop < 1:
            raise ConfigError(f"faults.drop = {self.drop} must be at least 0 and below 1")
        if self.seed is not None and not self.drop:
            raise ConfigError(f"faults.seed = {self.seed} has no effect without faults.drop: give it too, say 0.3")


NO_FAULTS = FaultsConfig()


@dataclass(frozen=True)
class SyncConfig:
    """When the workers average, in how many fragments, and what they send."""

    num_inner_steps: int = option(500, unused_with=_DATA_PARALLEL)
    """H: inner steps between two rounds of a fragment."""
    codec: Literal["fp32", "fp16", "bf16", "int8", "int4", "e3m0", "2bit", "topk"] = "fp16"
    """How outer gradients are encoded on the wire."""
    fragments: int = option(1, unused_with=_DATA_PARALLEL)
    """Number of fragments of the model's blocks, averaged in turn; the other parameters are one more fragment."""
    overlap_steps: int = option(0, unused_with=_DATA_PARALLEL)
    """Inner steps between posting and merging a round, while training continues."""
    mixing: float = option(0.0, unused_with=_DATA_PARALLEL)
    """Keep this share of the worker's own parameters at a merge (0: replace them; with overlap try 0.5)."""
    error_feedback: bool | None = option(None, unused_with=_DATA_PARALLEL)
    """Send what the codec left out of one round with the next ones (by default with 2bit and topk)."""
    error_decay: float | None = option(None, unused_with=_DATA_PARALLEL)
    """The share of that error which is kept from round to round (0.95)."""
    prune: float | None = option(None, unused_with=_DATA_PARALLEL)
    """Set this share of each neuron's outer gradient, its smallest values, to zero before it is encoded."""
    offload: bool = option(False, may_change=True, may_differ="always")
    """Keep anchors and outer momentum in CPU memory between rounds; for workers on a GPU."""
    max_norm_ratio: float | None = 3.0
    """A contribution counts with at most this many times the round's median norm; none: with any finite norm."""
    merge: Literal["mean", "clipped"] = option("mean", unused_with=_DATA_PARALLEL)
    """clipped: one worker of four and more that sends a wrong direction cannot pull the mean far (centred clipping)."""
    timeout_seconds: float = option(600.0, may_change=True)
    """A round that takes longer than this has failed."""
    warm_start: int = option(0, unused_with=_DATA_PARALLEL)
    """Inner steps at the start that are data-parallel: gradients are averaged at every step; in a swarm one worker
    takes them alone, and others join after them. 0: none."""
    outer_overlap: Literal["none", "eager", "delayed"] = option("none", unused_with=_DATA_PARALLEL)
    """eager: a round travels during the whole next one, and each worker's own share of it counts at once (1-outer-step
    overlap); delayed: the same without that share, for comparison."""
    growth: float | None = option(None, unused_with=_DATA_PARALLEL)
    """Longer rounds as the inner learning rate falls: H = max(num_inner_steps, (growth / learning rate)²) (QSR)."""
    second_moment_every: int | None = option(None, unused_with=_DATA_PARALLEL)
    """Average AdamW's second moment among the workers in every n-th round, in fp32 or bf16 (DES-LOC); none: never."""
    fragment_order: Literal["strided", "sequential"] = option("strided", unused_with=_DATA_PARALLEL)
    """strided: block i is in fragment i mod P; sequential: neighbouring blocks are in the same fragment."""
    fragments_by_hand: str | None = option(None, unused_with=_DATA_PARALLEL)
    """Instead of a number: patterns of parameter names, a semicolon between two fragments ("*embed*; *.0.*, *.1.*")."""

    dynamic_steps: bool = option(False, unused_with=_DATA_PARALLEL)
    """A slower worker takes fewer inner steps in a round, by its measured speed, so that all arrive together."""
    asynchronous: bool = option(False, unused_with=_DATA_PARALLEL)
    """No round waits: each outer gradient moves the anchor when it arrives, and its worker goes on from there."""
    momentum_arrivals: int | None = option(None, unused_with=_DATA_PARALLEL)
    """How many arrivals move the outer momentum once, with asynchronous (delayed Nesterov; default: workers)."""

    def __post_init__(self) -> None:
        if self.num_inner_steps < 1:
            raise ConfigError(f"sync.num_inner_steps = {self.num_inner_steps} must be at least 1")
        if self.warm_start < 0:
            raise ConfigError(f"sync.warm_start = {self.warm_start} must be at least 0")
        if self.fragments < 1:
            raise ConfigError(f"sync.fragments = {self.fragments} must be at least 1")
        if self.momentum_arrivals is not None and self.momentum_arrivals < 1:
            raise ConfigError(f"sync.momentum_arrivals = {self.momentum_arrivals} must be at least 1")
        if self.second_moment_every is not None and self.second_moment_every < 1:
            raise ConfigError(f"sync.second_moment_every = {self.second_moment_every} must be at least 1")
        if self.growth is not None and not 0 < self.growth < math.inf:
            raise ConfigError(f"sync.growth = {self.growth} must be finite and above 0")
        if not 0 <= self.overlap_steps < self.num_inner_steps:
            raise ConfigError(
                f"sync.overlap_steps = {self.overlap_steps} must be at least 0 and below "
                f"sync.num_inner_steps = {self.num_inner_steps}"
            )
        if not 0 <= self.mixing < 1:
            raise ConfigError(f"sync.mixing = {self.mixing} must be at least 0 and below 1")
        if self.error_decay is not None and not 0 < self.error_decay <= 1:
            raise ConfigError(f"sync.error_decay = {self.error_decay} must be above 0 and at most 1")
        if self.prune is not None and not 0 < self.prune < 1:
            raise ConfigError(f"sync.prune = {self.prune} must be above 0 and below 1")
        if self.merge not in FEWEST_TO_MERGE:
            raise ConfigError(f"sync.merge = {self.merge!r} must be one of {', '.join(FEWEST_TO_MERGE)}")
        if self.max_norm_ratio is not None and not self.max_norm_ratio > 1:
            raise ConfigError(f"sync.max_norm_ratio = {self.max_norm_ratio} must be above 1")
        if not 0 < self.timeout_seconds <= _LONGEST_SECONDS:
            raise ConfigError(
                f"sync.timeout_seconds = {self.timeout_seconds} must be above 0 and at most {_LONGEST_SECONDS:g}, a day"
            )
        refuse_combinations(self)

    @property
    def merges_at_once(self) -> bool:
        """Whether a round is merged in the step in which it is posted."""
        return not self.overlap_steps and self.outer_overlap == "none"

    @property
    def gradient_codec(self) -> str:
        """The codec of a warm start's gradients: one that needs error feedback leaves too much out of one gradient."""
        return "int4" if self.codec in COARSE_CODECS else self.codec

    @property
    def feedback_decay(self) -> float | None:
        """β of the error feedback; None: without it."""
        wanted = self.codec in COARSE_CODECS if self.error_feedback is None else self.error_feedback
        return (0.95 if self.error_decay is None else self.error_decay) if wanted else None


@dataclass(frozen=True)
class RefusedCombination:
    """Two options that are each valid and make no sense together, or of which one has no effect because of the
    other."""

    options: tuple[str, str]
    """Their dotted names in a run file."""
    applies: Callable[[SyncConfig, FaultsConfig], bool]
    message: str
    """Why, and what to do; {sync.growth} is replaced by that option's value."""

    def text(self, sync: SyncConfig, faults: FaultsConfig) -> str:
        return self.message.format(sync=_as_written(sync), faults=_as_written(faults))


def _as_written(options: SyncConfig | FaultsConfig) -> SimpleNamespace:
    """Return the values of a table as a run file has them: `true`, and not `True`."""
    values = vars(options).items()
    return SimpleNamespace(**{name: str(value).lower() if isinstance(value, bool) else value for name, value in values})


def _is_given(sync: SyncConfig, name: str) -> bool:
    return bool(getattr(sync, name) != SyncConfig.__dataclass_fields__[name].default)


def _together(first: str, second: str, reason: str, remedy: str = "leave out one of the two") -> RefusedCombination:
    """Refuse two options of `[sync]` that are both given."""
    return RefusedCombination(
        (f"sync.{first}", f"sync.{second}"),
        lambda sync, _: _is_given(sync, first) and _is_given(sync, second),
        f"sync.{first} = {{sync.{first}}} and sync.{second} = {{sync.{second}}}: {reason}; {remedy}",
    )


def _merge_with(other: str, applies: Callable[[SyncConfig], bool], value: str) -> RefusedCombination:
    """Refuse a way to merge other than the mean, where outer gradients are not at one place together."""
    return RefusedCombination(
        ("sync.merge", f"sync.{other}"),
        lambda sync, _: sync.merge != "mean" and applies(sync),
        f"sync.merge = {{sync.merge}} and sync.{other} = {value}: it needs all outer gradients of a round, whole, at "
        "one place; leave out one of the two",
    )


_ALL_OF_THE_MODEL = "all of the model travels with each arrival, and its momentum counts whole arrivals"
_LATE_MOMENTS = "a mean of second moments that comes late would undo the steps since"

REFUSED_COMBINATIONS: tuple[RefusedCombination, ...] = (
    _together(
        "fragments",
        "fragments_by_hand",
        "the one cuts the model by a number, the other by names",
        "give one of the two",
    ),
    RefusedCombination(
        ("sync.fragment_order", "sync.fragments"),
        lambda sync, _: sync.fragment_order != "strided" and sync.fragments == 1,
        "sync.fragment_order = {sync.fragment_order} has no effect with one fragment: give sync.fragments",
    ),
    RefusedCombination(
        ("sync.error_feedback", "sync.codec"),
        lambda sync, _: bool(sync.error_feedback) and sync.codec == "fp32",
        "sync.error_feedback = true has no effect with codec fp32, which has no error: leave it out",
    ),
    RefusedCombination(
        ("sync.error_decay", "sync.error_feedback"),
        lambda sync, _: sync.error_decay is not None and sync.feedback_decay is None,
        "sync.error_decay = {sync.error_decay} has no effect with codec {sync.codec} unless sync.error_feedback = "
        "true: add that, or leave it out",
    ),
    _merge_with("outer_overlap", lambda sync: sync.outer_overlap == "eager", "eager"),
    _merge_with("asynchronous", lambda sync: sync.asynchronous, "true"),
    _merge_with("codec", lambda sync: sync.codec == "topk", "topk"),
    _together(
        "growth",
        "dynamic_steps",
        "workers of different speeds stand together at the ends of rounds only, and evaluations and checkpoints are "
        "planned for rounds of one length",
    ),
    _together(
        "outer_overlap",
        "overlap_steps",
        "a round is merged after H steps, not after fewer",
        "leave out sync.overlap_steps",
    ),
    _together(
        "outer_overlap",
        "mixing",
        "the parameters never follow a mean, but the worker's own share of it",
        "leave out sync.mixing",
    ),
    _together(
        "outer_overlap",
        "prune",
        "a share of a pruned outer gradient would not be what the mean gets",
        "leave out sync.prune",
    ),
    _together("outer_overlap", "offload", "a worker's start stays on its device", "leave out sync.offload"),
    _together(
        "outer_overlap",
        "dynamic_steps",
        "a worker counts its own share of a mean as 1/k before it knows the others' steps",
        "leave out sync.dynamic_steps",
    ),
    _together("second_moment_every", "overlap_steps", _LATE_MOMENTS),
    _together("second_moment_every", "outer_overlap", _LATE_MOMENTS),
    RefusedCombination(
        ("sync.momentum_arrivals", "sync.asynchronous"),
        lambda sync, _: sync.momentum_arrivals is not None and not sync.asynchronous,
        "sync.momentum_arrivals = {sync.momentum_arrivals} has no effect without sync.asynchronous = true: give that "
        "too, or leave it out",
    ),
    _together(
        "asynchronous",
        "overlap_steps",
        "an exchange is with the anchor alone and waits for no worker that could be overlapped",
    ),
    _together("asynchronous", "mixing", "the anchor's answer holds the worker's own steps already"),
    _together("asynchronous", "outer_overlap", "there is no round of others to be late with"),
    _together("asynchronous", "fragments", _ALL_OF_THE_MODEL),
    _together("asynchronous", "fragments_by_hand", _ALL_OF_THE_MODEL),
    _together(
        "asynchronous",
        "warm_start",
        "its steps are synchronous; begin with the model that a run with a warm start gives",
    ),
    _together("asynchronous", "growth", "rounds of different lengths would arrive with different weights"),
    _together(
        "asynchronous", "second_moment_every", "there is no round of all workers that could average their moments"
    ),
    _together("asynchronous", "offload", "the anchor is in worker 0's CPU memory already"),
    RefusedCombination(
        ("sync.asynchronous", "sync.error_feedback"),
        lambda sync, _: sync.asynchronous and sync.feedback_decay is not None,
        "sync.asynchronous = true and sync.codec = {sync.codec}, sync.error_feedback: an error that is sent later "
        "would arrive at an anchor that others have moved; leave out one of the two",
    ),
    RefusedCombination(
        ("faults.drop", "sync.asynchronous"),
        lambda sync, faults: faults.drop > 0 and sync.asynchronous,
        "faults.drop = {faults.drop} and sync.asynchronous = true: a worker that goes on without the others' mean is "
        "what asynchronous workers always do; leave out one of the two",
    ),
)
"""All combinations that are refused, in the order in which they are looked for."""


def refuse_combinations(sync: SyncConfig, faults: FaultsConfig = NO_FAULTS) -> None:
    """Raises ConfigError for the first combination of REFUSED_COMBINATIONS that is in these options."""
    for combination in REFUSED_COMBINATIONS:
        if combination.applies(sync, faults):
            raise ConfigError(combination.text(sync, faults))


@dataclass(frozen=True)
class RefusedByRanks:
    """An option of `[sync]` that workers of several ranks in a swarm cannot have; it is accepted everywhere else."""

    option: str
    applies: Callable[[SyncConfig], bool]
    message: str
    """Says the same as RefusedCombination's."""


REFUSED_BY_RANKS_IN_A_SWARM: tuple[RefusedByRanks, ...] = (
    RefusedByRanks(
        "sync.error_feedback",
        lambda sync: sync.feedback_decay is not None,
        "sync.codec = {sync.codec} with error feedback: among several ranks of a worker in a swarm each span is "
        "encoded on a rank that holds only a part of it, and none remembers what the codec left out; use int4, e3m0 or "
        "a finer codec without sync.error_feedback, or workers of one rank",
    ),
    RefusedByRanks(
        "sync.offload",
        lambda sync: sync.offload,
        "sync.offload = true with several ranks of a worker in a swarm: anchors and outer momentum are shared out "
        "among the ranks already, on their devices; leave it out",
    ),
    RefusedByRanks(
        "sync.second_moment_every",
        lambda sync: sync.second_moment_every is not None,
        "sync.second_moment_every = {sync.second_moment_every} is for workers of one rank: leave it out",
    ),
)
"""In the order in which they are looked for. What a run has for all its workers, its first one decides."""


def refuse_by_ranks_in_a_swarm(sync: SyncConfig) -> None:
    """Raise ConfigError for the first row of REFUSED_BY_RANKS_IN_A_SWARM that is in these options."""
    for refused in REFUSED_BY_RANKS_IN_A_SWARM:
        if refused.applies(sync):
            raise ConfigError(refused.message.format(sync=sync))
