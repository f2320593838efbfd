"""Which rank of a worker holds which elements of a fragment, and a digest that the ranks compute together."""

import pytest
import torch

from diloco.core.digest import Digest, digest, joined_digest
from diloco.core.lanes import shard_bounds
from diloco.core.placement import Placement

SHAPES = [(5, 3), (), (7,), (1, 4), (64, 40)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_every_element_is_on_the_rank_that_holds_its_row_and_both_orders_agree(ranks: int) -> None:
    placement = Placement(SHAPES, ranks)
    holder = []
    for shape in SHAPES:
        bounds = shard_bounds(shape, ranks)
        for rank in range(ranks):
            holder += [rank] * (bounds[rank + 1] - bounds[rank])
    assert placement.numel == len(holder)
    for rank in range(ranks):
        own = [element for element, held_by in enumerate(holder) if held_by == rank]
        assert placement.held(rank) == len(own)
        for start, stop in [(0, len(holder)), (0, 0), (3, 17), (15, 16), (1000, 2000)]:
            first, after = placement.own_interval(rank, start, stop)
            inside = [element for element in own if start <= element < stop]
            assert own[first:after] == inside
            runs = [element for a, b in placement.runs(rank, first, after) for element in range(a, b)]
            assert runs == inside


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_digests_of_what_the_ranks_hold_make_that_of_the_whole(ranks: int) -> None:
    placement = Placement(SHAPES, ranks)
    whole = torch.randn(placement.numel, generator=torch.Generator().manual_seed(1))
    totals = []
    for rank in range(ranks):
        share = Digest(whole.device)
        for start, stop in placement.runs(rank, 0, placement.held(rank)):
            share.add_at(start, whole[start:stop])
        totals.append(share.total)
    assert joined_digest(totals, placement.numel) == digest(whole)
    whole[1234] += 1e-6
    assert joined_digest(totals, placement.numel) != digest(whole)
