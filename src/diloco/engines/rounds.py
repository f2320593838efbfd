"""The vocabulary of the engine contract: what goes into a round and what comes out of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import inf, nan
from typing import TYPE_CHECKING, Any

from diloco.core.config import Merge

if TYPE_CHECKING:  # a sidecar's link has no need of torch
    from torch import Tensor

    from diloco.codecs.encoded import EncodedVector


CONFIRMATION = -1
"""Stands for the fragment of a round at the end of a run, in which only headers travel."""
GRADIENTS = -2
"""Stands for the fragment of a warm start's rounds, which average gradients; they are numbered up to -1, the last."""


@dataclass(frozen=True)
class RoundKey:
    """Names a round: its place in the sequence of all rounds, and the fragment that it averages."""

    sequence: int
    fragment: int
    """The fragment's number, or CONFIRMATION or GRADIENTS."""


@dataclass(frozen=True)
class Report:
    """A worker's report of itself to the others with every round; nan where there is nothing to tell."""

    inner_steps: int = 0
    tokens: int = 0
    bytes_sent: int = 0
    elapsed_seconds: float = 0.0
    """Training and rounds, without evaluations."""
    sync_seconds: float = 0.0
    """The part of them that was spent on rounds instead of training: encoding, waiting, merging."""
    loss: float = nan
    validation_loss: float = nan
    validation_tokens: int = 0
    validation_step: int = 0
    checkpoint_step: int = 0
    """The inner step of its latest complete checkpoint; older ones may go once all are known to have one."""
    stopping: bool = False
    """This worker ends after this round's rotation; with a fixed membership all do."""
    done: bool = False
    """This worker has taken all its steps. With a fixed membership it posts on until all have."""
    step_seconds: float = 0.0
    """The worker's seconds of an inner step, measured since its last post; 0 where that is not measured."""
    last_round_seconds: tuple[float, ...] = ()
    """Its latest round that has ended: the sequence, then the seconds of each phase (history/waterfall.py)."""


@dataclass(frozen=True)
class Contribution:
    """An encoded outer gradient with its weight, and what is claimed of it. The engine may overwrite `vector`."""

    vector: "EncodedVector"
    weight: float
    norm: float
    anchor_digest: str
    layout_digest: str
    max_norm_ratio: float | None = None
    report: Report = field(default_factory=Report)
    note: bytes = b""
    """A message of this worker to the others with the round; only elastic engines carry it."""
    round_weight: float = inf
    """The weight of H inner steps: with an elastic engine `weight` counts as at most MAX_WEIGHT_ROUNDS of it."""
    work: float = 1.0
    """The inner steps behind it as a share of H, at most 1; each as the share of the peak learning rate, if known."""
    full_weight: float = 0.0
    """The weight of H inner steps, with any engine: as such it counts at least in a mean of leftovers."""
    merge: Merge = "mean"
    """The way of merging, as in SyncConfig."""
    patience_seconds: float = 0.0
    """Added to the round's deadline by a worker that has no steps left: the others may need H steps to post."""


@dataclass(frozen=True)
class Member:
    """A worker as the others last heard of it."""

    worker: int
    anchor_digest: str
    weight: float
    norm: float
    report: Report
    note: bytes = b""

    def as_json(self) -> dict[str, Any]:
        """Return all but the note, which is for the other workers only, as JSON can hold it."""
        fields = asdict(self)
        del fields["note"]
        return fields


@dataclass(frozen=True)
class RoundPhases:
    """This worker's seconds of a round by phase, as far as its engine can tell; None where it cannot."""

    others_seconds: float | None = None
    """The seconds from its post until it had heard of every contribution to the mean: the others were still at work."""
    send_seconds: float | None = None
    """The seconds from then until it had the whole mean, but `reduce_seconds`: parts and means were on their way."""
    reduce_seconds: float | None = None
    """This worker computed its part of the mean."""


@dataclass(frozen=True)
class Comparison:
    """A comparison of the contributions, in their order, from the reduction of some parts; of no parts it is empty.

    It adds up over parts, and so over the workers that reduce them.
    """

    products: tuple[float, ...] = ()
    """The sums of their inner products (core/merging.py)."""
    replaced: tuple[int, ...] = ()
    """The number of parts in which each counted as the mean of the others (core/merges.py)."""
    parts: int = 0

    def __add__(self, other: "Comparison") -> "Comparison":
        numbers = [a + b for a, b in zip(self.numbers, other.numbers, strict=True)]
        return Comparison.of_numbers(numbers, len(self.replaced))

    @staticmethod
    def empty(contributors: int) -> "Comparison":
        """Return the comparison of no parts, to which others are added."""
        pairs = contributors * (contributors + 1) // 2  # each contributor with itself too
        return Comparison((0.0,) * pairs, (0,) * contributors)

    @property
    def numbers(self) -> list[float]:
        """All numbers of the comparison in one list, to be added up."""
        return [*self.products, *self.replaced, self.parts]

    @staticmethod
    def of_numbers(numbers: Sequence[float], contributors: int) -> "Comparison":
        products = numbers[: -contributors - 1]
        counts = [int(number) for number in numbers[-contributors - 1 :]]
        return Comparison(tuple(products), tuple(counts[:-1]), counts[-1])


