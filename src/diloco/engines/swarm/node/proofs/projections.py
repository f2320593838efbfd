"""Projections: one number for each part of a vector, by which a mean can be checked without the contributions.

All elements of a part are added up, each with a random sign. The mean's number is the weighted mean of the
contributions' numbers, but for what its codec and fp32 round. The signs are drawn from the digest of the mean, so they
are known only after every reducer has fixed and signed its range: a wrong part has a wrong number, except by a chance
that no reducer can choose.
"""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.codecs.encoded import scratch
from diloco.engines.swarm.node.plan import Plan

Numbers = NDArray[np.float32]

_ROWS_ELEMENTS = 1 << 19
_DEVIATIONS = 5.0
_LOST_SHARE = 0.05  # of the norm of a part: what a codec with large steps turns into zeros
_FP32_SHARE = 1e-5  # of the longest contribution


def signs(mean_digest: bytes, elements: int) -> Tensor:
    """±1, fp32."""
    seed = int.from_bytes(hashlib.sha256(b"signs" + mean_digest).digest(), "little")
    bits = np.frombuffer(np.random.Generator(np.random.PCG64(seed)).bytes(-(-elements // 8)), np.uint8)
    return torch.from_numpy(np.unpackbits(bits)[:elements].astype(np.float32) * 2 - 1)


@torch.no_grad()
def project(codec: Codec, data: memoryview, num_parts: int, sign: Tensor) -> Numbers:
    """The number of each encoded part."""
    [numbers] = _map(codec, data, num_parts, sign.numel(), lambda values: torch.mv(values, sign))
    return numbers


@torch.no_grad()
def project_mean(codec: Codec, mean: memoryview, num_parts: int, sign: Tensor) -> tuple[Numbers, Numbers]:
    """The number of each part of a mean, and how much the codec may have changed the part, as a norm."""
    lost = 0.0 if codec.lossless else _LOST_SHARE

    def error(values: Tensor) -> Tensor:
        found: Tensor = codec.error_norm(values) + lost * torch.linalg.vector_norm(values, dim=1)
        return found

    numbers, errors = _map(codec, mean, num_parts, sign.numel(), lambda values: torch.mv(values, sign), error)
    return numbers, errors


def suspects(plan: Plan, wanted: Numbers, numbers: Numbers, error: Numbers) -> list[int]:
    """The parts of a mean that do not fit what was contributed, the worst of each reducer, the worst first.

    A sum of errors with random signs is about as large as their norm. One part in 130,000 is five times as far off
    (Hoeffding), were all errors as large as the codec's bound; and the squares of many parts add up to no more than
    theirs, but for chance. A part that is opened for nothing costs some bytes, and names no worker.
    """
    distance = np.maximum(np.abs(wanted.astype(np.float64) - numbers) - _FP32_SHARE * plan.longest, 0)
    excess = np.divide(distance, error, out=np.where(distance > 0, np.inf, 0.0), where=error > 0)
    excess[np.isnan(excess)] = np.inf
    found = []
    for rows in plan.ranges(len(numbers)).values():
        if count := len(rows):
            here = excess[rows.start : rows.stop]
            most = 1 + 8 / count**0.5 + 20 / count
            if here.max() > _DEVIATIONS or float(np.mean(here**2)) > most:
                found.append(rows.start + int(here.argmax()))
    return sorted(found, key=lambda part: -excess[part])


def expected(plan: Plan, numbers: dict[str, Numbers]) -> Numbers:
    """The numbers of the mean, from those of all contributions."""
    decision = plan.decision
    scales = decision.scales or (1.0,) * len(plan.contributors)
    terms = zip(plan.contributors, decision.weights, scales, strict=True)
    total = sum(numbers[entry.peer].astype(np.float64) * weight * scale for entry, weight, scale in terms)
    found: Numbers = np.asarray(total / sum(decision.weights), np.float32)
    return found


def _map(
    codec: Codec, data: memoryview, num_parts: int, part_elements: int, *functions: Callable[[Tensor], Tensor]
) -> list[Numbers]:
    """What each function says of each part."""
    width = len(data) // max(1, num_parts)
    rows = max(1, _ROWS_ELEMENTS // part_elements)
    found: list[Numbers] = [np.zeros(num_parts, np.float32) for _ in functions]
    for first in range(0, num_parts, rows):
        last = min(num_parts, first + rows)
        encoded = torch.frombuffer(data[first * width : last * width], dtype=torch.uint8).view(last - first, -1)
        values = scratch("decoded", (last - first, part_elements), encoded.device)
        codec.decode(encoded, values)
        for numbers, function in zip(found, functions, strict=True):
            numbers[first:last] = function(values).numpy()
    return found
