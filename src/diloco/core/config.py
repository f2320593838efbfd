"""The options of the outer loop: `[outer]` and `[sync]` of a run file. Torch-free, so that `--help` is quick."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from diloco.core.methods.course import Course
from diloco.core.options import option
from diloco.errors import ConfigError

_LONGEST_SECONDS = 86_400.0
_DATA_PARALLEL = ("mode", "data-parallel")
_DEFAULTS_OFF = {
    "overlap_steps": 0, "mixing": 0.0, "outer_overlap": "none", "fragments": 1, "warm_start": 0, "offload": False,
}  # fmt: skip
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
    """Each number of an outer optimizer has one rule, whatever optimizer and option (`option_name`) it belongs to."""
    if name in ("lr", "epsilon"):
        valid, rule = 0 < value < math.inf, "finite and above 0"
    else:
        valid, rule = 0 <= value < 1, "at least 0 and below 1"
    if not valid:
        raise ConfigError(f"outer.{option_name or name} = {value} of the outer optimizer '{optimizer}' must be {rule}")


def check_course(course: Course, optimizer: str) -> None:
    """A course must have an effect on that outer optimizer, and stay within the range of its numbers."""
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
    """So many rounds at the end are plain means of the workers' parameters."""

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
        """The optimizer's own numbers that were given."""
        names = {name for numbers in OUTER_NUMBERS.values() for name in numbers}
        return {name: value for name, value in asdict(self).items() if name in names and value is not None}

    def course(self) -> dict[str, Any]:
        """What was given of the course of these numbers over the run."""
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
    """With asynchronous: the outer momentum moves with every so many arrivals (delayed Nesterov; default: workers)."""

    def __post_init__(self) -> None:
        if self.num_inner_steps < 1:
            raise ConfigError(f"sync.num_inner_steps = {self.num_inner_steps} must be at least 1")
        if self.warm_start < 0:
            raise ConfigError(f"sync.warm_start = {self.warm_start} must be at least 0")
        if self.fragments < 1:
            raise ConfigError(f"sync.fragments = {self.fragments} must be at least 1")
        if self.outer_overlap != "none":
            self._check_outer_overlap()
        self._check_asynchronous()
        if self.second_moment_every is not None:
            self._check_second_moments(self.second_moment_every)
        if self.growth is not None and not 0 < self.growth < math.inf:
            raise ConfigError(f"sync.growth = {self.growth} must be finite and above 0")
        if self.growth is not None and self.dynamic_steps:
            raise ConfigError(
                f"sync.growth = {self.growth} and sync.dynamic_steps = True: workers of different speeds stand "
                "together at the ends of rounds only, and evaluations and checkpoints are planned for rounds of one "
                "length; leave out one of the two"
            )
        if self.fragments_by_hand is not None and self.fragments != 1:
            raise ConfigError(
                f"sync.fragments = {self.fragments} and sync.fragments_by_hand = {self.fragments_by_hand!r}: give one "
                "of the two"
            )
        if self.fragment_order != "strided" and self.fragments == 1:
            raise ConfigError(
                f"sync.fragment_order = {self.fragment_order} has no effect with one fragment: give sync.fragments"
            )
        if not 0 <= self.overlap_steps < self.num_inner_steps:
            raise ConfigError(
                f"sync.overlap_steps = {self.overlap_steps} must be at least 0 and below "
                f"sync.num_inner_steps = {self.num_inner_steps}"
            )
        if not 0 <= self.mixing < 1:
            raise ConfigError(f"sync.mixing = {self.mixing} must be at least 0 and below 1")
        self._check_codec()
        self._check_merge()
        if self.max_norm_ratio is not None and not self.max_norm_ratio > 1:
            raise ConfigError(f"sync.max_norm_ratio = {self.max_norm_ratio} must be above 1")
        if not 0 < self.timeout_seconds <= _LONGEST_SECONDS:
            raise ConfigError(
                f"sync.timeout_seconds = {self.timeout_seconds} must be above 0 and at most {_LONGEST_SECONDS:g}, a day"
            )

    def _check_codec(self) -> None:
        if self.error_feedback and self.codec == "fp32":
            raise ConfigError(
                "sync.error_feedback = true has no effect with codec fp32, which has no error: leave it out"
            )
        if self.error_decay is not None:
            if self.feedback_decay is None:
                raise ConfigError(
                    f"sync.error_decay = {self.error_decay} has no effect with codec {self.codec} unless "
                    "sync.error_feedback = true: add that, or leave it out"
                )
            if not 0 < self.error_decay <= 1:
                raise ConfigError(f"sync.error_decay = {self.error_decay} must be above 0 and at most 1")
        if self.prune is not None and not 0 < self.prune < 1:
            raise ConfigError(f"sync.prune = {self.prune} must be above 0 and below 1")

    def _check_merge(self) -> None:
        if self.merge not in FEWEST_TO_MERGE:
            raise ConfigError(f"sync.merge = {self.merge!r} must be one of {', '.join(FEWEST_TO_MERGE)}")
        reasons = {
            f"outer_overlap = {self.outer_overlap}": self.outer_overlap == "eager",
            "asynchronous = true": self.asynchronous,
            f"codec = {self.codec}": self.codec == "topk",
        }
        for given in (name for name, is_given in reasons.items() if is_given and self.merge != "mean"):
            raise ConfigError(
                f"sync.merge = {self.merge} and sync.{given}: it needs all outer gradients of a round, whole, at one "
                "place; leave out one of the two"
            )

    def _check_asynchronous(self) -> None:
        if not self.asynchronous:
            if self.momentum_arrivals is not None:
                raise ConfigError(
                    f"sync.momentum_arrivals = {self.momentum_arrivals} has no effect without sync.asynchronous = true:"
                    " give that too, or leave it out"
                )
            return
        if self.momentum_arrivals is not None and self.momentum_arrivals < 1:
            raise ConfigError(f"sync.momentum_arrivals = {self.momentum_arrivals} must be at least 1")
        reasons = {
            "overlap_steps": "an exchange is with the anchor alone and waits for no worker that could be overlapped",
            "mixing": "the anchor's answer holds the worker's own steps already",
            "outer_overlap": "there is no round of others to be late with",
            "fragments": "all of the model travels with each arrival, and its momentum counts whole arrivals",
            "fragments_by_hand": "all of the model travels with each arrival, and its momentum counts whole arrivals",
            "warm_start": "its steps are synchronous; begin with the model that a run with a warm start gives",
            "growth": "rounds of different lengths would arrive with different weights",
            "second_moment_every": "there is no round of all workers that could average their moments",
            "offload": "the anchor is in worker 0's CPU memory already",
            "feedback_decay": "an error that is sent later would arrive at an anchor that others have moved",
        }
        for name, reason in reasons.items():
            given, off = getattr(self, name), _DEFAULTS_OFF.get(name)
            if given != off:
                shown = "error_feedback" if name == "feedback_decay" else name
                value = (
                    f"codec = {self.codec}, sync.error_feedback" if name == "feedback_decay" else f"{shown} = {given}"
                )
                raise ConfigError(f"sync.asynchronous = true and sync.{value}: {reason}; leave out one of the two")

    def _check_outer_overlap(self) -> None:
        for name, off in (
            ("overlap_steps", 0),
            ("mixing", 0.0),
            ("prune", None),
            ("offload", False),
            ("dynamic_steps", False),
        ):
            if getattr(self, name) != off:
                reason = {
                    "overlap_steps": "a round is merged after H steps, not after fewer",
                    "mixing": "the parameters never follow a mean, but the worker's own share of it",
                    "prune": "a share of a pruned outer gradient would not be what the mean gets",
                    "offload": "a worker's start stays on its device",
                    "dynamic_steps": "a worker counts its own share of a mean as 1/k before it knows the others' steps",
                }[name]
                raise ConfigError(
                    f"sync.outer_overlap = {self.outer_overlap} and sync.{name} = {getattr(self, name)}: {reason}; "
                    f"leave out sync.{name}"
                )

    def _check_second_moments(self, every: int) -> None:
        if every < 1:
            raise ConfigError(f"sync.second_moment_every = {every} must be at least 1")
        if not self.merges_at_once:
            late = "overlap_steps" if self.overlap_steps else "outer_overlap"
            raise ConfigError(
                f"sync.second_moment_every = {every} and sync.{late} = {getattr(self, late)}: a mean of second moments "
                "that comes late would undo the steps since; leave out one of the two"
            )

    @property
    def merges_at_once(self) -> bool:
        """A round is merged in the step in which it is posted."""
        return not self.overlap_steps and self.outer_overlap == "none"

    @property
    def gradient_codec(self) -> str:
        """Of the gradients of a warm start: a codec that needs error feedback leaves too much out of one gradient."""
        return "int4" if self.codec in COARSE_CODECS else self.codec

    @property
    def feedback_decay(self) -> float | None:
        """β of the error feedback; None: without it."""
        wanted = self.codec in COARSE_CODECS if self.error_feedback is None else self.error_feedback
        return (0.95 if self.error_decay is None else self.error_decay) if wanted else None


def check_faults(faults: FaultsConfig, sync: SyncConfig) -> None:
    if faults.drop and sync.asynchronous:
        raise ConfigError(
            f"faults.drop = {faults.drop} and sync.asynchronous = true: a worker that goes on without the others' mean "
            "is what asynchronous workers always do; leave out one of the two"
        )