@dataclass(frozen=True, kw_only=True)
class RoundSummary:
    """All that is known of how a round ended, but for its mean and its members' reports.

    It comes from a swarm's network process as part of RoundOutcome, and is saved with a round in flight: a field that
    is added here needs no other line on the way to `RoundResult`.
    """

    contributors: tuple[int, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    """Worker -> why its contribution is not in the mean."""
    clipped: Mapping[int, str] = field(default_factory=dict)
    """Worker -> why its contribution was scaled down."""
    merge: Merge = "mean"
    """The way in which the mean was made: `mean`, `clipped` or another of core/merges.py."""
    plain: bool = False
    """The outer step with this mean is the mean itself, without momentum: what some workers had left at the end."""
    total_weight: float = 0.0
    """The weight of all contributions; 0: no worker had done any work, and there is no mean."""
    bytes_sent: int = 0
    bytes_received: int = 0
    seconds: float = 0.0
    resync: bool = False
    """A worker's anchor differed; this worker must call `fetch_state` now (with collective engines, all do)."""
    roster: tuple[int, ...] = ()
    """The numbers of all members, also of those that missed this round; with an elastic engine."""
    comparison: Comparison = Comparison()
    """The comparison of the contributors; without parts if this worker got the mean from another one afterwards."""
    phases: RoundPhases = RoundPhases()
    signatures: int = 0
    """The number of workers that have signed the digest of the mean, in a swarm."""
    mean_digest: str = ""
    """16 hex digits of what they signed; the same on every worker."""

    def summary_fields(self) -> dict[str, Any]:
        """Return the fields of this class by name, for another one that has them too."""
        return {each.name: getattr(self, each.name) for each in fields(RoundSummary)}

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON can hold them."""
        return {name: _to_json(value) for name, value in self.summary_fields().items()}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "RoundSummary":
        """Read what `as_json` gave; what an earlier version did not save has its default."""
        defaults = RoundSummary().summary_fields()
        return RoundSummary(**{name: _from_json(saved[name], like) for name, like in defaults.items() if name in saved})


def _to_json(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, Mapping):
        return {str(worker): reason for worker, reason in value.items()}
    if isinstance(value, Comparison | RoundPhases):
        return {name: _to_json(part) for name, part in vars(value).items()}
    return value


def _from_json(value: Any, like: object) -> Any:
    """Return a value from JSON in the type of `like`."""
    if isinstance(like, tuple):
        return tuple(value)
    if isinstance(like, Mapping):
        return {int(worker): reason for worker, reason in value.items()}
    if isinstance(like, Comparison | RoundPhases):
        return type(like)(**{name: _from_json(value[name], part) for name, part in vars(like).items() if name in value})
    return value


@dataclass(frozen=True)
class RoundResult(RoundSummary):
    """A mean, and how it came about."""

    mean: "EncodedVector"
    members: tuple[Member, ...]
    lane_means: "tuple[EncodedVector, ...]" = ()
    """Set by a worker of several ranks: the mean of each lane that this rank is in (outer/ranked_replica.py)."""

    @property
    def means(self) -> "tuple[EncodedVector, ...]":
        """One encoded mean for each lane of this rank."""
        return self.lane_means or (self.mean,)

    def means_with(self, worker: int) -> "tuple[EncodedVector, ...] | None":
        """Return the means if that worker's contribution is in them."""
        return self.means if worker in self.contributors else None

    @property
    def replaced(self) -> dict[int, float]:
        """The share of the parts in which each contributor counted as the others' mean; empty for plain means."""
        comparison = self.comparison
        if self.merge == "mean" or not comparison.parts:
            return {}
        counts = zip(self.contributors, comparison.replaced, strict=True)
        return {worker: count / comparison.parts for worker, count in counts}

    @property
    def stopping(self) -> bool:
        """Whether a worker ends early; with a fixed membership all do then."""
        return any(member.report.stopping for member in self.members)


@dataclass(frozen=True)
class GlobalState:
    """All that a joiner needs before its first inner step: anchors, outer optimizer state, position in the schedule."""

    tensors: "Mapping[str, Tensor]"
    """Empty if this worker's own tensors are right and only `means` are missing."""
    numbers: Mapping[str, int]
    """`sequence`: the first round that is in neither the tensors nor `means`; all before it are, or gave no mean."""
    layout_digest: str
    """A hash of everything that must be the same on all workers. An engine compares it before it hands tensors over;
    with an elastic one, the worker that takes them over does."""
    means: "tuple[tuple[RoundKey, Tensor], ...]" = ()
    """Encoded means (bytes, of whatever shape) of rounds that ended since, to be merged in this order before anything
    else. A source serves none; an elastic engine adds them, and moves `sequence` on."""
    plain: frozenset[int] = frozenset()
    """The sequence numbers of those `means` that are plain (RoundResult.plain)."""
    position: int | None = None
    """The others' position in the schedule by now, as far as is known; None: `numbers["inner_steps"]`."""
    note: bytes = b""
    """A message of the source to the joiner; only elastic engines carry it."""
