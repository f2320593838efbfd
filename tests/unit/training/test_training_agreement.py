"""Workers whose outer gradients point elsewhere than the others' are named, and honest ones are not."""

import logging

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.fragments import PartLayout
from diloco.core.merging import inner_products, leave_one_out
from diloco.engines.rounds import RoundResult
from diloco.training.records.agreement import Agreement


def gradients(sequence: int, *, liar: bool, count: int = 6) -> list[torch.Tensor]:
    common = torch.randn(2000, generator=torch.Generator().manual_seed(sequence))
    made = [
        common + torch.randn(2000, generator=torch.Generator().manual_seed(100 * sequence + i)) for i in range(count)
    ]
    if liar:
        made[2] = -made[2]
    return made


def result(values: list[torch.Tensor]) -> RoundResult:
    mean = EncodedVector(codec("fp32"), PartLayout(1))
    products = tuple(inner_products(values).tolist())
    return RoundResult(mean, tuple(range(len(values))), {}, float(len(values)), 0, 0, 0.0, (), products=products)


def test_the_cosine_with_the_others_is_that_of_the_vectors() -> None:
    values = gradients(0, liar=True)
    told = leave_one_out(range(6), inner_products(values).tolist())
    for worker, value in enumerate(values):
        others = torch.stack(values).sum(0) - value
        wanted = float(torch.nn.functional.cosine_similarity(value, others, dim=0))
        assert told[worker] == pytest.approx(wanted, abs=1e-3)
    assert leave_one_out(range(2), [1.0, 0.0, 1.0]) == {}


@pytest.mark.parametrize("liar", [False, True])
def test_a_worker_that_turns_its_gradients_around_is_named_within_five_rounds(
    liar: bool, caplog: pytest.LogCaptureFixture
) -> None:
    agreement = Agreement()
    with caplog.at_level(logging.WARNING):
        for sequence in range(5):
            agreement.hear(result(gradients(sequence, liar=liar)))
    assert agreement.named == ([2] if liar else [])
    assert len(caplog.records) == (1 if liar else 0)


def test_among_three_no_worker_is_named() -> None:
    agreement = Agreement()
    for sequence in range(6):
        agreement.hear(result(gradients(sequence, liar=True, count=3)))
    assert agreement.named == []
