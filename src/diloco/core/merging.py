"""Which contributions are in the mean, and the weighted mean itself (line 12 of Algorithm 1).

`decide` is a pure decision from the claims of all workers, in these steps:

    admit               which contributions have no fault of their own: finite, taken from the others' anchor
    bounded_weights     how much each counts: by the work behind it; leftover_weights at the end of a run
    norm_bounds         the largest norm with which each counts; a longer one is scaled down
    absurd_norms,       in a swarm: which are too long, or too short, to count at all
    short_norms

All workers decide on the same claims and so get the same answer. The divisor is the total weight of the contributions
that are in, never the number of workers that were expected.

How alike the contributions are is told by the cosine of every pair (Figures 10 and 11 of arXiv 2311.08105). Where a
part is reduced, all contributions to it are there in fp32, and their `inner_products` are taken; the sums over all
parts give the `cosines`.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import Tensor

from diloco.core.config import FEWEST_TO_MERGE, Merge

MAX_WEIGHT_ROUNDS = 5
"""A contribution in a swarm weighs at most as much as this many full rounds of an average worker."""
_MOST_UNEQUAL = 1000.0
"""A worker's full round cannot weigh more than so many of the median worker: no batches differ by so much."""
_FEWEST = 3
"""Claims in a round whose median one liar cannot move."""
FEWEST_FOR_NORMS = 4
"""Contributions in a round whose norms tell which one is out of bounds."""
_ABSURD = 10.0
"""Times the bound on a norm: no honest worker reaches it for each round of work that it counts as."""
LEAST_NORM = 0.1
"""A contribution with less than this share of the usual norm has next to no work in it: it would shorten the mean."""


@dataclass(frozen=True)
class Claim:
    """A worker's statement about its contribution before it is averaged."""

    weight: float
    norm: float
    """L2 norm of the outer gradient; not finite if any element is not finite."""
    anchor_digest: str = ""
    """Digest of the anchor that the outer gradient was taken from."""
    round_weight: float = math.inf
    """The weight of H inner steps of this worker; inf: its weight has no bound (a fixed membership is trusted)."""
    work: float = 1.0
    """The inner steps behind the contribution as a share of H, at most 1; each as its rate's share of the peak, if that
    is known."""
    full_weight: float = 0.0
    """The weight of H inner steps of this worker, whatever is behind the contribution."""
    done: bool = False
    """The worker has taken all its steps: what it contributes is left over."""


@dataclass(frozen=True)
class Decision:
    """The workers that are in the mean, their weights, and why the others are not in it."""

    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    """The weights in the mean: the work behind each contribution, or more in a mean of leftovers (leftover_weights)."""
    refused: dict[int, str]
    resync: bool
    scales: tuple[float, ...] = ()
    """The factors by which contributions are multiplied before they are averaged; none: all by 1."""
    clipped: dict[int, str] = field(default_factory=dict)
    """Worker -> why its contribution is scaled down."""
    too_long: frozenset[int] = frozenset()
    """Workers of `refused` whose norm is absurd."""
    too_short: frozenset[int] = frozenset()
    """Workers of `refused` whose contribution is next to nothing."""
    merge: Merge = "mean"
    """The way of merging, as in SyncConfig; `mean` also where too few contribute to be clipped."""
    total_weight: float = 0.0
    """All the work that is in the mean."""
    plain: bool = False
    """A mean of leftovers in which a worker counts that has nothing left: the outer step is the mean itself."""

    def summary_fields(self) -> dict[str, Any]:
        """Return by name the fields that RoundSummary has too, but for `resync`, which is each worker's own there."""
        return {name: getattr(self, name) for name in _IN_SUMMARY}


_IN_SUMMARY = ("contributors", "refused", "clipped", "merge", "plain", "total_weight")


