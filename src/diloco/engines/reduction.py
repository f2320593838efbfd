"""The reduction every engine shares: headers to a decision, encoded contributions to an encoded mean."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from diloco.codecs.base import Codec
from diloco.core.fragments import span_elements
from diloco.core.merging import Claim, admit, diverged, weighted_mean


@dataclass(frozen=True)
class Decision:
    """Who is in the mean, with which weight, and who is not and why."""

    contributors: tuple[int, ...]
    weights: tuple[float, ...]
    refused: dict[int, str]
    resync: bool

    @property
    def total_weight(self) -> float:
        return sum(self.weights)


def decide(workers: Sequence[int], claims: Sequence[Claim], max_norm_ratio: float | None) -> Decision:
    """The same claims give the same decision on every worker."""
    reasons = admit(claims, max_norm_ratio)
    accepted = [
        (worker, claim.weight)
        for worker, claim, reason in zip(workers, claims, reasons, strict=True)
        if reason is None and claim.weight > 0
    ]
    return Decision(
        contributors=tuple(worker for worker, _ in accepted),
        weights=tuple(weight for _, weight in accepted),
        refused={worker: reason for worker, reason in zip(workers, reasons, strict=True) if reason is not None},
        resync=bool(diverged([claim.anchor_digest for claim in claims])),
    )


def reduce_parts(codec: Codec, encoded: Sequence[Tensor], weights: Sequence[float], part: int, out: Tensor) -> None:
    """Encode into `out` the weighted mean of encoded parts of `part` elements (each tensor is [rows, part_bytes]).

    Accumulated in fp32 in the order given, a few parts at a time. `out` may be one of `encoded`.
    """
    batch = max(1, span_elements(out.device) // part)
    mean = torch.empty(min(batch, out.shape[0]), part, device=out.device)
    scratch = torch.empty_like(mean)

    def decoded(rows: slice, first_into: Tensor, others_into: Tensor) -> Iterator[Tensor]:
        for index, data in enumerate(encoded):
            into = others_into if index else first_into
            codec.decode(data[rows], into)
            yield into

    for first in range(0, out.shape[0], batch):
        rows = slice(first, min(first + batch, out.shape[0]))
        here = mean[: rows.stop - first]
        codec.encode(weighted_mean(decoded(rows, here, scratch[: len(here)]), weights, here), out[rows])
