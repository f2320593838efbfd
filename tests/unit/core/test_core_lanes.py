"""Lanes: every element has one owner in every worker, and every rank finds the same lanes."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco.core.lanes import Piece, make_lanes, shard_bounds

shapes = st.dictionaries(
    st.sampled_from("abcdef"), st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4
)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@given(shapes, sizes)
def test_every_element_is_in_exactly_one_lane(shapes: dict[str, tuple[int, ...]], sizes: list[int]) -> None:
    counts = {name: [0] * math.prod(shape) for name, shape in shapes.items()}
    for lane in make_lanes(shapes, sizes):
        for piece in lane.pieces:
            assert piece.start < piece.stop
            for element in range(piece.start, piece.stop):
                counts[piece.name][element] += 1
    assert all(count == 1 for elements in counts.values() for count in elements)


@given(shapes, sizes)
def test_a_lane_has_in_each_worker_the_rank_that_holds_its_elements(
    shapes: dict[str, tuple[int, ...]], sizes: list[int]
) -> None:
    for lane in make_lanes(shapes, sizes):
        for piece in lane.pieces:
            for rank, size in zip(lane.owners, sizes, strict=True):
                bounds = shard_bounds(shapes[piece.name], size)
                assert bounds[rank] <= piece.start < piece.stop <= bounds[rank + 1]


@given(shapes, sizes)
def test_every_rank_is_in_a_lane_and_the_first_lane_is_that_of_the_first_ranks(
    shapes: dict[str, tuple[int, ...]], sizes: list[int]
) -> None:
    lanes = make_lanes(shapes, sizes)
    assert lanes[0].owners == (0,) * len(sizes)
    assert [lane.owners for lane in lanes] == sorted({lane.owners for lane in lanes})
    for worker, size in enumerate(sizes):
        assert {lane.owners[worker] for lane in lanes} == set(range(size))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), st.integers(1, 6))
def test_rows_are_cut_as_fsdp2_cuts_them(shape: list[int], ranks: int) -> None:
    bounds = shard_bounds(tuple(shape), ranks)
    chunks = torch.zeros(shape).chunk(ranks)
    rows = [chunk.numel() for chunk in chunks] + [0] * (ranks - len(chunks))
    assert [after - before for before, after in pairwise(bounds)] == rows


def test_equal_workers_have_a_lane_for_each_rank_with_its_whole_shard() -> None:
    lanes = make_lanes({"weight": (6, 4), "bias": (6,)}, [3, 3])
    assert [lane.owners for lane in lanes] == [(0, 0), (1, 1), (2, 2)]
    assert lanes[1].pieces == (Piece("weight", (6, 4), 8, 16), Piece("bias", (6,), 2, 4))


def test_a_single_rank_is_in_every_lane_of_a_larger_worker() -> None:
    lanes = make_lanes({"weight": (5, 2)}, [1, 2])
    assert [(lane.owners, lane.pieces) for lane in lanes] == [
        ((0, 0), (Piece("weight", (5, 2), 0, 6),)),
        ((0, 1), (Piece("weight", (5, 2), 6, 10),)),
    ]
    assert str(lanes[1].pieces[0]) == "weight[6:10]"


@given(shapes, sizes)
def test_a_piece_is_whole_rows_at_its_place_in_the_tensor(shapes: dict[str, tuple[int, ...]], sizes: list[int]) -> None:
    whole = {name: torch.arange(math.prod(shape)).view(shape) for name, shape in shapes.items()}
    for lane in make_lanes(shapes, sizes):
        for piece in lane.pieces:
            place = tuple(slice(first, first + n) for first, n in zip(piece.offsets, piece.shape, strict=True))
            assert whole[piece.name][place].flatten().tolist() == list(range(piece.start, piece.stop))