def decide(
    workers: Sequence[int],
    claims: Sequence[Claim],
    max_norm_ratio: float | None,
    merge: Merge = "mean",
    rounds: Sequence[int] = (),
) -> Decision:
    """Decide from all claims to a round which contributions are in its mean, and how much each counts.

    The same claims give the same decision on every worker. `rounds`: as in `bounded_weights`, of each claim.
    """
    reasons = admit(claims)
    refused = {worker: reason for worker, reason in zip(workers, reasons, strict=True) if reason is not None}
    admitted = [index for index, reason in enumerate(reasons) if reason is None]
    admitted_claims = [claims[index] for index in admitted]
    work = bounded_weights(admitted_claims, [rounds[index] for index in admitted] if rounds else ())
    weights_of_leftovers = leftover_weights(admitted_claims, work)
    weights = weights_of_leftovers or work
    candidates = [
        _Candidate(workers[index], claims[index], rounds[index] if rounds else 1, own_work, weight)
        for index, own_work, weight in zip(admitted, work, weights, strict=True)
        if own_work > 0
    ]
    leftovers = weights_of_leftovers is not None
    _bound_norms(candidates, max_norm_ratio, leftovers=leftovers)
    too_long: dict[int, str] = {}
    too_short: dict[int, str] = {}
    if rounds and max_norm_ratio is not None:  # a swarm, in which a norm may be a lie
        too_long, too_short = _find_absurd(candidates, max_norm_ratio, leftovers=leftovers)
        refused |= too_long | too_short
        candidates = [candidate for candidate in candidates if candidate.worker not in refused]
    clipped: dict[int, str] = {}
    if max_norm_ratio is not None:
        clipped = {candidate.worker: candidate.excess(max_norm_ratio) for candidate in candidates if candidate.is_long}
    scales = [candidate.scale for candidate in candidates] if clipped else []
    idle_weight = sum(weight for own_work, weight in zip(work, weights, strict=True) if not own_work)
    counts_idle = bool(idle_weight and candidates)
    if counts_idle:  # zero outer gradients: they need not be sent to be in the mean
        moving = sum(candidate.weight for candidate in candidates)
        share = moving / (moving + idle_weight)
        scales = [scale * share for scale in scales or [1.0] * len(candidates)]
    return Decision(
        contributors=tuple(candidate.worker for candidate in candidates),
        weights=tuple(candidate.weight for candidate in candidates),
        scales=tuple(scales),
        clipped=clipped,
        merge=merge if len(candidates) >= FEWEST_TO_MERGE[merge] else "mean",
        refused=refused,
        too_long=frozenset(too_long),
        too_short=frozenset(too_short),
        resync=bool(diverged([claim.anchor_digest for claim in claims])),
        total_weight=sum(candidate.work for candidate in candidates),
        plain=counts_idle,
    )


@dataclass
class _Candidate:
    """An admitted contribution with work in it."""

    worker: int
    claim: Claim
    rounds: int
    """The rounds of work that it counts as at most (`bounded_weights`); 1 where that is not known."""
    work: float
    """The weight of the steps behind it, bounded."""
    weight: float
    """The weight in the mean: the same, or more in a mean of leftovers."""
    bound: float = math.inf
    """The norm with which it counts at most."""

    @property
    def is_long(self) -> bool:
        return self.claim.norm > self.bound

    @property
    def scale(self) -> float:
        """The factor by which the contribution is multiplied before it is averaged."""
        return min(1.0, self.bound / self.claim.norm) if self.is_long else 1.0

    def excess(self, max_norm_ratio: float) -> str:
        """Say by how much the contribution is too long."""
        return (
            f"norm {self.claim.norm:.3g} is above the bound {self.bound:.3g} (sync.max_norm_ratio = {max_norm_ratio:g})"
        )


