"""Centred clipping: close to the mean where all are honest, and not pulled far by one that is not."""

import pytest
import torch

from diloco.codecs.registry import codec
from diloco.core.config import Merge, SyncConfig
from diloco.core.merges import _replace_opposed, clipped_mean
from diloco.core.merging import Claim, decide
from diloco.engines.local import LocalSwarm
from diloco.engines.reduction import reduce_parts
from diloco.errors import ConfigError
from diloco.optimizer import DiLoCo

ROWS, PART = 5, 96


def contributions(count: int = 8, noise: float = 1.0, part: int = PART) -> list[torch.Tensor]:
    common = torch.randn(ROWS, part, generator=torch.Generator().manual_seed(99))
    return [common + noise * torch.randn(ROWS, part, generator=torch.Generator().manual_seed(i)) for i in range(count)]


def clipped(values: list[torch.Tensor], weights: list[float] | None = None) -> torch.Tensor:
    out = torch.empty_like(values[0])
    clipped_mean(values, weights or [1.0] * len(values), out, ())
    return out


def distance(some: torch.Tensor, other: torch.Tensor) -> float:
    return float((some - other).norm() / other.norm())


def test_of_honest_contributions_it_is_nearly_the_weighted_mean() -> None:
    values, weights = contributions(), [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 2.0]
    mean = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    assert distance(clipped(values, weights), mean) < 0.05
    same = [values[0].clone() for _ in range(8)]
    torch.testing.assert_close(clipped(same, weights), values[0])


@pytest.mark.parametrize("factor", [-1.0, -100.0])
def test_one_contribution_in_the_wrong_direction_pulls_it_less_than_the_plain_mean(factor: float) -> None:
    values = contributions(noise=0.5)
    honest = sum(values[:7], torch.zeros(ROWS, PART)) / 7
    values[7] = factor * values[7]
    plain = sum(values, torch.zeros(ROWS, PART)) / 8
    assert distance(clipped(values), honest) < min(0.15, 0.6 * distance(plain, honest))


@pytest.mark.parametrize("factor", [-1.0, 0.01, 0.0])
@pytest.mark.parametrize("bad", range(5))
def test_one_of_five_that_is_turned_around_or_next_to_nothing_counts_as_the_mean_of_the_others(
    bad: int, factor: float
) -> None:
    """Noise hides its distance from them."""
    values = contributions(5, noise=3.0, part=4096)
    honest = [value.clone() for index, value in enumerate(values) if index != bad]
    mean = sum(honest, torch.zeros(ROWS, 4096)) / 4
    with_it = [factor * value if index == bad else value for index, value in enumerate(values)]
    without = [mean if index == bad else value for index, value in enumerate(values)]
    torch.testing.assert_close(clipped(with_it), clipped(without))
    assert distance(clipped(with_it), mean) < 0.1


@pytest.mark.parametrize("batch", [512, 3 * 512, None])
@pytest.mark.parametrize("merge", ["clipped", "mean"])
def test_a_reduction_counts_the_parts_in_which_each_contribution_was_replaced(batch: int | None, merge: Merge) -> None:
    values = contributions(7, part=512)
    values[2][1:4] *= -1
    values[5][3:] *= 0.001
    encoded = [torch.empty(ROWS, codec("fp32").part_bytes(512), dtype=torch.uint8) for _ in values]
    for value, into in zip(values, encoded, strict=True):
        codec("fp32").encode(value, into)
    told = reduce_parts(codec("fp32"), encoded, [1.0] * 7, 512, encoded[0], merge=merge, batch_elements=batch)
    assert told.parts == ROWS
    assert told.replaced == ((0, 0, 3, 0, 0, 2, 0) if merge == "clipped" else (0,) * 7)


@pytest.mark.parametrize("noise", [1.0, 100.0])
def test_no_honest_contribution_is_held_to_be_turned_around(noise: float) -> None:
    values = torch.stack(contributions(8, noise, part=4096))
    before = values.clone()
    _replace_opposed(values, [1.0] * 8)
    assert torch.equal(values, before)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_at_most_a_third_is_left_out_even_if_each_points_against_all_others(count: int) -> None:
    values = torch.zeros(count, 1, 4096)
    values[:, 0, :count] = torch.eye(count) - 1 / count  # the corners of a simplex
    before = values.clone()
    _replace_opposed(values, [1.0] * count)
    assert int((values != before).any(-1).sum()) == (count - 1) // 3
    assert torch.isfinite(values).all()


def test_the_bits_do_not_depend_on_the_parts_that_are_reduced_together() -> None:
    values = contributions()
    whole = clipped(values)
    for row in range(ROWS):
        one = [value[row : row + 1] for value in values]
        assert torch.equal(clipped(one), whole[row : row + 1])


@pytest.mark.parametrize("batch", [PART, 3 * PART, None])
def test_a_reduction_of_encoded_parts_gives_one_mean_however_large_its_batches_are(batch: int | None) -> None:
    encoded = [torch.empty(ROWS, codec("fp32").part_bytes(PART), dtype=torch.uint8) for _ in range(8)]
    for value, into in zip(contributions(), encoded, strict=True):
        codec("fp32").encode(value, into)
    out = torch.empty_like(encoded[0])
    told = reduce_parts(codec("fp32"), encoded, [1.0] * 8, PART, out, merge="clipped", batch_elements=batch)
    assert (told.replaced, told.parts) == ((0,) * 8, ROWS)
    decoded = torch.empty(ROWS, PART)
    codec("fp32").decode(out, decoded)
    assert torch.equal(decoded, clipped(contributions()))


def test_a_round_with_fewer_than_four_contributions_is_averaged_plainly_and_says_so() -> None:
    claims = [Claim(1.0, 1.0)] * 4
    assert decide(range(4), claims, None, "clipped").merge == "clipped"
    assert decide(range(3), claims[:3], None, "clipped").merge == "mean"
    assert decide(range(4), [Claim(0.0, 0.0), *claims[:3]], None, "clipped").merge == "mean"


def test_it_is_refused_among_three_and_with_methods_that_never_have_all_contributions() -> None:
    for options in ({"outer_overlap": "eager"}, {"asynchronous": True}, {"codec": "topk"}):
        with pytest.raises(ConfigError, match=r"sync.merge = clipped"):
            SyncConfig(3, merge="clipped", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'median'"):
        SyncConfig(3, merge="median")  # type: ignore[arg-type]
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="3 workers"):
        DiLoCo(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            LocalSwarm(3).engines()[0],
            sync=SyncConfig(3, merge="clipped"),
        )
