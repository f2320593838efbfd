"""Workers whose outer gradients point elsewhere than the others' are named, and honest ones are not."""

import logging
from dataclasses import replace

import pytest
import torch

from diloco.codecs.encoded import EncodedVector
from diloco.codecs.registry import codec
from diloco.core.config import Merge
from diloco.core.fragments import PartLayout
from diloco.core.merging import inner_products, leave_one_out
from diloco.engines.rounds import Comparison, RoundKey, RoundResult
from diloco.history.events import event_fields
from diloco.outer.rounds import RoundEvent
from diloco.training.records.agreement import Agreement
from diloco.training.records.worker_events import round_ended


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
    told = Comparison(products, (0,) * len(values), 1)
    return RoundResult(
        mean=mean, members=(), contributors=tuple(range(len(values))), total_weight=float(len(values)), comparison=told
    )


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
            agreement.compare(result(gradients(sequence, liar=liar)))
    assert agreement.disagreeing == ([2] if liar else [])
    assert len(caplog.records) == (1 if liar else 0)


def test_among_three_no_worker_is_named() -> None:
    agreement = Agreement()
    for sequence in range(6):
        agreement.compare(result(gradients(sequence, liar=True, count=3)))
    assert agreement.disagreeing == []


def simulated(members: int, numel: int, rounds: int, seed: int, turned: int | None = None) -> list[list[int]]:
    """Which workers were named after each round. Each one's outer gradient is a common direction and its own noise.

    The noise is as in training small models on shards: twice as long as what is common, and not alike for all.
    """
    generator = torch.Generator().manual_seed(seed)
    agreement, named = Agreement(), list[list[int]]()
    noise = (torch.rand(members, 1, generator=generator) - 0.5).mul(0.6).exp()
    for _ in range(rounds):
        common = 0.5 * torch.randn(numel, generator=generator)
        values = list(common + noise * torch.randn(members, numel, generator=generator))
        if turned is not None:
            values[turned] = -values[turned]
        agreement.compare(result(values))
        named.append(agreement.disagreeing)
    return named


@pytest.mark.parametrize("members", [4, 5, 6, 8])
def test_honest_members_are_named_in_less_than_one_of_a_thousand_rounds(members: int) -> None:
    """Before the floors it was one round in ten."""
    rounds = [one for seed in range(12) for one in simulated(members, (30, 300)[seed % 2], 90, 100 * members + seed)]
    assert len(rounds) == 1080
    assert sum(bool(named) for named in rounds) <= 1


@pytest.mark.parametrize("members", [4, 8])
@pytest.mark.parametrize("numel", [30, 300])
def test_a_direction_that_is_turned_around_is_named_within_a_few_rounds(members: int, numel: int) -> None:
    for seed in range(5):
        named = simulated(members, numel, 12, seed, turned=1)
        assert [1] in named and named[-1] == [1]
        assert named.index([1]) < 10


def test_the_event_of_a_round_has_the_share_of_parts_in_which_each_contribution_was_replaced() -> None:
    def told(merge: Merge, comparison: Comparison) -> dict[str, float]:
        ended = replace(result(gradients(0, liar=True, count=4)), merge=merge, comparison=comparison)
        event = RoundEvent(
            key=RoundKey(0, 0), inner_step=1, norm=1.0, mean_norm=1.0, codec_error=None, result=ended, failure=None
        )
        return event_fields(round_ended(event, Agreement()))["replaced"]  # type: ignore[no-any-return]

    comparison = Comparison((1.0,) * 10, (0, 0, 3, 1), 4)
    assert told("clipped", comparison) == {"0": 0.0, "1": 0.0, "2": 0.75, "3": 0.25}
    assert told("mean", comparison) == {}
    assert told("clipped", Comparison()) == {}, "another worker sent it the mean after the round"