def _bound_norms(candidates: Sequence[_Candidate], max_norm_ratio: float | None, *, leftovers: bool) -> None:
    """Set the bound of each candidate. `leftovers`: the mean is one of leftovers."""
    late = [place for place, candidate in enumerate(candidates) if candidate.rounds > 1] if leftovers else ()
    bounds = norm_bounds([candidate.claim for candidate in candidates], max_norm_ratio, late)
    for candidate, bound in zip(candidates, bounds, strict=True):
        candidate.bound = bound


def _find_absurd(
    candidates: Sequence[_Candidate], max_norm_ratio: float, *, leftovers: bool
) -> tuple[dict[int, str], dict[int, str]]:
    """Find the workers whose contribution is too long, or too short, to count at all; each with the reason.

    `leftovers`: the mean is one of leftovers, and what is left may be next to nothing.
    """
    claims = [candidate.claim for candidate in candidates]
    long = absurd_norms(
        claims, [candidate.bound for candidate in candidates], [candidate.rounds for candidate in candidates]
    )
    short = [] if leftovers else short_norms(claims)
    return (
        {candidates[place].worker: candidates[place].excess(max_norm_ratio) for place in long},
        {
            candidates[place].worker: f"norm {claims[place].norm:.3g} is below a tenth of the usual one"
            for place in short
        },
    )


def admit(claims: Sequence[Claim]) -> list[str | None]:
    """Decide for each claim: None if the contribution is in the mean, else the reason why it is not.

    A weight of 0 is no offence (the worker took no step since the last round): it is let in and adds nothing.
    """
    majority = _majority([claim.anchor_digest for claim in claims])
    usual = _lower_median([claim.round_weight for claim in claims]) if len(claims) >= _FEWEST else math.inf
    return [_own_fault(claim, majority, _MOST_UNEQUAL * usual) for claim in claims]


def norm_bounds(claims: Sequence[Claim], max_norm_ratio: float | None, late: Collection[int] = ()) -> list[float]:
    """Bound the norm with which each admitted claim with work counts. A longer contribution is scaled down.

    The bound is `max_norm_ratio` times the round's (lower) median; None: there is none. A worker with more work than
    the median, up to one full round, is measured against the median norm per work times its own work: a fast worker
    among slow ones is no outlier, nor one that trains on when others have few steps left. Work is told by the weight,
    but where weights have no bound (they are shard sizes there) by the steps.

    `late`: positions of claims that are measured by their steps in any case. Leftovers of others at the end of a
    falling learning rate are short, and that of a worker which missed rounds is from a time of higher rates.
    """
    if max_norm_ratio is None or not claims:
        return [math.inf] * len(claims)
    norm = _lower_median([claim.norm for claim in claims])
    norm_per_weight = _lower_median([claim.norm / claim.weight for claim in claims])
    norm_per_work = _lower_median([claim.norm / claim.work for claim in claims])
    round_weight = _lower_median([claim.round_weight for claim in claims])
    bounds = []
    for index, claim in enumerate(claims):
        by_steps = math.isinf(round_weight) or index in late
        expected = norm_per_work * claim.work if by_steps else norm_per_weight * min(claim.weight, round_weight)
        usual = max(norm, expected)
        bounds.append(max_norm_ratio * usual if usual > 0 else math.inf)
    return bounds


def absurd_norms(claims: Sequence[Claim], bounds: Sequence[float], rounds: Sequence[int]) -> list[int]:
    """Find the positions of claims whose norm is so far above its bound that they are refused instead of scaled down.

    Scaled down, a lie still counts with the bound. `rounds` as in `bounded_weights`: a worker that missed some carries
    the work of several.
    """
    if len(claims) < FEWEST_FOR_NORMS:
        return []
    limits = [_ABSURD * count * bound for count, bound in zip(rounds, bounds, strict=True)]
    return [index for index, claim in enumerate(claims) if claim.norm > limits[index]]


