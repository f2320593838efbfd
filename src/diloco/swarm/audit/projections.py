"""Projections: one number or four for each part of a vector, by which a mean can be checked without the contributions.

All elements of a part are added up, each with a random sign. The mean's number is the weighted mean of the
contributions' numbers, but for what its codec and fp32 round. The signs are drawn from the digest of the mean, so they
are known only after every reducer has fixed and signed its range: a wrong part has a wrong number, except by a chance
that no reducer can choose.

A clipped mean (core/merges.py) is near the plain one, or near the one without those that count as the mean of the
others there. So its numbers, four for each part with signs of their own, are near those of one of these: z is their
distance from the nearest, less what the codec may have changed, as a share of the norm of the part. A part is suspected
if z is above t, six times the median of all parts, which fewer than half of the reducers cannot move, and at least 0.1.
A part that is wrong by δ times its norm has z = δ √(χ² / 4), where χ² has four degrees of freedom, so that it is missed
with the probability

    p = P(χ² < 4 t² / δ²) = 1 − e^(−u) (1 + u)   with u = 2 t² / δ²

A reducer that turns its range around has δ = 2. With t = 0.6, which is much, p is 0.014 for a range of one part, and
0.014 to the power of k for k parts: within two rounds it is found with 0.9998. Of lies in a single part those of
δ ≥ 2 t are found within two rounds with 0.99 (p = 0.09). `miss_probability` has this as a function.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from itertools import chain, combinations, islice

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import scratch
from diloco.swarm.protocol.plan import Plan

Numbers = NDArray[np.float32]

_ROWS_ELEMENTS = 1 << 19
_DEVIATIONS = 5.0
_LOST_SHARE = 0.05  # of the norm of a part: what a codec with large steps turns into zeros
_FP32_SHARE = 1e-5  # of the longest contribution
CLIPPED_NUMBERS = 4
"""The numbers of each part of a clipped mean."""
_LEAST_DISTANCE = 0.1
_USUAL_DISTANCES = 6.0
_FEWEST_NUMBERS = 16
_MOST_LEFT_OUT = 512  # sets of contributions that may count as the mean of the others


def signs(mean_digest: bytes, elements: int, count: int = 1) -> Tensor:
    """±1, fp32, [elements, count]: the signs of `count` numbers of each part."""
    seed = int.from_bytes(hashlib.sha256(b"signs" + mean_digest).digest(), "little")
    bits = np.frombuffer(np.random.Generator(np.random.PCG64(seed)).bytes(-(-elements * count // 8)), np.uint8)
    return torch.from_numpy(np.unpackbits(bits)[: elements * count].astype(np.float32) * 2 - 1).view(-1, count)


def miss_probability(wrong_by: float, threshold: float) -> float:
    """Compute the probability that a part of a clipped mean which is wrong by `wrong_by` times its norm is not
    suspected."""
    half = 2 * (threshold / wrong_by) ** 2
    return 1 - math.exp(-half) * (1 + half)


@torch.no_grad()
def project(codec: Codec, data: memoryview, num_parts: int, sign: Tensor) -> Numbers:
    """Compute the numbers of each encoded part, one part after another."""
    [numbers] = _map(codec, data, num_parts, len(sign), lambda values: _project(values, sign))
    return numbers.reshape(-1)


@torch.no_grad()
def project_mean(codec: Codec, mean: memoryview, num_parts: int, sign: Tensor) -> tuple[Numbers, Numbers, Numbers]:
    """Compute the numbers of each part of a mean, how much the codec may have changed the part, as a norm, and its
    norm."""
    lost = 0.0 if codec.lossless else _LOST_SHARE

    def error(values: Tensor) -> Tensor:
        bound: Tensor = codec.error_norm(values) + lost * torch.linalg.vector_norm(values, dim=1)
        return bound

    def norm(values: Tensor) -> Tensor:
        norms: Tensor = torch.linalg.vector_norm(values, dim=1)
        return norms

    numbers, errors, norms = _map(codec, mean, num_parts, len(sign), lambda values: _project(values, sign), error, norm)
    return numbers.reshape(-1), errors[:, 0], norms[:, 0]


def _project(values: Tensor, sign: Tensor) -> Tensor:
    return torch.mv(values, sign[:, 0])[:, None] if sign.shape[1] == 1 else values @ sign


def suspects(plan: Plan, wanted: Numbers, numbers: Numbers, error: Numbers) -> list[int]:
    """Find the parts of a mean that do not fit what was contributed, the worst of each reducer, the worst first.

    A sum of errors with random signs is about as large as their norm. One part in 130,000 is five times as far off
    (Hoeffding), were all errors as large as the codec's bound; and the squares of many parts add up to no more than
    theirs, but for chance. A part that is opened for nothing costs some bytes, and names no worker.
    """
    distance = np.maximum(np.abs(wanted.astype(np.float64) - numbers) - _FP32_SHARE * plan.longest, 0)
    excess = np.divide(distance, error, out=np.where(distance > 0, np.inf, 0.0), where=error > 0)
    excess[np.isnan(excess)] = np.inf
    worst = []
    for rows in plan.ranges(len(numbers)).values():
        if count := len(rows):
            in_range = excess[rows.start : rows.stop]
            most = 1 + 8 / count**0.5 + 20 / count
            if in_range.max() > _DEVIATIONS or float(np.mean(in_range**2)) > most:
                worst.append(rows.start + int(in_range.argmax()))
    return sorted(worst, key=lambda part: -excess[part])


def estimate_norm(numbers: Numbers, count: int) -> float | None:
    """Estimate the norm of a vector with these numbers, `count` for each part, by some tenths; None if they are too
    few.

    The square of a number is that of the part's norm, on average. Of sixteen and more their sum is a hundred times less
    than that with a probability below 10^-9.
    """
    return (
        math.sqrt(float(np.sum(numbers.astype(np.float64) ** 2)) / count) if len(numbers) >= _FEWEST_NUMBERS else None
    )


def estimate_cosine(one: Numbers, other: Numbers) -> float:
    """Estimate the cosine of two vectors with these numbers, within about one over the root of how many there are."""
    first = one.astype(np.float64)
    second = other.astype(np.float64)
    size = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / size if size > 0 else 0.0


def clipped_suspects(
    plan: Plan, told: dict[str, Numbers], numbers: Numbers, error: Numbers, norms: Numbers
) -> list[int]:
    """Find the parts of a clipped mean that are far from what was contributed, the worst of each reducer, the worst
    first.

    `told`: the numbers of each contribution. `numbers`, `error`, `norms`: of the mean (`project_mean`).
    """
    decision = plan.decision
    parts = len(norms)
    scales = decision.scales or (1.0,) * len(plan.contributors)
    given = [
        told[entry.peer].astype(np.float64).reshape(parts, -1) * scale
        for entry, scale in zip(plan.contributors, scales, strict=True)
    ]
    weights = decision.weights
    nearest = np.full(parts, np.inf)
    for left_out in _left_out(len(given)):
        kept = [place for place in range(len(given)) if place not in left_out]
        total = sum(weights[place] for place in kept)
        if total > 0:
            mean = sum(given[place] * (weights[place] / total) for place in kept)
            distance = np.sqrt(np.mean((numbers.astype(np.float64).reshape(parts, -1) - mean) ** 2, axis=1))
            nearest = np.fmin(nearest, distance)
    nearest = np.maximum(nearest - _FP32_SHARE * plan.longest - error, 0)
    far = np.divide(nearest, norms, out=np.where(nearest > 0, np.inf, 0.0), where=norms > 0)
    far[np.isnan(far)] = np.inf
    bound = max(_LEAST_DISTANCE, _USUAL_DISTANCES * float(np.median(far)))
    worst = [rows.start + int(far[rows.start : rows.stop].argmax()) for rows in plan.ranges(parts).values() if rows]
    return sorted((part for part in worst if far[part] > bound), key=lambda part: -far[part])


def _left_out(count: int) -> Iterator[tuple[int, ...]]:
    """Return the sets of contributions that may count as the mean of the others: a third at most, the small sets
    first."""
    sets = chain.from_iterable(combinations(range(count), size) for size in range((count - 1) // 3 + 1))
    return islice(sets, _MOST_LEFT_OUT)


def expected(plan: Plan, numbers: dict[str, Numbers]) -> Numbers:
    """Compute the numbers of the mean, from those of all contributions."""
    decision = plan.decision
    scales = decision.scales or (1.0,) * len(plan.contributors)
    terms = zip(plan.contributors, decision.weights, scales, strict=True)
    total = sum(numbers[entry.peer].astype(np.float64) * weight * scale for entry, weight, scale in terms)
    wanted: Numbers = np.asarray(total / sum(decision.weights), np.float32)
    return wanted


def _map(
    codec: Codec, data: memoryview, num_parts: int, part_elements: int, *functions: Callable[[Tensor], Tensor]
) -> list[Numbers]:
    """Compute the values of each function over all parts: for each function [parts, …]."""
    width = len(data) // max(1, num_parts)
    rows = max(1, _ROWS_ELEMENTS // part_elements)
    pieces: list[list[Numbers]] = [[] for _ in functions]
    for first in range(0, num_parts, rows):
        last = min(num_parts, first + rows)
        encoded = torch.frombuffer(data[first * width : last * width], dtype=torch.uint8).view(last - first, -1)
        values = scratch("decoded", (last - first, part_elements), encoded.device)
        codec.decode(encoded, values)
        for numbers, function in zip(pieces, functions, strict=True):
            numbers.append(function(values).reshape(last - first, -1).numpy())
    return [np.concatenate(numbers) if numbers else np.zeros((0, 1), np.float32) for numbers in pieces]
