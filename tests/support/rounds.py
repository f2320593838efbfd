"""Single rounds of an engine, without a model: known values in, a mean out."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.engines.base import Engine
from diloco.engines.rounds import Contribution, Report, RoundKey, RoundResult

NUMEL = 11 * 1024 + 37


def values(worker: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(worker)) * (worker + 1)


def contribution(
    engine: Engine,
    *,
    numel: int = NUMEL,
    name: str = "fp32",
    weight: float = 1.0,
    layout: str = "same",
    anchor: str = "same",
    tensor: torch.Tensor | None = None,
    report: Report | None = None,
) -> Contribution:
    tensor = values(engine.worker, numel) if tensor is None else tensor
    vector = EncodedVector(codec(name), PartLayout(numel))
    vector.encode(0, tensor)
    norm = float(torch.linalg.vector_norm(tensor.double()))
    return Contribution(vector, weight, norm, anchor, layout, 1000.0, report or Report())


def average(engine: Engine, sequence: int = 0, seconds: float = 60.0, **options: Any) -> RoundResult:
    return engine.start_round(RoundKey(sequence, 0), contribution(engine, **options), seconds).wait()


def decoded(result: RoundResult) -> list[float]:
    return result.mean.decode(0, result.mean.layout.num_parts).tolist()


def message(call: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def plain_mean(*workers: int) -> torch.Tensor:
    total = sum((values(worker) for worker in workers[1:]), values(workers[0]))
    return total / len(workers)