def short_norms(claims: Sequence[Claim]) -> list[int]:
    """Find the positions of claims with next to no outer gradient for their weight, which would only shorten the mean.

    Shorter than LEAST_NORM of the round's (lower) median, and of the median norm per weight times their own weight: a
    slow worker with few steps has a short one. Of fewer than three claims one cannot be told from the others.
    """
    if len(claims) < _FEWEST:
        return []
    norm = _lower_median([claim.norm for claim in claims])
    norm_per_weight = _lower_median([claim.norm / claim.weight for claim in claims])
    return [
        index
        for index, claim in enumerate(claims)
        if claim.norm < LEAST_NORM * min(norm, norm_per_weight * claim.weight)
    ]


def bounded_weights(claims: Sequence[Claim], rounds: Sequence[int] = ()) -> list[float]:
    """Bound the weight of each claim: at most its `rounds` times the (lower) median of the claims' `round_weight`.

    `rounds`: 1 of a worker that was in the last round, more of one that missed some, whose contribution has the work of
    several; () if that is not known: MAX_WEIGHT_ROUNDS each. One that lies about its weight counts as much as an honest
    one, not more: fewer than half of the workers cannot move the median.
    """
    round_weight = _lower_median([claim.round_weight for claim in claims]) if claims else math.inf
    most = rounds or [MAX_WEIGHT_ROUNDS] * len(claims)
    return [min(claim.weight, count * round_weight) for claim, count in zip(claims, most, strict=True)]


def leftover_weights(claims: Sequence[Claim], weights: Sequence[float]) -> list[float] | None:
    """Weigh a mean of leftovers, in which each present worker counts as a full round at least.

    None if a worker that still trains has work in the mean: it is a round like any other then. In a swarm, where a
    worker may lie about it, most of the workers must still train.
    `claims` are those of all present workers, `weights` their bounded ones. A worker without work is at the anchor: its
    outer gradient is zero, and its weight is in the divisor. Else one worker with something left would move the anchor
    alone, and one that has missed rounds would take back in full what the others have done meanwhile.
    """
    most = _lower_median([claim.round_weight for claim in claims]) if claims else math.inf
    training = [claim for claim, weight in zip(claims, weights, strict=True) if weight > 0 and not claim.done]
    mostly_done = 2 * sum(claim.done for claim in claims) > len(claims) and math.isfinite(most)
    if training and not mostly_done:
        return None
    return [max(weight, min(claim.full_weight, most)) for claim, weight in zip(claims, weights, strict=True)]


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def _own_fault(claim: Claim, reference_digest: str, most_a_round: float) -> str | None:
    if not math.isfinite(claim.weight) or claim.weight < 0:
        return f"weight {claim.weight} is not a finite number of at least 0"
    if not claim.round_weight > 0:
        return f"round_weight {claim.round_weight} must be above 0"
    if claim.weight > MAX_WEIGHT_ROUNDS * claim.round_weight:
        return f"weight {claim.weight:.3g} is above {MAX_WEIGHT_ROUNDS} rounds of work of {claim.round_weight:.3g} each"
    if claim.round_weight > most_a_round:
        return f"round_weight {claim.round_weight:.3g} is above {_MOST_UNEQUAL:g} times the median worker's"
    if not 0 <= claim.work <= 1 or (claim.weight > 0 and claim.work == 0):
        return f"work {claim.work} must be a share of a round, above 0 for a weight above 0"
    if not 0 <= claim.full_weight < math.inf:
        return f"full_weight {claim.full_weight} is not a finite number of at least 0"
    if not math.isfinite(claim.norm):
        return "the outer gradient is not finite"
    if claim.anchor_digest != reference_digest:
        return f"its anchor {claim.anchor_digest} is not the others' {reference_digest}"
    return None


def diverged(digests: Sequence[str]) -> tuple[int, ...]:
    """Find the positions whose anchor is not the majority's (ties go to the digest that comes first)."""
    reference = _majority(digests)
    return tuple(index for index, digest in enumerate(digests) if digest != reference)


def _majority(digests: Sequence[str]) -> str:
    return max(digests, key=lambda digest: (digests.count(digest), -digests.index(digest)))


def shares(weights: Sequence[float]) -> list[float]:
    """Divide weights by the largest: equal weights become exactly 1, and their mean a plain mean."""
    largest = max(weights, default=0.0)
    return [weight / largest for weight in weights] if largest > 0 else [0.0] * len(weights)


def weighted_mean(
    values: Iterable[Tensor], weights: Sequence[float], out: Tensor, scales: Sequence[float] = ()
) -> Tensor:
    """Compute Σ w_i s_i v_i / Σ w_i in fp32, summed in the order given: the same bits wherever it is computed.

    `scales` are those of contributions that are too long; none: 1 candidate.
    The first of `values` may be `out` itself, and all others the same scratch memory, filled anew each time.
    The total weight must be positive.
    """
    factors = shares(weights)
    total = sum(factors)
    assert total > 0
    if scales:
        factors = [factor * scale for factor, scale in zip(factors, scales, strict=True)]
    for index, (value, factor) in enumerate(zip(values, factors, strict=True)):
        if index:
            out.add_(value, alpha=factor)
        elif value is not out or factor != 1:
            torch.mul(value, factor, out=out)
    if total == 1:
        return out
    if math.frexp(total)[0] == 0.5:  # a power of two: its reciprocal is exact, and multiplying is faster
        return out.mul_(1 / total)
    # On a GPU, division by a plain number is multiplication by its reciprocal.
    return out.div_(torch.full((), total, device=out.device) if out.is_cuda else total)


def num_products(contributors: int) -> int:
    """Count the inner products of the contributions: one for each pair, and each contribution with itself."""
    return contributors * (contributors + 1) // 2


def inner_products(values: Sequence[Tensor]) -> Tensor:
    """Compute the inner products of the same parts of all contributions, in the order of
    `combinations_with_replacement`."""
    pairs = combinations_with_replacement([value.view(-1) for value in values], 2)
    if values[0].is_cuda:  # not `dot`: cuBLAS keeps 32 MiB for each stream that it is used in
        return torch.stack([torch.sum(a * b) for a, b in pairs])
    return torch.stack([torch.dot(a, b) for a, b in pairs])


def leave_one_out(workers: Sequence[int], products: Sequence[float]) -> dict[int, float]:
    """Return the cosine of each worker's contribution with the sum of all others; none with fewer than three."""
    count = len(workers)
    if count < 3 or len(products) != num_products(count):
        return {}
    product_of = dict(zip(combinations_with_replacement(range(count), 2), products, strict=True))
    rows = [[product_of[min(i, j), max(i, j)] for j in range(count)] for i in range(count)]
    whole = sum(map(sum, rows))
    agreement = {}
    for i, row in enumerate(rows):
        with_others = sum(row) - row[i]
        size = math.sqrt(max(0.0, row[i])) * math.sqrt(max(0.0, whole - 2 * sum(row) + row[i]))
        if size > 0 and math.isfinite(with_others / size):
            agreement[workers[i]] = round(max(-1.0, min(1.0, with_others / size)), 4)
    return agreement


def cosines(workers: Sequence[int], products: Sequence[float]) -> list[tuple[int, int, float]]:
    """Return (worker, worker, cosine) of every pair, from the inner products of the contributions; none without those.

    Four decimals: engines add up in different orders.
    """
    if len(products) != num_products(len(workers)):
        return []
    product_of = dict(zip(combinations_with_replacement(range(len(workers)), 2), products, strict=True))
    pairs = []
    for (i, j), product in product_of.items():
        size = math.sqrt(max(0.0, product_of[i, i])) * math.sqrt(max(0.0, product_of[j, j]))
        if i != j and size > 0 and math.isfinite(product / size):
            pairs.append((workers[i], workers[j], round(max(-1.0, min(1.0, product / size)), 4)))
    return pairs
